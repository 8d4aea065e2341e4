"""The campaign: what is measured alone, before the sets (checks, cold compiles, profiles, a search), and notes."""

import dataclasses
from pathlib import Path

import pytest
from campaign_lab import BOTH, Lab, config, experiment, family, laboratory
from records import gradient_check
from setups import setup

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import campaign, shortfall
from ddpm_lab.plan import Experiment, Family
from ddpm_lab.quality import quality
from ddpm_lab.setting import Images

HERE = setup(images=Images(folder="", sha256="", name=""))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return laboratory(tmp_path, monkeypatch)


COMPILED = Family(
    name="f",
    baseline=config(0),
    baseline_label="eager",
    candidates=(("compiled", config(0, compile="whole")),),
)


def test_cold_compiles_come_first_and_once(lab: Lab) -> None:
    lab.run(experiment(COMPILED), cold_compiles=1)
    assert lab.alone == [("cold", "compiled")]
    assert len(lab.sets) == 3
    assert [r.baseline_id for r in lab.records("cold")] == [config(0).run_id]
    lab.run(experiment(COMPILED))
    assert (lab.alone, lab.sets) == ([("cold", "compiled")], [])
    lab.run(experiment(COMPILED))
    assert lab.alone == []


@pytest.mark.parametrize(("status", "tried_again"), [("diverged", 0), ("unsupported", 1), ("crashed", 1)])
def test_a_compile_that_fails_is_tried_once(lab: Lab, status: str, tried_again: int) -> None:
    lab.failures = {config(0, compile="whole").run_id: status}
    lab.run(experiment(COMPILED))
    assert (len(lab.alone), lab.sets) == (1, [])
    lab.run(experiment(COMPILED))
    assert (len(lab.alone), lab.sets) == (tried_again, [])


@pytest.mark.parametrize(("status", "tried_again"), [("ok", 0), ("oom", 0), ("crashed", 1)])
def test_a_profile_is_taken_once(lab: Lab, status: str, tried_again: int) -> None:
    profiled = config(0, purpose="profile", world_size=2)
    asked = Experiment(name="profile", families=(), profiles=(("f", "fp32, 2 ranks", profiled),))
    lab.failures = {profiled.run_id: status}
    lab.run(asked)
    assert lab.alone == [("profile", "fp32, 2 ranks")]
    assert [p.parent for p in lab.traces] == [lab.folder] * 2
    assert all(profiled.run_id in p.name and p.name.endswith(".json.gz") for p in lab.traces)
    assert len(set(lab.traces)) == 2
    lab.run(asked)
    assert len(lab.alone) == tried_again


def test_a_search_comes_before_the_sets_and_leaves_out_what_is_larger(lab: Lab) -> None:
    base = RunConfig(device="cuda", global_batch_size=8)
    larger = {n: dataclasses.replace(base, global_batch_size=n) for n in (16, 32, 64)}
    sizes = Family(
        name="f",
        baseline=base,
        baseline_label="base",
        candidates=tuple((f"c{n}", c) for n, c in larger.items()),
        search_up_to=64,
    )
    lab.failures = {larger[32].run_id: "oom", dataclasses.replace(base, global_batch_size=24).run_id: "oom"}
    unknown = lab.campaign(experiment(sizes)).forecast()
    made = lab.run(experiment(sizes))
    assert lab.alone == [("search", f"batch {n}") for n in (8, 16, 32, 24, 20, 22, 23)]
    assert lab.sets == [("f", [*BOTH, "c16"])] * 3
    assert [(r.label, r.config.global_batch_size) for r in lab.records("largest")] == [("memory", 23)]
    assert {(r.set_id, r.baseline_id) for r in (*lab.records("search"), *lab.records("largest"))} == {("", "")}
    notes = {(n.label, n.reason) for n in lab.records("note")}
    assert notes == {(f"c{n}", "larger than 23, where the search ended") for n in (32, 64)}
    assert made.held.any
    lines = len(lab.ledger.read()[0])
    lab.run(experiment(sizes))
    assert (lab.alone, lab.sets, len(lab.ledger.read()[0])) == ([], [], lines)
    # Sets of the sizes that do not fit are forecast until the search has said so.
    assert unknown == campaign.SEARCH_SECONDS + 3 * 5 * shortfall.PLACE_SECONDS


def test_what_was_left_out_is_noted_once(lab: Lab) -> None:
    rows = (("f", "fp16", "needs a CUDA device"), ("f", "tf32", "needs a CUDA device"))
    for _ in range(2):
        lab.run(experiment(family("f", 1), left_out=rows))
    notes = lab.records("note")
    assert [(n.family, n.label, n.reason) for n in notes] == list(rows)
    assert {(n.status, n.set_id, n.baseline_id) for n in notes} == {("left out", "", config(0).run_id)}
    assert all(not n.windows for n in notes)


# --- gradient checks and what they keep from being trained -----------------------------------------------------------


def test_what_fails_its_gradient_check_is_measured_and_not_trained(lab: Lab) -> None:
    asked = quality(HERE, seeds=3, images=800, candidates=["bf16", "2 micro-batches"])
    lab.qualities = {c.config.run_id: gradient_check(0.9 if c.label == "bf16" else 0.0) for c in asked.checks}
    unknown = lab.campaign(asked).forecast()
    lab.run(asked, sets=1)
    assert lab.alone[:2] == [("check", "bf16"), ("check", "2 micro-batches")]
    assert lab.alone[2:] == [("quality", "fp32"), ("quality", "2 micro-batches")] * 3
    assert lab.sets == [(asked.families[0].name, ["fp32", "fp32 again", "bf16", "2 micro-batches"])]
    (note,) = lab.records("note")
    assert (note.label, note.status, note.config.purpose) == ("bf16", "left out", "quality")
    assert "not trained: its gradient check failed (the gradient is off by 90 %" in str(note.reason)
    again = lab.campaign(asked, sets=1)
    assert again.forecast() == 0 < unknown, "what is not trained takes no time"
    lab.run(asked, sets=1)
    assert (lab.alone, len(lab.records("note"))) == ([], 1)


def test_a_check_that_crashes_or_whose_baseline_fails_too_keeps_nobody_from_training(lab: Lab) -> None:
    asked = quality(HERE, seeds=2, images=800, candidates=["bf16"])
    (check,) = asked.checks
    of_base = dataclasses.replace(check, label="fp32", config=dataclasses.replace(check.config, precision="fp32"))
    both = dataclasses.replace(asked, checks=(of_base, check))
    lab.qualities = {c.config.run_id: gradient_check(0.9) for c in both.checks}
    lab.run(both, sets=1)
    assert [label for role, label in lab.alone if role == "quality"] == ["fp32", "bf16"] * 2
    lab.ledger.path.unlink()
    lab.qualities, lab.failures = {}, {check.config.run_id: "crashed"}
    lab.run(asked, sets=1)
    assert [label for role, label in lab.alone if role == "quality"] == ["fp32", "bf16"] * 2
    assert not lab.records("note")

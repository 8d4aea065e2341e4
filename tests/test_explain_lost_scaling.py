"""The lost scaling from records in which each part of it is planted, alone and together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make
from cells import by
from conftest import Call
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from ddpm_lab import plan
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import machine_state, phrases
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.questions import lost_scaling as question
from ddpm_lab.explain.questions.lost_scaling import Split, splits
from ddpm_lab.questions import experiments, planning
from ddpm_lab.questions.answers import answer
from ddpm_lab.questions.lost_scaling import lost_scaling
from ddpm_lab.record import RunRecord

ONE = RunConfig(global_batch_size=16)
RANKS, IMAGE = 2, 1.0
MANY = dataclasses.replace(ONE, world_size=RANKS)
FAMILY = lost_scaling(ONE, MANY, name="tiny, batch 16, 2 ranks", ranks_label="2 ranks", usable_cores=2)
PARTS = {
    "communication": "exposed communication",
    "data": "waiting for data",
    "slow": "slowest rank",
    "fixed": "smaller batch of a rank",
    "threads": "fewer threads for a rank",
    "shared": "shared memory and cores",
    "interaction": "interaction",
}


def steps(**plants: float) -> dict[str, float]:
    """Milliseconds of a step of each configuration, with planted losses; ``fixed`` is what no batch makes smaller."""
    p = {**dict.fromkeys(PARTS, 0.0), **plants}
    small = p["fixed"] + IMAGE * ONE.global_batch_size / RANKS
    off = small + p["threads"] + p["shared"] + p["slow"]
    many = off + p["communication"] + p["data"] + p["interaction"]
    one_off = p["fixed"] + IMAGE * ONE.global_batch_size
    return {
        "2 ranks": many,
        plan.NO_EXCHANGE: many - p["communication"],
        plan.READY_BATCHES: many - p["data"],
        plan.ALL_OFF: off,
        plan.ONE_OFF: one_off,
        plan.ONE_RANK: one_off + p["data"],
        plan.ONE_SMALL: small,
        plan.ONE_SMALL_THREADS: small + p["threads"],
    }


def measured(family: plan.Family, count: int = 6, /, twin_ratio: float = 1.0, **plants: float) -> list[RunRecord]:
    """Records of a family with planted losses, in milliseconds."""
    times = steps(**plants)
    base = times[plan.ONE_OFF]
    candidates = {
        label: (config, base * config.global_batch_size / ONE.global_batch_size / times[label])
        for label, config in family.candidates
    }
    values: dict[str, Any] = {"baseline": family.baseline, "baseline_label": plan.ONE_OFF, "experiment": "multi_gpu"}
    values["twin_ratio"] = twin_ratio
    found = make.sets(candidates, family=family.name, count=count, step_seconds=base / 1e3, set_noise=0.001, **values)
    share = 1 - plants.get("slow", 0.0) / times[plan.ALL_OFF]
    return [_uneven(r, share) if r.label == plan.ALL_OFF else r for r in found]


def _uneven(record: RunRecord, share: float) -> RunRecord:
    """Rank 1 takes as long as the window, rank 0 a ``share`` of it."""
    windows = [dataclasses.replace(w, rank_seconds=(share * w.seconds, w.seconds)) for w in record.windows]
    return dataclasses.replace(record, windows=tuple(windows))


def study(records: Sequence[RunRecord]) -> Study:
    return make.study(list(records), "multi_gpu")


def split(**plants: float) -> Split:
    (found,) = splits(study(measured(FAMILY, **plants)))
    return found


def parts(found: Split) -> Mapping[str, Any]:
    return {**{part.name: part.seconds for part in found.parts}, "interaction": found.interaction}


# One rank pays for its data too, so that half of it is no loss; half of what is fixed is one.
LOST = {"data": 0.5, "fixed": 0.5}


@pytest.mark.parametrize("plant", PARTS)
def test_a_planted_loss_is_found_by_its_own_part_and_by_no_other(plant: str) -> None:
    found = split(**{plant: 4.0})
    expected = {name: 4.0 * LOST.get(key, 1.0) if key == plant else 0.0 for key, name in PARTS.items()}
    for name, seconds in parts(found).items():
        assert 1e3 * seconds.value == pytest.approx(expected[name], abs=0.15), name
        half = (seconds.high - seconds.low) / 2
        assert abs(seconds.value - expected[name] / 1e3) <= 2 * half, f"{name} is far outside its interval"
        assert half < 0.2e-3
    assert 1e3 * found.loss.value == pytest.approx(sum(expected.values()), abs=0.15)
    assert 1e3 * found.ideal.value == pytest.approx(steps(**{plant: 4.0})[plan.ONE_RANK] / 2, rel=0.02)


def test_all_losses_together_add_up_to_the_loss() -> None:
    planted = {"communication": 3.0, "data": 2.0, "slow": 2.5, "fixed": 2.0, "threads": 1.5}
    found = split(**planted, shared=0.5, interaction=0.7)
    assert len(found.parts) == len(PARTS) - 1
    total = sum(part.seconds.value for part in found.parts)
    for name, seconds in parts(found).items():
        key = next(key for key, part in PARTS.items() if part == name)
        expected = {**planted, "shared": 0.5, "interaction": 0.7}[key] * LOST.get(key, 1.0)
        assert 1e3 * seconds.value == pytest.approx(expected, abs=0.2), name
    assert found.total.value == pytest.approx(total, rel=1e-9)
    assert found.loss.value == pytest.approx(total + found.interaction.value, rel=1e-9)
    assert found.measured.value - found.ideal.value == pytest.approx(found.loss.value, rel=1e-9)
    assert 1e3 * found.all_off.value == pytest.approx(steps(**planted, shared=0.5)[plan.ALL_OFF], rel=0.02)
    assert found.reliable


def test_an_interaction_above_a_third_makes_the_split_unreliable() -> None:
    fine, bad = (split(communication=4.0, interaction=x) for x in (1.0, 3.0))
    assert fine.reliable
    assert not bad.reliable
    shown = question.table(study(measured(FAMILY, communication=4.0, interaction=3.0)))
    assert [row["Note"] for row in shown if row["Part"] == "interaction"] == ["split unreliable"]


def test_the_figure_is_headed_by_what_was_lost_to() -> None:
    lost = splits(study(measured(FAMILY, communication=2.0, slow=4.0)))
    assert question.headline(lost) == "Lost to slowest rank and exposed communication"
    assert [(p.name, p.note) for p in lost[0].largest] == [("slowest rank", "rank 1"), ("exposed communication", "")]
    for nothing in (measured(FAMILY), measured(FAMILY, communication=4.0, interaction=3.0)):
        assert question.headline(splits(study(nothing))) == "Where the lost scaling went"


def heading(of: Study) -> str:
    drawn = question.figure(of)
    assert drawn is not None
    (ax,) = drawn.axes
    return str(ax.get_title(loc="left"))


def test_with_too_few_sets_the_parts_are_shown_and_no_loss_is_claimed() -> None:
    of = study(measured(FAMILY, 3, communication=4.0, slow=3.0))
    (found,) = splits(of)
    assert found.loss.low > 0, "an interval alone would claim it"
    assert found.doubt
    assert {p.note for p in found.parts} == {""}, "no rank is named"
    assert "Lost" not in question.sentence(found)
    shown = by(question.table(of), "Part")
    assert shown["loss"]["Note"] == found.doubt
    assert str(shown["exposed communication"]["Time in a step"]).startswith("4.")
    assert {row["Share of the loss"] for row in shown.values()} == {phrases.DASH}
    assert found.doubt in heading(of)
    assert splits(study(measured(FAMILY, 4, communication=4.0, slow=3.0)))[0].doubt == ""
    assert "(" not in heading(study(measured(FAMILY, communication=4.0, slow=3.0)))


def test_a_crowded_set_does_not_count() -> None:
    records = measured(FAMILY, communication=4.0)
    ids = list(dict.fromkeys(r.set_id for r in records))
    beside = [
        dataclasses.replace(r, windows=tuple(dataclasses.replace(w, others_cores=1.0) for w in r.windows))
        if r.set_id in ids[:2]
        else r
        for r in records
    ]
    (found,) = splits(study(beside))
    assert found == splits(study([r for r in records if r.set_id not in ids[:2]]))[0]


def test_ranks_that_share_cores_show_no_loss_and_are_not_listed_beside_the_answer() -> None:
    shared = [dataclasses.replace(r, mechanism_only=r.config.world_size > 1) for r in measured(FAMILY, communication=4)]
    (found,) = splits(study(shared))
    assert question.sentence(found) == "2 ranks for a batch of 16: mechanism tested, speed not claimed."
    assert {p.note for p in found.parts} == {""}
    assert question.figure(study(shared)) is None
    main = make.sets({"2 ranks": (RunConfig(world_size=2), 1.5)}, experiment="multi_gpu", baseline_label="1 rank")
    alone, beside = study(main), study([*main, *shared])
    notes = [[t.get_text() for t in answer(of).figure().findobj(Text)] for of in (alone, beside)]
    assert notes[0] == notes[1]
    assert machine_state.table(alone) == machine_state.table(beside)


def test_a_part_that_could_not_be_measured_says_why_and_the_others_stay() -> None:
    records = [r for r in measured(FAMILY, communication=4.0) if r.label != plan.READY_BATCHES]
    config = dict(FAMILY.candidates)[plan.READY_BATCHES]
    values = {"family": FAMILY.name, "baseline_id": FAMILY.baseline.run_id, "experiment": "multi_gpu"}
    records.append(
        make.record(config, role="candidate", label=plan.READY_BATCHES, status="oom", reason="no memory", **values)
    )
    of = study(records)
    (found,) = splits(of)
    by_name = {part.name: part for part in found.parts}
    assert 1e3 * by_name["exposed communication"].seconds.value == pytest.approx(4.0, abs=0.15)
    assert not by_name["waiting for data"].seconds.known
    assert by_name["waiting for data"].note == f"not measured: {plan.READY_BATCHES} (no memory)"
    assert not found.total.known
    shown = by(question.table(of), "Part")
    for name in ("waiting for data", "interaction"):
        assert str(shown[name]["Time in a step"]) == "not measured"
    assert question.figure(of) is None, "a waterfall with a gap does not arrive"


def test_overlapped_communication_is_what_a_profile_saw_beyond_the_exposed() -> None:
    config = dataclasses.replace(dict(FAMILY.candidates)["2 ranks"], purpose="profile")
    spans = [{"communication": {"seconds": s, "overlapped_seconds": 0.0}} for s in (0.009, 0.007)]
    ranks = [{"unsynchronised": {"spans": found}} for found in spans]
    profile = {"budget": {"ranks": ranks}}
    values: dict[str, Any] = {"experiment": "multi_gpu", "set_id": "", "baseline_id": "", "family": FAMILY.name}
    told = make.record(config, role="profile", label="2 ranks", profile=profile, **values)
    (found,) = splits(study([*measured(FAMILY, communication=4.0), told]))
    assert found.communication == 0.007, "the rank that waits least for the other"
    assert 1e3 * found.overlapped.value == pytest.approx(3.0, abs=0.15)
    assert found.overlapped.low < found.overlapped.value < found.overlapped.high
    assert not split(communication=4.0).overlapped.known


def test_the_parts_are_no_comparisons_of_the_question() -> None:
    main = make.sets({"2 ranks": (RunConfig(world_size=2), 1.5)}, experiment="multi_gpu", baseline_label="1 rank")
    alone, beside = (comparisons(study(r)) for r in (main, [*main, *measured(FAMILY, communication=4.0)]))
    assert [r.label for r in beside] == [r.label for r in alone]
    assert [r.p for r in beside] == pytest.approx([r.p for r in alone], abs=0, nan_ok=True)


def test_the_question_shows_figure_table_and_sentence() -> None:
    main = make.sets({"2 ranks": (RunConfig(world_size=2), 1.5)}, experiment="multi_gpu", baseline_label="1 rank")
    of = study([*main, *measured(FAMILY, communication=4.0)])
    captions = [caption for caption, _ in answer(of).tables()]
    assert any(c.startswith("Where the lost scaling went. 2 ranks take") for c in captions)
    assert "lost_scaling" in [name for _, _, name in answer(of).figures()]
    assert phrases.context(of) == phrases.context(study(main)), "the question's batches, not those of the parts"
    assert "lost_scaling" not in [name for _, _, name in answer(study(main)).figures()]
    shown = by(question.table(of), "Part")
    assert shown["work of rank 0 alone"]["How it is measured"] == "none in this step: every rank does the same"
    assert shown["exposed communication"]["Share of the loss"] in ("99 %", "100 %", "101 %")


def test_the_waterfall_leads_from_the_ideal_to_the_measured() -> None:
    planted = {"communication": 3.0, "data": 2.0, "slow": 2.5, "fixed": 2.0, "threads": 1.5, "interaction": -1.0}
    of = study(measured(FAMILY, **planted))
    drawn = question.figure(of)
    assert drawn is not None
    (ax,) = drawn.axes
    bars = sorted((p for p in ax.patches if isinstance(p, Rectangle)), key=lambda p: p.get_y())
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "ideal",
        *(part.name for part in splits(of)[0].parts),
        "interaction",
        "measured",
    ]
    reached = 0.0
    for bar in bars[:-1]:
        assert bar.get_x() == pytest.approx(reached)
        reached += bar.get_width()
    assert bars[-1].get_x() == 0
    assert bars[-1].get_width() == pytest.approx(reached, rel=1e-9)
    assert reached == pytest.approx(steps(**planted)["2 ranks"], rel=0.02)


def test_a_time_below_zero_says_what_it_means() -> None:
    gained = by(question.table(study(measured(FAMILY, communication=-1.0))), "Part")
    assert gained["exposed communication"]["Note"] == "a gain"
    noisy = measured(FAMILY)
    (found,) = splits(study(noisy))
    below = {p.name for p in found.parts if p.seconds.value < 0 and not p.seconds.resolved}
    assert below, "noise falls on both sides"
    shown = by(question.table(study(noisy)), "Part")
    assert {shown[name]["Note"] for name in below} == {"below zero: inconclusive"}


def test_the_run_that_asks_for_it_prints_it(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    more = {"4 ranks": (RunConfig(world_size=4), 1.2), "2 ranks": (RunConfig(world_size=2), 1.5)}
    of = study(
        [*make.sets(more, experiment="multi_gpu", baseline_label="1 rank"), *measured(FAMILY, communication=4.0)]
    )
    answered = SimpleNamespace(
        experiment=SimpleNamespace(name="multi_gpu", configurations=()),
        measured_sets=0,
        ledger="ledger.jsonl",
        output_dir=tmp_path,
        completed=True,
    )
    asked = SimpleNamespace(campaign=SimpleNamespace(target=SimpleNamespace(seconds=0)), measure=lambda: answered)
    monkeypatch.setattr(planning, "plan_question", lambda *_, **__: asked)
    monkeypatch.setattr(experiments, "study_of", lambda _: of)
    monkeypatch.setattr(experiments, "records_of", lambda _: [])
    _, out, _ = call("run", "multi_gpu", "--lost-scaling")
    said = question.sentence(splits(of)[0])
    assert f"where the lost scaling went, tiny, batch 16, 2 ranks: {said}" in out
    assert any(line.startswith("exposed communication") for line in out.splitlines())
    assert "where the lost scaling went, not split: 4 ranks; --world-sizes 1,4 does that\n" in out
    (shown,) = json.loads(call("run", "multi_gpu", "--lost-scaling", "--json")[1])
    assert shown["lost_scaling"][0]["sentence"] == said
    assert "exposed communication" in [row["Part"] for row in shown["lost_scaling"][0]["parts"]]

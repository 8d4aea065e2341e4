"""The report: its order, its sums, its targets, and that what was not measured is said with how to measure it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import records as make
from planted_machines import profiled, study, told

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import advice as adv
from ddpm_lab.explain import bottleneck, subject
from ddpm_lab.explain.bands import S002
from ddpm_lab.explain.bottleneck import MET, MISSED, NO_TARGET, UNKNOWN
from ddpm_lab.explain.bottleneck_report import markdown
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

CONFIG = RunConfig(global_batch_size=8)
STARVED = {"data": 60.0, "copy": 1.0, "forward": 20.0, "backward": 15.0, "optimizer": 4.0}
BUSY = {"data": 2.0, "copy": 1.0, "forward": 36.0, "backward": 56.0, "optimizer": 5.0}
ORDER = [
    "Executive summary",
    "Bottleneck identification",
    "Current configuration",
    "Recommendations",
    "Why the present speed is good or not",
    "Action plan",
    "Targets",
    "Conclusion",
    "Method",
]


def measured(phases: dict[str, float], **ratios: float) -> Study:
    changed = {
        "bf16": replace(CONFIG, precision="bf16"),
        "compiled": replace(CONFIG, compile="whole"),
        "larger": replace(CONFIG, global_batch_size=64),
    }
    found = {name: (changed[name], ratio) for name, ratio in ratios.items()}
    return study(profiled(CONFIG, phases), *told(CONFIG, found, step_seconds=0.1))


def status(shown: Study) -> dict[str, str]:
    about = subject.subject(shown)
    assert about is not None
    return {t.name.partition(",")[0]: t.status for t in bottleneck.targets(shown, about, adv.advice(shown))}


def test_sections_come_in_the_published_order() -> None:
    assert re.findall(r"^## (.+)$", markdown(measured(BUSY, bf16=1.4)), re.MULTILINE) == ORDER
    assert re.findall(r"^## (.+)$", markdown(study(profiled(CONFIG, BUSY))), re.MULTILINE) == ORDER


def test_the_phases_add_up_and_have_their_classes() -> None:
    text = markdown(measured(STARVED))
    table = text.partition("| Component |")[2].partition("\n\n")[0]
    cells = [[c.strip() for c in line.strip("| ").split("|")] for line in table.splitlines()[2:]]
    assert sum(float(c[1].removesuffix(" ms")) for c in cells[:-1]) == pytest.approx(100, abs=0.2)
    assert {c[0]: c[3] for c in cells}["waiting for data"] == "I/O"
    assert {c[0]: c[3] for c in cells}["host-to-device copy"] == "memory transfer"
    assert {c[0]: c[3] for c in cells}["backward"] == "compute"


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (STARVED, ["limited by I/O", "I/O 60 % (poor)", "compute share 39 % (poor)"]),
        (BUSY, ["limited by compute", "compute share 97 % (good)", "I/O 2.0 % (good)"]),
        ({"copy": 50.0, "forward": 49.0, "data": 1.0}, ["limited by memory transfer"]),
        (
            {"forward": 75.0, "data": 25.0},
            ["limited by compute", "between good and poor", "above its target (below 15 %)"],
        ),
    ],
)
def test_the_verdict_names_what_takes_most(phases: dict[str, float], words: list[str]) -> None:
    said = bottleneck.summary(study(profiled(CONFIG, phases)))[0]
    for word in words:
        assert word in said


def with_memory(record: RunRecord, share: float, cpu: float) -> RunRecord:
    assert record.profile is not None
    assert record.environment.ram_bytes is not None
    budget = {**record.profile["budget"], "state": {"cpu_utilisation_percent": cpu}}
    rank = replace(make.rank_record(0), peak_rss_bytes=int(share * record.environment.ram_bytes))
    return replace(record, profile={**record.profile, "budget": budget}, ranks=(rank,))


def test_targets_are_met_missed_or_not_measured() -> None:
    budget = profiled(CONFIG, BUSY)
    epoch = "time of 50"
    assert status(study(budget)) == {
        "compute share": MET,
        "I/O share": MET,
        "memory in use": NO_TARGET,
        "CPU utilisation": UNKNOWN,
        epoch: UNKNOWN,
    }
    assert status(measured(STARVED, bf16=1.4))["compute share"] == MISSED
    assert status(measured(STARVED, bf16=1.4))["I/O share"] == MISSED
    assert status(measured(BUSY, bf16=1.4))[epoch] == MISSED
    assert status(measured(BUSY, bf16=0.7))[epoch] == MET
    known = status(study(with_memory(budget, 0.5, 90.0)))
    assert (known["memory in use"], known["CPU utilisation"]) == (NO_TARGET, MET)
    known = status(study(with_memory(budget, 0.1, 50.0)))
    assert (known["memory in use"], known["CPU utilisation"]) == (NO_TARGET, MISSED)


@pytest.mark.parametrize(
    ("others", "status", "now"),
    [
        (0.1, MET, "90 %"),
        (1.0, UNKNOWN, "45 %; other processes took 1.0 of 2 cores"),
        (None, UNKNOWN, "95 % with other processes, whose share is unknown"),
    ],
)
def test_neighbours_are_no_utilisation(others: float | None, status: str, now: str) -> None:
    """The cores were busy for 95 % of the time, and what others took of that counts for nothing."""
    budget = with_memory(profiled(CONFIG, BUSY), 0.5, 95.0)
    assert budget.profile is not None
    budget.profile["budget"]["others_cores"] = others
    shown = study(budget)
    about = subject.subject(shown)
    assert about is not None
    (found,) = (t for t in bottleneck.targets(shown, about, ()) if t.name == "CPU utilisation")
    assert (found.status, found.now) == (status, now)


def test_what_neighbours_took_is_told_of_the_budget_and_of_the_sets_apart() -> None:
    budget = profiled(CONFIG, BUSY)
    assert budget.profile is not None
    budget.profile["budget"]["others_cores"] = 1.4
    sets = told(CONFIG, {"bf16": (replace(CONFIG, precision="bf16"), 1.4)}, count=6)
    sets = [replace(r, windows=tuple(replace(w, others_cores=1.1) for w in r.windows)) for r in sets]
    text = markdown(study(budget, *sets))
    assert "Other processes kept 1.4 of 2 cores busy while the time budget was taken." in text
    assert "6 of 6 sets were disturbed by other processes and do not count. The time budget was taken apart" in text


def test_a_target_is_told_from_the_name_of_a_share() -> None:
    text = markdown(study(profiled(CONFIG, {"data": 17.0, "forward": 83.0})))
    assert "I/O 17 % (good), and waiting for data is above its target (below 15 %)" in text
    assert "I/O good up to 20 %" in text.partition("## Method")[2]
    assert "I/O below 15 %, which is less than what it names good" in text.partition("## Method")[2]


def test_names_of_shares_are_the_published_bands() -> None:
    assert "S002, a report on the bottlenecks of one training run" in markdown(study(profiled(CONFIG, BUSY)))
    assert [S002.compute_name(s) for s in (0.95, 0.85, 0.75, 0.6, 0.3)] == [
        *("good", "good", "between good and poor", "poor", "poor")
    ]
    assert [S002.io_name(s) for s in (0.01, 0.15, 0.25, 0.4, 0.9)] == [
        *("good", "good", "between good and poor", "poor", "poor")
    ]


def test_a_recommendation_says_all_that_is_asked_of_it() -> None:
    text = markdown(measured(BUSY, bf16=1.4, compiled=0.8))
    first = text.partition("### 1. Train in bf16")[2].partition("###")[0]
    for name in ("Impact", "Now", "Rationale", "Evidence", "Expected improvement", "Quality", "Command", "Test plan"):
        assert f"**{name}" in first
    assert '`precision = "fp32"`' in first
    assert "--changes bf16" in first
    assert "ddpm-lab run quality" in first, "its quality was not measured"
    fine = text.partition("No action needed for")[2].partition("## ")[0]
    assert "waiting for data: 2.0 % of a step" in fine
    assert re.search(r"Compile the step: 0\.8\d* times as fast .*\(slower\)", fine)
    assert "Train in bf16" not in fine


def test_what_one_set_reads_comes_with_its_noise_floor_and_promises_nothing() -> None:
    bf16 = {"bf16": (replace(CONFIG, precision="bf16"), 1.77)}
    shown = study(profiled(CONFIG, BUSY), *told(CONFIG, bf16, count=1, set_noise=0.3))
    (again,) = (r.ratio.value for r in comparisons(shown) if r.role == "twin")
    reads = f"he present settings against themselves read {again:.2f}"
    assert abs(again - 1) > 0.03
    assert reads in bottleneck.summary(shown)[3]
    first = markdown(shown).partition(". Train in bf16\n")[2].partition("###")[0]
    assert reads in first.partition("**Evidence:**")[2].partition("\n")[0]
    assert first.partition("**Expected result:** ")[2].startswith("not known")
    assert first.partition("**Expected improvement:** ")[2].startswith("inconclusive")


def test_what_was_asked_for_is_told_whatever_came_of_it() -> None:
    compiled = {"compiled": (replace(CONFIG, compile="whole"), 1.0)}
    shown = study(profiled(CONFIG, BUSY), *told(CONFIG, compiled))
    said = " ".join(bottleneck.summary(shown))
    assert "First to be measured: Train in bf16" in said
    assert re.search(r"Measured too: compile the step, (1\.0|0\.99)\d* times as fast \(.*\): no gain\.", said)
    assert "**Recommended:**" not in markdown(shown)
    assert "**Recommended:** `precision" in markdown(measured(BUSY, bf16=1.4))


def test_with_enough_sets_the_noise_floor_is_an_interval_and_the_result_is_stated() -> None:
    text = markdown(measured(BUSY, bf16=1.4))
    assert re.search(r"he present settings against themselves read .* \(95 % interval ", text)
    assert re.search(r"\*\*Evidence:\*\* .*; the baseline repeated \d\.\d+ to \d\.\d+\)", text)
    assert re.search(r"\*\*Expected result:\*\* \d", text)
    assert "against themselves" not in "".join(bottleneck.summary(study(profiled(CONFIG, BUSY))))


def test_a_batch_that_was_swept_is_a_row_and_one_that_was_not_has_its_command() -> None:
    swept = markdown(measured(BUSY, larger=2.5))
    assert re.search(r"\| 64 \| .* images/s \|", swept)
    assert "Equal images in other batches are not equal training" in swept
    bare = markdown(study(profiled(CONFIG, BUSY)))
    assert "`ddpm-lab bottleneck --network tiny --batch-size 8` measures them" in bare
    assert "parts limits` measures the peaks" in bare


def test_without_a_time_budget_the_report_is_how_to_get_one() -> None:
    assert "ddpm-lab bottleneck" in markdown(study(*make.sets({})))

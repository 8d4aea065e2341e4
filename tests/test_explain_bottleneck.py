"""The bottleneck report: a planted machine's fault comes first with its gain, targets, verdict and page agree."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import records as make
from cells import column
from planted_machines import MACHINES, Planted, profiled, seconds, study, told

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import subject
from ddpm_lab.explain.bands import S002
from ddpm_lab.explain.changes import NO_EXCHANGE
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.questions import bottleneck as question
from ddpm_lab.explain.questions.bottleneck import MET, MISSED, NO_TARGET, UNKNOWN, Advice
from ddpm_lab.plan import Experiment, Family, Plan
from ddpm_lab.questions.bottleneck_page import markdown
from ddpm_lab.questions.experiments import study_of
from ddpm_lab.questions.planning import plan_experiment
from ddpm_lab.record import RunRecord

CONFIG = RunConfig(global_batch_size=8)
FILES = RunConfig(loader="files", global_batch_size=8)
BF16 = replace(CONFIG, precision="bf16")
COMPILED = replace(CONFIG, compile="whole")
STARVED = {"data": 60.0, "copy": 1.0, "forward": 20.0, "backward": 15.0, "optimizer": 4.0}
BUSY = {"data": 2.0, "copy": 1.0, "forward": 36.0, "backward": 56.0, "optimizer": 5.0}
OVERSHOOT = 1.06


def by_title(found: Sequence[Advice], title: str) -> Advice:
    return next(a for a in found if a.title == title)


def measured(phases: dict[str, float], **ratios: float) -> Study:
    changed = {"bf16": BF16, "compiled": COMPILED}
    found = {name: (changed[name], ratio) for name, ratio in ratios.items()}
    return study(profiled(CONFIG, phases), *told(CONFIG, found, step_seconds=0.1))


def about(shown: Study) -> subject.Subject:
    found = subject.subject(shown)
    assert found is not None
    return found


def target(shown: Study, name: str) -> question.Target:
    found = question.targets(shown, about(shown), question.advice(shown))
    return next(t for t in found if t.name.startswith(name))


# --- changes ----------------------------------------------------------------------------------------------------------


def phases_of(planted: Planted) -> list[dict[str, float]]:
    """What a time budget of the planted machine shows of each rank, in milliseconds."""
    config, costs = planted.config, dict(planted.config.options)
    loading = 1e3 * costs["loader"] if config.loader == "files" else 0.0
    fixed = 1e3 * costs["fixed"]
    step = 1e3 * seconds(config) - loading - fixed
    slow = 1e3 * costs["slow"] if config.world_size > 1 else 0.0
    every = {"data": loading, "forward": step, "optimizer": fixed}
    return [every] if config.world_size == 1 else [{**every, "forward": step - slow, "communication": slow}, every]


def records_of(planted: Planted) -> list[RunRecord]:
    """The records that measuring a planted machine makes."""
    config = planted.config
    per_image = seconds(config) / config.global_batch_size
    ratios = {n: (c, per_image / (seconds(c) / c.global_batch_size)) for n, c in planted.changes().items()}
    found = told(config, ratios, step_seconds=seconds(config))
    if NO_EXCHANGE in ratios:
        slow = dict(config.options)["slow"] / seconds(config)
        found = [
            r
            if r.label != NO_EXCHANGE
            else replace(
                r, windows=tuple(replace(w, rank_seconds=(w.seconds * (1 - slow), w.seconds)) for w in r.windows)
            )
            for r in found
        ]
    return [profiled(config, *phases_of(planted)), *found]


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_wrong_comes_first_with_what_curing_it_is_worth(name: str) -> None:
    planted = MACHINES[name]
    first, *others = question.advice(study(*records_of(planted)))
    assert first.title == planted.title
    assert first.status in (question.FASTER, question.DERIVED)
    assert first.low <= planted.gain <= first.high
    assert first.impact == "high"
    assert all(a.rank >= first.rank for a in others)


def test_what_is_not_measured_is_ordered_by_the_phases_it_acts_on_and_promises_nothing() -> None:
    shown = study(profiled(FILES, {"data": 60.0, "forward": 30.0, "optimizer": 10.0}))
    found = question.advice(shown)
    assert {a.status for a in found} == {question.NOT_MEASURED}
    assert found[0].title == "Use packed data"
    assert found[0].share == pytest.approx(0.6)
    assert by_title(found, "Compile the step").share == pytest.approx(0.3)
    assert by_title(found, "Use batches of 64 images").share == 0
    assert {a.expected() for a in found} == {"not measured"}
    assert not question.table(shown)


def test_what_is_resolved_goes_first() -> None:
    resolved = {
        "bf16": (replace(FILES, precision="bf16"), 1.08),
        "compiled": (replace(FILES, compile="whole"), 1.30),
        "batch 16": (replace(FILES, global_batch_size=16), 0.8),
    }
    unsure = {"batch 32": (replace(FILES, global_batch_size=32), 1.2)}
    shown = study(
        profiled(FILES, {"data": 60.0, "forward": 40.0}),
        *told(FILES, resolved),
        *told(FILES, unsure, set_noise=0.3, seed=1, count=6),
    )
    found = question.advice(shown)
    assert [a.title for a in found[:2]] == ["Compile the step", "Train in bf16"]
    assert column(question.table(shown), "Change") == [a.title for a in found if a.status != question.NOT_MEASURED]
    assert [a.rank for a in found] == sorted(a.rank for a in found)
    assert by_title(found, "Use batches of 32 images").status == question.NOT_RESOLVED
    assert by_title(question.declined(shown), "Use batches of 16 images").status == question.SLOWER


def test_a_single_set_settles_nothing() -> None:
    ratios = {"bf16": (BF16, 0.5), "batch 64": (replace(CONFIG, global_batch_size=64), 1.6)}
    shown = study(profiled(CONFIG, BUSY), *told(CONFIG, ratios, count=1, set_noise=0.3))
    found = question.advice(shown)
    unsure = {a.title for a in found if a.status == question.NOT_RESOLVED}
    assert unsure == {"Train in bf16", "Use batches of 64 images"}
    assert found[-1].title == "Train in bf16", "it is measured to be slower, and nobody knows"
    assert {a.impact for a in found} == {"unknown"}
    assert not any(a.sure for a in found)
    assert target(shown, "time of 50").status == UNKNOWN
    assert "**Recommended:**" not in markdown(shown)


def test_no_gain_is_declined_and_told() -> None:
    shown = study(profiled(CONFIG, BUSY), *told(CONFIG, {"compiled": (COMPILED, 1.0)}))
    left = by_title(question.declined(shown), "Compile the step")
    assert left.status == question.NO_GAIN
    assert any("compile the step" in said and left.expected() in said for said in question.summary(shown))


def test_what_is_known_to_cost_quality_is_not_recommended_and_said() -> None:
    records = [profiled(CONFIG, {"forward": 100.0}), *told(CONFIG, {"bf16": (BF16, 1.5)})]
    costly = study(*records, trials=make.trials({"bf16": (BF16, 0.1)}, baseline=CONFIG))
    assert "Train in bf16" not in [a.title for a in question.advice(costly)]
    left = by_title(question.declined(costly), "Train in bf16")
    assert left.status == question.WORSE
    assert left.quality_word.startswith("worse")
    same = study(*records, trials=make.trials({"bf16": (BF16, 0.0)}, baseline=CONFIG))
    assert question.advice(same)[0].quality.startswith("not worse")
    assert question.advice(study(*records))[0].quality.startswith("not measured")


def test_other_code_other_baselines_and_failures_are_no_measurements_of_this() -> None:
    budget = profiled(CONFIG, {"forward": 80.0, "optimizer": 20.0})
    other_code = [replace(r, code_version="code-2") for r in told(CONFIG, {"bf16": (BF16, 1.5)})]
    assert by_title(question.advice(study(budget, *other_code)), "Train in bf16").status == question.NOT_MEASURED
    elsewhere = told(BF16, {"compiled": (replace(BF16, compile="whole"), 1.5)})
    assert by_title(question.advice(study(budget, *elsewhere)), "Compile the step").status == question.NOT_MEASURED
    lost = told(CONFIG, {}, failures={"compiled": (COMPILED, "unsupported", "no C++ compiler")})
    failed = by_title(question.declined(study(budget, *lost)), "Compile the step")
    assert failed.status == question.FAILED
    assert "no C++ compiler" in failed.evidence


def test_what_was_left_out_is_said_with_its_reason() -> None:
    note = make.record(CONFIG, role="note", label="compiled", status="left out", reason="it takes too long")
    note = replace(note, experiment="bottleneck", family="one change at a time", baseline_id=CONFIG.run_id)
    shown = study(profiled(CONFIG, BUSY), note, *told(CONFIG, {"bf16": (BF16, 1.5)}))
    left_out = by_title(question.advice(shown), "Compile the step")
    assert left_out.evidence.endswith("; it takes too long")
    assert left_out.status == question.NOT_MEASURED
    assert left_out.evidence in markdown(shown)


def test_identical_ranks_have_no_straggler() -> None:
    planted = replace(MACHINES["straggler"], costs={"image": 0.002, "slow": 0.0})
    shown = study(*records_of(planted))
    assert not [a for a in question.advice(shown) if "slow" in a.title]
    assert by_title(question.declined(shown), "Find out why one rank is slow").status == question.NO_GAIN


def test_commands_name_the_present_settings_and_the_change() -> None:
    config = RunConfig(loader="files", loader_workers=2, precision="bf16", global_batch_size=8)
    found = question.advice(study(profiled(config, {"data": 50.0, "forward": 50.0})))
    assert found[0].command == (
        "ddpm-lab bottleneck --network tiny --batch-size 8 --precision bf16 --loader files --loader-workers 2 "
        "--changes 'packed data' --resolution 2%"
    )
    assert (found[0].current, found[0].recommended) == (
        'loader = "files", loader_workers = 2',
        'loader = "packed", loader_workers = 0',
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_a_planted_machine_is_measured_and_cured(name: str, tmp_path: Path) -> None:
    planted = MACHINES[name]
    config = planted.config
    family = Family(
        name="planted", baseline=config, baseline_label="as it is", candidates=tuple(planted.changes().items())
    )
    experiment = Experiment(
        name="bottleneck",
        families=(family,),
        profiles=(("planted", "as it is", dataclasses.replace(config, purpose="profile")),),
    )
    # Where something else held a set up there are more of them, as its users have it.
    measured = plan_experiment(
        experiment,
        data_name="none",
        plan=Plan(turns=2, window_seconds=0.1, window_steps=3, settle_steps=1, warmup_steps=2),
        sets=16,
        resolution=0.05,
        minutes=None,
        output=tmp_path,
        quiet=True,
    ).measure()
    # Ranks that wait do not share a core: what several of them show is a speed here.
    records = [replace(r, mechanism_only=False) for r in study_of(measured).records]
    first = question.advice(study(*records))[0]
    assert first.title == planted.title, (first, by_title(question.advice(study(*records)), planted.title))
    assert first.status in (question.FASTER, question.DERIVED)
    # A wait of 10 ms ends up to half a millisecond late on a busy machine, which is planted nowhere.
    assert first.low / OVERSHOOT <= planted.gain <= first.high * OVERSHOOT


# --- verdict, targets, page -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (STARVED, ["limited by I/O", "I/O 60 % (poor)", "compute share 39 % (poor)"]),
        (BUSY, ["limited by compute", "compute share 97 % (good)", "I/O 2.0 % (good)"]),
        ({"copy": 50.0, "forward": 49.0, "data": 1.0}, ["limited by memory transfer, 50 %"]),
        ({"forward": 75.0, "data": 25.0}, ["limited by compute", "between good and poor", "above its target"]),
        ({"forward": 83.0, "data": 17.0}, ["I/O 17 % (good), and waiting for data is above its target (below 15 %)"]),
    ],
)
def test_the_verdict_names_what_takes_most(phases: dict[str, float], words: list[str]) -> None:
    said = question.verdict(about(study(profiled(CONFIG, phases))))
    for word in words:
        assert word in said


def test_a_budget_that_explains_nothing_names_no_bottleneck() -> None:
    shown = study(profiled(FILES, {"data": 60.0, "forward": 40.0}, residual=30.0))
    assert "no bottleneck is named" in question.verdict(about(shown))


def with_state(share: float, cpu: float, others: float | None = 0.0) -> Study:
    """A busy step on a machine whose memory and cores are used so."""
    record = profiled(CONFIG, BUSY)
    assert record.profile is not None
    assert record.environment.ram_bytes is not None
    budget = {**record.profile["budget"], "state": {"cpu_utilisation_percent": cpu}, "others_cores": others}
    rank = replace(make.rank_record(0), peak_rss_bytes=int(share * record.environment.ram_bytes))
    return study(replace(record, profile={**record.profile, "budget": budget}, ranks=(rank,)))


@pytest.mark.parametrize(
    ("shown", "name", "status", "now"),
    [
        (study(profiled(CONFIG, BUSY)), "compute share", MET, "97 %"),
        (study(profiled(CONFIG, BUSY)), "I/O share", MET, "2.0 %"),
        (study(profiled(CONFIG, BUSY)), "CPU utilisation", UNKNOWN, UNKNOWN),
        (study(profiled(CONFIG, BUSY)), "time of 50", UNKNOWN, None),
        (measured(STARVED, bf16=1.4), "compute share", MISSED, "39 %"),
        (measured(STARVED, bf16=1.4), "I/O share", MISSED, "60 %"),
        (measured(BUSY, bf16=1.4), "time of 50", MISSED, None),
        (measured(BUSY, bf16=0.7), "time of 50", MET, None),
        (with_state(0.5, 90.0), "memory in use", NO_TARGET, "50 %"),
        (with_state(0.5, 90.0), "CPU utilisation", MET, "90 %"),
        (with_state(0.1, 50.0), "CPU utilisation", MISSED, "50 %"),
        # The cores were busy for 95 % of the time, and what others took of that counts for nothing.
        (with_state(0.5, 95.0, 0.1), "CPU utilisation", MET, "90 %"),
        (with_state(0.5, 95.0, 1.0), "CPU utilisation", UNKNOWN, "45 %; other processes took 1.0 of 2 cores"),
        (with_state(0.5, 95.0, None), "CPU utilisation", UNKNOWN, "95 % with other processes, whose share is unknown"),
    ],
)
def test_targets_are_met_missed_or_not_measured(shown: Study, name: str, status: str, now: str | None) -> None:
    found = target(shown, name)
    assert found.status == status
    assert now in (found.now, None)


def test_names_of_shares_are_the_published_bands() -> None:
    names = ["good", "good", "between good and poor", "poor", "poor"]
    assert [S002.compute_name(s) for s in (0.95, 0.85, 0.75, 0.6, 0.3)] == names
    assert [S002.io_name(s) for s in (0.01, 0.15, 0.25, 0.4, 0.9)] == names


def test_the_page_has_all_that_a_report_is_asked_for() -> None:
    text = markdown(measured(BUSY, bf16=1.4, compiled=0.8), [("drawn", "a.png")], ["It took long."])
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [
        "Executive summary",
        "Bottleneck identification",
        "Current configuration",
        "Recommendations",
        "Targets",
        "No action needed",
        "Method",
    ]
    assert "It took long." in sections["Executive summary"]
    assert "![drawn](a.png)" in sections["Bottleneck identification"]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line[:2] == "| "]
    phases = rows[1 : next(i for i, row in enumerate(rows) if row[0] == "whole step")]
    cells = {row[0]: row for row in phases if row[1].endswith("ms")}
    assert sum(float(row[1].removesuffix(" ms")) for row in cells.values()) == pytest.approx(100, abs=0.2)
    assert [cells[name][3] for name in ("waiting for data", "host-to-device copy", "backward")] == [
        *("I/O", "memory transfer", "compute")
    ]
    (first,) = re.findall(r"### 1\. Train in bf16\n(.*?)\n\n(?!-)", sections["Recommendations"], re.DOTALL)
    for said in ("**Rationale", "**Expected improvement", "**Evidence", "--changes bf16", "ddpm-lab run quality"):
        assert said in first
    assert '`precision = "fp32"`' in first
    assert re.search(r"the baseline repeated \d\.\d+ to \d\.\d+\)", first)
    assert "waiting for data: 2.0 % of a step" in sections["No action needed"]
    assert re.search(r"Compile the step: 0\.8\d* times as fast .*\(slower\)", sections["No action needed"])


def test_what_neighbours_took_is_told_of_the_budget_and_of_the_sets_apart() -> None:
    budget = profiled(CONFIG, BUSY)
    assert budget.profile is not None
    budget.profile["budget"]["others_cores"] = 1.4
    sets = told(CONFIG, {"bf16": (BF16, 1.4)}, count=6)
    sets = [replace(r, windows=tuple(replace(w, others_cores=1.1) for w in r.windows)) for r in sets]
    text = markdown(study(budget, *sets))
    assert "Other processes kept 1.4 of 2 cores busy while the time budget was taken." in text
    assert "6 of 6 sets were disturbed by other processes" in text


def test_without_a_time_budget_there_is_no_advice_but_how_to_get_it() -> None:
    bare = study(*make.sets({}))
    assert question.advice(bare) == ()
    assert not question.table(bare)
    assert "ddpm-lab bottleneck" in markdown(bare)

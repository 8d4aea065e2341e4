"""The question claims: wrong ways that run, what they make of a number, and verdicts on published claims."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import claimed
import numpy as np
import pytest
import records as make
from claimed import BASE, CONFIGS, STEP
from conftest import done_alone
from setups import setup

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.quality import NOT_MEASURED
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.stats import INCONCLUSIVE
from ddpm_lab.measure import hardware
from ddpm_lab.measure.alone import run_wrong_ways
from ddpm_lab.plan import Experiment
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.claims import (
    CONFIRMED,
    FAULTS,
    REFUTED,
    UNTESTABLE,
    Judged,
    Reading,
    claims,
    judged,
    pair_figure,
    readings,
)
from ddpm_lab.record import Machine, RunRecord

HERE = setup()


def ways(experiment: Experiment) -> set[str]:
    return {way for check in experiment.checks for way in check.config.option("ways", "").split()}


def ran(label: str, synthetic: RunConfig, folder: Path) -> dict[str, Any]:
    """What one real repeat of the wrong ways of a configuration answered."""
    here = replace(HERE, preset="smoke", usable_cores=hardware.usable_cores())
    (check,) = (c for c in claims(here).checks if c.label == label)
    config = replace(check.config, data=synthetic.data, data_sha256=synthetic.data_sha256)
    found = done_alone(folder, config, run_wrong_ways, role="wrong")
    assert found.status == "ok", found.reason
    assert found.windows == (), "none of it supplies a speed"
    return dict((found.profile or {})["wrong_ways"])


@pytest.mark.slow
def test_every_wrong_way_runs_and_is_wrong(synthetic: RunConfig, tmp_path: Path) -> None:
    answers = ran("fp32", synthetic, tmp_path)
    profiled, phases = answers["profiled"], answers["phases"]
    assert profiled["seconds"] > profiled["loop_seconds"] > 0
    assert profiled["inclusive_seconds"] > 1.5 * profiled["exclusive_seconds"], "nested events are counted again"
    assert (len(answers["runs"]["seconds"]), len(answers["fresh"]["step_seconds"])) == (50, 6)
    assert phases["phases"]["backward"] > 0
    assert sum(phases["phases"].values()) == pytest.approx(phases["seconds"], rel=0.05)
    assert answers["counted"] == {"network": "s000", "parameters": 39_156_227}
    small, large = answers["bars"], ran("batch 32", synthetic, tmp_path)["bars"]
    assert (small["steps"], small["images"], large["steps"], large["images"]) == (6, 48, 1, 32)
    if "one_thread" in answers:
        alone = answers["one_thread"]
        compute = sum(s for name, s in alone["phases"].items() if name not in ("data", "copy"))
        assert compute > 0.7 * alone["seconds"]
        assert alone["cpu_seconds"] < 1.2 * alone["seconds"], "one thread uses one core at most"


# --- verdicts, from planted records whose numbers are known ---


def read(key: str, records: Sequence[RunRecord]) -> Reading:
    return readings(claimed.study(records))[key]


def spread(i: int) -> float:
    """Some scatter over repeats whose geometric mean is 1."""
    return math.exp((-0.02, -0.01, 0.0, 0.0, 0.01, 0.02)[i])


def profiled(seconds: float) -> dict[str, Any]:
    return {"steps": 6, "seconds": seconds, "loop_seconds": 0.06, "inclusive_seconds": 0.4, "exclusive_seconds": 0.1}


def cold(config: RunConfig, baseline: RunConfig, **values: Any) -> RunRecord:
    told = {"experiment": "torch_compile", "family": "torch_compile", "baseline_id": baseline.run_id, **values}
    made = make.cold(config, [19.9], label="compiled", **told)[0]
    return replace(made, stages={"compile": 19.9, "warmup": 0.1}, warmup_steps=10)


SECONDS = {"forward": 0.06, "backward": 0.10, "optimizer": 0.03, "ema": 0.002, "data": 0.008}
PHASES: dict[str, Any] = {"steps": 20, "seconds": 0.2, "cpu_seconds": 0.2, "phases": SECONDS}
WAYS: dict[str, Any] = {
    "fresh": lambda i: {"step_seconds": [2 * STEP * spread(i)] * 6},
    "bars": lambda i: {"steps": 6, "images": 48, "seconds": 6 * STEP * (1 + 0.1 * i)},
    "runs": {"steps": 3, "seconds": [0.03 * math.exp(0.1 * (i - 24.5) / 24.5) for i in range(50)]},
    "profiled": lambda i: profiled(0.6 * spread(i)),
    "phases": PHASES,
    "one_thread": PHASES,
    "unsynchronised": {"steps": 20, "seconds": 2 * STEP},
    "loss_read": {"steps": 20, "seconds": 20 * STEP},
    "phases_waited_for": {**PHASES, "phases": {"forward": 0.1, "backward": 0.15, "data": 0.05}},
}


def test_every_fault_reads_what_was_planted() -> None:
    """Steps of 10 ms in the sets; each wrong number over the right one is known, and drawn with its interval."""
    bars = {"steps": 1, "images": 32, "seconds": 32 * STEP / 8 / 1.25}
    others = claimed.wrong("batch 32", bars=bars)
    compiled = cold(CONFIGS["compiled"], BASE, experiment="claims", family="tiny, batch 8")
    of = claimed.study([*claimed.sets(), *claimed.wrong(**WAYS), *others, compiled])
    found = readings(of)
    expected = {
        "multiplied": 300 * (1 + 0.12) / (1800 * STEP),  # a second of start-up
        "cold": 2.0,
        "compiling": 2.0 / (STEP / 1.5),
        "profiler": 10.0,
        "single": 1.5,
        "label": 1 / 1.8,
        "gradient": math.inf,
        "share": 0.96 / 0.5,  # one of two cores computes
        "nested": 4.0,
        "unsynchronised": 0.1,
        "loss_read": 1.0,
        "phase_sums": 1.5,
    }
    assert {key: found[key].ratio.value for key in expected} == pytest.approx(expected, rel=0.02)
    assert found.keys() == FAULTS.keys()
    assert all(found[key].ratio.contains(expected[key]) for key in ("multiplied", "cold", "profiler"))
    assert not found["compiling"].ratio.exists, "one compile has no interval"
    drawn = [tuple(np.asarray(line.get_xdata()).tolist()) for line in answer(of).figure().axes[0].lines]
    assert all((r.ratio.value,) in drawn for r in found.values() if math.isfinite(r.ratio.value))
    assert all(r.ratio.ends in drawn for r in found.values() if r.ratio.exists)
    # 32 images in one bar and 48 in the other: half as much again is all that is wrong.
    even = claimed.wrong(bars={"steps": 6, "images": 48, "seconds": 48 * STEP / 8})
    assert read("unequal", [*claimed.sets(), *even, *others]).ratio.value == pytest.approx(1.5, rel=0.01)


def test_few_records_give_fewer_numbers_and_those_of_another_baseline_none() -> None:
    once = [*claimed.sets(), *claimed.wrong(repeats=1, **WAYS)]
    assert not read("profiler", once).ratio.exists
    assert "single" not in readings(claimed.study(once)), "one run differs from nothing"
    other = [replace(r, baseline_id="another") for r in claimed.wrong(repeats=9, profiled=profiled(6.0))]
    both = read("profiler", [*other, *claimed.sets(), *claimed.wrong(**WAYS)])
    assert both.ratio.value == pytest.approx(10, rel=0.01)
    of = claimed.study(claimed.sets())
    assert not readings(of)
    assert answer(of).figure().axes
    for part in (of, claimed.study(claimed.wrong(**WAYS))):  # nothing was timed once, or nothing says what is true
        assert pair_figure(part) is None


# --- verdicts ---------------------------------------------------------------------------------------------------------

ONE_GPU = replace(make.GPUS, gpus=make.GPUS.gpus[:1])
CUDA = RunConfig(device="cuda", global_batch_size=128)


def verdict_on(study: Study, key: str, text: str = "") -> Judged:
    (found,) = [a for claim, a in judged(study) if claim.key == key and text in claim.says]
    return found


def verdict(study: Study, key: str, text: str = "") -> str:
    return verdict_on(study, key, text).verdict


def sets(experiment: str, candidates: dict[str, tuple[RunConfig, float]], **values: Any) -> list[RunRecord]:
    return make.sets(
        candidates, experiment=experiment, family=experiment, **{"set_noise": 0.002, "turn_noise": 0.002, **values}
    )


def on(machine: Machine, *records: RunRecord) -> Study:
    """A study of claims that rests on other questions' records."""
    return claimed.study([*claimed.sets(), *claimed.wrong()], beside=records, machine=machine)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_a_cpu_decides_nothing_about_the_speed_of_a_gpu(ratio: float) -> None:
    """Whatever is resolved here, for or against."""
    questions = {"amp": "bf16", "torch_compile": "compiled", "multi_gpu": "2 ranks"}
    beside = [r for q, label in questions.items() for r in sets(q, {label: (CONFIGS[label], ratio)}, baseline=BASE)]
    of = claimed.study([*claimed.sets(dict.fromkeys(CONFIGS, ratio)), *claimed.wrong(**WAYS)], beside=beside)
    needing = [a.verdict for claim, a in judged(of) if claim.gpus]
    assert needing == [UNTESTABLE] * 11


@pytest.mark.parametrize(
    ("ratio", "held", "faster", "values"),
    [
        (1.3, CONFIRMED, CONFIRMED, {}),
        (2.0, REFUTED, CONFIRMED, {}),
        (0.8, REFUTED, REFUTED, {}),
        (1.0, INCONCLUSIVE, INCONCLUSIVE, {"set_noise": 0.02}),
        (1.3, INCONCLUSIVE, INCONCLUSIVE, {"count": 3}),
        (1.3, INCONCLUSIVE, INCONCLUSIVE, {"twin_ratio": 2.0}),
        (1.9, INCONCLUSIVE, CONFIRMED, {"set_noise": 0.25}),  # faster, by 18 to 147 %
    ],
)
def test_a_gpu_decides_about_mixed_precision(ratio: float, held: str, faster: str, values: dict[str, Any]) -> None:
    """20 to 40 % is met or missed, with half of the memory; whether it accelerates at all is another claim."""
    half = {"fp16": (replace(CUDA, precision="fp16"), ratio)}
    heavy = sets("amp", half, baseline=CUDA, **values)
    assert verdict(on(ONE_GPU, *heavy), "S002-4") == REFUTED, "it takes as much memory"
    lean = [replace(r, ranks=(make.rank_record(0, 256 << 20),)) if r.role == "candidate" else r for r in heavy]
    of = on(ONE_GPU, *lean)
    others = [replace(CUDA, network="seed"), replace(CUDA, image_size=64)]
    firsts = [sets("amp", {"fp16": (replace(other, precision="fp16"), 9.0)}, baseline=other) for other in others]
    for first in ([], *firsts):  # of another network, of another size
        known = replace(of, beside=(*make.on(ONE_GPU, first), *of.beside))
        assert (verdict(known, "S002-4"), verdict(known, "S004-1")) == (held, faster)


FILES = replace(BASE, loader="files")
WORKERS = sets("workers", {"2 workers": (replace(FILES, loader_workers=2), 1.1)}, baseline=FILES)
ABOUT: dict[str, tuple[str, RunConfig, str]] = {
    "S000-1": ("multi_gpu", CUDA, "world_size"),
    "S002-3": ("batch_size", replace(CUDA, global_batch_size=8), "global_batch_size"),
    "S004-3": ("workers", replace(CUDA, loader="files"), "loader_workers"),
}


@pytest.mark.parametrize(
    ("key", "ratios", "expected"),
    [
        ("S000-1", {8: 6.45}, CONFIRMED),
        ("S000-1", {8: 4.0}, REFUTED),
        ("S000-1", {2: 1.5}, NOT_MEASURED),
        ("S002-3", {16: 1.2, 32: 2.0, 64: 2.8}, CONFIRMED),
        ("S002-3", {16: 1.2, 32: 2.0, 64: 4.0}, REFUTED),
        ("S002-3", {16: 1.2}, INCONCLUSIVE),
        ("S002-3", {16: 3.0}, REFUTED),
        ("S004-3", {4: 1.2, 8: 1.1}, CONFIRMED),
        ("S004-3", {2: 1.1, 4: 1.2}, INCONCLUSIVE),
        ("S004-3", {4: 1.2, 8: 1.2}, INCONCLUSIVE),
        ("S004-3", {4: 1.2, 8: 1.5}, REFUTED),
    ],
)
def test_gpus_decide_about_each_value_of_a_setting(key: str, ratios: dict[int, float], expected: str) -> None:
    question, base, name = ABOUT[key]
    rows = {f"{name} {n}": (replace(base, **{name: n}), ratio) for n, ratio in ratios.items()}  # type: ignore[arg-type]
    assert verdict(on(make.GPUS, *sets(question, rows, baseline=base)), key) == expected
    assert verdict(on(make.CPU), key) == UNTESTABLE


def test_what_a_number_means_is_decided_anywhere() -> None:
    of = claimed.study([*claimed.sets(), *claimed.wrong(**WAYS)])
    assert verdict(of, "S003-1", "gradient") == verdict(of, "S003-1", "Percentiles") == REFUTED
    for count, expected in ((39_156_227, REFUTED), (13_400_000, CONFIRMED)):
        ways = claimed.wrong(counted={"network": "s000", "parameters": count})
        assert verdict(claimed.study(ways), "S000-2") == expected
    assert verdict(of, "S000-2") == NOT_MEASURED


@pytest.mark.parametrize(
    ("differences", "ranks", "precision", "batches"),
    [
        ({"2 ranks": 0.0, "bf16": 0.0, "compiled": 0.0, "batch 32": 0.05}, CONFIRMED, CONFIRMED, REFUTED),
        ({"2 ranks": 0.0, "bf16": 0.0}, CONFIRMED, INCONCLUSIVE, NOT_MEASURED),
        ({"2 ranks": 0.0005, "bf16": 0.0, "compiled": 0.0}, INCONCLUSIVE, INCONCLUSIVE, NOT_MEASURED),
        ({"2 ranks": 0.05, "bf16": 0.0}, REFUTED, REFUTED, NOT_MEASURED),
    ],
)
def test_losses_are_judged_by_trials_over_seeds(
    differences: dict[str, float], ranks: str, precision: str, batches: str
) -> None:
    """Trials whose final losses differ from the baseline's by so much."""
    timed = sets("quality", {name: (CONFIGS[name], 1.1) for name in differences}, baseline=BASE)
    planted = {name: (CONFIGS[name], more) for name, more in differences.items()}
    tried = make.trials(planted, baseline=BASE, gain=0.001, seed_noise=0.005)
    of = replace(on(make.CPU, *timed, *WORKERS), trials=tuple(tried))
    keys = (("S001-2", ""), ("S004-5", "precision"), ("S004-5", "larger batches"))
    assert tuple(verdict(of, *key) for key in keys) == (ranks, precision, batches)


def test_a_loader_that_changes_nothing_confirms_nothing_of_number_formats() -> None:
    of = on(make.CPU, *WORKERS)
    assert verdict(of, "S004-5", "precision") == INCONCLUSIVE

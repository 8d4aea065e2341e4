"""Verdicts on published claims, from planted records: what decides, and what must not."""

from dataclasses import replace
from typing import Any

import claimed
import pytest
import records as make
from claimed import BASE

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import claims
from ddpm_lab.explain.claim_verdicts import CONFIRMED, REFUTED, UNTESTABLE, Judged
from ddpm_lab.explain.decisions import INCONCLUSIVE
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.quality import NOT_MEASURED
from ddpm_lab.record import Machine, RunRecord

ONE_GPU = replace(make.GPUS, gpus=make.GPUS.gpus[:1])
CUDA = RunConfig(device="cuda", global_batch_size=128)


def answer(study: Study, key: str, text: str = "") -> Judged:
    (found,) = [a for claim, a in claims.judged(study) if claim.key == key and text in claim.text]
    return found


def verdict(study: Study, key: str, text: str = "") -> str:
    return answer(study, key, text).verdict


def sets(experiment: str, candidates: dict[str, tuple[RunConfig, float]], **values: Any) -> list[RunRecord]:
    quiet = {"set_noise": 0.002, "turn_noise": 0.002, **values}
    return make.sets(candidates, experiment=experiment, family=experiment, **quiet)


def on(machine: Machine, *records: RunRecord) -> Study:
    """A study of claims that rests on other questions' records."""
    return claimed.study([*claimed.sets(), *claimed.wrong()], beside=records, machine=machine)


def cold(config: RunConfig, baseline: RunConfig) -> RunRecord:
    told = {"experiment": "torch_compile", "family": "torch_compile", "baseline_id": baseline.run_id}
    return make.cold(config, [20.0], label="compiled", **told)[0]


SPEEDS = {  # claims about the speed of GPUs
    *(("S000-1", ""), ("S001-1", "4 GPUs"), ("S001-1", "8 GPUs"), ("S002-1", ""), ("S002-2", ""), ("S002-3", "")),
    *(("S002-4", ""), ("S004-1", ""), ("S004-2", "Several"), ("S004-3", ""), ("S004-4", "so many times as long")),
}


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.3, 1.6, 3.0])
def test_a_cpu_decides_nothing_about_the_speed_of_a_gpu(ratio: float) -> None:
    """Whatever is resolved here, for or against."""
    ratios = dict.fromkeys(claimed.RATIOS, ratio)
    amp = sets("amp", {"bf16": (claimed.CONFIGS["bf16"], ratio)}, baseline=BASE)
    compiled = sets("torch_compile", {"compiled": (claimed.CONFIGS["compiled"], ratio)}, baseline=BASE)
    ranks = sets("multi_gpu", {"2 ranks": (claimed.CONFIGS["2 ranks"], ratio)}, baseline=BASE)
    phases = {"steps": 20, "seconds": 0.2, "cpu_seconds": 0.2, "phases": {"forward": 0.09, "backward": 0.1}}
    of = claimed.study([*claimed.sets(ratios), *claimed.wrong(one_thread=phases)], beside=[*amp, *compiled, *ranks])
    for key, text in SPEEDS:
        found = answer(of, key, text)
        assert found.verdict == UNTESTABLE, (key, text)
        assert "GPU" in found.why
        assert "the machine has none" in found.why


@pytest.mark.parametrize(
    ("ratio", "held", "accelerates"),
    [
        (1.3, CONFIRMED, CONFIRMED),
        (2.0, REFUTED, CONFIRMED),
        (0.8, REFUTED, REFUTED),
        (1.0, INCONCLUSIVE, INCONCLUSIVE),
    ],
)
def test_a_gpu_decides_about_mixed_precision(ratio: float, held: str, accelerates: str) -> None:
    """20 to 40 % is met or missed; whether it accelerates at all is another claim."""
    noise = 0.02 if ratio == 1.0 else 0.002
    half = replace(CUDA, precision="fp16")
    of = on(ONE_GPU, *sets("amp", {"fp16": (half, ratio)}, baseline=CUDA, set_noise=noise))
    assert verdict(of, "S002-4") == held
    assert verdict(of, "S004-1") == accelerates


@pytest.mark.parametrize(("ratio", "expected"), [(6.45, CONFIRMED), (6.0, CONFIRMED), (4.0, REFUTED), (7.9, REFUTED)])
def test_eight_gpus_decide_about_eight_gpus(ratio: float, expected: str) -> None:
    eight = replace(CUDA, world_size=8)
    records = sets("multi_gpu", {"8 GPUs": (eight, ratio)}, baseline=CUDA)
    assert verdict(on(make.GPUS, *records), "S000-1") == expected
    one = answer(on(ONE_GPU), "S000-1")
    assert one.verdict == UNTESTABLE
    assert "needs 8 GPUs, the machine has 1" in one.why
    assert verdict(on(make.GPUS), "S000-1") == NOT_MEASURED


def test_compiling_that_pays_off_refutes_a_general_statement() -> None:
    for baseline, machine in ((BASE, make.CPU), (CUDA, ONE_GPU)):
        compiled = replace(baseline, compile="whole")
        quick = sets("torch_compile", {"compiled": (compiled, 1.5)}, baseline=baseline)
        found = answer(on(machine, *quick, cold(compiled, baseline)), "S004-4", "unsuitable")
        assert found.verdict == REFUTED
        assert "pays off after" in found.why
        assert verdict(on(machine, *quick), "S004-4", "unsuitable") == NOT_MEASURED, "without its cost"
        slow = sets("torch_compile", {"compiled": (compiled, 0.8)}, baseline=baseline)
        told = verdict(on(machine, *slow, cold(compiled, baseline)), "S004-4", "unsuitable")
        assert told == (CONFIRMED if machine is ONE_GPU else UNTESTABLE), "a slow CPU says nothing of a GPU"
    unclear = sets("torch_compile", {"compiled": (claimed.CONFIGS["compiled"], 1.0)}, baseline=BASE, set_noise=0.02)
    assert verdict(on(make.CPU, *unclear), "S004-4", "unsuitable") == INCONCLUSIVE


def test_too_few_sets_and_what_is_smaller_than_the_twin_decide_nothing() -> None:
    half = replace(CUDA, precision="fp16")
    for values in ({"count": 3}, {"twin_ratio": 2.0}):
        of = on(ONE_GPU, *sets("amp", {"fp16": (half, 1.3)}, baseline=CUDA, **values))
        assert verdict(of, "S002-4") == verdict(of, "S004-1") == INCONCLUSIVE


@pytest.mark.parametrize(("count", "expected"), [(39_156_227, REFUTED), (13_400_000, CONFIRMED)])
def test_parameters_are_counted_anywhere(count: int, expected: str) -> None:
    ways = claimed.wrong(counted={"network": "s000", "parameters": count})
    assert verdict(claimed.study(ways), "S000-2") == expected
    assert verdict(claimed.study(claimed.wrong()), "S000-2") == NOT_MEASURED


def test_what_a_number_means_is_decided_anywhere() -> None:
    phases = {"steps": 20, "seconds": 0.2, "cpu_seconds": 0.4, "phases": {"forward": 0.08, "backward": 0.1}}
    runs = {"steps": 3, "seconds": [0.03 + 0.0001 * i for i in range(50)]}
    of = claimed.study([*claimed.sets(), *claimed.wrong(phases=phases, runs=runs)])
    assert verdict(of, "S003-1", "gradient") == verdict(of, "S003-1", "Percentiles") == REFUTED


@pytest.mark.parametrize(("share", "expected"), [(0.6, REFUTED), (0.96, CONFIRMED)])
def test_a_gpu_says_how_busy_it_was(share: float, expected: str) -> None:
    """87.7 % in compute phases is its utilisation, or is not: NVML says."""
    answers = {"steps": 20, "seconds": 0.2, "cpu_seconds": 0.2, "phases": {"forward": 0.07, "backward": 0.12}}
    on_gpu = {"gpu_utilisation_percent": 100 * share}
    config = {"config": replace(CUDA, purpose="check")}
    ways = [
        replace(r, config=replace(config["config"], seed=i), ranks=())
        for i, r in enumerate(
            claimed.wrong(phases_waited_for=lambda i: {**answers, **on_gpu, "seconds": 0.2 + 0.0001 * i})
        )
    ]
    assert verdict(claimed.study(ways, machine=ONE_GPU), "S002-2") == expected


def quality(**differences: float) -> Study:
    """A study with trials of configurations, whose final losses differ from the baseline's by so much."""
    speeds = {name: (claimed.CONFIGS[name], 1.1) for name in differences}
    timed = sets("quality", speeds, baseline=BASE)
    tried = make.trials({n: (claimed.CONFIGS[n], d) for n, d in differences.items()}, baseline=BASE)
    return replace(on(make.CPU, *timed), trials=tuple(tried))


def test_losses_are_judged_by_trials_over_seeds() -> None:
    same = quality(**{"2 ranks": 0.0, "bf16": 0.0, "batch 32": 0.05})
    assert verdict(same, "S001-2") == CONFIRMED
    assert "seeds of one configuration end" in answer(same, "S001-2").why
    assert verdict(same, "S004-5", "precision") == CONFIRMED
    assert verdict(same, "S004-5", "larger batches") == REFUTED
    worse = quality(**{"2 ranks": 0.05, "bf16": 0.0})
    assert verdict(worse, "S001-2") == verdict(worse, "S004-5", "precision") == REFUTED
    assert verdict(worse, "S004-5", "larger batches") == NOT_MEASURED
    assert verdict(on(make.CPU), "S001-2") == NOT_MEASURED


def test_the_column_of_a_cpu_is_judged_by_a_cpu() -> None:
    base = replace(BASE, global_batch_size=32)
    larger = {"batch 256": (replace(BASE, global_batch_size=256), 1.4)}
    of = on(make.CPU, *sets("batch_size", larger, baseline=base))
    assert verdict(of, "S004-2", "On a CPU") == CONFIRMED
    assert verdict(on(make.CPU), "S004-2", "On a CPU") == NOT_MEASURED


def test_the_finding_counts_the_verdicts() -> None:
    of = on(make.CPU)
    found = finding(of)
    told = [a.verdict for _, a in claims.judged(of)]
    assert f"Of {len(told)} published claims" in found.headline
    assert f"{told.count(UNTESTABLE)} not testable" in found.headline
    shown = claims.table(of)
    assert list(shown["Verdict"]) == told
    assert all(shown["Why"])
    assert not shown["Claim"].duplicated().any()


def test_own_sets_answer_where_no_other_question_was_asked() -> None:
    """The question that a claim is about comes first; the sets beside the wrong ways stand in for it."""
    alone = answer(claimed.study(claimed.sets()), "S004-1")
    assert "bf16 0.80" in alone.here
    assert "this notebook" in alone.here
    amp = sets("amp", {"bf16": (claimed.CONFIGS["bf16"], 0.7)}, baseline=BASE)
    both = answer(claimed.study(claimed.sets(), beside=amp), "S004-1")
    assert "bf16 0.700" in both.here or "bf16 0.70" in both.here
    assert "notebook 03" in both.here

"""Findings and tables say what the records hold, and no more."""

from dataclasses import replace
from typing import Any

import pytest
import records as make

from ddpm_lab.config import LOADER_ALONE, RunConfig
from ddpm_lab.explain import compiling, decisions, findings, phrases
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, comparisons
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.tables import table
from ddpm_lab.record import RunRecord

BF16 = RunConfig(precision="bf16")
COMPILED = RunConfig(compile="whole")


def cold(seconds: float = 30.0) -> list[RunRecord]:
    return make.cold(COMPILED, [seconds], experiment="torch_compile", label="compiled", baseline_id=RunConfig().run_id)


def compile_study(ratio: float, seconds: float = 30.0, **values: Any) -> Study:
    records = make.sets(
        {"compiled": (COMPILED, ratio)}, experiment="torch_compile", baseline_label="eager", step_seconds=0.1, **values
    )
    return make.study(records + cold(seconds))


def test_a_difference_that_is_called() -> None:
    found = finding(make.study(make.sets({"bf16": (BF16, 1.62)})))
    assert (found.verdict, found.status, found.sets) == (decisions.FASTER, findings.ANSWERED, 6)
    assert found.low < 1.62 < found.high
    assert found.way_out == ""
    for part in ("1.62", "6 sets", "2 cores, no GPU", "2026-01-03", "quality not measured"):
        assert part in found.claim


def test_one_set_claims_nothing() -> None:
    found = finding(make.study(make.sets({"bf16": (BF16, 1.62)}, count=1)))
    assert found.status == found.verdict == decisions.TOO_FEW
    assert (found.sets, found.way_out) == (1, "ddpm-lab run amp --batch-size 32")
    assert "62 %" not in found.claim


def test_without_an_answer_the_way_to_one_is_told() -> None:
    found = finding(make.study(make.sets({"bf16": (BF16, 1.0)}, set_noise=0.03)))
    assert found.status == found.verdict == decisions.INCONCLUSIVE
    assert found.low < 1 < found.high
    assert found.way_out.startswith("ddpm-lab run amp --batch-size 32 --resolution 3% (about ")


def test_the_same_speed_is_an_answer() -> None:
    found = finding(make.study(make.sets({"bf16": (BF16, 1.0)}, set_noise=0.002, turn_noise=0.001)))
    assert (found.status, found.verdict, found.way_out) == (findings.ANSWERED, decisions.SAME, "")


def test_a_twin_that_differs_vetoes_only_what_is_smaller_than_itself() -> None:
    large = finding(make.study(make.sets({"bf16": (BF16, 1.62)}, twin_ratio=1.05)))
    assert (large.verdict, large.status) == (decisions.FASTER, findings.ANSWERED)
    assert large.noise_low > 1
    small = finding(make.study(make.sets({"bf16": (BF16, 1.0)}, twin_ratio=1.05, set_noise=0.002)))
    assert small.high < 1, "its interval alone would say slower"
    assert small.verdict == small.status == decisions.INCONCLUSIVE


def test_sets_that_others_disturbed_do_not_count() -> None:
    some = finding(make.study(make.sets({"bf16": (BF16, 1.62)}, crowded=[(0, 0), (0, 1)])))
    assert (some.sets, some.verdict) == (5, decisions.FASTER)
    everything = [(s, turn) for s in range(6) for turn in range(6)]
    none = finding(make.study(make.sets({"bf16": (BF16, 1.62)}, crowded=everything)))
    assert (none.sets, none.status, none.way_out) == (0, decisions.TOO_FEW, "ddpm-lab run amp --batch-size 32")


def test_failures_are_told_with_their_reason() -> None:
    failures = {"fp16": (RunConfig(seed=9), "oom", "90 GiB asked, 78 GiB free")}
    some = finding(make.study(make.sets({"bf16": (BF16, 1.5)}, failures=failures)))
    assert "Failed: fp16 (out of memory: 90 GiB asked, 78 GiB free)" in some.claim
    every = finding(make.study(make.sets({}, failures=failures)))
    assert every.headline == "Every candidate failed: fp16"
    assert every.status == findings.FAILED
    assert "90 GiB asked" in every.claim


def test_a_failed_baseline_and_an_empty_ledger() -> None:
    base = make.record(RunConfig(), status="crashed", reason="signal 9")
    candidate = make.record(
        BF16, role="candidate", label="bf16", status="crashed", reason="x", baseline_id=base.baseline_id
    )
    assert "baseline failed" in finding(make.study([base, candidate])).headline
    nothing = finding(replace(make.study([base]), records=()))
    assert nothing.status == "not measured"
    assert "ddpm-lab run amp" in nothing.claim


def test_a_mechanism_is_named_and_its_speed_is_not() -> None:
    ranks = RunConfig(world_size=4, oversubscribe=True)
    records = make.sets(
        {"4 ranks": (ranks, 1.77)}, experiment="multi_gpu", mechanism_only=["4 ranks"], baseline_label="1 rank"
    )
    found = finding(make.study(records))
    assert found.headline == f"{MECHANISM_ONLY.capitalize()}: 4 ranks"
    shown = table(make.study(records)).to_string()
    assert MECHANISM_ONLY in shown
    assert "1.7" not in found.claim + shown


def test_workers_put_the_loader_alone_beside_training() -> None:
    def config(workers: int, workload: str = RunConfig().workload) -> RunConfig:
        return RunConfig(loader="files", loader_workers=workers, workload=workload)

    training = make.sets(
        {"2 workers": (config(2), 1.15)},
        baseline=config(0),
        baseline_label="0 workers",
        experiment="workers",
        family="training, tiny, batch 32",
        step_seconds=0.1,
    )
    alone = make.sets(
        {"2 workers": (config(2, LOADER_ALONE), 1.8)},
        baseline=config(0, LOADER_ALONE),
        baseline_label="0 workers",
        experiment="workers",
        family="loader alone, batch 32",
        step_seconds=0.01,
    )
    found = finding(make.study(training + alone))
    assert found.ratio == pytest.approx(1.15, rel=0.02), "of training, and not of the loader alone"
    assert "The loader alone delivers 3," in found.claim
    assert "where training takes at most 3" in found.claim


def test_compiling_pays_off_after_cost_by_saving() -> None:
    found = compile_study(1.25)
    row = comparisons(found)[2]
    cost = compiling.break_even(found, row)
    # 30 s by 100 ms - 80 ms a step.
    assert cost.steps == pytest.approx(1500, rel=0.1)
    assert cost.steps_low < cost.steps < cost.steps_high
    assert "pays off after 1," in finding(found).claim


def test_compiling_that_is_not_called_faster_never_claims_to_pay_off() -> None:
    assert "pays off never, at this speed" in finding(compile_study(0.9)).claim
    assert "whether it pays off is not known" in finding(compile_study(1.0, set_noise=0.05)).claim


def test_a_verdict_on_quality_is_told_for_each_family_that_differs() -> None:
    sets, trials = [], []
    for batch, worse in ((16, 0.0), (32, 0.03)):
        base = RunConfig(global_batch_size=batch)
        two = {"2 ranks": replace(base, world_size=2)}
        named: dict[str, Any] = {
            "baseline": base,
            "baseline_label": "1 rank",
            "experiment": "multi_gpu",
            "family": f"batch {batch}",
        }
        sets += make.sets(
            {"compiled": (replace(base, compile="whole"), 2.0), "2 ranks": (two["2 ranks"], 1.5)}, **named
        )
        trials += make.trials({"2 ranks": (two["2 ranks"], worse)}, baseline=base)
    claim = finding(replace(make.study(sets), trials=tuple(trials))).claim
    assert "2 ranks of batch 16 not worse after 8,000 images (8 seeds; loss " in claim
    assert "2 ranks of batch 32 worse after 8,000 images (8 seeds; loss +0.03 (" in claim
    assert claim.endswith("; of compiled not measured.")


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 call"), ("1", "1 call"), ("0.2", "0.2 calls"), (1234, "1,234 calls")]
)
def test_plurals(count: int | str, words: str) -> None:
    assert phrases.plural(count, "call") == words


def test_profile_names_the_largest_class() -> None:
    found = finding(make.study([make.profile(RunConfig(purpose="profile"))]))
    assert found.headline == "Convolutions take 62 % of the operator time of a training step"
    failed = make.record(RunConfig(), experiment="profile", role="profile", status="crashed", reason="signal 9")
    assert finding(make.study([failed])).status == findings.FAILED


def test_sides_are_named_as_their_owner_wrote_them() -> None:
    found = make.sets({"mine": (BF16, 1.5)}, experiment="compare", baseline_label="main")
    assert finding(make.study(found)).headline.startswith("mine is")
    assert finding(make.study(make.sets({"two": (BF16, 1.5)}))).headline.startswith("Two is")
    both = make.study(make.sets({"bf16": (BF16, 1.5)}), "recommendation")
    assert finding(both).headline.startswith("bf16 is"), "a format keeps its letters"


def test_sets_that_were_lost_are_told_beside_those_that_were_not() -> None:
    records = make.sets({"bf16": (BF16, 1.62)})
    dead = next(r for r in records if r.label == "bf16")
    dead = replace(dead, set_id="lost", status="crashed", reason="rank 0 was ended by signal 9", windows=())
    said = finding(make.study([dead, *records])).claim
    assert "Lost on the way, in 1 set: bf16 (crashed" in said
    assert "signal 9" in said
    assert "Lost" not in finding(make.study(records)).claim


def test_table_has_a_row_for_every_configuration_and_no_missing_value() -> None:
    failures = {"fp16": (RunConfig(seed=9), "oom", "no room")}
    shown = table(make.study(make.sets({"bf16": (BF16, 1.5)}, failures=failures)))
    assert list(shown["Configuration"]) == ["fp32 (baseline)", "fp32 again, repeated", "bf16", "fp16"]
    assert not shown.isna().any(axis=None)
    assert "nan" not in shown.to_string()
    assert "no room" in shown.to_string()
    for study in (compile_study(1.25), make.study([make.profile(RunConfig(purpose="profile"))])):
        assert "nan" not in table(study).to_string()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0096, "9.60 ms"), (34, "34.0 s"), (750, "12.5 min"), (11520, "3.20 h"), (float("nan"), "unknown")],
)
def test_durations(value: float, expected: str) -> None:
    assert phrases.seconds(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(4312.0, "4,310"), (12.34, "12.3"), (0.0456, "0.0456"), (999.7, "1,000"), (0.0, "0")]
)
def test_significant(value: float, expected: str) -> None:
    assert phrases.significant(value) == expected


def test_what_failed_outside_any_set_is_named_with_its_remedy() -> None:
    """A compile from empty caches that cannot run here leaves one record, and it is no side of a comparison."""
    config = RunConfig(precision="bf16", compile="whole")
    reason = "no C++ compiler (g++); on Debian or Ubuntu: apt install g++"
    cold = make.record(
        config, role="cold", experiment="torch_compile", label="compiled", status="unsupported", reason=reason
    )
    found = finding(make.study([cold], "torch_compile"))
    assert found.status == findings.FAILED
    assert "compiled failed" in found.headline
    assert "apt install g++" in found.claim


def test_what_needs_more_cores_than_were_free_says_so() -> None:
    base = RunConfig(threads=1, global_batch_size=16)
    alone = make.sets({}, baseline=base, baseline_label="1 rank", experiment="multi_gpu", crowded=[(0, 0), (0, 1)])
    left_out = make.record(base, experiment="multi_gpu", role="note", label="2 ranks", status="left out", reason="few")
    left_out = replace(left_out, baseline_id=alone[0].baseline_id, family=alone[0].family)
    found = finding(make.study([*alone, left_out]))
    assert found.headline == "Not measured: 1 core was free, and every candidate needs more"
    assert (found.status, found.way_out) == ("not measured", "ddpm-lab run multi_gpu")

"""What all answers come to: only changes that were called faster and cost no quality, and what they give together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import records as make

from ddpm_lab.config import LOADER_ALONE, ExchangeConfig, RunConfig
from ddpm_lab.explain import decisions, findings, gains, quality
from ddpm_lab.explain.frames import RECOMMENDATION, Study
from ddpm_lab.plan import WEAK
from ddpm_lab.record import RunRecord

BF16 = RunConfig(precision="bf16")
KEPT = RunConfig(freed_memory="kept")
"""A change of the same arithmetic: its quality needs no trials."""
BOTH = replace(BF16, freed_memory="kept")


def study(*records: Sequence[RunRecord], harm: float | None = None) -> Study:
    """All questions of a machine; with ``harm`` bf16 was tried too, and its loss ends so much higher."""
    found = make.study([r for part in records for r in part], RECOMMENDATION)
    return replace(found, trials=() if harm is None else tuple(make.trials({"bf16": (BF16, harm)})))


def amp(ratio: float = 1.3, **values: Any) -> list[RunRecord]:
    return make.sets({"bf16": (BF16, ratio)}, **values)


def memory(ratio: float = 1.1, **values: Any) -> list[RunRecord]:
    return make.sets({"freed memory kept": (KEPT, ratio)}, **{"experiment": "bottleneck", **values})


def together(ratio: float) -> list[RunRecord]:
    return make.sets({"bf16, freed memory kept": (BOTH, ratio)}, experiment=RECOMMENDATION, family="tiny, together")


def test_a_combination_that_was_measured_and_is_faster_is_what_to_use() -> None:
    found = gains.answer(study(amp(), memory(), together(1.35), harm=0.0))
    assert found.row is not None
    assert (found.status, found.row.label) == (gains.ANSWERED, "bf16, freed memory kept")
    assert found.row.ratio.value == pytest.approx(1.35, rel=0.02), "measured, and no product of 1.3 and 1.1"
    assert found.way_out == ""


def test_a_combination_is_recommended_as_long_as_each_of_its_changes_may_be() -> None:
    sides = (amp(), memory(), together(1.35))
    unknown, worse = gains.answer(study(*sides)), gains.answer(study(*sides, harm=0.05))
    for found in (unknown, worse):
        assert found.row is not None
        assert found.row.label == "freed memory kept", "bf16 is not known to be as good, or worse"
    fine = study(*sides, harm=0.0)
    assert gains.answer(fine).headline.endswith(
        "faster together, quality not worse after 8,000 images (8 seeds) and identical (the same arithmetic)"
    )
    slower = gains.answer(study(amp(0.8), memory(), together(1.35), harm=0.0))
    assert slower.row is not None
    assert slower.row.label == "freed memory kept"
    both = replace(fine, trials=(*fine.trials, *make.trials({"both": (BOTH, 0.05)})))
    alone = gains.answer(both)
    assert alone.row is not None
    assert alone.row.label == "bf16", "together they were tried, and learn worse"


def test_a_combination_stays_the_answer_where_a_change_was_measured_since() -> None:
    more = make.sets({"losses read": (RunConfig(read_loss=True), 1.2)}, experiment="lever")
    found = gains.answer(study(amp(), memory(), together(1.35), more, harm=0.0))
    assert found.row is not None
    assert found.row.label == "bf16, freed memory kept"


def test_a_combination_that_is_not_faster_leaves_the_best_single_change() -> None:
    for worse in (0.9, 1.0):
        found = gains.answer(study(amp(), memory(), together(worse), harm=0.0))
        assert found.row is not None
        assert (found.status, found.row.label) == (gains.ANSWERED, "bf16")


def test_a_gain_on_some_of_the_cores_says_so() -> None:
    few = [replace(r, config=replace(r.config, threads=1)) for r in amp()]
    ids = {r.run_id: replace(r, config=replace(r.config, threads=1)).run_id for r in amp()}
    found = gains.answer(study([replace(r, baseline_id=ids[r.baseline_id]) for r in few], harm=0.0))
    assert " on 1 core, quality not worse" in found.headline


def test_of_single_changes_the_fastest_that_is_not_worse_is_what_to_use() -> None:
    found = gains.answer(study(amp(1.3), memory(1.1), harm=0.05))
    assert found.row is not None
    assert found.row.label == "freed memory kept", "bf16 is faster and worse"
    assert "bf16" in found.detail
    better = gains.answer(study(amp(1.3), memory(1.1), harm=0.0))
    assert better.row is not None
    assert better.row.label == "bf16"


def test_a_faster_change_of_unknown_quality_comes_with_the_command_that_judges_it() -> None:
    found = gains.answer(study(amp()))
    assert found.row is not None
    assert (found.row.label, found.way_out) == ("bf16", "ddpm-lab run amp --batch-size 32 --seeds 8")
    assert found.status == gains.UNTRIED
    assert "Use" not in found.headline
    own = gains.answer(study(amp(data_name="1,000 images from my/folder")))
    assert own.way_out == "ddpm-lab run amp --data DATA --batch-size 32 --seeds 8"


def test_a_faster_change_that_is_worse_keeps_the_defaults_and_is_not_judged_again() -> None:
    found = gains.answer(study(amp(), harm=0.05))
    assert (found.row, found.status, found.way_out) == (None, gains.ANSWERED, "")
    assert "nothing measured here is faster" not in found.headline
    assert "bf16" in found.detail


def test_what_is_worse_by_less_than_the_margin_is_not_recommended_and_needs_no_more_trials() -> None:
    trials = make.trials({"bf16": (BF16, 0.0005)}, gain=0.001, seed_noise=0.005)
    slight = replace(study(amp()), trials=tuple(trials))
    found = gains.answer(slight)
    assert (found.row, found.status, found.way_out) == (None, gains.ANSWERED, "")
    assert found.headline == "Keep the defaults: what is faster here costs quality"
    assert "Faster, and worse by less than the margin: bf16 (1." in found.detail
    assert gains.combination(replace(study(amp(), memory()), trials=tuple(trials))) is None


def test_where_trials_cannot_judge_there_is_no_way_out() -> None:
    """No loss is known at which harm shows in the network "seed"."""
    base, bf16 = RunConfig(network="seed"), RunConfig(network="seed", precision="bf16")
    records = make.sets({"bf16": (bf16, 1.3)}, baseline=base)
    trials = make.trials({"bf16": (bf16, 0.0)}, baseline=base)
    found = gains.answer(replace(make.study(records, RECOMMENDATION), trials=tuple(trials)))
    assert (found.status, found.way_out) == (gains.UNTRIED, "")
    assert quality.NO_LOSS_KNOWN in found.headline


def test_nothing_faster_keeps_the_defaults() -> None:
    found = gains.answer(study(amp(0.8), harm=0.0))
    assert (found.row, found.status, found.way_out) == (None, gains.ANSWERED, "")
    noisy = gains.answer(study(amp(1.0, set_noise=0.04)))
    assert (noisy.row, noisy.status) == (None, decisions.INCONCLUSIVE)
    assert noisy.way_out.startswith("ddpm-lab run amp --batch-size 32 --resolution 3%")
    some = gains.answer(study(amp(1.0, set_noise=0.04), memory(0.8)))
    assert (some.row, some.status) == (None, gains.ANSWERED)
    assert some.way_out, "one of two questions is open"


def test_without_sets_there_is_no_recommendation() -> None:
    nothing = gains.answer(replace(study(amp()), records=()))
    assert (nothing.row, nothing.status) == (None, quality.NOT_MEASURED)
    assert nothing.way_out
    few = gains.answer(study(amp(1.6, count=3), harm=0.0))
    assert (few.row, few.status) == (None, decisions.TOO_FEW)
    assert few.way_out


def test_what_is_no_change_of_a_training_is_left_out() -> None:
    """Other trainers, other work, the loader alone, ranks that exchange nothing, and steps with more images."""
    two = RunConfig(world_size=2)
    others = [
        make.sets({"another trainer": (RunConfig(read_loss=True), 9.0)}, experiment="peers"),
        make.sets({"batch 64": (RunConfig(global_batch_size=64), 9.0)}, experiment="batch_size"),
        make.sets(
            {"2 workers": (RunConfig(loader="files", loader_workers=2, workload=LOADER_ALONE), 9.0)},
            baseline=RunConfig(loader="files", workload=LOADER_ALONE),
            experiment="workers",
        ),
        make.sets(
            {"no exchange": (replace(two, exchange=ExchangeConfig(enabled=False)), 9.0)},
            baseline=two,
            experiment="exchange",
        ),
        make.sets(
            {"2 ranks": (RunConfig(world_size=2, global_batch_size=64), 1.9)},
            experiment="multi_gpu",
            family=f"tiny, batch 32 per rank{WEAK}",
        ),
    ]
    assert [c.label for c in gains.measured(study(amp(), *others))] == ["bf16"]


def test_a_combination_joins_the_changes_that_may_be_recommended() -> None:
    found = gains.combination(study(amp(), memory(), harm=0.0))
    assert found is not None
    base, base_label, config, label = found
    assert (base, config) == (RunConfig(), BOTH)
    assert label == "bf16, freed memory kept"
    assert base_label


@pytest.mark.parametrize(
    "of",
    [
        lambda: study(amp(), memory()),
        lambda: study(amp(), memory(), harm=0.05),
        lambda: study(amp(1.0, set_noise=0.002), memory(), harm=0.0),
        lambda: study(amp(0.8), memory(), harm=0.0),
        lambda: study(amp(count=3), memory(), harm=0.0),
        lambda: study(amp(), harm=0.0),
        study,
    ],
    ids=["quality unknown", "worse", "as fast", "slower", "too few sets", "one change", "nothing"],
)
def test_fewer_than_two_changes_make_no_combination(of: Any) -> None:
    assert gains.combination(of()) is None


def test_of_a_setting_one_value_is_combined_and_the_primary_one_goes_first() -> None:
    files = RunConfig(loader="files")
    steps = {f"{n} workers": (replace(files, loader_workers=n), 1 + n / 10) for n in (2, 4)}
    values: dict[str, Any] = {"baseline": files, "baseline_label": "0 workers", "experiment": "workers"}
    kept = make.sets({"freed memory kept": (replace(files, freed_memory="kept"), 1.1)}, **values, family="memory")
    for primary in (2, 4):
        found = gains.combination(study(make.sets(steps, **values, primary=f"{primary} workers"), kept))
        assert found is not None
        assert found[2] == replace(files, loader_workers=primary, freed_memory="kept")


def test_a_change_measured_with_another_loader_is_left_out() -> None:
    files = RunConfig(loader="files")
    workers = make.sets(
        {"2 workers": (replace(files, loader_workers=2), 1.3)},
        baseline=files,
        baseline_label="0 workers",
        experiment="workers",
        family="training",
    )
    found = gains.combination(study(amp(), memory(), workers, harm=0.0))
    assert found is not None
    assert found[2] == BOTH
    assert gains.combination(study(amp(), workers, harm=0.0)) is None


def test_what_cannot_run_together_is_left_out() -> None:
    """Two ranks cannot share a batch of one."""
    one = RunConfig(global_batch_size=1)
    kept = make.sets({"kept": (replace(one, freed_memory="kept"), 1.2)}, baseline=one, experiment="bottleneck")
    more = make.sets({"batch 2": (RunConfig(global_batch_size=2), 1.2)}, baseline=one, experiment="lever")
    assert gains.combination(study(kept, more)) is None


def test_the_finding_of_a_report_is_the_answer() -> None:
    found = findings.finding(study(amp(), memory(), together(1.35), harm=0.0))
    assert (found.status, found.verdict, found.sets) == (findings.ANSWERED, decisions.FASTER, 6)
    assert found.ratio == pytest.approx(1.35, rel=0.02)
    unknown = findings.finding(study(amp()))
    assert unknown.way_out == "ddpm-lab run amp --batch-size 32 --seeds 8"


def test_the_table_says_of_every_change_whether_it_may_be_recommended() -> None:
    shown = gains.table(study(amp(), memory(0.8), harm=0.0))
    assert list(zip(shown["Change"], shown["May be recommended"], strict=True)) == [
        ("bf16", "yes"),
        ("freed memory kept", "no"),
    ]
    assert not shown.isna().any(axis=None)
    assert gains.table(replace(study(amp()), records=())).empty


def test_a_gain_in_a_format_that_is_slower_itself_is_none() -> None:
    """bf16 at 0.7 of fp32, and compiled at 1.47 of eager bf16, come to 1.03 of fp32: nobody measured that."""
    slow = make.sets({"bf16": (RunConfig(precision="bf16"), 0.7)}, family="tiny, batch 32, 1 rank")
    bf16 = RunConfig(precision="bf16")
    compiled = make.sets(
        {"compiled": (replace(bf16, compile="whole"), 1.47)},
        baseline=bf16,
        experiment="torch_compile",
        family="tiny, batch 32, 1 rank, bf16",
    )
    found = gains.answer(make.study([*slow, *compiled], "recommendation"))
    assert found.row is None
    assert found.headline == "Keep the defaults: the only gains are in bf16, which is itself not faster"
    assert "Faster in bf16, which is itself not faster: compiled (1.4" in found.detail
    assert gains.combination(make.study([*slow, *compiled], "recommendation")) is None

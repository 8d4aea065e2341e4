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
from ddpm_lab.questions.answers import answer
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


ALL = "bf16, freed memory kept"
SINCE = make.sets({"losses read": (RunConfig(read_loss=True), 1.2)}, experiment="lever")


@pytest.mark.parametrize(
    ("records", "harm", "label", "status"),
    [
        ((amp(), memory(), together(1.35)), 0.0, ALL, gains.ANSWERED),
        ((amp(), memory(), together(1.35), SINCE), 0.0, ALL, gains.ANSWERED),
        ((amp(), memory(), together(1.35)), None, "freed memory kept", gains.ANSWERED),
        ((amp(), memory(), together(1.35)), 0.05, "freed memory kept", gains.ANSWERED),
        ((amp(0.8), memory(), together(1.35)), 0.0, "freed memory kept", gains.ANSWERED),
        ((amp(), memory(), together(0.9)), 0.0, "bf16", gains.ANSWERED),
        ((amp(), memory(), together(1.0)), 0.0, "bf16", gains.ANSWERED),
        ((amp(), memory()), 0.0, "bf16", gains.ANSWERED),
        ((amp(), memory()), 0.05, "freed memory kept", gains.ANSWERED),
        ((amp(),), None, "bf16", gains.UNTRIED),
        ((amp(),), 0.05, None, gains.ANSWERED),
        ((amp(0.8),), 0.0, None, gains.ANSWERED),
        ((amp(1.0, set_noise=0.04),), None, None, decisions.INCONCLUSIVE),
        ((amp(1.0, set_noise=0.04), memory(0.8)), None, None, gains.ANSWERED),
        ((amp(1.6, count=3),), 0.0, None, decisions.TOO_FEW),
        ((), None, None, quality.NOT_MEASURED),
    ],
)
def test_the_answer_is_the_fastest_that_was_measured_and_is_not_worse(
    records: Any, harm: float | None, label: str | None, status: str
) -> None:
    found = gains.answer(study(*records, harm=harm))
    assert (found.row and found.row.label, found.status) == (label, status)


def test_a_combination_has_the_ratio_that_was_measured() -> None:
    found = answer(study(amp(), memory(), together(1.35), harm=0.0)).finding
    assert (found.status, found.verdict, found.sets) == (findings.ANSWERED, decisions.FASTER, 6)
    assert found.ratio == pytest.approx(1.35, rel=0.02), "measured, and no product of 1.3 and 1.1"


def test_a_combination_that_learns_worse_leaves_the_best_single_change() -> None:
    fine = study(amp(), memory(), together(1.35), harm=0.0)
    found = gains.answer(replace(fine, trials=(*fine.trials, *make.trials({"both": (BOTH, 0.05)}))))
    assert found.row is not None
    assert found.row.label == "bf16"


def test_the_way_out_is_the_command_that_settles_what_is_open() -> None:
    assert gains.answer(study(amp())).way_out == "ddpm-lab run amp --batch-size 32 --seeds 8"
    own = gains.answer(study(amp(data_name="1,000 images from my/folder")))
    assert own.way_out == "ddpm-lab run amp --data DATA --batch-size 32 --seeds 8"
    noisy = gains.answer(study(amp(1.0, set_noise=0.04)))
    assert noisy.way_out.startswith("ddpm-lab run amp --batch-size 32 --resolution 3%")
    assert gains.answer(study(amp(1.0, set_noise=0.04), memory(0.8))).way_out
    assert gains.answer(study(amp(1.6, count=3), harm=0.0)).way_out
    assert not gains.answer(study(amp(), harm=0.05)).way_out


def test_what_is_worse_by_less_than_the_margin_is_not_recommended_and_needs_no_more_trials() -> None:
    trials = make.trials({"bf16": (BF16, 0.0005)}, gain=0.001, seed_noise=0.005)
    slight = replace(study(amp()), trials=tuple(trials))
    found = gains.answer(slight)
    assert (found.row, found.status, found.way_out) == (None, gains.ANSWERED, "")
    assert gains.combination(replace(study(amp(), memory()), trials=tuple(trials))) is None


def test_where_trials_cannot_judge_there_is_no_way_out() -> None:
    """No loss is known at which harm shows in the network "seed"."""
    base, bf16 = RunConfig(network="seed"), RunConfig(network="seed", precision="bf16")
    records = make.sets({"bf16": (bf16, 1.3)}, baseline=base)
    trials = make.trials({"bf16": (bf16, 0.0)}, baseline=base)
    found = gains.answer(replace(make.study(records, RECOMMENDATION), trials=tuple(trials)))
    assert (found.status, found.way_out) == (gains.UNTRIED, "")


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
    assert (found[0], found[2], found[3]) == (RunConfig(), BOTH, ALL)
    assert gains.combination(study(amp(), workers, harm=0.0)) is None


def test_what_cannot_run_together_is_left_out() -> None:
    """Two ranks cannot share a batch of one."""
    one = RunConfig(global_batch_size=1)
    kept = make.sets({"kept": (replace(one, freed_memory="kept"), 1.2)}, baseline=one, experiment="bottleneck")
    more = make.sets({"batch 2": (RunConfig(global_batch_size=2), 1.2)}, baseline=one, experiment="lever")
    assert gains.combination(study(kept, more)) is None


def test_the_table_says_of_every_change_whether_it_may_be_recommended() -> None:
    shown = gains.table(study(amp(), memory(0.8), harm=0.0))
    assert [(row["Change"], row["May be recommended"]) for row in shown] == [
        ("bf16", "yes"),
        ("freed memory kept", "no"),
    ]
    assert not gains.table(replace(study(amp()), records=()))


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
    assert gains.combination(make.study([*slow, *compiled], "recommendation")) is None

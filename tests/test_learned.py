"""Time to a loss: images over speed, with intervals that cover what is planted, and nothing where nobody arrived."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import learned, stats
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.optimizer_settings import OptimizerConfig
from ddpm_lab.plan import scaled
from ddpm_lab.record import RunRecord

BASE, LARGE = RunConfig(global_batch_size=8), RunConfig(global_batch_size=16)
SPEEDS = {"batch 16": (LARGE, 1.5)}


def slower_to_learn(records: list[RunRecord], label: str, factor: float) -> list[RunRecord]:
    """The same trials, where a configuration needs ``factor`` as many images for the same loss.

    Its looks keep their images, and their losses are those of earlier ones.
    """
    found = []
    for r in records:
        if r.label == label:
            looks = (r.quality or {})["held_out"]
            at = [look["images"] for look in looks]
            losses = np.interp(np.array(at) / factor, at, [look["loss"] for look in looks])
            moved = [{**look, "loss": float(loss)} for look, loss in zip(looks, losses, strict=True)]
            found.append(replace(r, quality={**(r.quality or {}), "held_out": moved}))
        else:
            found.append(r)
    return found


def studied(factor: float, speed: float = 1.5, *, seed_noise: float = 0.0, sets: int = 6, seed: int = 0) -> Study:
    speeds = make.sets(
        {"batch 16": (LARGE, speed)},
        baseline=BASE,
        baseline_label="batch 8",
        experiment="batch_size",
        count=sets,
        seed=seed,
    )
    made = make.trials({"batch 16": (LARGE, 0.0)}, baseline=BASE, seed_noise=seed_noise, gain=0.02)
    return replace(make.study(speeds), trials=tuple(slower_to_learn(made, "batch 16", factor)))


def ways(of: Study) -> list[learned.Way]:
    (rows,) = learned.families(of)
    return learned.ways(of, rows)


def test_a_batch_that_is_faster_by_image_can_be_slower_to_the_loss() -> None:
    """1.5 times as many images a second, and 1.1 times as many needed: faster; 1.05 times as fast: slower."""
    quick, slow = studied(1.1), studied(1.1, speed=1.05)
    base, large = ways(quick)
    assert base.times == 1
    assert large.times == pytest.approx(1.1 / 1.5, rel=0.02)
    assert large.seconds / base.seconds == pytest.approx(1.1 / 1.5, rel=0.02)
    assert large.low < large.seconds < large.high
    assert finding(quick).headline.endswith("; fastest to loss 0.4900: batch 16")
    assert finding(slow).headline.endswith("; fastest to loss 0.4900: batch 8")
    claim = finding(slow).claim
    assert "Fastest per image: batch 16; fastest to loss 0.4900: batch 8." in claim
    assert "batch 8 takes " in claim
    assert "1.050 times as long (1.040 to 1.060)" in claim


def test_who_does_not_arrive_has_no_time() -> None:
    base, large = ways(studied(1.2))
    assert base.arrives
    assert (large.lost, large.seeds, large.arrives) == (8, 8, False)
    assert math.isnan(large.times)
    claim = finding(studied(1.2)).claim
    assert "batch 16 did not reach it with 8 of 8 seeds" in claim
    assert "; fastest to loss 0.4900 of those that reached it: batch 8." in claim, "1.5 times the images might do"
    slow = studied(1.2, speed=1.05)
    (_, large) = ways(slow)
    assert 1 < large.times_low < 8_000 / 7_200 / 1.05, "so long at least, by the images that it was trained on"
    assert "; fastest to loss 0.4900: batch 8." in finding(slow).claim


def test_a_difference_within_both_intervals_names_nobody() -> None:
    found = finding(studied(1.1, speed=1.1))
    assert "which is fastest to loss 0.4900 is not resolved between batch" in found.claim
    assert "fastest to loss 0.4900: batch" not in found.claim


def three(first: float, second: float) -> Study:
    """Batches of 16 and 32 that need as many images as the baseline, and are so many times as fast."""
    both = {"batch 16": (LARGE, first), "batch 32": (RunConfig(), second)}
    speeds = make.sets(both, baseline=BASE, baseline_label="batch 8", experiment="batch_size")
    made = make.trials({name: (config, 0.0) for name, (config, _) in both.items()}, baseline=BASE, seed_noise=0.0)
    return replace(make.study(speeds), trials=tuple(made))


def test_the_fastest_is_shown_to_be_faster_than_every_other() -> None:
    """Both are half as fast again as the baseline, and within their intervals as fast as each other."""
    said = finding(three(1.5, 1.505)).claim
    assert said.count("is not resolved between batch 32 and batch 16") == 2, "per image, and to the loss"
    clear = finding(three(1.5, 1.6)).claim
    assert "Fastest per image: batch 32; fastest to loss" in clear
    assert learned.fastest(ways(three(1.5, 1.6)), 0.45).endswith(": batch 32")


def test_what_withholds_a_verdict_on_speed_withholds_the_fastest() -> None:
    sure = ways(studied(1.1))
    assert learned.fastest(sure, 0.49) == "fastest to loss 0.4900: batch 16"
    not_resolved = "which is fastest to loss 0.4900 is not resolved between batch 16 and batch 8"
    few = ways(studied(1.1, sets=4))
    assert few[1].times_high < 1
    assert learned.fastest(few, 0.49) == f"{not_resolved} (4 sets with batch 16)"
    of = studied(1.1, seed_noise=0.0)
    fewer = ways(replace(of, trials=tuple(r for r in of.trials if r.config.seed < 4)))
    assert learned.fastest(fewer, 0.49) == f"{not_resolved} (4 seeds with batch 16)"
    for verdict, why in ((stats.NOT_TRUSTED, stats.NOT_TRUSTED), (stats.BURSTS, "bursts with batch 16")):
        doubted = replace(sure[1], row={**sure[1].row, "verdict": verdict})
        assert learned.fastest([sure[0], doubted], 0.49) == f"{not_resolved} ({why})"
    slowed = replace(sure[1], row={**sure[1].row, "bursts": 1.5})
    assert learned.fastest([sure[0], slowed], 0.49) == not_resolved, "faster by image all the same, but not to the loss"
    lost = ways(studied(1.2))
    assert learned.fastest(lost, 0.49) == "fastest to loss 0.4900 of those that reached it: batch 8"
    doubted = replace(lost[1], row={**lost[1].row, "verdict": stats.NOT_TRUSTED})
    assert learned.fastest([lost[0], doubted], 0.49).endswith("is not resolved (instrument not trusted here)")


def test_trials_with_other_draws_are_no_part_of_a_family() -> None:
    """Losses of other draws lie elsewhere: the target, and who reaches it, are those of one extent."""
    of = three(1.5, 1.6)
    other = [r for r in of.trials if r.label == "batch 32"]
    other = [replace(r, config=replace(r.config, options=(("images", 8_000), ("draws", 512)))) for r in other]
    base = [r for r in make.trials({}, baseline=BASE, seed_noise=0.0) if r.label == "fp32"]
    more = [replace(r, config=replace(r.config, options=(("images", 8_000), ("draws", 512)))) for r in base]
    both = replace(of, trials=(*[r for r in of.trials if r.label != "batch 32"], *more, *other))
    assert [w.label for w in ways(both)] == ["batch 8", "batch 32"]


def test_one_set_and_one_seed_give_no_interval() -> None:
    (_, large) = ways(studied(1.05, sets=1))
    assert large.arrives
    assert math.isnan(large.low + large.times_low)
    of = studied(1.05)
    (_, large) = ways(replace(of, trials=tuple(r for r in of.trials if r.config.seed == 0)))
    assert large.arrives
    assert math.isnan(large.low)
    assert math.isnan(large.times_low)


def test_the_interval_of_the_ratio_covers_the_truth() -> None:
    """Seeds and sets scatter alike; in 95 of 100 experiments the truth lies between the ends."""
    rng = np.random.default_rng(3)
    row = {"role": "candidate", "label": "x", "sets": 6, "images_per_second": 1.0}
    row |= {"images_per_second_low": math.nan, "images_per_second_high": math.nan}
    (of, *_) = make.trials({}, seeds=1, seed_noise=0.0)
    covered = 0
    for _ in range(400):
        logs = 0.02 * rng.standard_normal(6)
        mean, half = logs.mean(), 2.571 * logs.std(ddof=1) / math.sqrt(6)
        speed = {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
        needed = np.exp(0.02 * rng.standard_normal(8))
        pairs = tuple((_reaches(of, 1000.0), _reaches(of, 1000.0 * n)) for n in needed)
        found = learned.way({**row, **speed}, pairs, 0.5)
        covered += found.times_low <= 1 <= found.times_high
    assert 0.93 * 400 <= covered <= 0.99 * 400


def _reaches(of: RunRecord, images: float) -> RunRecord:
    looks = [{"images": 0.0, "loss": 1.0}, {"images": images, "loss": 0.5}]
    return replace(of, quality={**(of.quality or {}), "held_out": looks})


def test_a_scaled_learning_rate_is_a_way_of_its_own() -> None:
    of = studied(1.05)
    again = make.trials(
        {"batch 16, scaled learning rate": (scaled(LARGE, BASE), 0.0)}, baseline=BASE, seed_noise=0.0, gain=0.02
    )
    of = replace(of, trials=(*of.trials, *[r for r in again if r.label != "fp32"]))
    base, same, rated = ways(of)
    assert [base.label, same.label, rated.label] == ["batch 8", "batch 16", "batch 16, scaled learning rate"]
    assert rated.seconds == pytest.approx(same.seconds / 1.05, rel=0.01)
    assert rated.row["ratio"] == same.row["ratio"], "the same speed"


def test_timed_and_tried_may_average_differently() -> None:
    """Sets move the averages every tenth step, trials at every one: a scaled rate is found all the same."""
    every = {c.global_batch_size: replace(c, optimizer=OptimizerConfig(ema_every=1)) for c in (BASE, LARGE)}
    both = {"batch 16": (every[16], 0.0), "batch 16, scaled learning rate": (scaled(every[16], every[8]), 0.0)}
    of = replace(studied(1.0), trials=tuple(make.trials(both, baseline=every[8])))
    assert [w.label for w in ways(of)] == ["batch 8", *both]


def test_training_losses_are_means_over_equal_images() -> None:
    records = make.trials(
        {"batch 16": (LARGE, 0.1)}, baseline=BASE, seeds=2, images=800, seed_noise=0.0, pair_noise=0.0
    )
    found = learned.training(records, 800, 10)
    assert found.shape == (4, 10)
    told = np.array((records[0].quality or {})["losses"])
    assert found[0] == pytest.approx(told.reshape(10, 10).mean(1)), "ten steps of eight images to a point"
    assert np.all(found[1] - found[0] == pytest.approx(0.1, abs=0.005)), "batches of both sizes lie at the same images"

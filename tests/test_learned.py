"""What trials have learned: who belongs to a family, and losses over equal images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import trained as learned
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import scaled

BASE, LARGE = RunConfig(global_batch_size=8), RunConfig(global_batch_size=16)
SPEEDS = {"batch 16": (LARGE, 1.5)}


def studied() -> Study:
    speeds = make.sets(SPEEDS, baseline=BASE, baseline_label="batch 8", experiment="batch_size")
    made = make.trials({"batch 16": (LARGE, 0.0)}, baseline=BASE, seed_noise=0.0, gain=0.02)
    return replace(make.study(speeds), trials=tuple(made))


def tried(of: Study) -> list[Comparison]:
    (rows,) = learned.families(of)
    return learned.tried(of, rows)


def three(first: float, second: float) -> Study:
    """Batches of 16 and 32 that need as many images as the baseline, and are so many times as fast."""
    both = {"batch 16": (LARGE, first), "batch 32": (RunConfig(), second)}
    speeds = make.sets(both, baseline=BASE, baseline_label="batch 8", experiment="batch_size")
    made = make.trials({name: (config, 0.0) for name, (config, _) in both.items()}, baseline=BASE, seed_noise=0.0)
    return replace(make.study(speeds), trials=tuple(made))


def test_trials_with_other_draws_are_no_part_of_a_family() -> None:
    """Losses of other draws lie elsewhere: the target, and who reaches it, are those of one extent."""
    of = three(1.5, 1.6)
    other = [r for r in of.trials if r.label == "batch 32"]
    other = [replace(r, config=replace(r.config, options=(("images", 8_000), ("draws", 512)))) for r in other]
    base = [r for r in make.trials({}, baseline=BASE, seed_noise=0.0) if r.label == "fp32"]
    more = [replace(r, config=replace(r.config, options=(("images", 8_000), ("draws", 512)))) for r in base]
    both = replace(of, trials=(*[r for r in of.trials if r.label != "batch 32"], *more, *other))
    assert [r.label for r in tried(both)] == ["batch 8", "batch 32"]


def test_a_scaled_learning_rate_is_a_row_of_its_own() -> None:
    of = studied()
    again = make.trials(
        {"batch 16, scaled learning rate": (scaled(LARGE, BASE), 0.0)}, baseline=BASE, seed_noise=0.0, gain=0.02
    )
    of = replace(of, trials=(*of.trials, *[r for r in again if r.label != "fp32"]))
    base, same, rated = tried(of)
    assert [r.label for r in (base, same, rated)] == ["batch 8", "batch 16", "batch 16, scaled learning rate"]
    assert rated.ratio == same.ratio, "the same speed"


def test_training_losses_are_means_over_equal_images() -> None:
    records = make.trials(
        {"batch 16": (LARGE, 0.1)}, baseline=BASE, seeds=2, images=800, seed_noise=0.0, pair_noise=0.0
    )
    found = learned.training(records, 800, 10)
    assert found.shape == (4, 10)
    told = np.array((records[0].quality or {})["losses"])
    assert found[0] == pytest.approx(told.reshape(10, 10).mean(1)), "ten steps of eight images to a point"
    assert np.all(found[1] - found[0] == pytest.approx(0.1, abs=0.005)), "batches of both sizes lie at the same images"

"""What trials have learned: the answer about quality, who belongs to a family, and losses over equal images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import records as make
from cells import column

from ddpm_lab.config import CHECK, RunConfig
from ddpm_lab.explain import trained as learned
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.quality import NOT_ENOUGH, NOT_WORSE
from ddpm_lab.plan import NOT_TRAINED, scaled
from ddpm_lab.questions.ask import answer

BF16, LARGE, MICRO = RunConfig(precision="bf16"), RunConfig(global_batch_size=64), RunConfig(accumulation=2)
SPEEDS = {"bf16": (BF16, 1.6), "batch 64": (LARGE, 1.3), "2 micro-batches": (MICRO, 0.9)}
LOSSES = {"bf16": (BF16, 0.0), "batch 64": (LARGE, 0.02), "2 micro-batches": (MICRO, 0.0)}


def studied(seeds: int = 8) -> Study:
    speeds = make.sets(SPEEDS, experiment="quality", family="tiny, batch 32")
    return replace(make.study(speeds, "quality"), trials=tuple(make.trials(LOSSES, seeds=seeds)))


def test_the_answer_is_the_fastest_that_is_not_worse() -> None:
    found = answer(studied()).finding
    assert (found.status, found.verdict) == ("answered", NOT_WORSE)
    assert found.headline.startswith("bf16 trains 1.6")
    assert found.headline.endswith("batch 64 is worse")
    assert "not worse after 8,000 images (8 seeds)" in found.quality
    few = answer(studied(3)).finding
    assert (few.status, few.verdict) == (NOT_ENOUGH, NOT_ENOUGH)
    assert answer(replace(studied(), trials=())).finding.quality == "quality not measured"


def test_another_baseline_is_not_passed_over_in_silence() -> None:
    other, of = RunConfig(global_batch_size=128), studied()
    narrow = {"bf16": (replace(other, precision="bf16"), 1.2)}
    earlier = make.sets(narrow, baseline=other, experiment="quality", family="tiny, batch 128")
    both = replace(make.study([*earlier, *of.records], "quality"), trials=of.trials)
    assert "tiny, batch 128" in answer(both).finding.claim
    assert "tiny, batch 128" not in answer(of).finding.claim


def test_the_table_has_a_row_for_each_configuration() -> None:
    shown = answer(studied()).table()
    assert column(shown, "Configuration") == ["fp32 (baseline)", "bf16", "batch 64", "2 micro-batches"]
    assert column(shown, "Seeds") == ["8"] * 4
    assert shown[2]["Quality"] == "worse after 8,000 images (8 seeds)"
    # The loss to be reached is the baseline's after 90 % of its images.
    for row in (0, 1):
        assert float(shown[row]["Images to the same loss"].replace(",", "")) == pytest.approx(0.9 * 8_000, rel=0.05)
    assert learned.images_to_reach(make.trials({}), 0.1) == "not reached (8 of 8 seeds)"


def test_what_is_not_resolved_hides_none_that_is_faster_and_of_few_sets_nothing_is_called_faster() -> None:
    speeds = make.sets({**SPEEDS, "2 micro-batches": (MICRO, 1.9)}, experiment="quality", family="tiny, batch 32")
    few = [r for r in speeds if r.label != "2 micro-batches" or r.set_id in {s.set_id for s in speeds[:10]}]
    of = replace(make.study(few, "quality"), trials=tuple(make.trials(LOSSES)))
    assert answer(of).finding.headline.startswith("bf16 trains 1.6")
    speeds = make.sets(SPEEDS, experiment="quality", family="tiny, batch 32", count=2)
    of = replace(make.study(speeds, "quality"), trials=tuple(make.trials(LOSSES)))
    assert "which is faster is not known" in answer(of).finding.headline


def checked(study: Study, error: float) -> Study:
    """The study with a check of each candidate, whose gradient is off by so much."""
    answer = make.gradient_check(error)
    tried = {r.run_id: r for r in study.records if r.role == "candidate"}.values()
    checks = [
        replace(r, role="check", set_id="", windows=(), quality=answer, config=check)
        for r in tried
        if (check := replace(r.config, purpose="check", workload=CHECK))
    ]
    return replace(study, records=(*checks, *study.records))


@pytest.mark.parametrize("name", ["amp", "peers", "multi_gpu", "quality"])
def test_checks_are_no_rows_and_are_told_where_they_fail(name: str) -> None:
    speeds = make.sets(SPEEDS, experiment=name, family="tiny, batch 32, 1 rank")
    plain = replace(make.study(speeds, name), trials=tuple(make.trials(LOSSES)))
    sound, wrong = checked(plain, 0.0), checked(plain, 0.9)
    for study in (sound, wrong):
        assert [r.label for r in comparisons(study)] == [r.label for r in comparisons(plain)]
        assert answer(study).table() == answer(plain).table()
        assert answer(study).finding.headline == answer(plain).finding.headline
        (shown,) = (rows for caption, rows in answer(study).tables() if caption.startswith("Loss and gradient"))
        assert column(shown, "Configuration") == list(SPEEDS)
    assert repr(answer(sound).finding) == repr(answer(plain).finding)
    assert "he gradient of bf16 is not as expected" in answer(wrong).finding.claim


def test_what_a_check_kept_from_being_trained_is_said_with_its_reason() -> None:
    trial, why = make.trials(LOSSES, seeds=1)[1], "its gradient check failed (worst layer stem.bias off by 90 %)"
    note = replace(trial, role="note", status="left out", reason=f"{NOT_TRAINED}: {why}", quality=None)
    for name in ("quality", "amp"):
        speeds = make.sets(SPEEDS, experiment=name, family="tiny, batch 32")
        others = tuple(t for t in make.trials(LOSSES) if t.label != "bf16")
        of = replace(make.study([*speeds, note], name), trials=others)
        assert why in answer(of).finding.claim
        row = next(r for r in comparisons(of) if r.label == "bf16")
        assert (row.quality, bool(row.sets)) == ("not measured", True), "its speed stands, without a verdict"


# --- families of trials ---

B8, B16 = RunConfig(global_batch_size=8), RunConfig(global_batch_size=16)


def tried(of: Study) -> list[Comparison]:
    (rows,) = learned.families(of)
    return learned.tried(of, rows)


def test_trials_with_other_draws_are_no_part_of_a_family() -> None:
    """Losses of other draws lie elsewhere: the target, and who reaches it, are those of one extent."""
    # Batches of 16 and 32 that need as many images as the baseline.
    both = {"batch 16": (B16, 1.5), "batch 32": (RunConfig(), 1.6)}
    speeds = make.sets(both, baseline=B8, baseline_label="batch 8", experiment="batch_size")
    made = make.trials({name: (config, 0.0) for name, (config, _) in both.items()}, baseline=B8, seed_noise=0.0)
    more = [
        replace(r, config=replace(r.config, options=(("images", 8_000), ("draws", 512))))
        for r in made
        if r.label != "batch 16"
    ]
    mixed = replace(make.study(speeds), trials=(*[r for r in made if r.label != "batch 32"], *more))
    assert [r.label for r in tried(mixed)] == ["batch 8", "batch 32"]


def test_a_scaled_learning_rate_is_a_row_of_its_own() -> None:
    speeds = make.sets({"batch 16": (B16, 1.5)}, baseline=B8, baseline_label="batch 8", experiment="batch_size")
    equal = make.trials({"batch 16": (B16, 0.0)}, baseline=B8, seed_noise=0.0, gain=0.02)
    again = make.trials(
        {"batch 16, scaled learning rate": (scaled(B16, B8), 0.0)}, baseline=B8, seed_noise=0.0, gain=0.02
    )
    of = replace(make.study(speeds), trials=(*equal, *[r for r in again if r.label != "fp32"]))
    base, same, rated = tried(of)
    assert [r.label for r in (base, same, rated)] == ["batch 8", "batch 16", "batch 16, scaled learning rate"]
    assert rated.ratio == same.ratio, "the same speed"
    (ax,) = learned.differences(of).axes  # type: ignore[union-attr]
    assert len(ax.get_yticklabels()) == 2, "both are drawn"


def test_training_losses_are_means_over_equal_images() -> None:
    records = make.trials({"batch 16": (B16, 0.1)}, baseline=B8, seeds=2, images=800, seed_noise=0.0, pair_noise=0.0)
    found = learned.training(records, 800, 10)
    assert found.shape == (4, 10)
    told = np.array((records[0].quality or {})["losses"])
    assert found[0] == pytest.approx(told.reshape(10, 10).mean(1)), "ten steps of eight images to a point"
    assert np.all(found[1] - found[0] == pytest.approx(0.1, abs=0.005)), "batches of both sizes lie at the same images"

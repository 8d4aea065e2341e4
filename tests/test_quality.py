"""Trials: what is trained for quality, what is said of what was learned, and FIDs."""

from dataclasses import replace

import numpy as np
import pytest
import records as make
from cells import column
from matplotlib.text import Text
from setups import setup

from ddpm_lab.config import CHECK, PEER_WORKLOADS, TRAINING, RunConfig
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import NOT_TRAINED, TUNED, Experiment, Trial
from ddpm_lab.questions import quality as learned
from ddpm_lab.questions.ask import answer, ask, questions, trained
from ddpm_lab.training.setting import Setup

HERE = setup()
GPUS = replace(HERE, device="cuda", gpus=2, usable_cores=16)


def judged(experiment: Experiment) -> list[Trial]:
    """Trials that look at what was learned, and not at the weights alone."""
    return [t for t in experiment.trials if t.config.workload == TRAINING]


@pytest.mark.parametrize("name", questions())
def test_only_full_on_a_gpu_trains_for_quality_without_being_asked(name: str) -> None:
    for here in (*(replace(HERE, preset=preset) for preset in ("smoke", "quick", "full")), GPUS):
        assert not judged(ask(name, replace(here, network="seed"))) or name == "quality"
    full = ask(name, replace(GPUS, preset="full", network="seed"))
    assert bool(judged(full)) == (name in (*trained(), "quality"))
    assert all(t.config.option("images", 0) >= 2_500 * t.baseline.global_batch_size for t in judged(full))
    assert {t.config.seed for t in judged(full)} <= set(range(8))
    if name in trained():
        assert ask(name, replace(GPUS, preset="full", network="seed"), seeds=0).trials == ()


@pytest.mark.parametrize("name", [*trained(), "workers", "quality"])
@pytest.mark.parametrize("here", [HERE, GPUS, replace(HERE, usable_cores=1), replace(GPUS, gpus=1)])
def test_a_trial_trains_what_is_timed(name: str, here: Setup) -> None:
    setup = replace(here, preset="full", network="seed" if name == "peers" else "tiny")
    experiment = ask(name, setup, **({} if name == "workers" else {"seeds": 2}))
    timed = {
        (f.name, c.run_id)
        for f in experiment.families
        for c in (f.baseline, *(c for _, c in f.candidates))
        if not f.mechanism
    }
    ids = [t.config.run_id for t in experiment.trials]
    assert len(set(ids)) == len(ids), "trained twice"
    for t in experiment.trials:
        assert t.timed is not None
        assert (t.family, t.timed.run_id) in timed
        assert t.config.exchange.enabled, "ranks that exchange nothing do not train"
        ours = t.config.implementation == "lab" and not t.config.workload.startswith(PEER_WORKLOADS)
        assert ours or t.label.endswith(TUNED), "others as they come"
        if name == "batch_size":
            assert t.config.option("images", 0) % t.config.global_batch_size == 0, "equal images, or none compare"
        allowed = {"purpose", "seed", "options"}
        allowed |= set() if t.config.is_own else {"workload", "loader", "loader_workers"}
        assert set(t.config.differences(t.timed)) <= allowed
        assert set(t.timed.options) <= set(t.config.options), "a part or an attention of its own too"


# --- what they have learned ---

BF16, LARGE, MICRO = RunConfig(precision="bf16"), RunConfig(global_batch_size=64), RunConfig(accumulation=2)
SPEEDS = {"bf16": (BF16, 1.6), "batch 64": (LARGE, 1.3), "2 micro-batches": (MICRO, 0.9)}
LOSSES = {"bf16": (BF16, 0.0), "batch 64": (LARGE, 0.02), "2 micro-batches": (MICRO, 0.0)}


def studied(seeds: int = 8) -> Study:
    speeds = make.sets(SPEEDS, experiment="quality", family="tiny, batch 32")
    return replace(make.study(speeds, "quality"), trials=tuple(make.trials(LOSSES, seeds=seeds)))


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


@pytest.mark.parametrize("name", ["amp", "peers", "quality"])
def test_checks_are_no_rows_and_are_told_where_they_fail(name: str) -> None:
    speeds = make.sets(SPEEDS, experiment=name, family="tiny, batch 32, 1 rank")
    plain = replace(make.study(speeds, name), trials=tuple(make.trials(LOSSES)))
    sound, wrong = answer(checked(plain, 0.0)), answer(checked(plain, 0.9))
    assert sound.table() == wrong.table() == answer(plain).table()
    assert repr(sound.finding) == repr(answer(plain).finding)
    assert any(note.startswith("Wrong gradient: bf16") for note in wrong.finding.notes)


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


# --- curves -----------------------------------------------------------------------------------------------------------

B8, B16 = RunConfig(global_batch_size=8), RunConfig(global_batch_size=16)


def test_one_band_is_drawn_where_all_share_a_margin() -> None:
    longer = make.trials({"bf16": LOSSES["bf16"]}, images=16_000, gain=0.02, seed_noise=0.02)
    one = studied()
    for of, bands in ((one, 2), (replace(one, trials=(*one.trials, *longer)), 1)):
        drawn = " ".join(text.get_text() for text in answer(of).figure().findobj(Text) if isinstance(text, Text))
        assert drawn.replace("\n", " ").lower().count("band: the") == bands


def test_training_losses_are_means_over_equal_images() -> None:
    records = make.trials({"batch 16": (B16, 0.1)}, baseline=B8, seeds=2, images=800, seed_noise=0.0, pair_noise=0.0)
    images, found = learned.training(records, records[0])
    assert found.shape == (4, 50)
    assert images == pytest.approx(np.arange(8, 800, 16))
    told = np.array((records[0].quality or {})["losses"])
    assert found[0] == pytest.approx(told.reshape(50, 2).mean(1)), "two steps of eight images to a point"
    assert np.all(found[1] - found[0] == pytest.approx(0.1, abs=0.005)), "batches of both sizes lie at the same images"


# --- FIDs ---


def test_a_fid_is_never_without_its_count_and_what_is_wrong_with_it_is_told() -> None:
    trial = make.trials({}, seeds=1)[0]
    assert learned.fid_of([trial]) is None
    found = learned.fid_of([trial, make.with_fid(trial, 123.456)])
    assert found is not None
    few = {**found, "fid": 1.234, "images": 2_048}
    failed = {**{k: v for k, v in found.items() if k != "fid"}, "reason": "rank 0 was killed by SIGKILL"}
    told = [learned.fid_words(one) for one in (found, few, failed)]
    assert told == ["123.5 (2,500 images)", "1.23 (2,048 images, too few)", "failed"]
    assert ["singular" in learned.fid_method([("bf16", one)]) for one in (few, found)] == [True, False]
    assert "bf16 failed (rank 0 was killed by SIGKILL)" in learned.fid_method([("bf16", failed)])
    fids = tuple(r if r.config.seed else make.with_fid(r, 123.4) for r in studied().trials)
    assert set(column(answer(replace(studied(), trials=fids)).table(), "FID")) == {"123.4 (2,500 images)"}
    assert "FID" not in answer(studied()).table()[0]

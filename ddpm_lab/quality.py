"""Does a setting cost quality? Configurations trained for real from several seeds, and their speed beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice, several, whole
from ddpm_lab.config import CHECK, DDPM, TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.data.prepared import read_manifest
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.inception import plan_fid
from ddpm_lab.plan import Experiment, Family, Fid, Trial
from ddpm_lab.setting import Setup

WORKLOADS = (DDPM, TRAINING, CHECK)
IDENTITY_STEPS = 20
"""Steps after which settings that must not change what is learned have the same weights, to the last bit."""
_SEEDS = {"smoke": 2, "quick": 4, "full": 8}
_IMAGES = {"smoke": 320, "quick": 4_000, "full": 8_000}
_CUDA_IMAGES = {"smoke": 2_560, "quick": 64_000, "full": 640_000}
_DRAWS = {"smoke": 64, "quick": 512, "full": 512}
_FID_IMAGES = {"smoke": 64, "quick": 2_500, "full": 10_000}
"""Of a FID, where the data has so many to train on; with fewer than 2,049 the covariance is singular."""


def quality(
    setup: Setup,
    *,
    global_batch_size: int | None = None,
    images: int | None = None,
    seeds: int | None = None,
    candidates: Sequence[str] | None = None,
    inception: str | None = None,
    fid_images: int | None = None,
) -> Experiment:
    """What does each setting cost in quality, and what does it gain in speed? fp32, eager, one rank is the baseline.

    ``images`` are those that one run trains on, ``seeds`` the runs of each configuration; ``candidates`` are names of
    ``settings_of``, and None is the preset's choice. The average of the weights is moved at every step: runs are short.
    The first seed of each configuration draws images. Where a file of the Inception's weights is given, their FID is
    measured, of ``fid_images`` images against as many training images.
    """
    cuda = setup.device == "cuda"
    batch = setup.batch_size(global_batch_size) if cuda or global_batch_size else 8
    count = _SEEDS[setup.preset] if seeds is None else seeds
    amount = (_CUDA_IMAGES if cuda else _IMAGES)[setup.preset] if images is None else images
    whole("seeds", count, 1)
    whole("images", amount, batch)
    base = setup.config(global_batch_size=batch, optimizer=OptimizerConfig(ema_every=1))
    known = settings_of(base, setup)
    if candidates is not None:
        several("candidates", candidates)
        for name in candidates:
            choice("candidates", name, known)
    asked = [
        n for n in known if (n in candidates if candidates is not None else setup.preset != "smoke" or n in _SMOKE)
    ]
    rows = tuple((name, known[name]) for name in asked)
    family = Family(name=setup.family_name(batch), baseline=base, baseline_label="fp32", candidates=rows)
    options = {"images": amount, "draws": _DRAWS[setup.preset]}
    fid = _fid(setup, inception, fid_images)
    trials = [
        replace(trial(family, label, config, setup.seed + i, **options), draw=i == 0, fid=None if i else fid)
        for i in range(count)
        for label, config in (("fp32", base), *rows)
    ]
    checks = tuple(
        Trial(family=family.name, label=label, baseline=base, config=replace(config, purpose="check", workload=CHECK))
        for label, config in rows
        if replace(config, optimizer=base.optimizer, global_batch_size=batch) != base
    )
    return Experiment(name="quality", families=(family,), trials=tuple(trials), checks=checks)


_SMOKE = ("bf16", "2 micro-batches")


def _fid(setup: Setup, inception: str | None, images: int | None) -> Fid | None:
    if inception is None:
        if images is not None:
            raise ConfigError(f"fid_images is {images!r}, and no FID is measured: give the file inception too")
        return None
    manifest = read_manifest(Path(setup.images.folder)) if setup.images.folder else None
    usual = _FID_IMAGES[setup.preset] if manifest is None else min(_FID_IMAGES[setup.preset], manifest.train_count)
    return plan_fid(inception, usual if images is None else images, manifest)


def settings_of(base: RunConfig, setup: Setup) -> dict[str, RunConfig]:
    """Configurations to compare with ``base``, by name: every setting that may change what is learned."""
    batch = base.global_batch_size
    changes: dict[str, dict[str, Any]] = {"bf16": {"precision": "bf16"}}
    if setup.device == "cuda":
        changes |= {
            "tf32": {"precision": "tf32"},
            "fp16": {"precision": "fp16"},
            "bf16 compiled": {"precision": "bf16", "compile": "whole"},
        }
    else:
        changes |= {"bf16 with joined kernels": {"precision": "bf16", "kernels": "fused"}}
    changes |= {"compiled": {"compile": "whole"}, f"batch {2 * batch}": {"global_batch_size": 2 * batch}}
    if setup.most_ranks > 1 and batch % 2 == 0:
        changes["2 GPUs" if setup.device == "cuda" else "2 ranks"] = {"world_size": 2}
        changes["bf16 exchange"] = {"world_size": 2, "exchange": ExchangeConfig(hook="bf16")}
        changes["fp16 exchange"] = {"world_size": 2, "exchange": ExchangeConfig(hook="fp16")}
    if batch % 2 == 0:
        changes["2 micro-batches"] = {"accumulation": 2}
    changes["EMA every 10 steps"] = {"optimizer": replace(base.optimizer, ema_every=10)}
    return {name: replace(base, **change) for name, change in changes.items()}


def trial(family: Family, label: str, config: RunConfig, seed: int, *, images: int, draws: int) -> Trial:
    """One run of a configuration on so many images; without ``draws`` only its final weights are looked at."""
    return Trial(
        family=family.name,
        label=label,
        baseline=family.baseline,
        config=replace(
            config,
            purpose="quality",
            workload=TRAINING if draws else config.workload,
            seed=seed,
            options=(("images", images), ("draws", draws)),
        ),
    )


def identity_trials(family: Family) -> tuple[Trial, ...]:
    """Twenty steps of each configuration of a family whose settings must not change what is learned."""
    amount = IDENTITY_STEPS * family.baseline.global_batch_size
    rows = ((family.baseline_label, family.baseline), *family.candidates)
    return tuple(trial(family, label, config, config.seed, images=amount, draws=0) for label, config in rows)

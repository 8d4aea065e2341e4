"""Does a setting cost quality? Configurations trained for real from several seeds, and their speed beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError, choice, whole
from ddpm_lab.config import CHECK, DDPM, OWN, TRAINING, UNLEARNED, ExchangeConfig, RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.declared import Opt
from ddpm_lab.explain import figure_quality, figure_samples, machine_state, samples, trained
from ddpm_lab.explain import quality as verdicts
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.findings import ANSWERED, Finding, about, compared, untrained
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import LOST, Experiment, Family, Fid, Trial, scaled
from ddpm_lab.training.inception import plan_fid
from ddpm_lab.training.setting import Batch, Setup

Images = Annotated[int | None, Opt("images that each of these runs trains on", least=1)]
IDENTITY_STEPS = 20
"""Steps after which settings that must not change what is learned have the same weights, to the last bit."""
_SEEDS = {"smoke": 2, "quick": 5, "full": 8}
_STEPS = {"smoke": 40, "quick": 2_500, "full": 2_500}
"""Of the baseline's batch: tiny at batch 8 reaches the loss that shows harm (``explain.quality``) after 1,600."""
_DRAWS = {"smoke": 64, "quick": 512, "full": 512}
_FID_IMAGES = {"smoke": 64, "quick": 2_500, "full": 10_000}
"""Of a FID, where the data has so many to train on; with fewer than 2,049 the covariance is singular."""


def quality(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    images: Images = None,
    seeds: Annotated[int | None, Opt("runs of each setting, from so many seeds", least=1)] = None,
    candidates: Annotated[Sequence[str] | None, Opt("settings to try")] = None,
    inception: Annotated[str | None, Opt("file of the Inception's weights, for a FID")] = None,
    fid_images: Annotated[int | None, Opt("images of a FID", least=2)] = None,
) -> Experiment:
    """What does each setting cost in quality, and what does it gain in speed? fp32, eager, one rank is the baseline.

    ``images`` are those that one run trains on, rounded up to whole steps of every batch size; ``seeds`` the runs of
    each configuration; ``candidates`` are names of ``settings_of``, and None is the preset's choice.
    The first seed of each configuration draws images. Where a file of the Inception's weights is given, their FID is
    measured, of ``fid_images`` images against as many training images.
    """
    cuda = setup.device == "cuda"
    batch = setup.batch_size(global_batch_size) if cuda or global_batch_size else 8
    count = _SEEDS[setup.preset] if seeds is None else seeds
    base = setup.config(global_batch_size=batch)
    known = settings_of(base, setup)
    for name in candidates or ():
        choice("candidates", name, known)
    asked = [
        n for n in known if (n in candidates if candidates is not None else setup.preset != "smoke" or n in _SMOKE)
    ]
    rows = tuple((name, known[name]) for name in asked)
    amount = _images(setup, images, [base, *(config for _, config in rows)])
    family = Family(name=setup.family_name(batch), baseline=base, baseline_label="fp32", candidates=rows)
    fid = _fid(setup, inception, fid_images)
    draws = _DRAWS[setup.preset]
    trials = [
        replace(
            trial(family, label, config, setup.seed + i, images=amount, draws=draws, draw=not i), fid=None if i else fid
        )
        for i in range(count)
        for label, config in (("fp32", base), *rows)
    ]
    return Experiment(name="quality", families=(family,), trials=tuple(trials), checks=checks_of(family, base, rows))


def checks_of(family: Family, base: RunConfig, rows: Sequence[tuple[str, RunConfig]]) -> tuple[Trial, ...]:
    """Checks of loss and gradient: of the rows that are more than ``base`` with another optimizer or batch."""
    return tuple(
        Trial(
            family=family.name,
            label=label,
            baseline=family.baseline,
            config=replace(config, purpose="check", workload=CHECK),
        )
        for label, config in rows
        if replace(config, optimizer=base.optimizer, global_batch_size=base.global_batch_size) != base
    )


_SMOKE = ("bf16", "2 micro-batches")


def _images(setup: Setup, asked: int | None, configs: Sequence[RunConfig]) -> int:
    """The images asked for, or the preset's, or the next number that batches of every size make up in whole steps.

    The baseline is the first of ``configs``. Raises ConfigError.
    """
    sizes = {config.global_batch_size for config in configs}
    usual = max(_STEPS[setup.preset] * configs[0].global_batch_size, *sizes)
    images = usual if asked is None else asked
    whole("images", images, max(sizes))
    step = math.lcm(*sizes)
    return -(-images // step) * step if len(sizes) > 1 else images


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
        changes |= {"tf32": {"precision": "tf32"}, "fp16": {"precision": "fp16"}}
    changes |= {
        "bf16 with joined kernels": {"precision": "bf16", "kernels": "fused"},
        "compiled": {"compile": "whole"},
        "bf16 compiled": {"precision": "bf16", "compile": "whole"},
        f"batch {2 * batch}": {"global_batch_size": 2 * batch},
    }
    if setup.most_ranks > 1 and batch % 2 == 0:
        two = {"world_size": 2, "nodes": setup.nodes(2)}
        changes["2 GPUs" if setup.device == "cuda" else "2 ranks"] = two
        changes["bf16 exchange"] = {**two, "exchange": ExchangeConfig(hook="bf16")}
        changes["fp16 exchange"] = {**two, "exchange": ExchangeConfig(hook="fp16")}
    if batch % 2 == 0:
        changes["2 micro-batches"] = {"accumulation": 2}
    changes["EMA every step"] = {"optimizer": replace(base.optimizer, ema_every=1)}
    return {name: replace(base, **change) for name, change in changes.items()}


def with_trials(experiment: Experiment, setup: Setup, *, seeds: int | None, images: int | None) -> Experiment:
    """An experiment with trials of its families besides: what their settings cost in quality, and checks before them.

    ``seeds`` and ``images`` are as in ``quality``; None is no trial at all, except in ``full`` on a GPU: a CPU would
    take days for the steps that show harm, in batches as large as those of ``full``. The families come one after the
    other, so that the first has a verdict where time is short. Raises ConfigError.
    """
    judged = not setup.own or "held_out_loss" in setup.own.offers
    if setup.own and seeds and not judged:
        raise ConfigError(f"seeds is {seeds!r}, and {setup.own.name} gives no held_out_loss that would judge its runs")
    unasked = setup.preset == "full" and setup.device == "cuda" and judged
    count = (_SEEDS["full"] if unasked else 0) if seeds is None else seeds
    whole("seeds", count, 0)
    if not count and images is not None:
        raise ConfigError(f"images is {images!r}, and without seeds no run is trained on them: give seeds, such as 8")
    tried = [f for f in experiment.families if count and _rows(f)]
    found = [t for f in tried for t in _trials(f, setup, count, images)]
    checks = [c for f in tried if not f.baseline.is_own for c in checks_of(f, _tried(f.baseline), _learners(f))]
    others = [config for f in experiment.families for _, config in f.candidates]
    if seeds and others and not any(map(_trains, others)):
        raise ConfigError(
            f"seeds is {seeds!r}, and only other trainers are asked for, which are not trained here: leave it out, or "
            "add the parts levers or exchange"
        )
    once = {t.config.run_id: t for t in (*experiment.trials, *found)}
    checked = {c.config.run_id: c for c in (*experiment.checks, *checks)}
    return replace(experiment, trials=tuple(once.values()), checks=tuple(checked.values()))


def _rows(family: Family) -> list[tuple[str, RunConfig]]:
    """The candidates that are this trainer, where the baseline is; none of families whose quality nobody asks for."""
    apart = family.mechanism or family.name.endswith(LOST)
    return [] if apart or not _trains(family.baseline) else [row for row in family.candidates if _trains(row[1])]


def _learners(family: Family) -> list[tuple[str, RunConfig]]:
    """Those that may learn something else than the baseline, as they are tried."""
    base = _learned(family.baseline)
    return [(label, _tried(config)) for label, config in _rows(family) if _learned(config) != base]


def _learned(config: RunConfig) -> RunConfig:
    """A configuration without what changes no bit of what is learned."""
    tried = _tried(config)
    return tried if config.is_own else replace(tried, **UNLEARNED)


def _trials(family: Family, setup: Setup, seeds: int, images: int | None) -> list[Trial]:
    """Trials of a family's baseline and of the candidates that are this trainer.

    Batches of several sizes are trained on equally many images; larger ones besides, and last, with a learning rate
    that grows as they do. What differs in its loader alone, or in how two ranks exchange the same gradients, is trained
    for a few steps: it must learn the very same.
    """
    rows = _rows(family)
    base = _tried(family.baseline)
    amount = _images(setup, images, [base, *(config for _, config in rows)])
    learners = [row for row in rows if _learned(row[1]) != _learned(family.baseline)]
    equal = [(family.baseline_label, base, family.baseline)] if learners else []
    equal += [(label, _tried(config), config) for label, config in learners]
    draws = 1 if base.is_own else _DRAWS[setup.preset]  # how much it looks at is the user's affair
    larger = [row for row in equal if row[1].global_batch_size > base.global_batch_size]
    again = [(f"{label}, scaled learning rate", scaled(config, base), timed) for label, config, timed in larger]
    found = [
        trial(
            family, label, config, setup.seed + i, images=amount, draws=draws, timed=timed, draw=not (i or base.is_own)
        )
        for part in (equal, again)
        for i in range(seeds)
        for label, config, timed in part
    ]
    loaders = tuple(row for row in rows if row not in learners and not base.is_own)
    return [*found, *(identity_trials(replace(family, candidates=loaders)) if loaders else ())]


def _trains(config: RunConfig) -> bool:
    """Whether a configuration is this trainer, and trains: its ranks exchange what they have learned."""
    ours = config.workload in (DDPM, OWN) and config.implementation == "lab"
    return ours and config.exchange.enabled and not config.option("without", "")  # which is about speed alone


def _tried(config: RunConfig) -> RunConfig:
    """A configuration as it is tried: a loader changes nothing.

    Nor does how two ranks exchange their gradients as they are: a sum of two has no order.
    """
    plainly = config.world_size == 2 and config.exchange.enabled and config.exchange.hook == "none"
    return replace(
        config,
        loader=config.loader if config.is_own else "packed",
        loader_workers=0,
        exchange=ExchangeConfig() if plainly else config.exchange,
    )


def trial(
    family: Family,
    label: str,
    config: RunConfig,
    seed: int,
    *,
    images: int,
    draws: int,
    timed: RunConfig | None = None,
    draw: bool = False,
) -> Trial:
    """One run of a configuration on so many images; without ``draws`` only its final weights are looked at.

    With ``draw`` its averaged weights draw images at the end.
    """
    return Trial(
        family=family.name,
        label=label,
        baseline=family.baseline,
        config=replace(
            config,
            purpose="quality",
            workload=TRAINING if draws and not config.is_own else config.workload,
            seed=seed,
            options=(*config.own_options, ("images", images), ("draws", draws)),
        ),
        timed=timed or config,
        draw=draw,
    )


def identity_trials(family: Family) -> tuple[Trial, ...]:
    """Twenty steps of each configuration of a family whose settings must not change what is learned."""
    amount = IDENTITY_STEPS * family.baseline.global_batch_size
    rows = ((family.baseline_label, family.baseline), *family.candidates)
    return tuple(trial(family, label, config, config.seed, images=amount, draws=0) for label, config in rows)


def answer(study: Study) -> Answer:
    """Show what each setting costs in quality and gains in speed; the one named first is the fastest not worse."""
    rows = trained.rows(study)
    found = _finding(study) if any(r.equivalence.seeds for r in rows) else compared(study)
    shown = speeds(study, found)
    caption = "What each setting draws from the same noise."
    return replace(
        shown,
        figure=lambda: figure_quality.figure(study, found.headline) or shown.figure(),
        table=lambda: trained.table(study),
        views=(
            _curves(study),
            View(caption=caption, name="samples", figure=lambda: figure_samples.figure(study)),
            _checks(study),
        ),
    )


def _finding(study: Study) -> Finding:
    rows = trained.rows(study)
    headline, lead = trained.headline(rows)
    notes = (trained.evidence(rows), trained.unsound(study), untrained(study), *machine_state.warnings(study))
    fid = f"FID: {samples.fid_sentence(trained.fids(study))}."
    evidence = trained.method(study).strip()
    found = about(study, lead, headline, *notes, trained.elsewhere(study), fid, evidence=evidence)
    return replace(found, status=ANSWERED if trained.answered(rows) else verdicts.NOT_ENOUGH)


def trained_views(study: Study) -> tuple[View, ...]:
    """Return what the configurations of a question about speed have learned, where they were trained."""
    losses = View(
        caption="Final held-out loss less the baseline's, with the margin.",
        name="quality",
        figure=lambda: figure_quality.differences(study),
    )
    learned = (View(caption=caption, table=partial(list, rows)) for caption, rows in trained.tables(study))
    return (losses, _curves(study), _checks(study), *learned)


def _curves(study: Study) -> View:
    caption = "Held-out and training loss on the way, all settings overlaid."
    return View(caption=caption, name="curves", figure=lambda: figure_quality.curves(study))


def _checks(study: Study) -> View:
    caption = "Loss and gradient of a step against fp32 on the same batch."
    return View(caption=caption, table=lambda: trained.check_table(study))

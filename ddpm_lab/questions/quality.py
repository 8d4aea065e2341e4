"""Does a setting cost quality? Configurations trained for real from several seeds, and their speed beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddpm_lab.checks import ConfigError, choice, whole
from ddpm_lab.config import CHECK, DDPM, OWN, SAME_WEIGHTS, TRAINING, ExchangeConfig, RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.declared import Opt
from ddpm_lab.explain import machine_state, phrases, stats
from ddpm_lab.explain import quality as verdicts
from ddpm_lab.explain.answer import Answer, band, speeds
from ddpm_lab.explain.answer import row as ratio_row
from ddpm_lab.explain.charts import Figure, Panel, forest
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, Finding, about, command_of, compared, judging, unsound, untrained
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import LOST, Experiment, Family, Fid, Question, Trial
from ddpm_lab.questions import trained
from ddpm_lab.training.setting import Batch, Setup

QUESTION = Question(title="Does any setting cost quality?", file="08_quality", long=True)


Images = Annotated[int | None, Opt("images that each of these runs trains on", least=1)]
IDENTITY_STEPS = 20
"""Steps after which settings that must not change what is learned have the same weights, to the last bit."""
_SMOKE = ("bf16", "2 micro-batches")
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
    Where a file of the Inception's weights is given, the first seed of each configuration draws ``fid_images`` images,
    and their FID against as many training images is measured.
    """
    batch = setup.batch_size(global_batch_size) if setup.device == "cuda" or global_batch_size else 8
    count = _SEEDS[setup.preset] if seeds is None else seeds
    base = setup.config(global_batch_size=batch)
    known = settings_of(base, setup)
    for name in candidates or ():
        choice("candidates", name, known)
    usual = _SMOKE if setup.preset == "smoke" else tuple(known)
    rows = tuple((name, known[name]) for name in known if name in (usual if candidates is None else candidates))
    family = Family(name=setup.family_name(batch), baseline=base, baseline_label="fp32", candidates=rows)
    trials = _trials(family, setup, count, images)
    fid = _fid(setup, inception, fid_images)
    first = (setup.seed, TRAINING)
    trials = [replace(t, fid=fid) if (t.config.seed, t.config.workload) == first else t for t in trials]
    return Experiment(name="quality", families=(family,), trials=tuple(trials), checks=tuple(_checks(family)))


def _checks(family: Family) -> list[Trial]:
    """Checks of loss and gradient: of what learns something else than the baseline by more than optimizer or batch."""
    base = _tried(family.baseline)
    usual: dict[str, Any] = {"optimizer": base.optimizer, "global_batch_size": base.global_batch_size}
    tried = [(label, _tried(config)) for label, config in ([] if base.is_own else _learners(family))]
    others = [(label, replace(c, purpose="check", workload=CHECK)) for label, c in tried if replace(c, **usual) != base]
    return [Trial(family=family.name, label=label, baseline=family.baseline, config=c) for label, c in others]


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
    from ddpm_lab.training.fid import plan_fid

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
        "bf16 with fused kernels": {"precision": "bf16", "kernels": "fused"},
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
    if count > verdicts.MOST_SEEDS:
        raise ConfigError(f"seeds is {count}: give at most {verdicts.MOST_SEEDS}")
    if not count and images is not None:
        raise ConfigError(f"images is {images!r}, and without seeds no run is trained on them: give seeds, such as 8")
    tried = [f for f in experiment.families if count and _rows(f)]
    found = [t for f in tried for t in _trials(f, setup, count, images)]
    checks = [check for f in tried for check in _checks(f)]
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
    """Those that may learn something else than the baseline; one alone of those that learn the same."""
    found = {_learned(row[1]): row for row in reversed(_rows(family))}
    found.pop(_learned(family.baseline), None)
    return [*found.values()][::-1]


def _learned(config: RunConfig) -> RunConfig:
    """A configuration without what changes no bit of what is learned."""
    tried = _tried(config)
    return tried if config.is_own else replace(tried, **SAME_WEIGHTS)


def _trials(family: Family, setup: Setup, seeds: int, images: int | None) -> list[Trial]:
    """Trials of a family's baseline and of the candidates that are this trainer, on equally many images.

    What differs in its loader alone, or in how two ranks exchange gradients, must learn the same, shown in a few steps.
    """
    rows, learners, base = _rows(family), _learners(family), _tried(family.baseline)
    amount = _images(setup, images, [base, *(config for _, config in rows)])
    both = [(family.baseline_label, family.baseline), *learners] if learners else []
    # How much a training of the user's looks at is the user's affair.
    how: dict[str, Any] = {"images": amount, "draws": 1 if base.is_own else _DRAWS[setup.preset]}
    found = [trial(family, label, config, setup.seed + i, **how) for i in range(seeds) for label, config in both]
    learned = _learned(family.baseline)
    loaders = tuple(row for row in rows if _learned(row[1]) == learned and not base.is_own)
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
    exchange = ExchangeConfig() if plainly else config.exchange
    return replace(config, loader=config.loader if config.is_own else "packed", loader_workers=0, exchange=exchange)


def trial(family: Family, label: str, timed: RunConfig, seed: int, *, images: int, draws: int) -> Trial:
    """One run of a configuration on so many images; without ``draws`` only its final weights are looked at."""
    config = _tried(timed) if draws else timed  # whose loader is what is looked at
    workload = TRAINING if draws and not config.is_own else config.workload
    options = (*config.own_options, ("images", images), ("draws", draws))
    tried = replace(config, purpose="quality", workload=workload, seed=seed, options=options)
    return Trial(family=family.name, label=label, baseline=family.baseline, config=tried, timed=timed)


def identity_trials(family: Family) -> tuple[Trial, ...]:
    """Twenty steps of each configuration of a family whose settings must not change what is learned."""
    amount = IDENTITY_STEPS * family.baseline.global_batch_size
    rows = ((family.baseline_label, family.baseline), *family.candidates)
    return tuple(trial(family, label, config, config.seed, images=amount, draws=0) for label, config in rows)


def answer(study: Study) -> Answer:
    """Show what each setting costs in quality and gains in speed; the one named first is the fastest not worse."""
    family = _family(study)
    found = _finding(study, family) if any(r.equivalence.seeds for r in family) else compared(study)
    shown, views = speeds(study, found), (trained.trained_view(study, [family]),)
    table = partial(trained.loss_table, family, fid=bool(_fids(family)))
    return replace(shown, figure=lambda: _figure(study, family, shown), table=table, views=views)


def _family(study: Study) -> list[Comparison]:
    """The baseline that was measured last, and its candidates: another batch or network is another question."""
    latest = next((r.baseline_id for r in reversed(study.records) if r.role == "baseline"), None)
    mine = [r for r in comparisons(study) if r.baseline_id == latest]
    return [r for r in mine if r.role == "baseline"][:1] + [r for r in mine if r.role == "candidate"]


def _finding(study: Study, family: Sequence[Comparison]) -> Finding:
    short, lead = _headline(family[1:])
    known = _fids(family)
    fid = f"FID {trained.fid_method(known)}." if known else "FID: not measured: give --inception FILE."
    notes = (unsound(study), untrained(study), *machine_state.warnings(study), fid)
    found = about(study, lead, short, *notes, evidence=_method(family))
    tried = [r.equivalence.verdict for r in family if r.equivalence.seeds]
    status = verdicts.NOT_ENOUGH if verdicts.NOT_ENOUGH in tried else ANSWERED
    seeds = max(r.equivalence.seeds_needed or 0 for r in family)
    way_out = judging(study, command_of(study, lead), lead.baseline, seeds=seeds) if seeds else ""
    return replace(found, verdict=lead.equivalence.verdict, status=status, way_out=way_out)


def _fids(family: Sequence[Comparison]) -> list[tuple[str, Mapping[str, Any]]]:
    """The FIDs that were asked for, by label, the baseline's first."""
    return [(r.label, found) for r in family if (found := trained.fid_of(trained.trials_of(family, r)))]


def _headline(found: Sequence[Comparison]) -> tuple[str, Comparison]:
    """The answer in one line, and the configuration that it is about."""
    good = [r for r in found if r.equivalence.verdict in verdicts.GOOD]
    quick = [r for r in good if r.verdict == stats.FASTER]
    worse = [r for r in found if r.equivalence.verdict == verdicts.WORSE]
    says = [f"{r.label} is worse" for r in worse[:2]] + [f"so are {len(worse) - 2} more"] * (len(worse) > 2)
    if quick:
        lead = max(quick, key=lambda r: r.ratio.value)
        judged = lead.equivalence
        how = verdicts.NOT_WORSE if judged.verdict == verdicts.IDENTICAL else judged.verdict
        how += verdicts.after(judged)
        first = f"{lead.label} trains {phrases.ratio(lead)} times as fast as {lead.baseline_label}, {how}"
        return "; ".join([first, *says]), lead
    lead = max(good or worse or list(found), key=lambda r: r.ratio.value if r.sets else 0.0)
    if good:
        even = [r for r in good if r.equivalence.verdict != verdicts.SLIGHTLY]
        decided, base_label = all(r.answered for r in even or good), lead.baseline_label
        what = f"not worse than {base_label}" if even else f"worse than {base_label} by less than the margin"
        first = f"{phrases.plural(len(even or good), 'setting')} of {len(found)} {what}, "
        says.insert(0, first + ("none of them faster" if decided else "which is faster is not known yet"))
    return "; ".join(says) or f"Not enough data for a verdict on {phrases.plural(len(found), 'setting')}", lead


def _method(family: Sequence[Comparison]) -> str:
    """How the verdicts were found: images, seeds, how far the loss fell."""
    if not (records := trained.trials_of(family, family[0])):
        return ""
    first, last = np.array([verdicts.curve(r)[1][[0, -1]] for r in records]).mean(0)
    what = f"Held-out loss of the averaged weights after {trained.extent_of(family)[1]:,} images"
    seeds = phrases.plural(len(records), "seed")
    return f"{what}, paired over {seeds}, 90 % intervals; the baseline fell from {first:.3f} to {last:.4f}."


def _figure(study: Study, family: Sequence[Comparison], usual: Answer) -> Figure:
    """Two columns for each setting: how much faster it is, and what it costs in loss; of nothing known the usual."""
    shown = sorted((c for c in family if c.equivalence.seeds and c.sets), key=lambda c: -c.ratio.value)
    if not shown:
        return usual.figure()
    speed = Panel(rows=[*map(ratio_row, shown)], heading="Speed", reference=1, band=band(shown), label="times as fast")
    return forest(
        [speed, trained.loss_panel(shown, "Quality")],
        title=usual.finding.headline,
        context=phrases.context(study),
        note=f"{_method(family)} Speed: blue faster, orange slower, grey neither; band: the baseline "
        f"repeated. Loss: {phrases.within(trained.MEANING)}",
        beside=True,
    )

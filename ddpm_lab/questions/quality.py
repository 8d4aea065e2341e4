"""Does a setting cost quality? Configurations trained for real from several seeds, and their speed beside it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from ddpm_lab.checks import ConfigError, choice, whole
from ddpm_lab.config import CHECK, DDPM, OWN, SAME_WEIGHTS, TRAINING, ExchangeConfig, RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.declared import Opt
from ddpm_lab.explain import charts, machine_state, phrases, stats
from ddpm_lab.explain import quality as verdicts
from ddpm_lab.explain.answer import Answer, View, band, speeds
from ddpm_lab.explain.answer import row as ratio_row
from ddpm_lab.explain.charts import Figure, Line, Panel, Plot, Row, forest, lines
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, Finding, about, command_of, compared, judging, unsound, untrained
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import LOST, TUNED, Experiment, Family, Fid, Question, Trial
from ddpm_lab.record import RunRecord
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
"""Of a FID, where the data has so many to train on."""
LEAST_IMAGES = 2_049  # images with which the covariance of Inception's 2,048 features can have its full rank
FEW = f"with fewer than {LEAST_IMAGES:,} images the covariance is singular, and the FID too rough to compare"
MEANING = "Blue: not worse; orange: worse; grey: not enough data. Band: the margin, up to which a loss counts as equal."
_COLOURS = dict.fromkeys(verdicts.GOOD, charts.GOOD) | {verdicts.WORSE: charts.BAD}
_POINTS = 50

Array = npt.NDArray[np.float64]
Series = Callable[[Sequence[RunRecord], RunRecord], tuple[Array, Array]]


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
    found = with_trials(Experiment(name="quality", families=(family,)), setup, seeds=count, images=images)
    fid, first = _fid(setup, inception, fid_images), (setup.seed, TRAINING)
    trials = (replace(t, fid=fid) if (t.config.seed, t.config.workload) == first else t for t in found.trials)
    return replace(found, trials=tuple(trials))


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
    batch, cuda = base.global_batch_size, setup.device == "cuda"
    even, two = batch % 2 == 0, {"world_size": 2, "nodes": setup.nodes(2)}
    shared = even and setup.most_ranks > 1
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (True, "bf16", {"precision": "bf16"}),
        *((cuda, name, {"precision": name}) for name in ("tf32", "fp16")),
        (True, "bf16 with fused kernels", {"precision": "bf16", "kernels": "fused"}),
        (True, "compiled", {"compile": "whole"}),
        (True, "bf16 compiled", {"precision": "bf16", "compile": "whole"}),
        (True, f"batch {2 * batch}", {"global_batch_size": 2 * batch}),
        (shared, "2 GPUs" if cuda else "2 ranks", two),
        *((shared, f"{hook} exchange", {**two, "exchange": ExchangeConfig(hook=hook)}) for hook in ("bf16", "fp16")),
        (even, "2 micro-batches", {"accumulation": 2}),
        (True, "EMA every step", {"optimizer": replace(base.optimizer, ema_every=1)}),
    ]
    return {name: replace(base, **change) for able, name, change in changes if able}


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
    more = (trial for f in experiment.families if count for trial in _trials(f, setup, count, images))
    once = {t.config.run_id: t for t in (*experiment.trials, *experiment.checks, *more)}.values()
    trials, checks = (tuple(t for t in once if (t.config.purpose == "check") is first) for first in (False, True))
    return replace(experiment, trials=trials, checks=checks)


def _rows(family: Family) -> list[tuple[str, RunConfig]]:
    """The candidates that are trained: this trainer's, and tuned others; none where nobody asks for quality."""
    apart = family.mechanism or family.name.endswith(LOST)
    if apart or not _trains(family.baseline):
        return []
    return [(label, config) for label, config in family.candidates if _trains(config) or label.endswith(TUNED)]


def _learned(config: RunConfig) -> RunConfig:
    """A configuration without what changes no bit of what is learned."""
    tried = _tried(config)
    return tried if config.is_own else replace(tried, **SAME_WEIGHTS)


def _trials(family: Family, setup: Setup, seeds: int, images: int | None) -> list[Trial]:
    """Trials of a family's baseline and of the candidates that are this trainer, on equally many images; and checks.

    One alone is tried of those that learn the same. What differs in its loader alone, or in how two ranks exchange
    gradients, must learn the same as the baseline, shown in a few steps. Loss and gradient are checked of what learns
    something else by more than optimizer or batch.
    """
    rows, base, same = _rows(family), _tried(family.baseline), _learned(family.baseline)
    if not rows:
        return []
    amount = _images(setup, images, [base, *(config for _, config in rows)])
    others = {_learned(config): (label, config) for label, config in reversed(rows) if _learned(config) != same}
    learners = [*others.values()][::-1]
    both = [(family.baseline_label, family.baseline), *learners] if learners else []
    # How much a training of the user's looks at is the user's affair.
    how: dict[str, Any] = {"images": amount, "draws": 1 if base.is_own else _DRAWS[setup.preset]}
    found = [trial(family, label, config, setup.seed + i, **how) for i in range(seeds) for label, config in both]
    if base.is_own:
        return found
    if loaders := tuple(row for row in rows if _learned(row[1]) == same):
        found += identity_trials(replace(family, candidates=loaders))
    usual: dict[str, Any] = {"optimizer": base.optimizer, "global_batch_size": base.global_batch_size}
    for label, config in ((label, _tried(config)) for label, config in learners if config.workload == DDPM):
        if replace(config, **usual) != base:
            check = replace(config, purpose="check", workload=CHECK)
            found.append(Trial(family=family.name, label=label, baseline=family.baseline, config=check))
    return found


def _trains(config: RunConfig) -> bool:
    """Whether a configuration is this trainer, and trains: its ranks exchange what they have learned."""
    ours = config.workload in (DDPM, OWN) and config.implementation == "lab"
    # Options of the lab are about speed alone.
    return ours and config.exchange.enabled and (config.is_own or not config.options)


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
    workload = TRAINING if draws and config.workload == DDPM else config.workload
    options = (*config.own_options, ("images", images), ("draws", draws))
    tried = replace(config, purpose="quality", workload=workload, seed=seed, options=options)
    return Trial(family=family.name, label=label, baseline=family.baseline, config=tried, timed=timed)


def identity_trials(family: Family) -> tuple[Trial, ...]:
    """Twenty steps of each configuration of a family whose settings must not change what is learned."""
    amount = IDENTITY_STEPS * family.baseline.global_batch_size
    rows = ((family.baseline_label, family.baseline), *family.candidates)
    return tuple(trial(family, label, config, config.seed, images=amount, draws=0) for label, config in rows)


def answer(study: Study) -> Answer:
    """Show what each setting costs in quality and gains in speed; the one named first is the fastest not worse.

    Of the baseline that was measured last alone: another batch or network is another question.
    """
    latest = next((r.baseline_id for r in reversed(study.records) if r.role == "baseline"), None)
    mine = [r for r in comparisons(study) if r.baseline_id == latest]
    family = [r for r in mine if r.role == "baseline"][:1] + [r for r in mine if r.role == "candidate"]
    found = _finding(study, family) if any(r.equivalence.seeds for r in family) else compared(study)
    shown, views = speeds(study, found), (trained_view(study, [family]),)
    table = partial(_loss_table, family, fid=bool(_fids(family)))
    return replace(shown, figure=lambda: _figure(study, family, shown), table=table, views=views)


def _finding(study: Study, family: Sequence[Comparison]) -> Finding:
    short, lead = _headline(family[1:])
    known = _fids(family)
    fid = f"FID {fid_method(known)}." if known else "FID: not measured: give --inception FILE."
    notes = (unsound(study), untrained(study), *machine_state.warnings(study), fid)
    found = about(study, lead, short, *notes, evidence=_method(family))
    tried = [r.equivalence.verdict for r in family if r.equivalence.seeds]
    status = verdicts.NOT_ENOUGH if verdicts.NOT_ENOUGH in tried else ANSWERED
    seeds = max(r.equivalence.seeds_needed or 0 for r in family)
    way_out = judging(study, command_of(study, lead), lead.baseline, seeds=seeds) if seeds else ""
    return replace(found, verdict=lead.equivalence.verdict, status=status, way_out=way_out)


def _fids(family: Sequence[Comparison]) -> list[tuple[str, Mapping[str, Any]]]:
    """The FIDs that were asked for, by label, the baseline's first."""
    return [(r.label, found) for r in family if (found := fid_of(trials_of(family, r)))]


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
    if not (records := trials_of(family, family[0])):
        return ""
    first, last = np.array([verdicts.curve(r)[1][[0, -1]] for r in records]).mean(0)
    what = f"Held-out loss of the averaged weights after {extent_of(family)[1]:,} images"
    seeds = phrases.plural(len(records), "seed")
    return f"{what}, paired over {seeds}, 90 % intervals; the baseline fell from {first:.3f} to {last:.4f}."


def _figure(study: Study, family: Sequence[Comparison], usual: Answer) -> Figure:
    """Two columns for each setting: how much faster it is, and what it costs in loss; of nothing known the usual."""
    shown = sorted((c for c in family if c.equivalence.seeds and c.sets), key=lambda c: -c.ratio.value)
    if not shown:
        return usual.figure()
    speed = Panel(rows=[*map(ratio_row, shown)], heading="Speed", reference=1, band=band(shown), label="times as fast")
    margins = {c.equivalence.margin for c in shown if not math.isnan(c.equivalence.margin)}
    one = next(((-m, m) for m in margins if len(margins) == 1), None)  # trials of other lengths have other margins
    label, meaning = "held-out loss, less the baseline's", MEANING if one else MEANING.partition(" Band")[0]
    records = tuple(r for r in study.records if r.family == family[0].family)
    losses = Panel(rows=[*map(_loss, shown)], heading="Quality", reference=0, band=one, label=label)
    return forest(
        [speed, losses],
        title=usual.finding.headline,
        context=phrases.context(replace(study, records=records)),
        note=f"{_method(family)} Speed: blue faster, orange slower, grey neither; band: the baseline "
        f"repeated. Loss: {phrases.within(meaning)}",
        beside=True,
    )


# --- what was learned -------------------------------------------------------------------------------------------------


def extent_of(rows: Sequence[Comparison]) -> tuple[int, int]:
    """The largest ``verdicts.extent`` of trials that any verdict rests on; zeros without any."""
    return max((verdicts.extent(r.equivalence.pairs[0][0]) for r in rows if r.equivalence.pairs), default=(0, 0))


def trials_of(rows: Sequence[Comparison], row: Comparison) -> list[RunRecord]:
    """The trials of one of ``rows`` that verdicts rest on, of the largest extent, in the order of their seeds."""
    extent, lead = extent_of(rows), row.role == "baseline"
    pairs = [p for r in (rows if lead else [row]) for p in r.equivalence.pairs if verdicts.extent(p[0]) == extent]
    found = {r.config.seed: r for r in (base if lead else tried for base, tried in pairs)}
    return [found[seed] for seed in sorted(found)]


def _loss_table(family: Sequence[Comparison], *, fid: bool) -> Table:
    """One row a configuration: speed, quality, and held-out loss."""
    images, shown = extent_of(family)[1], []
    for row in family:
        lead = row.role == "baseline"
        records = trials_of(family, row)
        final = np.mean([np.interp(images, *verdicts.curve(r)) for r in records]) if records else math.nan
        distance = fid_of(records)
        shown.append(
            {
                "Configuration": f"{row.label} (baseline)" if lead else row.label,
                "Speed": phrases.times(row.ratio) if row.sets else phrases.DASH,
                "Verdict on speed": phrases.outcome(row),
                "Quality": "baseline" if lead else row.quality,
                "Held-out loss": f"{final:.4f}" if records else phrases.DASH,
                **({"FID": fid_words(distance) if distance else phrases.DASH} if fid else {}),
                **phrases.loss(row),
                "Seeds": str(len(records)),
            }
        )
    return shown


# --- FIDs -------------------------------------------------------------------------------------------------------------


def fid_of(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    """The FID of one of these trials, with its counts, or the reason why it failed; None where none was asked for."""
    asked = (((r.quality or {}).get("fid") or {}) for r in records)
    return next((found for found in asked if found), None)


def fid_words(found: Mapping[str, Any]) -> str:
    """A FID with the number of images it is of: ``12.3 (2,500 images)``."""
    if "fid" not in found:
        return "failed"
    few = ", too few" if found["images"] < LEAST_IMAGES else ""
    return f"{found['fid']:.{1 if found['fid'] >= 10 else 2}f} ({found['images']:,} images{few})"


def fid_method(known: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """How FIDs by label were measured, why any failed, and whether they are of too few images."""
    first = known[0][1]
    text = f"against as many training images, with the first seed, by DDIM in {first['steps']} steps; "
    text += f"Inception {first['inception_sha256'][:8]}"
    text += "".join(f"; {label} failed ({f.get('reason', 'unpublished')})" for label, f in known if "fid" not in f)
    return f"{text}; {FEW}" if any(found["images"] < LEAST_IMAGES for _, found in known) else text


# --- figures ----------------------------------------------------------------------------------------------------------


def _loss(c: Comparison) -> Row:
    e = c.equivalence
    if math.isnan(e.difference):
        return Row(name=c.label, missing=verdicts.sentence(e))
    colour = _COLOURS.get(e.verdict, charts.OPEN)
    return Row(name=c.label, value=e.difference, low=e.low, high=e.high, colour=colour, text=f"{e.difference:+.4f}")


def trained_view(study: Study, families: Sequence[Sequence[Comparison]]) -> View:
    """What configurations have learned, of the ``families`` that were trained."""
    caption = "Held-out and training loss on the way, all settings overlaid."
    return View(caption, "curves", lambda: _curves(study, [rows for rows in families if extent_of(rows)[1]]))


def _curves(study: Study, families: Sequence[Sequence[Comparison]]) -> "Figure | None":
    """Held-out and training loss of all settings over the images trained on, overlaid; None without trials."""
    plots, how = [], dict[str, Any](from_zero=False, x_label="images trained on", y_label="loss")
    for rows in families:
        several = f"{rows[0].family}: " if len(families) > 1 else ""
        for heading, series in (("held-out loss of the averaged weights", _held_out), ("training loss", training)):
            plots.append(Plot(lines=_overlaid(rows, series), heading=several + heading, **how))
    if not plots:
        return None
    return lines(
        plots,
        title="Loss during training",
        context=phrases.context(study),
        note=f"Mean over seeds; shade: lowest and highest seed. The training loss is the mean over each of up to "
        f"{_POINTS} equal shares of the images. "
        "Grey: settings whose loss is not found to be larger by the margin.",
    )


def _overlaid(rows: Sequence[Comparison], series: Series) -> list[Line]:
    """The baseline, what loses more, and in grey all others; ``series`` gives images (n,), losses (trials, n)."""
    base, found = trials_of(rows, rows[0]), []
    for c in sorted((c for c in rows if c.role == "candidate"), key=_apart):
        if mine := trials_of(rows, c):
            name, colour = (c.label, "") if _apart(c) else ("no larger loss found", charts.OPEN)
            found.append(_curve(name, *series(mine, base[0]), colour))
    return [*found, _curve(f"{rows[0].label} (baseline)", *series(base, base[0]), charts.INK)]


def _apart(c: Comparison) -> bool:
    """Whether the final loss is found to be larger, and by more than the margin where there is one."""
    e = c.equivalence
    return e.verdict == verdicts.WORSE or e.low > (0.0 if math.isnan(e.margin) else e.margin)


def _curve(name: str, images: Array, values: Array, colour: str) -> Line:
    low, high = values.min(0), values.max(0)
    return Line(name=name, x=images, y=values.mean(0), low=low, high=high, colour=colour, look="-", shade=True)


def _held_out(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
    images, _ = verdicts.curve(base)
    return images, np.array([np.interp(images, *verdicts.curve(r)) for r in records])


def training(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
    """Middles (n,) of n equal shares of the images that all trained on, and mean losses in each (trials, n)."""
    every = [(r.config.global_batch_size, np.array((r.quality or {})["losses"], float)) for r in (base, *records)]
    images = min(batch * len(losses) for batch, losses in every)
    points = min(_POINTS, images // max(batch for batch, _ in every))
    found = []
    for batch, losses in every[1:]:
        share = ((np.arange(len(losses)) + 0.5) * batch * points / images).astype(int)
        inside = share < points
        counts = np.bincount(share[inside], minlength=points)
        found.append(np.bincount(share[inside], losses[inside], minlength=points) / counts)
    return (np.arange(points) + 0.5) * images / points, np.array(found)

"""How fast is the lab's own trainer: beside other people's, and lever by lever."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, SEED_FAMILY, DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import findings, phrases, quality, stats
from ddpm_lab.explain.answer import Answer, View, speed_table, speeds
from ddpm_lab.explain.charts import Figure, Line, Plot, lines
from ddpm_lab.explain.comparisons import QUALITY, Comparison, comparisons, families
from ddpm_lab.explain.findings import Finding, about, common_notes, compared
from ddpm_lab.explain.selection import Study, rank_zero
from ddpm_lab.explain.table import Table
from ddpm_lab.measure.hardware import package_version
from ddpm_lab.plan import FORMATS, LEVERS, OURS, TUNED, Experiment, Family, Plan, Question
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Batch, Setup, torchs_precision, usual_settings

DDPT = "ddpm_lab.training.peers:denoising_diffusion_pytorch"
DIFFUSERS = "ddpm_lab.training.peers:diffusers"

PUBLISHED = "the published code"
PEERS = {PUBLISHED: DDPM, "denoising-diffusion-pytorch": DDPT, "diffusers": DIFFUSERS}
"""Other trainers by name; the published code is the seed network as it was first written, by the lab's own step."""
BEYOND_SEED = ("diffusers",)
"""Those that have a network of another family too; the others' networks are of the seed family."""
PARTS = ("peers", "levers")
BOTH_FP32, LIMITS = ", both fp32", "limits of this machine"
"""End and begin names of families in published records that are not measured any more."""

PLAN = Plan(window_seconds=1.0, settle_steps=1, warmup_steps=3)
"""Steps of seconds need few of them: no window shorter than a second, and ratios of two or three no hundredth parts."""
TITLE = "How fast is this trainer beside others?"
QUESTION = Question(title=TITLE, file="07_peers", trains=True, long=True, plan=PLAN)


def peers(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    trainers: Annotated[Sequence[str] | None, Opt("other trainers", choices=tuple(PEERS))] = None,
    parts: Annotated[Sequence[str] | None, Opt("parts of the question", choices=PARTS)] = None,
) -> Experiment:
    """How fast is this trainer? Beside others as they come and tuned, and each lever alone.

    ``trainers`` are names of PEERS, ``parts`` some of PARTS; None is all that a network of this size has, levers only
    in ``full``. On a CPU, where compiling a trainer takes minutes, the tuned ones are compiled too in ``full``, or if
    ``trainers`` are given.
    """
    batch = 32 if global_batch_size is None and setup.device == "cpu" else setup.batch_size(global_batch_size)
    able = [n for n in PEERS if n in BEYOND_SEED or setup.network in SEED_FAMILY]
    if trainers is not None and (lost := [n for n in trainers if n not in able]):
        raise ConfigError(f"trainers has {lost[0]!r}, which has no network of the size of {setup.network!r}: use seed")
    asked = [n for n in able if trainers is None or n in trainers]
    wanted = parts or (PARTS if setup.preset == "full" else PARTS[:1])
    settings = {**usual_settings(setup.device), **setup.formats.get(OURS, {})}
    ours = setup.config(global_batch_size=batch, diffusion=DiffusionConfig(loss="l2"), **settings)
    name, families = setup.family_name(batch), list[Family]()
    if "peers" in wanted:
        compiled = setup.device == "cpu" and (setup.preset == "full" or trainers is not None)
        ways = [_ways(ours, peer, setup.formats.get(peer, {}), compiled=compiled) for peer in asked]
        rows = tuple(row for way in zip(*ways, strict=True) for row in way)  # all as they come, then all tuned
        beside: dict[str, Any] = {"baseline": ours, "baseline_label": OURS, "primary": asked[0] + TUNED}
        families.append(Family(name=name, candidates=rows, **beside))
    if "levers" in wanted:
        families.append(_levers(ours, f"{name}{LEVERS}", setup))
    return Experiment(name="peers", families=tuple(families))


def _ways(ours: RunConfig, peer: str, formats: Mapping[str, Any], *, compiled: bool) -> Iterator[tuple[str, RunConfig]]:
    """Another trainer as it comes, in the formats of this one, and tuned, on a CPU perhaps compiled too.

    As it comes: torch's own precision, NCHW and default Adam, and a look at every loss; its package's version is an
    option, where it is installed, since another version is other work. In this trainer's number and memory format:
    what two lines change. Tuned: all that its users could change, formats, fused Adam, averages in one call, freed
    memory kept. On a CPU the formats are then those in which it was measured to be fastest here (``Setup.formats``). On
    a GPU it is compiled, and has flash attention if it offers that. On a CPU flash attention gives the same and is no
    faster: of eight steps in turn with eight without, on 2 cores in bf16 at batch 32, the median took 1.02 times as
    long.
    """
    cuda, version = ours.device == "cuda", "" if peer == PUBLISHED else package_version(peer)
    package = (("package", f"{peer} {version}"),) if version else ()
    comes = replace(
        ours,
        precision=torchs_precision(ours.device),
        channels_last=False,
        kernels="aten",
        freed_memory="default",
        compile="off",
        loader="packed",
        workload=PEERS[peer],
        implementation="plain" if peer == PUBLISHED else "lab",
        # What torch.optim.Adam chooses where nothing is said.
        optimizer=OptimizerConfig(adam="foreach" if cuda else "loop", ema="loop"),
        read_loss=True,
        options=package,
    )
    formatted = replace(comes, precision=ours.precision, channels_last=True)
    flash = ((plan.FLASH_ATTENTION, True),) if cuda and PEERS[peer] == DDPT else ()
    memory, same = "default" if cuda else "kept", {name: getattr(ours, name) for name in ("compile", "loader")}
    tuned = replace(
        formatted, **same, freed_memory=memory, optimizer=OptimizerConfig(), read_loss=False, options=(*package, *flash)
    )
    tuned = replace(tuned, **formats)
    yield peer, comes
    yield f"{peer}, in {ours.precision}{FORMATS}", formatted
    yield peer + TUNED, tuned
    if compiled:
        yield peer + TUNED + plan.COMPILED, replace(tuned, compile="whole")


def _levers(ours: RunConfig, name: str, setup: Setup) -> Family:
    """Each of the trainer's settings put back alone; those that cannot apply to this device are not in the list.

    The fused kernels work in channels-last and eagerly alone: what puts these back puts the kernels back, as it says.
    """
    optimizer, fused = ours.optimizer, ours.kernels == "fused"
    cuda, bf16 = setup.device == "cuda", ours.precision == "bf16"
    parts = plan.FUSED_PARTS if bf16 else plan.FUSED_PARTS[:-2]
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (True, "fp32", {"precision": "fp32"}),
        (cuda, "eager", {"compile": "off"}),
        (fused, "eager kernels", {"kernels": "aten"}),
        (fused, "freed memory given back", {"freed_memory": "default"}),
        (True, "NCHW, eager kernels" if fused else "NCHW", {"channels_last": False, "kernels": "aten"}),
        (True, "Adam weight by weight", {"optimizer": replace(optimizer, adam="loop")}),
        (True, "EMA weight by weight", {"optimizer": replace(optimizer, ema="loop")}),
        (True, "every loss read", {"read_loss": True}),
        (True, "files, no workers", {"loader": "files"}),
        *((fused, f"eager {part}", {"options": (("without", part),)}) for part in parts),
        (fused, "compiled block by block, eager kernels", {"kernels": "aten", "compile": "regional"}),
        *((cuda, name, {"precision": name}) for name in ("tf32", "fp16")),
        (cuda, "compiled block by block", {"compile": "regional"}),
        (cuda, "CUDA graphs", {"compile_mode": "reduce-overhead"}),
        (cuda, "max-autotune", {"compile_mode": "max-autotune"}),
        (cuda, "packed, copied", {"loader": "packed"}),
        # GPUs without bf16 have neither kernel.
        *((cuda and bf16, f"{name} attention", {"options": (("attention", name),)}) for name in ("flash", "cudnn")),
    ]
    rows = ((label, replace(ours, **change)) for able, label, change in changes if able)
    different = tuple(row for row in rows if row[1] != ours)  # fp32 is the default of many processors
    return Family(name=name, baseline=ours, baseline_label="as by default", candidates=different)


def answer(study: Study) -> Answer:
    """Compare this trainer with others, and lever by lever."""
    found, others = _finding(study), other_trainers(study)
    rivals = replace(study, records=tuple(r for r in study.records if _is_rival(r.family))) if others else study
    put_back = replace(study, records=tuple(r for r in study.records if r.family.endswith(LEVERS)))
    rows = [r for r in comparisons(study) if r.family.endswith(LEVERS) and r.role != "twin"]
    title = "What each setting of the trainer is worth here"
    levers = speeds(put_back, replace(found, headline=title), rows=rows)
    worth = f"{title.replace('here', 'on this machine')}: below 1 the trainer's default is faster."
    drawn = levers.figure if any(r.sets for r in rows) else None
    views = (*_time_to_loss(study), View(worth, "levers", drawn, lambda: speed_table(rows)))
    return replace(speeds(rivals, found, rows=others or None, views=views), study=study, table=lambda: table(study))


def _finding(study: Study) -> Finding:
    # The lab's own trainer as the baseline of the others, trained as both sides do it best, and not in fp32 alone; of
    # several networks or batches that of most others.
    rivals = [r for r in comparisons(study) if _is_rival(r.family)]
    trained = [r for r in rivals if not r.family.endswith(BOTH_FP32) and r.sets]
    count, others = Counter(r.family for r in trained if r.role == "candidate"), other_trainers(study)
    base = max((r for r in trained if r.role == "baseline"), key=lambda r: count[r.family], default=None)
    measured = [r for r in others if r.sets and base and r.family == base.family]
    if base is None or not measured:
        # Without others it is about the levers.
        return compared(study, keep=lambda r: _is_rival(r.family) if rivals else r.family.endswith(LEVERS))
    # The primary comparison; where that is missing the trainer that comes nearest, so that the claim holds for all.
    nearest = min([r for r in measured if r.primary] or measured, key=lambda r: r.ratio.value)
    mine = replace(nearest, label="this trainer", baseline_label=nearest.label, experiment="peers")
    rate, note = phrases.significant(base.images_per_second), ""
    tuned = {(r.config.device, r.config.compile) for r in others if r.sets and TUNED in r.label}
    if tuned == {("cpu", "off")}:
        note = "Compilation of the others is not tried on a CPU but in full. "
    note += f"This trainer takes {rate} images/s in {base.config.precision} at batch {base.batch}."
    found = about(study, nearest, findings.headline_of(mine), note, *common_notes(study, comparisons(study)))
    if nearest.quality != QUALITY:  # no verdict on this trainer, of which the headline is
        found = replace(found, quality=f"quality of {nearest.label}: {nearest.quality}")
    return replace(found, way_out=findings.way_out_of(study, nearest))


def other_trainers(study: Study) -> list[Comparison]:
    """Every other trainer, turned round: ``ratio`` is the time it takes for equal images divided by this trainer's."""
    rows = [r for r in comparisons(study) if _is_rival(r.family) and r.role in ("candidate", "note")]
    return [_turned(r) for r in rows]


def _turned(row: Comparison) -> Comparison:
    """A row as this trainer beside it."""
    verdicts = {stats.FASTER: stats.SLOWER, stats.SLOWER: stats.FASTER}
    logs, verdict = tuple((s, -v) for s, v in row.logs), verdicts.get(row.verdict, row.verdict)
    ratio, noise = row.ratio.inverse, row.noise.inverse
    return replace(row, baseline_label="the other", ratio=ratio, noise=noise, logs=logs, verdict=verdict)


_Runs = dict[tuple[str, str, int], RunRecord]
"""Trials of one extent by machine, code and seed."""


class _Trained(NamedTuple):
    """A trainer that was trained: its row, its runs, and its seconds for an image."""

    row: Comparison
    runs: _Runs
    seconds: float


def _time_to_loss(study: Study) -> tuple[View, ...]:
    """How long trainers take to a held-out loss that this one reached too: figure and table, if any were trained."""
    for rows in families(r for r in comparisons(study) if _is_rival(r.family)):
        if len(trained := _trained(study, rows)) > 1:
            what = "time to the lowest held-out loss that all runs of this trainer and of the other reached"
            caption = f"{rows[0].family}: {what}"
            drawn = partial(_by_time, trained, study)
            return (View(caption, "time_to_loss", drawn, partial(_times_table, trained)),)
    return ()


def _trained(study: Study, rows: Sequence[Comparison]) -> list[_Trained]:
    """Those of a family that have a speed, and runs as long as the longest of the baseline and another; it is first."""
    timed = [r for r in rows if r.role in ("baseline", "candidate") and r.sets]
    runs = [_runs(study, r) for r in timed]
    longest = max(runs[0].keys() & {extent for each in runs[1:] for extent in each}, default=None) if runs else None
    seconds = [1 / (rows[0].images_per_second * r.ratio.value) for r in timed]
    every = zip(timed, runs, seconds, strict=True)
    return [_Trained(row, each[longest], took) for row, each, took in every if longest in each]


def _runs(study: Study, row: Comparison) -> dict[tuple[int, int], _Runs]:
    """Trials of a configuration by their extent: this machine's, and published ones of any, since learning travels."""
    own = (r for r in study.trials if quality.speaks_for(r, row.code_version))
    found, work = dict[tuple[int, int], _Runs](), quality.work_of(row.config, loosely=True)
    for r in (*study.published_trials, *own):
        if r.status == "ok" and quality.final_loss(r) is not None and quality.work_of(r.config, loosely=True) == work:
            found.setdefault(quality.extent(r), {})[(*r.cohort[:2], r.config.seed)] = r
    return found


def images_to(record: RunRecord, loss: float) -> float:
    """Images after which a run first had a held-out ``loss`` that it reaches, between two looks by a straight line."""
    images, losses = quality.curve(record)
    last = int((losses <= loss).argmax())
    near = slice(max(0, last - 1), last + 1)
    return float(np.interp(-loss, -losses[near], images[near]))


class _ToLoss(NamedTuple):
    """A held-out loss, the images that another trainer and this one took to it, and the ratio of times over seeds."""

    other: _Trained
    loss: float
    images: tuple[float, float]
    ratio: stats.Interval
    seeds: int


def _to_loss(trained: Sequence[_Trained]) -> Iterator[_ToLoss]:
    """Each other trainer beside this one, where both have learned something.

    The ratio's interval is of a product: the time for an image over sets, by the images over seeds. The ends of both
    95 % intervals are multiplied, which makes it wider than it need be.
    """
    ours = trained[0]
    for one in trained[1:]:
        # Fewer, where the time was over; a seed counts once, whoever tried it.
        seeds = sorted({key[-1]: key for key in ours.runs if key in one.runs}.values())
        both = [each.runs[seed] for each in (ours, one) for seed in seeds]
        loss = max((float(quality.curve(r)[1].min()) for r in both), default=math.inf)
        if not both or any(quality.curve(r)[1][0] <= loss for r in both):
            continue
        mine, theirs = (np.log([images_to(each.runs[seed], loss) for seed in seeds]) for each in (ours, one))
        of_images, of_time = stats.estimate(theirs - mine), one.row.ratio.inverse
        ends = {end: getattr(of_images, end) * getattr(of_time, end) for end in ("value", "low", "high")}
        images = float(np.exp(theirs.mean())), float(np.exp(mine.mean()))
        yield _ToLoss(one, loss, images, stats.Interval(**ends), len(seeds))


def _times_table(trained: Sequence[_Trained]) -> Table:
    return [
        {
            "Configuration": found.other.row.label,
            "Held-out loss": f"{found.loss:.4f}",
            "Images to it": f"{found.images[0]:,.0f}",
            "This trainer's": f"{found.images[1]:,.0f}",
            "Time to it": phrases.seconds(found.images[0] * found.other.seconds),
            "Of this trainer's time": phrases.times(found.ratio),
            "Seeds": str(found.seeds),
        }
        for found in _to_loss(trained)
    ]


def _by_time(trained: Sequence[_Trained], study: Study) -> Figure:
    """Held-out loss of each trainer over its time: images by the seconds that an image takes in the sets."""
    drawn = list[Line]()
    for one in trained:
        curves = [quality.curve(r) for r in one.runs.values()]
        images = curves[0][0][1:]  # before them the loss falls by most
        losses = np.array([np.interp(images, *curve) for curve in curves])
        how = {"low": losses.min(0), "high": losses.max(0), "shade": True}
        drawn.append(Line(name=one.row.label, x=images * one.seconds / 60, y=losses.mean(0), **how))
    plot = Plot(
        lines=drawn,
        x_label="minutes of training",
        y_label=f"held-out {trained[0].row.config.diffusion.loss.upper()} loss",
        heading=trained[0].row.family,
        from_zero=False,
        height=3.6,
    )
    every = [r for one in trained for r in one.runs.values()]
    chosen = any("weights" in look for r in every for look in (r.quality or {}).get("held_out", ()))
    which = (
        "averaged or trained weights, whichever are better; this trainer and the published code by the former"
        if chosen
        else "averaged weights"
    )
    machines = sorted({r.machine.name for r in every})
    where = "" if machines == [study.hardware] else f" Trained on {phrases.joined(machines)}."
    note = (
        "Mean over seeds; shade: lowest and highest seed. Time: images trained on, times the seconds for one in the "
        f"sets. Others have networks of their own, and are judged by their {which}.{where}"
    )
    title, near = "Held-out loss over time", min(_to_loss(trained), key=lambda f: f.ratio.value, default=None)
    if near is not None:
        slower = f"{phrases.times(near.ratio)} times as long as this trainer"
        undecided = near.ratio.contains(1) or not near.ratio.exists
        title = f"To one held-out loss {near.other.row.label} takes {slower}{': undecided' * undecided}"
    return lines([plot], title=title, context=phrases.context(study), note=note)


def _is_rival(family: str) -> bool:
    return not family.endswith(LEVERS) and not family.startswith(LIMITS)


def table(study: Study) -> Table:
    """How many times as fast this trainer is as each other, beside speed, size and memory of that one."""
    shown = [r if r.role == "baseline" else _turned(r) for r in comparisons(study) if _is_rival(r.family)]

    def columns(row: Comparison) -> dict[str, str]:
        wanted = (row.run_id, row.family, row.role, "ok")
        records = [r for r in study.records if (r.run_id, r.family, r.role, r.status) == wanted]
        seen = rank_zero(records[-1]) if records else {}
        return {
            "Format": str(row.config.precision) if row.sets else phrases.DASH,
            "Weights": f"{seen['parameters'] / 1e6:.2f} M" if "parameters" in seen else phrases.DASH,
        }

    cells = speed_table(shown, columns)
    return [{"This trainer is" if name == "Speed" else name: cell for name, cell in row.items()} for row in cells]

"""How fast is the lab's own trainer: beside other people's, lever by lever, and against what the machine can do."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, SAMPLING, SEED_FAMILY, DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import decisions, findings, limits, phrases
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.forest import forest
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.figure_ratios import MEANING, band
from ddpm_lab.explain.figure_ratios import row as ratio_row
from ddpm_lab.explain.findings import ANSWERED, FAILED, Finding, about, common_notes, compared, plain
from ddpm_lab.explain.frames import Study, rank_zero
from ddpm_lab.explain.table import Table, without_constant
from ddpm_lab.measure.hardware import package_version
from ddpm_lab.plan import (
    BOTH_FP32,
    COMPILED,
    FLASH_ATTENTION,
    FORMATS,
    FUSED_PARTS,
    LEVERS,
    LIMITS,
    OURS,
    TUNED,
    Experiment,
    Family,
    Plan,
)
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.questions.question import Question
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Batch, Setup, usual_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DDPT = "ddpm_lab.training.peers:denoising_diffusion_pytorch"
DIFFUSERS = "ddpm_lab.training.peers:diffusers"
PRODUCT = "ddpm_lab.training.limits:product"
COPY = "ddpm_lab.training.limits:copy"
CONVOLUTION = "ddpm_lab.training.limits:convolution"

PUBLISHED = "the published code"
PEERS = {PUBLISHED: DDPM, "denoising-diffusion-pytorch": DDPT, "diffusers": DIFFUSERS}
"""Other trainers by name; the published code is the seed network as it was first written, by the lab's own step."""
BEYOND_SEED = ("diffusers",)
"""Those that have a network of another family too; the others' networks are of the seed family."""
PARTS = ("peers", "fp32", "sampling", "limits", "levers")

SAMPLED = 16
"""Images sampled at once."""
PLAN = Plan(window_seconds=1.0, settle_steps=1, warmup_steps=3)
"""Steps of seconds need few of them: no window shorter than a second, and ratios of two or three no hundredth parts."""
QUESTION = Question(
    title="How fast is this trainer beside others, and how far from the limit?",
    file="07_peers",
    trains=True,
    long=True,
    plan=PLAN,
)


def peers(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    trainers: Annotated[Sequence[str] | None, Opt("other trainers", choices=tuple(PEERS))] = None,
    parts: Annotated[Sequence[str] | None, Opt("parts of the question", choices=PARTS)] = None,
) -> Experiment:
    """How fast is this trainer? Beside others as they come and tuned, in fp32, each lever alone, and the limits.

    ``trainers`` are names of PEERS, ``parts`` some of PARTS; None is all that a network of this size has. On a CPU,
    where compiling a trainer takes minutes, the tuned ones are compiled too in the preset ``full``, or if ``trainers``
    names them.
    """
    batch = 32 if global_batch_size is None and setup.device == "cpu" else setup.batch_size(global_batch_size)
    able = [n for n in PEERS if n in BEYOND_SEED or setup.network in SEED_FAMILY]
    if trainers is not None and (lost := [n for n in trainers if n not in able]):
        raise ConfigError(f"trainers has {lost[0]!r}, which has no network of the size of {setup.network!r}: use seed")
    asked = [n for n in able if trainers is None or n in trainers]
    if PUBLISHED not in asked and (empty := [part for part in ("fp32", "sampling") if part in (parts or ())]):
        missing = "that trainer among trainers" if PUBLISHED in able else f"network seed, not {setup.network!r}"
        raise ConfigError(
            f"parts has {empty[0]!r}, which compares with {PUBLISHED} alone and needs {missing}: give that, or leave "
            "the part out"
        )
    ours = setup.config(global_batch_size=batch, diffusion=DiffusionConfig(loss="l2"), **usual_settings(setup.device))
    name = setup.family_name(batch)
    compiled = setup.device == "cpu" and (setup.preset == "full" or trainers is not None)
    makers: dict[str, Callable[[], Family]] = {
        "peers": lambda: _against(ours, name, asked, setup.formats, compiled=compiled),
        "fp32": lambda: _both_fp32(ours, name),
        "sampling": lambda: _sampling(ours, setup),
        "limits": lambda: _limits(ours, f"{LIMITS}, {setup.network}"),
        "levers": lambda: _levers(ours, f"{name}{LEVERS}", setup),
    }
    wanted = set(parts or PARTS)
    if PUBLISHED not in asked:
        wanted -= {"fp32", "sampling"}
    if setup.preset != "full" and parts is None:
        wanted.discard("levers")
    profiled = ((name, OURS, dataclasses.replace(ours, purpose="profile")),) if "limits" in wanted else ()
    families = tuple(make() for part, make in makers.items() if part in wanted)
    return Experiment(name="peers", families=families, profiles=profiled)


def _both_fp32(ours: RunConfig, name: str) -> Family:
    """The lab's trainer and the published code, both in single precision."""
    rows = ((PUBLISHED, _as_it_comes(ours, PUBLISHED)),)
    single = dataclasses.replace(ours, precision="fp32")
    return Family(name=f"{name}{BOTH_FP32}", baseline=single, baseline_label=OURS, candidates=rows)


def _against(
    ours: RunConfig, name: str, asked: Sequence[str], formats: Mapping[str, Mapping[str, Any]], *, compiled: bool
) -> Family:
    rows = [(peer, _as_it_comes(ours, peer)) for peer in asked]
    rows += [(f"{peer}, in {ours.precision}{FORMATS}", _formatted(ours, peer)) for peer in asked]
    tuned = {peer: dataclasses.replace(_tuned(ours, peer), **formats.get(peer, {})) for peer in asked}
    rows += [(peer + TUNED, config) for peer, config in tuned.items()]
    if compiled:
        whole = [(peer, dataclasses.replace(config, compile="whole")) for peer, config in tuned.items()]
        rows += [(peer + TUNED + COMPILED, config) for peer, config in whole]
    return Family(name=name, baseline=ours, baseline_label=OURS, candidates=tuple(rows), primary=asked[0] + TUNED)


def _as_it_comes(ours: RunConfig, peer: str) -> RunConfig:
    """A trainer as its code is written: single precision, NCHW, torch's default Adam, and a look at every loss."""
    adam = "foreach" if ours.device == "cuda" else "loop"  # what torch.optim.Adam chooses where nothing is said
    return dataclasses.replace(
        ours,
        workload=PEERS[peer],
        precision="fp32",
        channels_last=False,
        kernels="aten",
        freed_memory="default",
        compile="off",
        loader="packed",
        implementation="plain" if peer == PUBLISHED else "lab",
        optimizer=OptimizerConfig(adam=adam, ema="loop"),
        read_loss=True,
        options=_package(peer),
    )


def _package(peer: str) -> tuple[tuple[str, str], ...]:
    """The version of another trainer's package, where it is installed: another version is other work."""
    version = "" if peer == PUBLISHED else package_version(peer)
    return (("package", f"{peer} {version}"),) if version else ()


def _formatted(ours: RunConfig, peer: str) -> RunConfig:
    """The same in number and memory format of this trainer: what two lines change."""
    return dataclasses.replace(_as_it_comes(ours, peer), precision=ours.precision, channels_last=True)


def _tuned(ours: RunConfig, peer: str) -> RunConfig:
    """The same with all that its users could change: formats, fused Adam, averages in one call, freed memory kept.

    On a CPU the formats are those in which it was measured to be fastest here (``Setup.formats``).

    On a GPU it is compiled, and has flash attention if it offers that. On a CPU flash attention gives the same and is
    no faster: of eight steps in turn with eight without, on 2 cores in bf16 at batch 32, the median took 1.02 times as
    long.
    """
    flash = ours.device == "cuda" and PEERS[peer] == DDPT
    return dataclasses.replace(
        _formatted(ours, peer),
        compile=ours.compile,
        loader=ours.loader,
        freed_memory=ours.freed_memory,
        optimizer=OptimizerConfig(),
        read_loss=False,
        options=(*_package(peer), *(((FLASH_ATTENTION, True),) if flash else ())),
    )


def _sampling(ours: RunConfig, setup: Setup) -> Family:
    """A denoising step of ancestral sampling, beside the published code's sampler."""
    here = dataclasses.replace(ours, workload=SAMPLING, global_batch_size=SAMPLED, loader="packed")
    plain: dict[str, Any] = {"precision": "fp32", "channels_last": False, "kernels": "aten", "freed_memory": "default"}
    published = dataclasses.replace(here, compile="off", implementation="plain", **plain)
    name = f"{setup.family_name(SAMPLED)}{plan.SAMPLING}"
    return Family(name=name, baseline=here, baseline_label=OURS, candidates=((PUBLISHED, published),))


def _levers(ours: RunConfig, name: str, setup: Setup) -> Family:
    """Each of the trainer's settings put back alone; those that cannot apply to this device are not in the list.

    The joined kernels work in channels-last and eagerly alone: what puts these back puts the kernels back too, and its
    label says so.
    """
    optimizer, fused = ours.optimizer, ours.kernels == "fused"
    changes: list[tuple[str, dict[str, Any]]] = [
        ("fp32", {"precision": "fp32"}),
        ("NCHW, eager kernels" if fused else "NCHW", {"channels_last": False, "kernels": "aten"}),
        ("Adam weight by weight", {"optimizer": dataclasses.replace(optimizer, adam="loop")}),
        ("EMA weight by weight", {"optimizer": dataclasses.replace(optimizer, ema="loop")}),
        ("every loss read", {"read_loss": True}),
        ("files, no workers", {"loader": "files"}),
    ]
    if fused:
        changes.insert(1, ("eager kernels", {"kernels": "aten"}))
        changes.insert(2, ("freed memory given back", {"freed_memory": "default"}))
        parts = FUSED_PARTS if ours.precision == "bf16" else FUSED_PARTS[:-2]
        changes += [(f"eager {part}", {"options": (("without", part),)}) for part in parts]
        changes.append(("compiled block by block, kernels not joined", {"kernels": "aten", "compile": "regional"}))
    if setup.device == "cuda":
        changes.insert(1, ("eager", {"compile": "off"}))
        changes += [
            ("tf32", {"precision": "tf32"}),
            ("fp16", {"precision": "fp16"}),
            ("compiled block by block", {"compile": "regional"}),
            ("CUDA graphs", {"compile_mode": "reduce-overhead"}),
            ("max-autotune", {"compile_mode": "max-autotune"}),
            ("packed, copied", {"loader": "packed"}),
        ]
    rows = tuple((label, dataclasses.replace(ours, **change)) for label, change in changes)
    return Family(name=name, baseline=ours, baseline_label="as by default", candidates=rows)


def _limits(ours: RunConfig, name: str) -> Family:
    """Peaks: products in single precision as the baseline, in the trainer's own, and a copy."""
    plain = dataclasses.replace(
        ours, global_batch_size=1, kernels="aten", compile="off", loader="packed", optimizer=OptimizerConfig()
    )
    single = dataclasses.replace(plain, workload=PRODUCT, precision="fp32")
    rows = [("convolution, fp32", dataclasses.replace(single, workload=CONVOLUTION))]
    if ours.precision != "fp32":
        own = dataclasses.replace(single, precision=ours.precision)
        rows.insert(0, (f"product, {ours.precision}", own))
        rows.append((f"convolution, {ours.precision}", dataclasses.replace(own, workload=CONVOLUTION)))
    rows.append(("copy", dataclasses.replace(single, workload=COPY)))
    return Family(name=name, baseline=single, baseline_label="product, fp32", candidates=tuple(rows))


def answer(study: Study) -> Answer:
    """Compare this trainer with others, lever by lever, and with the limits of the machine."""
    found = _finding(study)
    shown = speeds(study, found)
    limits_of = "How far from the limit: an image at this machine's peaks, and measured."
    parts = "The parts of a step: work for an image, its least time at this machine's peaks, and what sets it."
    views = (
        View(caption=limits_of, name="limits", figure=lambda: roofline_figure(study)),
        View(
            caption="What each setting of the trainer is worth on this machine.",
            name="levers",
            figure=lambda: levers_figure(study),
            table=lambda: lever_table(study),
        ),
        View(caption=parts, table=lambda: limits.table(study, this_trainer(study))),
        *trained_views(study),
    )
    return replace(
        shown,
        figure=lambda: figure(study, found.headline) or shown.figure(),
        table=lambda: table(study),
        views=views,
    )


def _finding(study: Study) -> Finding:
    rows = comparisons(study)
    others = [r for r in rows if r.role not in ("baseline", "twin")]
    if not any(r.sets and _rival(r) for r in others):
        return _without_others(study, others) or compared(study, keep=_rival)
    nearest = lead(study)
    if nearest is None:
        return compared(study, keep=_rival)
    notes = (evidence(study), *common_notes(study, rows))
    return about(study, nearest, headline(nearest), *notes)


def _rival(row: Comparison) -> bool:
    return not row.family.startswith(LIMITS)


def _without_others(study: Study, others: Sequence[Comparison]) -> Finding | None:
    """The answer to ``peers`` where no other trainer runs here, or where only the machine's peaks were asked for."""
    notes = common_notes(study, comparisons(study))
    rivals = [r for r in others if _rival(r)]
    peaks = f"Peaks of this machine: {known}" if (known := limits.peaks(study)) else ""
    unable = [r.label for r in rivals if r.status == "unsupported" and not r.label.endswith((TUNED, FORMATS))]
    if unable and all(r.status in ("unsupported", "left out") for r in rivals):
        headline = f"No other trainer can run here: {phrases.joined(list(dict.fromkeys(unable)))}"
        return plain(study, headline, FAILED, evidence(study), f"{peaks}." if peaks else "", *notes)
    return replace(plain(study, peaks, ANSWERED, *notes), verdict="measured") if peaks and not rivals else None


_NONE = phrases.DASH
_TIMES = " \N{MULTIPLICATION SIGN}"


def other_trainers(study: Study) -> list[Comparison]:
    """Every other trainer, turned round: ``ratio`` is the time it takes for equal images divided by this trainer's.

    The names of those that are measured in fp32 against fp32 say so, and of those beside whom the trainer had another
    network or batch than beside most, which. Trainers without a speed come too.
    """
    base, found = this_trainer(study), []
    for row in comparisons(study):
        if row.role not in ("candidate", "note") or not _is_rival(row.family):
            continue
        named = replace(row, label=row.label + (_kind(row.family) or _other_work(row, base)))
        found.append(_turned(named) if row.sets else named)
    return found


def _kind(family: str) -> str:
    """What is compared there, where it is not training in the trainer's own precision."""
    return next((kind for kind in (BOTH_FP32, plan.SAMPLING, LEVERS) if family.endswith(kind)), "")


def _other_work(row: Comparison, base: Comparison | None) -> str:
    """Network and batch of a row, where they are not those that this trainer is described with."""
    work = (row.config.network, row.batch)
    here = base is None or work == (base.config.network, base.batch)
    return "" if here else f", on {work[0]} at batch {work[1]}"


def levers(study: Study) -> list[Comparison]:
    """Each setting put back alone, as it was measured: below 1 the trainer's own choice is faster."""
    return [r for r in comparisons(study) if r.family.endswith(LEVERS) and r.role == "candidate"]


def this_trainer(study: Study) -> Comparison | None:
    """The lab's own trainer, as the baseline of the others; of several networks or batches that of most others."""
    trained = [r for r in comparisons(study) if _is_rival(r.family) and not _kind(r.family)]
    others = Counter(r.family for r in trained if r.role == "candidate" and r.sets)
    mine = [r for r in trained if r.role == "baseline" and r.sets]
    return max(mine, key=lambda r: others[r.family], default=None)


def _baselines(study: Study) -> dict[tuple[str, str], Comparison]:
    """The lab's own trainer as the baseline of each family in which it has a speed, by family and baseline."""
    mine = [r for r in comparisons(study) if r.role == "baseline" and r.sets and _is_rival(r.family)]
    return {(r.family, r.baseline_id): r for r in mine}


def drawn(study: Study, rows: Sequence[Comparison]) -> Study:
    """The study of the families that rows belong to: what is said beside them is of these alone."""
    wanted = {(r.baseline_id, _kind(r.family)) for r in rows}
    records = [r for r in study.records if _is_rival(r.family) or r.family.endswith(LEVERS)]
    return replace(study, records=tuple(r for r in records if (r.baseline_id, _kind(r.family)) in wanted))


def _is_rival(family: str) -> bool:
    return not family.endswith(LEVERS) and not family.startswith(LIMITS)


def is_peer(row: Comparison) -> bool:
    """Whether a row compares training as both sides do it best: neither fp32 alone, nor sampling."""
    return bool(row.sets) and BOTH_FP32 not in row.label and plan.SAMPLING not in row.label


def step_of(row: Comparison) -> int:
    """How far a trainer was tuned: 0 as it comes, 1 in this trainer's formats, 2 all that its users could change."""
    return 2 if TUNED in row.label else int(FORMATS in row.label)


def _turned(row: Comparison) -> Comparison:
    words = {decisions.FASTER: decisions.SLOWER, decisions.SLOWER: decisions.FASTER}
    return replace(
        row,
        ratio=row.ratio.inverse,
        noise=row.noise.inverse,
        logs=tuple((set_id, -log) for set_id, log in row.logs),
        verdict=words.get(row.verdict, row.verdict),
    )


def lead(study: Study) -> Comparison | None:
    """The primary comparison; where that is missing the trainer that comes nearest, so that the claim holds for all."""
    measured = [r for r in other_trainers(study) if is_peer(r)]
    primary = [r for r in measured if r.primary]
    return min(primary or measured, key=lambda r: r.ratio.value, default=None)


def headline(other: Comparison) -> str:
    """Such as "This trainer is 50 % faster than the published code, tuned"."""
    mine = replace(other, label="this trainer", baseline_label=other.label, experiment="peers")
    return phrases.begun(findings.headline_of(mine))


def evidence(study: Study) -> str:
    """Return this trainer's speed, how far it is from the limit, and which tuning was not tried."""
    told, base = [], this_trainer(study)
    tuned = [r.config for r in other_trainers(study) if r.sets and TUNED in r.label]
    if tuned and all((config.device, config.compile) == ("cpu", "off") for config in tuned):
        told.append("Compilation of the others is not tried on a CPU but in full.")
    if base is not None:
        told.append(f"This trainer takes {phrases.throughput(base)} in {base.config.precision} at batch {base.batch}.")
    return " ".join((*told, limits.sentence(study, base))).strip()


def table(study: Study) -> Table:
    """How many times as fast this trainer is as each other, size, speed and memory.

    Before the others of a family stands this trainer as it ran beside them.
    """
    found = []
    for row in _shown(study):
        records = _records(study, row)
        seen = rank_zero(records[-1]) if records else {}
        measured = bool(row.sets)
        found.append(
            {
                "Configuration": row.label,
                "This trainer is": phrases.ratio_with_interval(row, _TIMES)
                if measured and row.role == "candidate"
                else _NONE,
                "Verdict": phrases.outcome(row),
                "Images/s": phrases.significant(row.images_per_second) if measured else _NONE,
                "Step": phrases.seconds(row.step_seconds) if measured else _NONE,
                "Format": str(row.config.precision) if measured else _NONE,
                "Peak memory": phrases.peak_memory(row) if measured else _NONE,
                "Weights": f"{seen['parameters'] / 1e6:.2f} M" if "parameters" in seen else _NONE,
                "GFLOP/image": _flop(study, row, seen),
                "Sets \N{MULTIPLICATION SIGN} turns": f"{row.sets} \N{MULTIPLICATION SIGN} {row.turns}"
                if measured
                else _NONE,
                "Quality": row.quality if measured else _NONE,
                "Note": row.reason if not measured else "",
            }
        )
    return without_constant(found, {"Note": [""]})


def _shown(study: Study) -> list[Comparison]:
    base, bases, others = this_trainer(study), _baselines(study), other_trainers(study)
    found, twins = [], _twins(study)
    # The family that is described in words comes first, whatever order they were measured in.
    for row in ([base] if base else []) + others:
        if mine := bases.pop((row.family, row.baseline_id), None):
            where = _kind(mine.family) or _other_work(mine, base)
            found += [replace(mine, label=f"{OURS} (baseline){where}"), *twins]
            twins = []
        found += [row] if row.role != "baseline" else []
    return found


def lever_table(study: Study) -> Table:
    """Each setting of the trainer put back alone: the trainer's speed with it, memory and quality."""
    found = [
        {
            "Configuration": row.label,
            "Speed of the trainer with it": phrases.ratio_with_interval(row) if row.sets else _NONE,
            "Verdict": phrases.outcome(row) if row.sets else phrases.failure(row),
            "Images/s": phrases.significant(row.images_per_second) if row.sets else _NONE,
            "Peak memory": phrases.peak_memory(row) if row.sets else _NONE,
            "Quality": row.quality if row.sets else _NONE,
            **phrases.loss(row),
        }
        for row in levers(study)
    ]
    return without_constant(found, {key: [_NONE] for key in phrases.LOSS})


def _twins(study: Study) -> list[Comparison]:
    twins = [r for r in comparisons(study) if r.role == "twin" and _is_rival(r.family) and r.sets]
    return [replace(r, label=f"{OURS}, repeated", role="candidate") for r in twins[:1]]


def _records(study: Study, row: Comparison) -> list[RunRecord]:
    role = "twin" if row.label.endswith(", repeated") else row.role
    mine = [r for r in study.records if r.run_id == row.run_id and r.family == row.family]
    return [r for r in mine if r.role == role and r.status == "ok"]


def _flop(study: Study, row: Comparison, seen: Mapping[str, Any]) -> str:
    """Of what a row times: a peer and a sampler count their own work, that of the lab's trainer is with the limits."""
    trains = row.config.workload == DDPM
    value = seen.get("flop_per_image") or (limits.flop_per_image(study, row.config) if trains else None)
    return f"{value / 1e9:.2f}" if value else _NONE


_WORK_KINDS = ("convolution", "matrix product", "normalisation", "element-wise", "optimizer", "rest")


def figure(study: Study, title: str) -> Figure | None:
    """One row for each other trainer and how it was set: how many times as fast this one is; None without any.

    What was measured in fp32 alone, in sampling, or with another network or batch stands in the table.
    """
    rows = [r for r in other_trainers(study) if r.sets]
    if not rows:
        return None
    own = this_trainer(study)
    mine = [r for r in rows if is_peer(r) and own is not None and r.baseline_id == own.run_id] or rows
    panels: dict[str, list[Comparison]] = {}
    for r in sorted(mine, key=lambda r: (step_of(r), -r.ratio.value)):
        panels.setdefault(re.split(f"{FORMATS}|{TUNED}|, ", r.label)[0], []).append(r)
    others = phrases.plural(len(rows) - len(mine), "other comparison")
    return forest(
        [
            Panel(
                heading=name,
                rows=[ratio_row(r, r.label.removeprefix(name).removeprefix(", ") or "as it comes") for r in found],
                reference=1,
                band=band(found),
            )
            for name, found in panels.items()
        ],
        title=title,
        context=phrases.context(drawn(study, mine)),
        note=f"Time of the other trainer for equal images divided by this one's, with 95 % interval over sets; dots: "
        f"single sets; band: this trainer repeated. Blue: this trainer is faster; orange: slower; grey: no difference "
        f"found. Quality is not measured. {f'The table has {others}.' if len(rows) > len(mine) else ''}",
        label="this trainer is so many times as fast",
    )


def levers_figure(study: Study) -> Figure | None:
    """One row for each setting put back alone: how fast the trainer then is; None where none is measured."""
    rows = sorted((r for r in levers(study) if r.sets), key=lambda r: r.ratio.value)
    if not rows:
        return None
    return forest(
        [Panel(rows=[*map(ratio_row, rows)], reference=1, band=band(rows))],
        title="What each setting of the trainer is worth here",
        context=phrases.context(drawn(study, rows)),
        note="Each setting put back alone: below 1 the trainer's default is faster. Geometric mean and 95 % interval "
        f"over sets; band: the baseline repeated. {MEANING}",
        label="speed relative to the default settings",
    )


def roofline_figure(study: Study) -> Figure | None:
    """The time of an image: measured, and at the machine's peaks by kind of work; None where it was not measured."""
    base = this_trainer(study)
    line = limits.roofline(study, base)
    if base is None or line is None:
        return None
    peaks = (
        f"peak {phrases.significant(line.flops / 1e9)} GFLOP/s in {line.precision}, "
        f"{phrases.significant(line.bandwidth / 1e9)} GB/s in a copy"
    )
    rows = [
        Row(
            name="measured",
            value=1e3 * line.measured_seconds,
            colour=style.SOFT,
            text=phrases.seconds(line.measured_seconds),
        ),
        _bar("at peak, every kernel for itself", {p.kind: p.seconds for p in line.parts}),
        _bar("at peak, the rest free", _needed(line.parts)),
    ]
    return bars(
        [Panel(rows=rows)],
        title=f"Runs at {100 * line.flop_share:.0f} % of the hardware limit",
        context=f"{phrases.context(drawn(study, [base]))}{style.SEPARATOR}{peaks}",
        label="milliseconds for an image",
        names={kind: colour for kind, colour in zip(_WORK_KINDS, style.SERIES, strict=False) if kind in rows[1].parts},
        note="At the peak each kind of work takes the longer of its FLOP at the measured FLOP/s (the better of a large "
        "product and a convolution) and its bytes at the measured bandwidth. Caches can make bytes cheaper.",
    )


def _needed(parts: Sequence[limits.Part]) -> dict[str, float]:
    return {p.kind: p.seconds for p in parts if p.kind in (*limits.NEEDED, limits.OPTIMIZER)}


def _bar(name: str, parts: dict[str, float]) -> Row:
    parts = {kind: 1e3 * seconds for kind, seconds in parts.items()}
    return Row(name=name, parts=parts, text=phrases.seconds(sum(parts.values()) / 1e3))

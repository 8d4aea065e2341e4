"""What limits a step, and what should be changed next? Its time budget, and each change of one setting, measured."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ddpm_lab import files
from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import DDPM, NETWORKS, ExchangeConfig, RunConfig
from ddpm_lab.declared import Opt, known
from ddpm_lab.explain import findings, machine_state, pages, phrases, quality, stats
from ddpm_lab.explain import table as tables
from ddpm_lab.explain.answer import MEANING, Answer, View, speeds
from ddpm_lab.explain.answer import row as ratio_row
from ddpm_lab.explain.bands import DOCUMENTS
from ddpm_lab.explain.charts import Figure, Panel, Row, forest
from ddpm_lab.explain.comparisons import PROJECTED_IMAGES, Comparison, comparisons, families
from ddpm_lab.explain.selection import Study, once, rank_zero
from ddpm_lab.explain.table import Table
from ddpm_lab.measure.shortfall import COMPILE_SECONDS, Held
from ddpm_lab.plan import SEARCH, Experiment, Family, Question
from ddpm_lab.questions import profile as bd
from ddpm_lab.questions import torch_compile
from ddpm_lab.questions.batch_size import CAVEAT
from ddpm_lab.questions.multi_gpu import PARAMETERS
from ddpm_lab.questions.profile import TARGETS, Budget
from ddpm_lab.questions.recommendation import FASTER, GOOD, INCONCLUSIVE, Change, change, changes_table, single
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Batch, Setup, WorldSize, check_cores

QUESTION = Question(title="What should be changed next?", file="bottleneck")

BASELINE = "the present settings"
COMPILE_SHARE = 0.5  # share of the time that cold compiles may take: the rest is for what they are compared with
CHANGES, SIZES = ", one change at a time", ", batch sizes"
MOST_BESIDE = 4
"""Panels that can be read beside each other."""
_FIXED = ("purpose", "workload", "data", "data_sha256", "options", "nodes")
"""Settings of a configuration that a question does not take."""
MET, MISSED, UNKNOWN, NO_TARGET = "met", "missed", "not measured", "no target on a CPU"
REPORT = "bottleneck_report"
_ACTS_ON = {
    "loader": ("data", "copy"),
    "loader_workers": ("data",),
    "exchange": ("communication",),
    "optimizer": ("optimizer", "EMA"),
    **dict.fromkeys(("precision", "compile", "kernels", "channels_last"), ("forward", "backward")),
}
"""Phases of a time budget that a setting can make shorter, where it is about some of them."""
_WHY = {
    "world_size": "Ranks share the batch, and exchange gradients for it",
    "global_batch_size": "What a step costs whatever its batch is shared by another number of images; "
    + phrases.within(CAVEAT[:-1]),
}


def bottleneck(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    world_size: WorldSize = 1,
    only: Annotated[Sequence[str] | None, Opt("changes to measure")] = None,
    **settings: Any,
) -> Experiment:
    """What takes the time of a step, and which change of one setting makes it faster?

    ``settings`` are those of ``RunConfig`` that the configuration in question has; what is left out is as there, and
    where it is measured as usual on the device. Each change that the machine can run is measured against it; ``only``
    names some of them. ``smoke`` measures the first three, and twice the batch.
    """
    known("a configuration", settings, RunConfig)
    for name in _FIXED:
        if name in settings:
            raise ConfigError(f"{name} is {settings[name]!r}: the lab sets it itself here; leave it out")
    setup.check_ranks(world_size)
    batch = setup.batch_size(global_batch_size, world_size)
    config = setup.config(global_batch_size=batch, world_size=world_size, **settings)
    check_cores("loader_workers", config.loader_workers, setup.usable_cores)
    offered = changes(config, usable_cores=setup.usable_cores, most_ranks=setup.node_size)
    for label in only or ():
        choice("only", label, offered)
    if only is None:
        only = [*list(offered)[:3], f"batch {2 * batch}"] if setup.preset == "smoke" else [*offered]
    name, families = setup.family_name(batch, world_size), []
    for what, same in ((CHANGES, True), (SIZES, False)):
        rows = tuple((n, c) for n, c in offered.items() if n in only and (c.global_batch_size == batch) is same)
        if rows:
            families.append(Family(name=name + what, baseline=config, baseline_label=BASELINE, candidates=rows))
    profile = (name, BASELINE, replace(config, purpose="profile"))
    return Experiment(name="bottleneck", families=tuple(families), profiles=(profile,))


def fitting(experiment: Experiment, seconds: float, held: Held) -> Experiment:
    """Leave out the changes whose cold compiles alone would take more than half of ``seconds``, and say so."""
    took, families = max(held.compile_seconds, default=COMPILE_SECONDS), experiment.families
    every = [(f.name, label, c) for f in families for label, c in f.candidates if c.compile != "off"]
    cold = [row for row in every if not held.cold_compiles(row[2].run_id) and row[2].run_id not in held.lasting]
    gone = [(family, label) for family, label, _ in cold[int(COMPILE_SHARE * seconds // took) :]]
    why = f"does not fit into the time: its cold compile takes about {took:.0f} s"
    kept = [replace(f, candidates=tuple(r for r in f.candidates if (f.name, r[0]) not in gone)) for f in families]
    left_out = (*experiment.left_out, *((*row, why) for row in gone))
    return replace(experiment, families=tuple(kept), left_out=left_out)


def changes(config: RunConfig, *, usable_cores: int, most_ranks: int) -> dict[str, RunConfig]:
    """Configurations one change away from ``config`` that its machine could run, in the order of measuring.

    What has to be compiled comes last of those of its batch: it is left out first where time is short. After it come
    the other batches of S002's sweep, and twice its own. What cannot be, such as a batch that the ranks cannot share,
    nobody asked for.
    """
    cuda, files = config.device == "cuda", config.loader == "files"
    eager, alone = config.compile == "off", config.world_size == 1
    workers = sorted({0 if config.loader_workers else min(4, usable_cores), 2 * config.loader_workers})
    ranks = most_ranks if cuda else min(2, most_ranks)
    exchange, optimizer = config.exchange, config.optimizer
    fused = "fused kernels" if config.channels_last else "fused kernels in channels last"
    graphs = {"compile_mode": "reduce-overhead"}
    rows: list[tuple[bool, str, dict[str, Any]]] = [
        (files, "packed data", {"loader": "packed", "loader_workers": 0}),
        *((files, f"{n} loader worker{'s' * (n != 1)}", {"loader_workers": n}) for n in workers if n <= usable_cores),
        (cuda and config.loader in ("files", "packed"), "resident data", {"loader": "resident", "loader_workers": 0}),
        *((cuda or name != "tf32", name, {"precision": name}) for name in ("bf16", "tf32", "fp32")),
        (not eager, "eager", {"compile": "off", "compile_mode": "default"}),
        (eager and config.workload == DDPM, fused, {"kernels": "fused", "channels_last": True}),
        (not cuda, "freed memory kept", {"freed_memory": "kept"}),
        (True, "channels last", {"channels_last": True}),
        (True, "losses not read", {"read_loss": False}),
        (True, "fused Adam", {"optimizer": replace(optimizer, adam="fused", ema="foreach")}),
        (not alone, "gradients in bf16", {"exchange": replace(exchange, hook="bf16")}),
        (not alone, "1 rank", {"world_size": 1, "nodes": 1, "exchange": ExchangeConfig()}),
        (alone, f"{ranks} ranks", {"world_size": ranks}),
        (cuda and alone and config.compile == "whole", "CUDA graphs", graphs),
        (cuda and alone and eager, "compiled with CUDA graphs", {"compile": "whole", "kernels": "aten", **graphs}),
        (eager, "compiled", {"compile": "whole", "kernels": "aten"}),
    ]
    sizes = sorted({8, 16, 32, 64, 2 * config.global_batch_size})
    rows += [(True, f"batch {n}", {"global_batch_size": n}) for n in sizes]
    found = {}
    for able, name, settings in rows:
        with contextlib.suppress(ConfigError):
            if able and (other := replace(config, **settings)) != config:
                found[name] = other
    return found


# --- the answer: each change, and what it depends on ------------------------------------------------------------------


def answer(study: Study) -> Answer:
    """The speed of every change; where several networks or batches were measured, side by side too."""
    view = View("Each change, by network and batch", "by_network", partial(_by_network, study))
    return speeds(study, findings.compared(study), views=[view])


def _by_network(study: Study) -> "Figure | None":
    """A panel for each change, of many the most telling; a row for each network and batch, from the smallest.

    None if there are not two rows.
    """
    every = [[r for r in rows if r.sets] for rows in families(comparisons(study)) if rows[0].family.endswith(CHANGES)]
    shown = sorted(
        (rows for rows in every if any(r.role == "candidate" for r in rows)),
        key=lambda rows: (list(NETWORKS).index(rows[0].config.network), rows[0].batch),
    )
    if len(shown) < 2:
        return None
    found = dict[str, dict[int, Comparison]]()  # of each change, by the place of its row
    for place, rows in enumerate(shown):
        for r in (r for r in rows if r.role == "candidate"):
            found.setdefault(r.label, {})[place] = r
    first = sorted(found, key=lambda name: _interest([*found[name].values()]), reverse=True)[:MOST_BESIDE]
    drawn = {name: rows for name, rows in found.items() if name in first}
    names, panels = [_work(rows[0]) for rows in shown], list[Panel]()
    for label, cells in drawn.items():
        rows_of = [ratio_row(cells[i], name) if i in cells else Row(name=name) for i, name in enumerate(names)]
        panels.append(Panel(rows=[replace(r, text="", dots=()) for r in rows_of], heading=label, reference=1))
    others = phrases.joined([name for name in found if name not in drawn])
    steps = phrases.joined(sorted({_step(rows[0].baseline) for rows in shown}))
    gaps = any(len(rows) < len(shown) for rows in drawn.values())
    return forest(
        panels,
        title=_by_network_title([[*rows.values()] for rows in drawn.values()]),
        context=phrases.context(study),
        note=f"Speed with one change to a step ({steps}), relative to the step without it, and its 95 % interval. "
        f"M: million parameters. {MEANING}"
        f"{' No point: not measured, or failed.' * gaps}{f' Not drawn: {others}.' * bool(others)}",
        beside=True,
    )


def _interest(rows: Sequence[Comparison]) -> tuple[bool, float]:
    """Of a change's comparisons: whether it is faster here and slower there, and its largest effect that is called."""
    called = [r for r in rows if r.verdict in (stats.FASTER, stats.SLOWER)]
    return len({r.verdict for r in called}) > 1, max((abs(math.log(r.ratio.value)) for r in called), default=0.0)


def _step(config: RunConfig) -> str:
    """Number format, compilation and memory format: "fp32, eager, NCHW"."""
    compiled, layout = config.compile != "off", "channels_last" if config.channels_last else "NCHW"
    return f"{config.precision}, {'compiled' if compiled else 'eager'}, {layout}"


def _work(row: Comparison) -> str:
    """Network, batch and trained parameters in millions: "seed, batch 8 (10 M)"."""
    head, count = row.family.removesuffix(CHANGES).removesuffix(", 1 rank"), PARAMETERS[row.config.network]
    return head if row.config.is_own else f"{head} ({count / 1e6:.2g} M)"


def _by_network_title(found: Sequence[Sequence[Comparison]]) -> str:
    """Name what the change with the largest gain depends on, of those that are faster in one place, slower in another.

    ``found`` holds each change's comparisons.
    """
    called = [[r for r in rows if r.resolved] for rows in found]
    contrary = [rows for rows in called if len({r.verdict for r in rows}) > 1]
    if not contrary:
        return "What each change is worth, by network and batch"
    most = max(contrary, key=lambda rows: max(r.ratio.value for r in rows))
    low, high = (end(most, key=lambda r: r.ratio.value) for end in (min, max))
    apart = [(a, b) for a in most for b in most if (a.verdict, b.verdict) == (stats.FASTER, stats.SLOWER)]
    network, batch = (
        any(a.batch == b.batch for a, b in apart),
        any(a.config.network == b.config.network for a, b in apart),
    )
    what = "network and batch" if network is batch else "the network" if network else "the batch"
    return f"{low.label} trains {phrases.ratio(low)} to {phrases.ratio(high)} times as fast: it depends on {what}"


# --- the configuration in question ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The configuration in question: its profile with a time budget, and its speed where sets measured it."""

    config: RunConfig
    profile: RunRecord
    taken: Budget
    speed: Comparison | None

    @property
    def step_seconds(self) -> float:
        """Seconds of its step: over sets, or where there are none, those of the time budget."""
        return self.speed.step_seconds if self.speed else self.taken.running.step_seconds


def subject(study: Study) -> Subject | None:
    """What a study's latest time budget is about; one that was taken for this question goes first."""
    every = [r for r in study.records if r.role == "profile"]
    mine = [r for r in every if r.experiment == "bottleneck"]  # where it failed, nothing else speaks for it
    found = [(r, taken) for r in mine or every if (taken := bd.budget(r)) is not None]
    if not found:
        return None
    *_, (record, taken) = sorted(found, key=lambda pair: pair[0].experiment == "profile")
    config = replace(record.config, purpose="timing")
    same = ("baseline", config.run_id, record.code_version)
    speeds = [r for r in comparisons(study) if r.sets and (r.role, r.run_id, r.code_version) == same]
    return Subject(config=config, profile=record, taken=taken, speed=max(speeds, key=lambda r: r.sets, default=None))


# --- changes, by what was measured of them ----------------------------------------------------------------------------


@once
def considered(study: Study) -> tuple[Change, ...]:
    """Every change that was measured, or that the machine could run, ranked; none without a time budget."""
    about = subject(study)
    if about is None:
        return ()
    machine, config = about.profile.machine, about.config
    ranks = len(machine.gpus) if config.device == "cuda" else machine.usable_cores
    offered = changes(config, usable_cores=machine.usable_cores, most_ranks=ranks)
    names = {other.run_id: name for name, other in offered.items()}
    mine = (config.run_id, about.profile.code_version)
    known: dict[str, Comparison] = {}  # of whichever question has most sets
    for row in sorted(comparisons(study), key=lambda row: -row.sets):
        if single(row) and row.experiment != SEARCH and (row.baseline_id, row.code_version) == mine:
            known.setdefault(row.run_id, row)
    found = [_change(study, about, row.config, names.get(row.run_id, ""), row) for row in known.values()]
    found += [_change(study, about, offered[name], name) for run_id, name in names.items() if run_id not in known]
    return tuple(sorted(found, key=lambda a: a.rank))


def advice(study: Study) -> tuple[Change, ...]:
    """Changes worth applying or measuring, the one with the largest sure gain first."""
    return tuple(a for a in considered(study) if a.listed)


def _change(study: Study, about: Subject, other: RunConfig, name: str, row: Comparison | None = None) -> Change:
    """What is known of a change; without a ``name`` it has no command of its own."""
    changed = other.differences(about.config)
    trials = quality.Trials((*study.trials, *study.other_trials), study.published_trials)
    judged = trials.verdict(about.config, other, about.profile.code_version)
    if row is None:
        mine = ("note", name, about.config.run_id)
        notes = [r.reason for r in comparisons(study) if (r.role, r.label, r.baseline_id) == mine]
        evidence = "; ".join(["Not measured against the present settings", *notes[-1:]])
    elif not row.sets:
        evidence = phrases.failure(row)
    else:
        evidence = f"Measured in {row.family}: {phrases.ratio(row)} ({phrases.evidence(row.ratio)}{findings.noise(row)}"
        evidence += ")" if row.resolved else f"); {phrases.outcome(row)}"
        if other.compile != "off" and about.config.compile == "off":
            evidence += f". {torch_compile.sentence(study, row).removesuffix('.')}"
    line = about.taken.running
    phases = [p for p in line.phases if any(p in _ACTS_ON.get(setting, ()) for setting in changed)]
    share = sum(map(line.share, phases))
    acts = f"It acts on {phrases.joined([bd.LONG.get(p, p) for p in phases])}: {bd.percent(share)} of a step"
    usual = acts if phases else "No phase of the time budget shows it"
    return change(
        row,
        other,
        about.config,
        judged,
        title=name or (row.label if row else ""),
        against=about.profile.label,
        rationale=next((why for setting, why in _WHY.items() if setting in changed), usual),
        evidence=evidence,
        command=findings.command_of_step(study, about.config, *filter(None, [name]), known=row),
        share=share,
        usable=row is not None and row.verdict == FASTER and judged.verdict in GOOD,
    )


# --- verdict, targets, summary ----------------------------------------------------------------------------------------


def summary(study: Study) -> list[str]:
    """The executive summary, one sentence each; where there is no time budget, how to measure one."""
    about = subject(study)
    if about is None:
        lost = [r for r in study.records if r.role == "profile" and r.status != "ok"]
        why = f"The step could not be profiled: {phrases.failure(lost[-1])}." if lost else ""
        return [why or "No time budget is recorded: give it more minutes, or leave --minutes out."]
    batch, seconds = about.config.global_batch_size, about.step_seconds
    on = phrases.plural(about.speed.sets, "set") if about.speed else "by the time budget; no set measured its speed"
    took = f"A step of {phrases.plural(batch, 'image')} takes {phrases.seconds(seconds)}"
    took += f" ({phrases.significant(batch / seconds)} images/s, {on})."
    lines = [verdict(about), took, "Nothing that was measured would make it faster."]
    found = advice(study)
    if first := next((a for a in found if a.usable), next(iter(found), None)):
        kind = "to be judged" if first.status == FASTER else "to be measured"
        kind = "First recommendation" if first.usable else f"First {kind}"
        judged = f", {first.verdict}" + f", quality {first.quality}" * (first.status == FASTER)
        lines[-1] = f"{kind}: {first.title} ({first.recommended}), speed {first.expected}{judged}."
    statuses = [row["Status"] for row in targets(study, about) if row["Status"] != NO_TARGET]
    lines.append(f"{statuses.count(MET)} of {phrases.plural(len(statuses), 'target')} are met.")
    return [*lines, *([f"{about.taken.disturbance}."] if about.taken.disturbance else [])]


def verdict(about: Subject) -> str:
    """What limits the step, in one sentence, by the classes of its phases."""
    line = about.taken.running
    if not about.taken.explained:
        return f"{bd.headline(about.taken)}: no bottleneck is named."
    compute, io = line.share(bd.COMPUTE), line.share(bd.IO)
    most = max((bd.IO, bd.TRANSFER, bd.COMPUTE, bd.OTHER), key=line.share)
    shares = f"compute share {bd.percent(compute)}, I/O {bd.percent(io)}"
    if most == bd.COMPUTE and io >= TARGETS.io:
        shares += f", and waiting for data is above its target (below {bd.percent(TARGETS.io)})"
    names = {bd.TRANSFER: "memory transfer", bd.OTHER: "phases of the workload's own"}
    what = f"{names[most]}, {bd.percent(line.share(most))} of it" if most in names else most
    what = "the host, which launches its kernels" if about.taken.waits_for_host else what
    return f"The step is limited by {what}: {shares}."


def targets(study: Study, about: Subject) -> Table:
    """The targets of the report and what is reached of each: met, missed, not measured, or no target on a CPU."""
    line, cpu = about.taken.running, about.config.device == "cpu"
    (low, high), (memory, of) = TARGETS.memory, _memory(about)
    first = next((a for a in considered(study) if a.status == FASTER), None)
    known = [a.status for a in considered(study) if not math.isnan(a.ratio)]
    settled = MET if known and INCONCLUSIVE not in known else UNKNOWN
    epoch = about.step_seconds * PROJECTED_IMAGES / about.config.global_batch_size
    faster = phrases.seconds(epoch / first.ratio) if first else "no change is known to be faster"
    compute, io, busy = (bd.percent(share) for share in (TARGETS.compute, TARGETS.io, TARGETS.utilisation))
    device = "CPU" if cpu else "GPU"
    held = _target(f"memory in use, of {of}", f"{100 * low:.0f} to {bd.percent(high)}", memory, low, high)
    last = (f"time of {PROJECTED_IMAGES:,} images", faster, phrases.seconds(epoch), MISSED if first else settled)
    return [
        _target("compute share", f"above {compute}", line.share(bd.COMPUTE), TARGETS.compute, 1.01),
        _target("I/O share", f"below {io}", line.share(bd.IO), -1.0, TARGETS.io),
        held | ({"Status": NO_TARGET} if cpu else {}),
        _target(f"{device} utilisation", f"above {busy}", _utilisation(about), TARGETS.utilisation, 1.01),
        dict(zip(held, last, strict=True)),
    ]


def _target(name: str, wanted: str, value: float, low: float, high: float) -> dict[str, str]:
    status = UNKNOWN if math.isnan(value) else MET if low < value < high else MISSED
    now = UNKNOWN if math.isnan(value) else bd.percent(value)
    return {"Target": name, "Wanted": wanted, "Now": now, "Status": status}


def _memory(about: Subject) -> tuple[float, str]:
    """Share of memory in use at the peak, of the fullest card, or of the machine's by all ranks; NaN is unknown."""
    ranks, record = about.profile.ranks, about.profile
    if about.config.device == "cuda":
        totals = [rank.get("device_total_bytes") for rank in record.witness.get("ranks", ())]
        pairs = zip([rank.peak_reserved_bytes for rank in ranks], totals, strict=False)
        return max((held / total for held, total in pairs if held and total), default=math.nan), "the card"
    peaks, total = [rank.peak_rss_bytes for rank in ranks], record.environment.ram_bytes
    return (sum(p or 0 for p in peaks) / total if total and peaks and all(peaks) else math.nan), "the machine's"


def _utilisation(about: Subject) -> float:
    """How busy the device was while the budget was taken; a CPU without its neighbours, where they took little."""
    values, kind = (about.profile.profile or {})["budget"], "cpu" if about.config.device == "cpu" else "gpu"
    taken = values.get("state", {}).get(f"{kind}_utilisation_percent")
    share = math.nan if taken is None else taken / 100
    if kind == "gpu":
        return share
    cores, others = about.profile.environment.machine.usable_cores, values.get("others_cores")
    return math.nan if others is None or others > bd.DISTURBED * cores else max(share - others / cores, 0.0)


# --- the report -------------------------------------------------------------------------------------------------------


def write(study: Study, folder: Path, pictures: Sequence[tuple[str, str]] = ()) -> Path:
    """Write the report into ``folder``, as Markdown and as a page; returns the former. See ``markdown``."""
    folder.mkdir(parents=True, exist_ok=True)
    text, target = markdown(study, pictures), folder / f"{REPORT}.md"
    files.replace(target, text)
    pages.write_markdown(text, target.with_suffix(".html"))
    return target


def markdown(study: Study, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The whole report; ``pictures`` are (text alternative, file name) of those that lie beside it."""
    about = subject(study)
    if about is None:
        return f"# Bottleneck report\n\n{summary(study)[0]}\n"
    found, config = advice(study), about.config
    return pages.markdown(
        "bottleneck.md.j2",
        study=study,
        config=config,
        record=about.profile,
        seen=rank_zero(about.profile),
        taken=about.taken,
        advice=found,
        declined=[a for a in considered(study) if not a.listed],
        summary=summary(study),
        phases=tables.markdown(bd.table(about.taken)),
        verdict=verdict(about),
        evidence=bd.evidence(about.taken),
        pictures=[(alt, tables.Rendered(name)) for alt, name in pictures],
        ranked=tables.markdown(changes_table(found)),
        all_changes=findings.command_of_step(study, config),
        targets=tables.markdown(targets(study, about)),
        bands=TARGETS,
        budget=bd,
        phrases=phrases,
        document=DOCUMENTS[TARGETS.whose],
        busy=" ".join(machine_state.warnings(study)),
    )

"""Do more ranks or GPUs train faster? Strong and weak scaling, and whether one or several should be used."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError, choice, missing_to_explain, whole
from ddpm_lab.config import NETWORKS, RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import charts, findings, machine_state, phrases, stats
from ddpm_lab.explain.answer import Answer, View, measured, projection, speeds, timed
from ddpm_lab.explain.bands import Bands, share
from ddpm_lab.explain.charts import Figure, Line, Plot, lines
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.stats import Interval
from ddpm_lab.measure import hardware
from ddpm_lab.measure.cluster import current
from ddpm_lab.plan import SCALINGS, WEAK, Experiment, Family, Question
from ddpm_lab.questions import experiments
from ddpm_lab.questions import lost_scaling as lost
from ddpm_lab.training.setting import Batches, Precision, Setup, Workers, WorldSizes, check_ranks, usual_device

QUESTION = Question(title="Do more ranks or GPUs train faster?", file="02_multi_gpu", trains=True)

FULL_BATCH_SIZES = (32, 64, 128, 256, 512)


def multi_gpu(
    setup: Setup,
    *,
    world_sizes: WorldSizes = None,
    global_batch_sizes: Batches = None,
    precision: Precision | None = None,
    scaling: Annotated[str | None, Opt("which scaling (default: both; smoke: strong)", choices=SCALINGS)] = None,
    lost_scaling: Annotated[bool | None, Opt("where the rest of the ideal speed-up went")] = None,
    loader_workers: Workers = None,
    alone: Annotated[bool, Opt("the most ranks without one rank beside them")] = False,
) -> Experiment:
    """Return the experiment on strong scaling (ranks share a batch) and weak scaling (each rank has its own batch).

    For weak scaling, ``global_batch_sizes`` are per rank: n ranks process n times as many images. ``scaling`` None
    measures both, but in ``smoke`` only strong scaling, and in ``quick`` weak scaling only of the first batch size.
    ``lost_scaling`` measures the causes of the loss relative to ideal scaling, for the most ranks with a device each
    and the smallest batch that they can share; None means only in ``full``. ``loader_workers`` decode files on demand;
    without them, images are packed in advance. ``alone`` measures only the most ranks, and so no ratio.
    """
    full, precision = setup.preset == "full", precision or setup.plain_precision
    usual = [*setup.doubled_ranks, setup.most_ranks] if full or setup.device == "cuda" else [1, 2]
    ranks = [n for n in setup.world_sizes(world_sizes, sorted(set(usual))) if n > 1]
    small = (128, 512) if setup.device == "cuda" else (16, 32)
    batches = global_batch_sizes or (FULL_BATCH_SIZES if full else small if setup.preset == "quick" else small[:1])
    families, left_out = list[Family](), list[tuple[str, str, str]]()
    settings = {"precision": precision, **({} if loader_workers is None else setup.files(loader_workers))}
    for batch in batches if scaling != "weak" else ():
        uneven = [n for n in ranks if batch % n]
        if uneven and world_sizes is not None:
            raise ConfigError(f"a global batch of {batch} cannot be shared by {uneven[0]} ranks: give a multiple")
        family = _scaled(setup, batch, [n for n in ranks if n not in uneven], settings)
        families += [family] * bool(family.candidates or not uneven)  # omit a baseline without any candidate
        images = f"{batch} image{'s' * (batch != 1)}"
        left_out += [(family.name, n, f"{images} cannot be shared by {n}") for n in map(setup.ranks_label, uneven)]
    weak = batches if full or scaling else batches[:1] if setup.preset == "quick" else ()
    if scaling == "weak" or (ranks and scaling != "strong"):
        families += [_scaled(setup, b, ranks, settings, weak=True) for b in weak]
    if not families:
        raise ConfigError(f"{left_out[0][2]}, so nothing can be compared: give a batch size that they can share")
    if alone:
        most = [(f, *f.candidates[-1]) if f.candidates else (f, f.baseline_label, f.baseline) for f in families]
        families = [replace(f, baseline=config, baseline_label=name, candidates=()) for f, name, config in most]
    if not ranks and world_sizes is None:
        left_out += [(f.name, setup.ranks_label(2), setup.why_alone) for f in families]
        if setup.device == "cuda" and setup.usable_cores >= 2 and setup.places != 1 and not setup.own:
            families.append(_mechanism(setup, precision))
    if setup.own and lost_scaling:
        raise ConfigError(f"lost_scaling splits the step of the lab's own trainer, not that of {setup.own.name}")
    splits = full and not setup.own if lost_scaling is None else lost_scaling
    if splits and (split := lost.lost_scaling(setup, ranks, batches, settings)):
        families.append(split)
    elif lost_scaling and (ranks or world_sizes is not None):
        sizes = ", ".join(map(str, batches))
        raise ConfigError(f"lost_scaling: give world_sizes of several ranks that can share a batch of {sizes}")
    return Experiment(name="multi_gpu", families=tuple(families), left_out=tuple(left_out))


def _scaled(setup: Setup, batch: int, ranks: Sequence[int], settings: dict[str, Any], *, weak: bool = False) -> Family:
    """Strong: the same global batch on each number of ranks. Weak: the same batch on each rank, over equal images."""
    many = [(n, setup.config(global_batch_size=n * batch if weak else batch, world_size=n, **settings)) for n in ranks]
    plain = settings.get("precision", setup.plain_precision) == setup.plain_precision
    name = setup.family_name(batch, per_rank=weak) + f", {settings.get('precision')}" * (not plain)
    return Family(
        name=f"{name}{WEAK}" if weak else name,
        baseline_label=setup.ranks_label(1),
        baseline=setup.config(global_batch_size=batch, **settings),
        candidates=tuple((setup.ranks_label(n), config) for n, config in many),
        primary=setup.ranks_label(ranks[-1]) if ranks and not weak else "",
    )


def _mechanism(setup: Setup, precision: str) -> Family:
    """Two gloo ranks on the CPU of a machine with one GPU: they show that several ranks work, nothing about speed."""
    cpu = replace(setup, device="cpu", network="tiny")
    one = cpu.config(global_batch_size=16, precision="bf16" if precision == "bf16" else "fp32")
    name, two = f"{cpu.family_name(16)}, CPU ranks", ("2 ranks", replace(one, world_size=2))
    return Family(name=name, baseline_label="1 rank", baseline=one, candidates=(two,), mechanism=True)


# --- the answer -------------------------------------------------------------------------------------------------------

BEYOND = "above 100 %"
KINDS = {"strong": "the ranks share the batch", "weak": "each rank keeps its batch"}
"""What stays in each kind of scaling. They are never compared with each other."""


def answer(study: Study) -> Answer:
    """Compare numbers of ranks, strong and weak scaling apart, and say where lost scaling went."""
    rows = scaling_rows(study)
    title = f"Efficiency, by {study.bands.owner} bands"

    def columns(row: Comparison) -> dict[str, str]:
        return {title: rated(row, study.bands) if row.sets and row.role == "candidate" else phrases.DASH}

    splits = lost.splits(study)
    views = (
        View("Speed-up and parallel efficiency against the number of ranks.", "speedup", partial(by_ranks, study)),
        View("Time for 50,000 images against the batch size.", "batch", partial(_by_batch, study)),
        View("Memory of each configuration's ranks.", "machine", partial(memory, study)),
        View(f"{lost.headline(splits)}.", table=lambda: lost.table(splits)),
        View("What the machine did meanwhile.", table=lambda: machine_state.table(study)),
    )
    found = findings.compared(study, rows=rows, own=partial(_efficiency_notes, study))
    kinds = [r if r.scaling == "weak" else replace(r, family=f"{r.family}, strong scaling") for r in rows]
    return speeds(study, found, rows=kinds, columns=columns, views=views)


def scaling_rows(study: Study) -> list[Comparison]:
    """The comparisons of the families that scale."""
    return [row for row in comparisons(study) if row.experiment == "multi_gpu" and row.scaling]


def layout(config: RunConfig) -> str:
    """On what a configuration runs: "1 CPU rank", "4 GPUs", "8 GPUs on 2 hosts"."""
    words = phrases.plural(config.world_size, "GPU" if config.device == "cuda" else "CPU rank")
    return words if config.nodes == 1 else f"{words} on {phrases.plural(config.nodes, 'host')}"


def batch_of(row: Comparison) -> int:
    """Images of a step: in weak scaling those of each rank."""
    return row.config.rank_batch_size if row.scaling == "weak" else row.batch


def efficiency(row: Comparison) -> str:
    """Such as "80 %"."""
    return f"{100 * row.efficiency.value:.0f} %"


def band(row: Comparison, bands: Bands) -> str:
    """The name of an efficiency; of too few sets, or where all of it lies above 100 %, why it has none."""
    if row.sets < stats.LEAST_SETS:
        return stats.TOO_FEW
    return BEYOND if row.efficiency.low > 1 else bands.name(row.efficiency.value)


def rated(row: Comparison, bands: Bands) -> str:
    """An efficiency with its interval and its band: "80 % (78 to 82 %), good"."""
    low, high = (100 * end for end in row.efficiency.ends)
    span = f" ({low:.0f} to {high:.0f} %)" if row.efficiency.exists else ""
    return f"{efficiency(row)}{span}, {band(row, bands)}"


def _efficiency_notes(study: Study, lead: Comparison) -> list[str]:
    """What the efficiency of the comparison that leads is called, and what keeps ranks of a CPU from 100 %."""
    text = f"Parallel efficiency with {lead.label}: {rated(lead, study.bands)}, by {study.bands.owner} bands"
    if band(lead, study.bands) == BEYOND:
        text += "; more ranks alone cannot give that: the baseline was disturbed, or caches hold what each works on"
    shared = f"{_shared_cores(study, [lead])}: expect no efficiency near 100 %." if lead.config.device == "cpu" else ""
    return [f"{text}.", shared]


def _shared_cores(study: Study, rows: Sequence[Comparison]) -> str:
    """What CPU ranks share, without a full stop."""
    cores = phrases.plural(study.records[-1].environment.machine.usable_cores, "core")
    several = any(r.config.nodes > 1 for r in rows)
    return f"All ranks of a host share its {cores}" if several else f"All ranks share the same {cores}"


# --- figures ----------------------------------------------------------------------------------------------------------


def by_ranks(study: Study) -> "Figure | None":
    """Speed-up and efficiency against the number of ranks, one line a family; None below three numbers."""
    found = [sorted(rows, key=lambda c: (c.ranks, c.config.nodes)) for rows in measured(study) if len(rows) > 1]
    plots, bands = [], study.bands
    for kind, what in KINDS.items():
        families = [rows for rows in found if rows[0].scaling == kind]
        hosts = {c.ranks: c.config.nodes for rows in families for c in rows}
        if len(hosts) < 3:
            continue
        ranks, many = sorted(hosts), max(hosts) > 16  # which only a logarithmic axis tells apart
        names = [f"{n}\n{hosts[n]} hosts" if hosts[n] > 1 else str(n) for n in ranks]
        common: dict[str, Any] = {"x_label": "ranks", "ticks": ranks, "names": names, "log_x": many}
        ideal = Line(name="ideal", x=[1, ranks[-1]], y=[1, ranks[-1]], colour=charts.SOFT, look="--", width=1.4)
        curves = [ideal, *(_line(rows, [c.ratio for c in rows]) for rows in families)]
        heading = f"{kind.capitalize()} scaling: {what}"
        plots.append(Plot(lines=curves, heading=heading, y_label="speed-up", log_y=many, height=3.2, **common))
        shares = [_line(rows, [c.efficiency.times(100) for c in rows]) for rows in families]
        common |= {"level": 100 * bands.threshold, "height": 2.2}
        plots.append(Plot(lines=shares, y_label="parallel efficiency, %", **common))
    cpu = [c for rows in found for c in rows if c.config.device == "cpu"]
    note = f"{_shared_cores(study, cpu)}; the ideal is that of ranks with devices of their own. " if cpu else ""
    note += "Upright lines: 95 % interval over sets. Speeds are for equal images. "
    note += f"{phrases.begun(bands.owner)} bands: {bands.sentence()}. Dashed: {share(bands.threshold)}."
    title = "Speed-up and parallel efficiency against the number of ranks"
    return lines(plots, title=title, context=phrases.context(study), note=note) if plots else None


def _line(rows: Sequence[Comparison], values: Sequence[Interval]) -> Line:
    y, low, high = zip(*((v.value, *v.ends) for v in values), strict=True)
    return Line(name=rows[0].family.removesuffix(WEAK), x=[c.ranks for c in rows], y=y, low=low, high=high)


def _by_batch(study: Study) -> "Figure | None":
    """Time for 50,000 images against the batch size, one line a number of ranks; None below three sizes."""
    every = [c for rows in measured(study) for c in rows]
    if not every:
        return None
    unit, time_of = projection(every)
    plots, bases = [], {(c.family, c.baseline_id): c for c in every if c.role == "baseline"}
    for kind, what in KINDS.items():
        found: dict[str, list[Comparison]] = defaultdict(list)
        for c in sorted((c for c in every if c.scaling == kind), key=lambda c: (c.config.device, c.ranks, batch_of(c))):
            found[f"{layout(c.config)}, {c.config.image_size} px"].append(c)
        batches = sorted({batch_of(c) for rows in found.values() for c in rows})
        if len(batches) < 3:
            continue
        series = [
            timed(rows, lambda c, _: time_of(c, bases.get((c.family, c.baseline_id))), batch_of, name)
            for name, rows in found.items()
        ]
        label = "global batch size, images a step" if kind == "strong" else "images a step on each rank"
        heading = f"{kind.capitalize()} scaling: {what}"
        plots.append(Plot(lines=series, heading=heading, x_label=label, y_label=unit, log_x=True, ticks=batches))
    title = "Time for 50,000 images against the batch size"
    note = "A projection from timed steps, without start-up; upright lines: 95 % interval of the ratio to one rank."
    return lines(plots, title=title, context=phrases.context(study, batch=False), note=note) if plots else None


def memory(study: Study) -> "Figure | None":
    """Memory of each configuration's largest rank in each turn: its GPU's, else of the host; None where unknown."""
    moments = [m for m in machine_state.moments(study) if m.record.role != "twin"]
    name, what = "rss_bytes", "Memory of the largest rank (resident set, RSS)"
    if any(m.window.state.get("allocated_bytes") is not None for m in moments):
        name, what = "allocated_bytes", "GPU memory allocated by the largest rank"
    runs: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for m in moments:
        if (value := m.window.state.get(name)) is not None:
            runs.setdefault(m.record.label, {}).setdefault(m.record.set_id, []).append((m.turn, value / 2**20))
    series = []
    for label, sets in runs.items():
        xs, ys = zip(*(p for run in sets.values() for p in [*run, (math.nan, math.nan)]), strict=True)
        series.append(Line(name=label, x=xs, y=ys, look=".-"))
    plot = Plot(lines=series, heading=what, x_label="turn, counted over all sets", y_label="MiB", height=1.6)
    note = "One window of every configuration is a turn. Each set has new processes, so lines begin anew."
    return lines([plot], title="Memory over the run", context=phrases.context(study), note=note) if series else None


# --- one rank or several ----------------------------------------------------------------------------------------------

USUAL = {"cpu": ("tiny", 32), "cuda": ("seed", 128)}
"""Network and global batch size by kind of device, where neither was said."""
SINGLE, MULTI, MEASURE, PRIOR = "single", "multi", "measure", "prior, not measured"
PARAMETERS = {
    **{"tiny": 44_332, "seed-16": 634_179, "seed-32": 2_520_707},
    **{"seed": 10_050_819, "ddpm": 35_746_307, "s000": 39_156_227},
}
"""Trained parameters of each network, which do not depend on the size of its images."""
_VARIES = {*("network", "device", "threads", "world_size", "nodes"), *("global_batch_size", "data_sha256", "seed")}
_PRIOR = (
    (1_000_000, math.inf, SINGLE, "the model is too small, below 1,000,000 parameters"),
    (5_000_000, 128, SINGLE, "below 5,000,000 parameters with a batch below 128"),
    (5_000_000, math.inf, MEASURE, "below 5,000,000 parameters with a batch of at least 128, only measuring tells"),
    (10_000_000, math.inf, MEASURE, "between 5,000,000 and 10,000,000 parameters only measuring tells"),
    (math.inf, 64, SINGLE, "the batch is below 64: increase it for several"),
    (math.inf, math.inf, MULTI, "at least 10,000,000 parameters with a batch of at least 64"),
)
"""S003's strategy selector: the first row that has more parameters and a larger batch answers, for its reason."""


class NoRanksError(ConfigError):
    """Several ranks were asked for where there can be only one: nothing is wrong but the machine."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Whether one rank or several should train a network at a batch, and why.

    ``answer`` is single, multi, inconclusive (measured, and neither), or measure (the rule, or another batch that was
    measured, leaves it to a measurement).
    ``source`` says what it rests on: "measured", with the batch where that is another one, or that it is a prior.
    Ratio, interval and sets are those of the comparison behind it.
    """

    answer: str
    reason: str
    source: str
    network: str | None
    parameters: int
    batch: int
    device: str
    measured_batch: int | None = None
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    sets: int = 0

    def sentence(self) -> str:
        """Give the answer in one sentence, with its reason and what it rests on."""
        work = f"{self.network or 'a network'} ({self.parameters:,} parameters), batch {self.batch}"
        return f"{self.answer} for {work}{', fp32' * (self.measured_batch is not None)}: {self.reason} [{self.source}]"

    def way_out(self) -> str:
        """Return the command that measures what is not known at this batch; empty where it was measured."""
        asked = f"ddpm-lab run multi_gpu --network {self.network or 'NAME'} --batch-sizes {self.batch}"
        if self.answer == stats.INCONCLUSIVE:
            return f"{asked} --resolution 2%"
        return asked if self.measured_batch != self.batch else ""


def prior(parameters: int, batch: int) -> tuple[str, str]:
    """Answer and reason by the thresholds of S003, which know neither machine nor network."""
    return next((answer, why) for most, largest, answer, why in _PRIOR if parameters < most and batch < largest)


def strategy(
    *,
    network: str | None = None,
    parameters: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    output_dir: str | Path | None = None,
) -> Strategy:
    """One rank or several for a network and a global batch size, with the reason.

    The records of this machine decide; where they hold nothing of this network, published thresholds do, and the
    answer says so. A network given by its number of ``parameters`` is one of the lab's if the numbers agree. None is
    what is usual for the device. Raises ConfigError for a value that cannot be, or where scipy is missing.
    """
    if missing := missing_to_explain():
        raise ConfigError(f"weighing records needs {missing}, which is not installed here: install it first")
    device = usual_device(device)
    check_ranks(device, 1, len(hardware.gpus()), hardware.usable_cores())
    usual_network, usual_batch = USUAL[device]
    batch = usual_batch if batch_size is None else batch_size
    whole("batch_size", batch, 1)
    if parameters is None:
        network = network or usual_network
        choice("network", network, NETWORKS)
        parameters = PARAMETERS[network]
    else:
        whole("parameters", parameters, 1)
        network = next((name for name, count in PARAMETERS.items() if count == parameters), None)
    measured = experiments.measured_here("multi_gpu", output_dir, network=network, device=device, image_size=32)
    return decide(measured, network=network, parameters=parameters, batch=batch, device=device)


def decide(study: Study, *, network: str | None, parameters: int, batch: int, device: str) -> Strategy:
    """Choose by strong scaling of the plain step (fp32, eager) of this network on this kind of device, else the prior.

    Comparisons at this batch decide, else those at the nearest smaller one where several gain, or larger one where they
    gain nothing.
    """
    common: dict[str, Any] = {"network": network, "parameters": parameters, "batch": batch, "device": device}
    found = [
        r
        for r in scaling_rows(study)
        if r.scaling == "strong" and r.sets and r.role == "candidate"
        if (r.config.network, r.config.device) == (network, device)
        if r.config.differences(RunConfig()).keys() <= _VARIES
    ]
    if not found:
        answer, reason = prior(parameters, batch)
        return Strategy(answer=answer, reason=reason, source=PRIOR, **common)
    batches = sorted({r.batch for r in found}, key=lambda b: (abs(math.log(b / batch)), b))
    decided = {b: _at_batch(found, b) for b in batches}

    def tells(b: int) -> bool:
        # The larger its batch, the more work a rank has beside the exchange: that tells of one direction alone.
        answer = decided[b][0]
        return b == batch or (answer == MULTI and b < batch) or (answer == SINGLE and b > batch)

    nearest = next(filter(tells, batches), batches[0])
    answer, reason, lead = decided[nearest]
    if answer in (SINGLE, MULTI) and not tells(nearest):
        answer, reason = MEASURE, f"{reason}, and the batch decides what several gain"
    source = "measured" if nearest == batch else f"measured at batch {nearest}, not at {batch}"
    common |= {"ratio": lead.ratio.value, "low": lead.ratio.low, "high": lead.ratio.high, "sets": lead.sets}
    return Strategy(answer=answer, reason=reason, source=source, measured_batch=nearest, **common)


def _at_batch(found: Sequence[Comparison], batch: int) -> tuple[str, str, Comparison]:
    """What comparisons at a batch say, why, and the one that says it; answers with all cores before others."""
    last = sorted((r for r in found if r.batch == batch), key=lambda r: (r.answered, not r.baseline.threads))[-1]
    several = [r for r in found if r.baseline_id == last.baseline_id]
    faster = [r for r in several if r.verdict == stats.FASTER]
    lead = max(faster or several, key=lambda r: r.ratio.value)
    evidence = phrases.evidence(lead.ratio)
    if faster or all(r.answered for r in several):
        return MULTI if faster else SINGLE, f"{findings.headline_of(lead)} ({evidence})", lead
    reads = f"reads {phrases.ratio(lead)} ({evidence}), {phrases.outcome(lead)}"
    return stats.INCONCLUSIVE, f"{lead.label} against {lead.baseline_label} {reads}", lead


def several_ranks(device: str, *, needed: bool = False) -> int:
    """How many ranks several are where nobody says: all GPUs of all hosts of a job, or two on a CPU; 1 on one device.

    Raises NoRanksError where there is one device, and several are ``needed``.
    """
    most, unit = (len(hardware.gpus()), "GPU") if device == "cuda" else (hardware.usable_cores(), "usable core")
    have = f"this machine has {most} {unit}"
    if (cluster := current()) is not None:
        hosts = len(cluster.hosts)
        most = hosts * min(most, cluster.node_size)
        have = f"this job has room for {phrases.plural(most, 'rank')} on {phrases.plural(hosts, 'host')}"
    if needed and most < 2:
        raise NoRanksError(f"--ranks multi needs two ranks, and {have}: use --ranks single")
    return max(1, most if device == "cuda" else min(most, 2))

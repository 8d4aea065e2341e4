"""Do published claims hold here? Sets of what they are about, and beside them the wrong ways to measure, really run.

Claims, and the faults behind their numbers, are rows of ``claims.toml``. A claim about the speed of GPUs is judged by
GPUs alone: on a CPU it is not testable, and only the fault behind its number is shown, with its size there.
"""

import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import machine_state, phrases, quality, stats
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.answer import row as drawn
from ddpm_lab.explain.bands import DOCUMENTS
from ddpm_lab.explain.charts import BAD, Figure, Panel, Row, forest
from ddpm_lab.explain.comparisons import COMPARED, Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, compared, output_of, plain
from ddpm_lab.explain.selection import Study, once
from ddpm_lab.explain.stats import Interval
from ddpm_lab.explain.table import Table
from ddpm_lab.measure.alone import WORKLOAD
from ddpm_lab.plan import Experiment, Family, Question, Trial, scaling
from ddpm_lab.questions import torch_compile
from ddpm_lab.record import crowded_sets
from ddpm_lab.training.setting import Batch, Setup

QUESTION = Question(title="Which published claims hold here?", file="09_claims", long=True)

Repeats = Annotated[int | None, Opt("times that each wrong way is run", least=1)]
BAR_STEPS = 6
"""Steps of the smaller batch in a bar; the larger batch does as many as fit into the same images, which is fewer."""
_REPEATS = {"smoke": 1, "quick": 6, "full": 20}
_WAYS = ("fresh", "bars", "runs", "profiled", "phases", "counted")
_PAIRED = ("fresh", "bars", "runs", "profiled")  # what is run of both sides of a pair
_CPU_WAYS = ("one_thread",)
_CUDA_WAYS = ("loss_read", "unsynchronised", "phases_waited_for")


def claims(setup: Setup, *, global_batch_size: Batch = None, repeats: Repeats = None) -> Experiment:
    """Which published claims hold here? Settings that the claims are about, in sets, and wrong ways to measure them.

    Each wrong way is run ``repeats`` times, in processes of its own. Its records have the role "wrong", and no figure
    or table takes a speed from them. ``smoke`` leaves compiling out, which takes most of a minute.
    """
    cuda = setup.device == "cuda"
    batch = setup.batch_size(global_batch_size) if cuda or global_batch_size else 8
    count = _REPEATS[setup.preset] if repeats is None else repeats
    base = setup.config(global_batch_size=batch)
    narrow = "fp16" if cuda else "bf16"
    # The images of a bar hold one step of the larger batch, and half as many images again.
    large, larger = f"batch {4 * batch}", replace(base, global_batch_size=4 * batch)
    rows = [(narrow, replace(base, precision=narrow))]
    rows += [("compiled", replace(base, compile="whole"))] if setup.preset != "smoke" else []
    rows += [(large, larger)]
    two = setup.ranks_label(2)
    several = setup.most_ranks > 1 and batch % 2 == 0 and 2 % setup.nodes(2) == 0
    rows += [(two, setup.config(global_batch_size=batch, world_size=2))] if several else []
    name = setup.family_name(batch)
    family = Family(name=name, baseline=base, baseline_label="fp32", candidates=tuple(rows), together=True)
    why = "the batch is odd" if setup.most_ranks > 1 else "each rank needs a device of its own"
    # A thread and a core are one on a CPU alone, and where there is one core no other can be idle.
    ways = (*_WAYS, *(_CUDA_WAYS if cuda else _CPU_WAYS if setup.usable_cores > 1 else ()))
    wrong = []
    for seed in range(setup.seed, setup.seed + count):
        for label, config, mine in (("fp32", base, ways), (narrow, rows[0][1], _PAIRED), (large, larger, ("bars",))):
            options = (("ways", " ".join(mine)), ("bar_images", BAR_STEPS * batch))
            run = replace(config, purpose="check", workload=WORKLOAD, seed=seed, options=options)
            wrong.append(Trial(family=name, label=label, baseline=base, config=run))
    left_out = () if several else ((name, two, why),)
    return Experiment(name="claims", families=(family,), left_out=left_out, checks=tuple(wrong))


def answer(study: Study) -> Answer:
    """Judge each published claim, and show what each wrong way to measure did to a number."""
    shown = speeds(study, compared(study))
    if study.records:
        named: dict[str, list[str]] = defaultdict(list)
        for claim, found in judged(study):
            named[found.verdict].append(f"{phrases.within(claim.says)} ({claim.key})")
        refuted, confirmed, untestable = (len(named[verdict]) for verdict in (REFUTED, CONFIRMED, UNTESTABLE))
        headline = f"Of {len(CLAIMS)} published claims {refuted} are refuted and {confirmed} confirmed"
        headline += f"; {untestable} need GPUs" * bool(untestable)
        text = " ".join(f"{v.capitalize()}: {'; '.join(named[v])}." for v in (CONFIRMED, REFUTED) if named[v])
        known = {"verdict": "judged", "quality": "quality in the table, where a claim is about it"}
        shown = replace(shown, finding=plain(study, headline, ANSWERED, text, *machine_state.warnings(study), **known))
    wrong = "Each fault: what is done wrong, what that did to a number here, how it is done right."
    often = "One pair of settings, compared in the ways of most benchmarks, and in sets."
    views = (View(often, "once", lambda: pair_figure(study)), View(wrong, table=lambda: _fault_table(study)))
    figure = shown.figure
    return replace(shown, figure=lambda: _fault_figure(study) or figure(), table=lambda: table(study), views=views)


def table(study: Study) -> Table:
    """One row a claim: published, what the wrong and the right way read, verdict and reason."""
    found = {key: f"{FAULTS[key].name}: {FAULTS[key].said(r)[0]}" for key, r in readings(study).items()}
    return [
        {
            "Claim": claim.says,
            "Document": f"{claim.key}, {DOCUMENTS[claim.key[:4]]}",
            "Published": claim.number,
            "Wrong way, measured": "; ".join(found[key] for key in claim.faults if key in found) or phrases.DASH,
            "Right way, measured": answer.here,
            "Verdict": answer.verdict,
            "Why": answer.why,
        }
        for claim, answer in judged(study)
    ]


# --- faults: what each wrong way reads, beside what the sets say ------------------------------------------------------

ROWS = tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))
DRAWN = 1800  # steps that a run of six is drawn as, 300 times over


class Reading(NamedTuple):
    """A wrong number over the right one (infinite if that is 0), both, and what they make of a comparison."""

    ratio: Interval
    wrong: float
    right: float

    def factor(self) -> str:
        """Such as "3.07 (2.15 to 4.36)"."""
        value, low, high = map(phrases.significant, (self.ratio.value, *self.ratio.ends))
        text = f"{value} ({low} to {high})" if self.ratio.exists else value
        return "the true value is 0" if math.isinf(self.ratio.value) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of measuring: what is done wrong, how it is done right, and the words for both numbers."""

    name: str
    seen_in: str
    wrong: str
    right: str
    reads: tuple[str, str]
    seconds: bool = True
    gpu: bool = False

    def said(self, read: Reading) -> list[str]:
        """The wrong and the right number in words."""
        say = phrases.seconds if self.seconds else phrases.significant
        return [text.format(say(value)) for text, value in zip(self.reads, (read.wrong, read.right), strict=True)]


FAULTS = {key: Fault(**row) for key, row in ROWS["fault"].items()}


class Records:
    """What the records of a machine say: answers of wrong ways, and comparisons of every question.

    Where wrong ways of several networks or batches were run, those of the baseline that was measured last count.
    """

    def __init__(self, study: Study) -> None:
        self.study, every = study, (*study.records, *study.beside)
        self.gpus, self.cores = (len(every[-1].machine.gpus), every[-1].machine.usable_cores) if every else (0, 1)
        self.cuda = any(r.config.device == "cuda" for r in study.records)
        self.studies = {
            name: replace(study, experiment=name, records=tuple(r for r in every if r.experiment == name))
            for name in {r.experiment for r in every}
        }
        latest = next((r for r in reversed(study.records) if r.role in ("baseline", "wrong")), None)
        last, self.config = (latest.baseline_id, latest.config) if latest else ("", RunConfig())
        wrong = [r for r in study.records if (r.role, r.status, r.baseline_id) == ("wrong", "ok", last)]
        self.ways: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
        by_seed = {(r.label, r.config.seed): r for r in sorted(wrong, key=lambda r: r.config.seed)}
        for (label, seed), r in by_seed.items():
            begun = {"begun": r.stages.get("start", 0.0) + r.stages.get("build", 0.0)}
            for way, result in (r.profile or {}).get("wrong_ways", {}).items():
                if isinstance(result, dict) and [] not in result.values():
                    self.ways[way, label][seed] = result | begun
        rows = [row for row in comparisons(study) if row.baseline_id == last and row.sets]
        self.own = {row.label: row for row in rows if row.role == "candidate"}
        self.step = self.step_of(next((row for row in rows if row.role == "baseline"), None))

    def each(self, way: str, value: Callable[[Any], float], label: str = "fp32") -> dict[int, float]:
        """A ``value`` of what each repeat of a wrong way answered, by seed."""
        return {seed: value(result) for seed, result in self.ways[way, label].items()}

    def faster(self, way: str, label: str, seconds: Callable[[Any], float] = itemgetter("seconds")) -> list[float]:
        """How many times as fast as fp32 a configuration looks in each repeat of a wrong way that both have."""
        base, other = (self.each(way, seconds, x) for x in ("fp32", label))
        return [base[seed] / other[seed] for seed in base.keys() & other.keys() if other[seed]]

    def step_of(self, row: Comparison | None) -> Interval:
        """Seconds of a step in the sets that count, with the interval that their spread gives; NaN without any."""
        if row is None:
            return Interval(value=math.nan)
        members = [r for r in self.study.records if r.baseline_id == row.baseline_id and r.role in COMPARED]
        lost, mine = crowded_sets(members), (row.role, row.run_id)
        quiet = [r for r in members if (r.role, r.run_id) == mine and r.windows and r.set_id not in lost]
        return _mean(row.batch * statistics.median(w.seconds_per_image for w in r.windows) for r in quiet)


def _mean(values: Iterable[float]) -> Interval:
    """Geometric mean of repeats with its 95 % interval."""
    return stats.estimate(np.log([v for v in values if v > 0]))


def _against(wrong: Iterable[float], right: Interval, *, times: int = 1) -> Reading:
    """A number of each repeat beside one of the sets, both ``times`` as long; a single repeat has no interval."""
    read, ends = _mean(wrong), (math.nan, math.nan)
    if read.exists and not math.isnan(right.value):
        ends = stats.quotient_interval(read, right)
    ratio = Interval(value=read.value / right.value, low=ends[0], high=ends[1])
    return Reading(ratio, times * read.value, times * right.value)


def _pairs(pairs: Sequence[tuple[float, float]]) -> Reading:
    """A wrong and a right number of each repeat."""
    wrong, right = (_mean(pair[side] for pair in pairs).value for side in (0, 1))
    return Reading(_mean(a / b for a, b in pairs), wrong, right)


def _from_start(result: Any) -> float:
    """Seconds of a step, from the start of its process."""
    return float(result["begun"] + sum(result["step_seconds"])) / len(result["step_seconds"])


def _of_step(result: Any) -> float:
    return float(result["seconds"] / result["steps"])


_STEPS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "multiplied": ("fresh", _from_start),
    "cold": ("fresh", lambda result: statistics.fmean(result["step_seconds"])),
    "profiler": ("profiled", _of_step),
    "unsynchronised": ("unsynchronised", _of_step),
    "loss_read": ("loss_read", _of_step),
    "phase_sums": ("phases_waited_for", lambda result: sum(result["phases"].values()) / result["steps"]),
}
"""Faults that call another time than the sets' that of a step: the wrong way, and the time in what it answers."""


@once
def readings(study: Study) -> dict[str, Reading]:
    """What each fault reads on the machine of the records, by its key, as far as it was measured."""
    found = Records(study)
    read = {
        key: _against(found.each(way, value).values(), found.step, times=DRAWN if key == "multiplied" else 1)
        for key, (way, value) in _STEPS.items()
    }
    if compiled := found.own.get("compiled"):
        cold = [r for r in study.records if (r.role, r.status, r.run_id) == ("cold", "ok", compiled.run_id)]
        whole = [r for r in cold if {"compile", "warmup"} <= r.stages.keys() and r.warmup_steps]
        seconds = ((r.stages["compile"] + r.stages["warmup"]) / r.warmup_steps for r in whole)
        read["compiling"] = _against(seconds, found.step_of(compiled))
    read |= _other_numbers(found)
    return {key: reading for key, reading in read.items() if not math.isnan(reading.ratio.value)}


def _other_numbers(found: Records) -> dict[str, Reading]:
    """Faults whose numbers are ratios, shares or widths of intervals, and a phase that is called by another name."""
    read, runs = dict[str, Reading](), [result["seconds"] for result in found.ways["runs", "fp32"].values()]
    if larger := next((row for label, row in found.own.items() if label.startswith("batch ")), None):
        read["unequal"] = _against(found.faster("bars", larger.label), larger.ratio)
    if len(bars := found.each("bars", _of_step).values()) > 1:
        read["single"] = Reading(Interval(value=max(bars) / min(bars)), max(bars) / min(bars), 1)
    halves = [sum(seconds[::2]) / sum(seconds[1::2]) for seconds in runs if len(seconds) > 1]
    two = next((row.ratio for row in found.own.values() if row.ranks == 2), None)
    read["label"] = _against(halves, two) if two else Reading(_mean(halves), _mean(halves).value, math.nan)
    backward = found.each("phases", lambda result: result["phases"].get("backward", 0.0) / result["steps"]).values()
    if any(backward):
        read["gradient"] = Reading(Interval(value=math.inf), _mean(backward).value, 0)
    shares = []
    for result in found.ways["phases_waited_for" if found.cuda else "one_thread", "fp32"].values():
        compute = sum(result["phases"].get(name, 0.0) for name in ("forward", "backward", "optimizer", "ema"))
        used = result.get("gpu_utilisation_percent") if found.cuda else 100 * result["cpu_seconds"] / result["seconds"]
        busy = used if found.cuda else used / found.cores
        shares += [(100 * compute / result["seconds"], busy)] if busy else []
    read["share"] = _pairs(shares)
    nested = found.ways["profiled", "fp32"].values()
    read["nested"] = _pairs([(result["inclusive_seconds"], result["exclusive_seconds"]) for result in nested])
    widths = [_half_width(*np.percentile(seconds, (2.5, 97.5))) for seconds in runs]
    width = _half_width(found.step.low, found.step.high)
    read["percentiles"] = _against(widths, Interval(value=width or math.nan))
    return read


def _half_width(low: float, high: float) -> float:
    """Half of an interval, in per cent of its middle."""
    return 100 * (math.sqrt(high / low) - 1)


def _fault_table(study: Study) -> Table:
    """One row a fault: what is done wrong, what that did to a number here, and how it is done right."""
    found, rows, columns = readings(study), [], ("Fault", "Seen in", "Done wrong", "Here", "Done right")
    for key, fault in FAULTS.items():
        on_cpu = "needs a GPU: on a CPU the call that computes is the call that waits"
        missing = on_cpu if fault.gpu else "not measured here"
        here = "; ".join(fault.said(found[key])) if key in found else missing
        rows.append(dict(zip(columns, (fault.name, fault.seen_in, fault.wrong, here, fault.right), strict=True)))
    return rows


def _fault_figure(study: Study) -> "Figure | None":
    """Each fault's number over the true one, the largest first; None where no wrong way was run."""
    found = sorted(readings(study).items(), key=lambda item: -item[1].ratio.value)
    if not found:
        return None
    most = max((read.ratio.value for _, read in found if math.isfinite(read.ratio.value)), default=1.0)
    rows = []
    for key, read in found:
        name, (low, high) = FAULTS[key].name, read.ratio.ends
        if math.isinf(read.ratio.value):
            rows.append(Row(name=name, missing=read.factor()))
        else:
            rows.append(Row(name=name, value=read.ratio.value, low=low, high=high, colour=BAD, text=read.factor()))
    return forest(
        [Panel(rows=rows, reference=1)],
        title=f"Wrong ways of measuring report up to {phrases.significant(most)} times the true value",
        context=phrases.context(study),
        note="The number that a wrong way of measuring gives, divided by that of the lab's sets on this machine: "
        "geometric mean over repeats and sets, and its 95 % interval. At 1 the wrong way would be right.",
        label="reported / true value",
    )


_TIMED_ONCE: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
    ("six steps of each, process included", "fresh", _from_start),
    ("the first step of each", "fresh", lambda a: a["step_seconds"][0]),
    ("six steps of each, nothing warm", "fresh", lambda a: sum(a["step_seconds"])),
    ("six warm steps of each", "bars", itemgetter("seconds")),
    ("six steps of each, profiler on", "profiled", itemgetter("seconds")),
    ("the fastest of 50 short runs", "runs", lambda a: min(a["seconds"])),
    ("150 warm steps of each", "runs", lambda a: sum(a["seconds"])),
)
"""Usual ways to compare two settings: what is timed of each in a process of its own, one after the other."""


def pair_figure(study: Study) -> "Figure | None":
    """A dot for each time that a pair was compared in a usual way, and for each set; None where sets have no answer."""
    found = Records(study)
    pair = found.own.get("bf16") or found.own.get("fp16")
    if pair is None or not pair.answered:
        return None
    read = {name: found.faster(way, pair.label, seconds) for name, way, seconds in _TIMED_ONCE}

    def ends(dots: Sequence[float], digits: int = 3) -> str:
        return " to ".join(phrases.significant(end(dots), digits) for end in (min, max))

    rows = [Row(name=n, value=_mean(d).value, dots=d, text=ends(d)) for n, d in read.items() if len(d) > 1]
    if not rows:
        return None
    longest = f"{rows[-1].name} say {ends(rows[-1].dots, 2)}"
    mine = tuple(r for r in study.records if r.config.global_batch_size == pair.batch)
    rows.append(drawn(pair, "in turns: a dot for each set"))
    return forest(
        [Panel(rows=rows, reference=pair.ratio.value)],
        title=f"{pair.label}: {longest} times as fast, sets in turns {phrases.times(pair.ratio)}",
        context=phrases.context(replace(study, records=mine)),
        note=f"A small dot is one timing, in fresh processes, {max(len(row.dots) for row in rows[:-1])} of each way; "
        "at the right the least and the most. Large dots: geometric means. Last row: this lab's ratio, 95 % interval.",
        label=f"speed of {pair.label} relative to fp32",
    )


# --- claims and their judges ------------------------------------------------------------------------------------------

CONFIRMED, REFUTED, UNTESTABLE = "confirmed", "refuted", "not testable on this machine"
_NOTEBOOKS = {"multi_gpu": "02", "amp": "03", "workers": "04", "torch_compile": "05", "quality": "08"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published claim and what judges it: see the head of ``claims.toml``."""

    key: str
    says: str
    number: str
    judge: str
    questions: Sequence[str] = ()
    setting: str = ""
    values: Sequence[object] = ()
    baseline: object = None
    scaling: str = ""
    device: str = "cuda"
    nodes: int = 1
    gpus: int = 0
    between: Sequence[tuple[float, float]] = ()
    memory: Sequence[float] = ()
    expects: str = stats.FASTER
    best: bool = False
    varies: Sequence[str] = ()
    fault: str = ""
    within: float = 0.0
    command: str = ""
    why: str = ""
    faults: Sequence[str] = ()


CLAIMS = tuple(Claim(**row) for row in ROWS["claim"])


class Judged(NamedTuple):
    """A verdict, what the right way says here, and why the verdict is what it is."""

    verdict: str
    here: str
    why: str


@once
def judged(study: Study) -> list[tuple[Claim, Judged]]:
    """Every published claim with its verdict on the machine of the records."""
    records = Records(study)
    return [(claim, _JUDGES[claim.judge](claim, records) or _undecided(claim, records)) for claim in CLAIMS]


def _rows(claim: Claim, records: Records) -> list[Comparison]:
    """Comparisons with a speed of the questions of a claim, those of the network and size in question first."""
    studies = [records.studies[name] for name in claim.questions if name in records.studies]
    found = [r for s in studies for r in comparisons(s) if r.role == "candidate" and r.sets and not r.loader_alone]

    def apart(r: Comparison) -> tuple[bool, bool]:
        others = {"network", "image_size"} & r.config.differences(records.config).keys()
        return bool(claim.scaling) and scaling(r.family) != claim.scaling, bool(others)

    return sorted(found, key=apart)


def _asked(claim: Claim, records: Records) -> dict[object, Comparison]:
    """The first comparison for each of the values that a claim is about, if it was measured."""
    found: dict[object, Comparison] = {}
    for r in _rows(claim, records):
        value, changed = getattr(r.config, claim.setting), r.config.differences(r.baseline).keys()
        there = r.config.nodes == claim.nodes and claim.device in ("", r.config.device)
        alone = claim.setting == "world_size" or (r.ranks == 1 and changed == {claim.setting})
        if there and alone and claim.baseline in (None, getattr(r.baseline, claim.setting)) and value in claim.values:
            found.setdefault(value, r)
    return {value: found[value] for value in claim.values if value in found}


def _said(row: Comparison) -> str:
    """Such as "bf16 0.74 (0.62 to 0.88) times as fast as fp32 (tiny, batch 8), 6 sets, notebook 03"."""
    grown, of = row.batch != row.baseline.global_batch_size, row.experiment
    base = row.baseline_label
    if grown and row.ranks == row.baseline.world_size:
        base = f"batch {row.baseline.global_batch_size}"
    weak = ", weak scaling" * (grown and row.ranks > row.baseline.world_size)
    source = "this notebook" if of == "claims" else f"notebook {_NOTEBOOKS[of]}" if of in _NOTEBOOKS else of
    sets = phrases.plural(row.sets, "set")
    return f"{row.label} {phrases.times(row.ratio)} times as fast as {base} ({row.family}), {sets}{weak}, {source}"


def _undecided(claim: Claim, records: Records) -> Judged:
    """Not testable where GPUs are missing, else not measured; with the comparisons that come nearest."""
    rows: dict[str, Comparison] = {}
    for row in _rows(claim, records):
        if claim.setting in row.config.differences(row.baseline):
            rows.setdefault(row.label, row)
    here = "; ".join(map(_said, [*rows.values()][:4])) or phrases.DASH
    if read := readings(records.study).get(claim.fault):
        here = FAULTS[claim.fault].said(read)[1]
    question = claim.questions[0] if claim.questions else "claims"
    command = claim.command or f"ddpm-lab run {question} --preset full{' --data DATA' * (question == 'quality')}"
    command = command.replace("ddpm-lab run", " ".join(["ddpm-lab run", *output_of(records.study)]))
    by_none = claim.judge == "untestable"
    command += " gives numbers, none of which decides it" if by_none else " measures it"
    if records.gpus >= claim.gpus:
        return Judged("no verdict" if by_none and rows else quality.NOT_MEASURED, here, command)
    need = f"{phrases.plural(claim.gpus, 'GPU')}{f' on each of {claim.nodes} hosts' * (claim.nodes > 1)}"
    return Judged(UNTESTABLE, here, f"needs {need}, the machine has {records.gpus or 'none'}; there {command}")


# Each judge gives None where nothing decides.


def _near(claim: Claim, records: Records) -> Judged | None:
    """Whether measured numbers are the published ones: of ratios, where all or none of an interval is between."""
    if not claim.questions and (counted := records.each("counted", itemgetter("parameters"))):
        count, (low, high) = [*counted.values()][-1] / 1e6, claim.between[0]
        verdict = CONFIRMED if low <= count <= high else REFUTED
        return Judged(verdict, f"{count:.1f} M, counted on the network itself", f"accepted: {low} M to {high} M")
    rows, verdicts, why = _asked(claim, records), [], []
    ends = dict(zip(claim.values, claim.between, strict=False))
    for value, row in rows.items():
        low, high = ends[value]
        inside = low <= row.ratio.low and row.ratio.high <= high
        apart = row.ratio.high < low or row.ratio.low > high
        verdict = CONFIRMED if inside else REFUTED if apart else stats.INCONCLUSIVE
        verdicts.append(verdict if row.answered else stats.INCONCLUSIVE)
        why.append(f"{row.label}: {f'accepted: {low} to {high}' if row.answered else phrases.outcome(row)}")
        if claim.memory:
            bases = {b.baseline_id: b for b in comparisons(records.studies[row.experiment]) if b.role == "baseline"}
            share, (low, high) = row.peak_memory_bytes / max(bases[row.baseline_id].peak_memory_bytes, 1), claim.memory
            known = CONFIRMED if low <= share <= high else REFUTED
            verdicts.append(stats.INCONCLUSIVE if math.isnan(share) else known)
            why.append(f"memory {phrases.significant(share)} of {row.baseline_label}, accepted: {low} to {high}")
    here = "; ".join(f"{_said(r)}, peak memory {phrases.peak_memory(r)}" for r in rows.values())
    if rows and (lacking := [value for value in claim.values if value not in rows]):
        verdicts.append(stats.INCONCLUSIVE)
        why.append(f"{phrases.joined(lacking)} not measured")
    worst = next((v for v in (REFUTED, stats.INCONCLUSIVE, CONFIRMED) if v in verdicts), None)
    return Judged(worst, here, "; ".join(why)) if worst else None


def _faster(claim: Claim, records: Records) -> Judged | None:
    """Whether a comparison is called what a claim expects, whatever number it came with."""
    row = next(iter(_asked(claim, records).values()), None)
    if row is None:
        return None
    if not row.answered or (claim.expects == stats.SLOWER and not row.resolved):
        return Judged(stats.INCONCLUSIVE, _said(row), phrases.outcome(row))
    why = f"it is called {row.verdict}"
    if claim.expects == stats.SLOWER:  # everywhere: where compiling pays off refutes it, and no CPU confirms it
        cost, steps = torch_compile.break_even(records.studies[row.experiment], row)
        if row.verdict == stats.SLOWER and row.config.device == "cpu":
            return _undecided(replace(claim, gpus=1), records)
        if row.verdict == stats.FASTER and math.isnan(steps.value):
            return None
        why = f"compiling takes {phrases.seconds(cost.value)} and pays off {torch_compile.pays_off(steps, row)}"
    others = [r for r in _rows(claim, records) if claim.best and r.family == row.family]
    better = [r.label for r in others if r.ratio.low > row.ratio.high]
    unclear = [
        f"{r.label} may be faster" for r in others if r.run_id != row.run_id and not r.ratio.high < row.ratio.low
    ]
    holds = row.verdict == claim.expects and not better
    most = max((getattr(r.config, claim.setting) for r in others), default=None)
    unclear += ["no more were measured"] * (getattr(row.config, claim.setting) == most)
    if holds and unclear:
        return Judged(stats.INCONCLUSIVE, _said(row), unclear[0])
    return Judged(CONFIRMED if holds else REFUTED, _said(row), f"{better[0]} is faster" if better else why)


def _equivalent(claim: Claim, records: Records) -> Judged | None:
    """Whether configurations learn as well as their baseline, by trials over seeds."""
    rows = [r for r in _rows(claim, records) if r.config.differences(r.baseline).keys() <= set(claim.varies)]
    rows = [r for r in rows if r.equivalence.verdict != quality.NOT_MEASURED]
    if not rows:
        return None
    verdicts = {row.equivalence.verdict for row in rows}
    tried = {name for r in rows for name in r.config.differences(r.baseline)}
    lacking = [f"{str(name).replace('_', ' ')} not tried" for name in claim.values if name not in tried]
    kept = verdicts <= {quality.IDENTICAL, quality.NOT_WORSE} and not lacking
    labels = {said: dict.fromkeys(r.label for r in rows if r.quality == said) for said in (r.quality for r in rows)}
    here = "; ".join(f"{phrases.joined(list(names))} {said}" for said, names in labels.items())
    verdict = REFUTED if quality.WORSE in verdicts else CONFIRMED if kept else stats.INCONCLUSIVE
    return Judged(verdict, here, "; ".join([f"held-out loss {claim.why}", *lacking]))


def _same_number(claim: Claim, records: Records) -> Judged | None:
    """Whether what a fault reads is the true number, by the interval of their ratio."""
    read = readings(records.study).get(claim.fault)
    if read is None or (claim.gpus and not records.cuda):
        return None
    wrong, right = FAULTS[claim.fault].said(read)
    (low, high), most = read.ratio.ends, 1 + claim.within
    same = claim.within and 1 / most <= low and high <= most
    apart = math.isinf(read.ratio.value) or low > most or high < 1 / most
    verdict = REFUTED if apart else CONFIRMED if same else stats.INCONCLUSIVE
    return Judged(verdict, right, f"it reads {wrong}: {read.factor()}")


_JUDGES: dict[str, Callable[[Claim, Records], Judged | None]] = {"untestable": lambda *_: None}
_JUDGES |= {"near": _near, "faster": _faster, "equivalent": _equivalent, "number": _same_number}

"""Wrong ways to measure: what each one really run here reads, beside what the lab's own sets say."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.charts.forest import forest
from ddpm_lab.explain.charts.style import BAD, Panel, Row
from ddpm_lab.explain.comparisons import COMPARED, Comparison, comparisons
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.explain.stats import Estimate
from ddpm_lab.explain.table import Table
from ddpm_lab.record import RunRecord, crowded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = tomllib.loads((Path(__file__).parent / "claims.toml").read_text())
DRAWN = 1800  # steps that a run of six is drawn as, 300 times over
_UNKNOWN = Estimate(value=math.nan, p=math.nan, sets=0)


class Reading(NamedTuple):
    """A wrong number over the right one (infinite if that is 0), both, and what they make of a comparison."""

    ratio: Estimate
    wrong: float
    right: float
    also: str = ""

    def factor(self) -> str:
        """Such as "3.07 (2.15 to 4.36)"."""
        if math.isinf(self.ratio.value):
            return "the true value is 0"
        return phrases.with_interval(phrases.significant, self.ratio.value, *self.ratio.ends)


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
        last = next((r.baseline_id for r in reversed(study.records) if r.role in ("baseline", "wrong")), "")
        mine = (r for r in study.records if (r.role, r.status, r.baseline_id) == ("wrong", "ok", last))
        self._wrong = sorted(mine, key=lambda r: r.config.seed)
        rows = [row for row in comparisons(study) if row.baseline_id == last and row.sets]
        self.own = {row.label: row for row in rows if row.role == "candidate"}
        self.base = next((row for row in rows if row.role == "baseline"), None)

    def runs(self, way: str, label: str = "fp32") -> list[tuple[RunRecord, Any]]:
        """The record of each repeat of a wrong way, and what the way answered, in the order of their seeds."""
        told = {r.config.seed: (r, (r.profile or {}).get("wrong_ways", {})) for r in self._wrong if r.label == label}
        return [(r, ways[way]) for r, ways in told.values() if way in ways]

    def faster(self, way: str, label: str) -> list[float]:
        """How many times as fast as fp32 a configuration looks in each repeat of a wrong way."""
        theirs = {r.config.seed: answer["seconds"] for r, answer in self.runs(way, label)}
        return [a["seconds"] / theirs[r.config.seed] for r, a in self.runs(way) if r.config.seed in theirs]

    def step(self, row: Comparison | None) -> Estimate:
        """Seconds of a step in the sets that count, with the interval that their spread gives; NaN without any."""
        if row is None:
            return _UNKNOWN
        members = [r for r in self.study.records if r.baseline_id == row.baseline_id and r.role in COMPARED]
        mine = [r for r in members if (r.role, r.run_id) == (row.role, row.run_id) and r.windows]
        quiet = [r for r in mine if not crowded([m for m in members if m.set_id == r.set_id])]
        return _mean([row.batch * statistics.median(w.seconds_per_image for w in r.windows) for r in quiet])


def _mean(values: Sequence[float]) -> Estimate:
    """Geometric mean of repeats with its 95 % interval."""
    return stats.estimate(np.log([v for v in values if v > 0]))


def _against(wrong: Sequence[float], right: Estimate, also: str = "") -> Reading:
    """A number of each repeat beside one of the sets; of a single repeat nobody knows the spread."""
    read, ends = _mean(wrong), (math.nan, math.nan)
    if read.exists and not math.isnan(right.value):
        ends = stats.quotient_interval(*((e.value, e.low, e.high) for e in (read, right)))
    ratio = Estimate(value=read.value / right.value, low=ends[0], high=ends[1], p=math.nan, sets=read.sets)
    return Reading(ratio, read.value, right.value, also)


def _pairs(pairs: Sequence[tuple[float, float]]) -> Reading:
    """A wrong and a right number of each repeat."""
    wrong, right = (_mean([pair[side] for pair in pairs]).value for side in (0, 1))
    return Reading(_mean([a / b for a, b in pairs]), wrong, right)


def _steps(way: str, seconds: Callable[[RunRecord, Any], float], times: float = 1) -> Callable[[Records], Reading]:
    """What a way says of the time of a step, beside that of the sets; both are shown ``times`` as long."""

    def read(found: Records) -> Reading:
        read = _against([seconds(*run) for run in found.runs(way)], found.step(found.base))
        return read._replace(wrong=times * read.wrong, right=times * read.right)

    return read


def _timed(_: RunRecord, answer: Mapping[str, Any]) -> float:
    return float(answer["seconds"]) / int(answer["steps"])


def _from_the_start(record: RunRecord, answer: Mapping[str, Any]) -> float:
    start = sum(record.stages.get(stage, 0.0) for stage in ("start", "build"))
    return float(start + sum(answer["step_seconds"])) / len(answer["step_seconds"])


def _compiling(found: Records) -> Reading | None:
    row = found.own.get("compiled")
    if row is None:
        return None
    runs = [r for r in found.study.records if (r.role, r.status, r.run_id) == ("cold", "ok", row.run_id)]
    wrong = [(r.stages["compile"] + r.stages["warmup"]) / r.warmup_steps for r in runs]
    looks = phrases.significant(found.step(found.base).value / _mean(wrong).value, 2)
    also = f"compiled looks {looks} times as fast as eager, and is {phrases.ratio_with_interval(row)}"
    return _against(wrong, found.step(row), also)


def _profiler(found: Records) -> Reading:
    read = _steps("profiled", _timed)(found)
    row = next((found.own[name] for name in ("bf16", "fp16") if name in found.own), None)
    if row is None or not (looks := found.faster("profiled", row.label)):
        return read
    also = f"{row.label} looks {phrases.significant(_mean(looks).value)} times as fast as fp32"
    return read._replace(also=f"{also}, and is {phrases.ratio_with_interval(row)}")


def _unequal(found: Records) -> Reading | None:
    row = next((row for label, row in found.own.items() if label.startswith("batch ")), None)
    return _against(found.faster("bars", row.label), row.ratio) if row else None


def _single(found: Records) -> Reading:
    runs = [_timed(*run) for run in found.runs("bars")]
    ratio = max(runs) / min(runs) if len(runs) > 1 else math.nan
    return Reading(replace(_UNKNOWN, value=ratio), ratio, 1)


def _label(found: Records) -> Reading:
    runs = [answer["seconds"] for _, answer in found.runs("runs")]
    wrong = [sum(one[::2]) / sum(one[1::2]) for one in runs]
    refused = [line for _, lines in found.runs("labelled_two") for line in lines]
    hidden = [answer["same_device"] for _, answer in found.runs("hidden_devices")]
    also = "with CUDA_VISIBLE_DEVICES changed, cuda:0 is the same GPU; " * bool(hidden and all(hidden))
    also += f"the witness refuses the record: {refused[0]}" if refused else ""
    two = next((row.ratio for row in found.own.values() if row.ranks == 2), None)
    return _against(wrong, two, also) if two else Reading(_mean(wrong), _mean(wrong).value, math.nan, also)


def _gradient(found: Records) -> Reading | None:
    backward = [a["phases"].get("backward", 0.0) / a["steps"] for _, a in found.runs("phases")]
    return Reading(replace(_UNKNOWN, value=math.inf), _mean(backward).value, 0) if any(backward) else None


def _share(found: Records) -> Reading:
    pairs = []
    for _, a in found.runs("phases_waited_for" if found.cuda else "one_thread"):
        compute = sum(a["phases"].get(name, 0.0) for name in ("forward", "backward", "optimizer", "ema"))
        busy = a.get("gpu_utilisation_percent") if found.cuda else 100 * a["cpu_seconds"] / a["seconds"] / found.cores
        pairs += [(100 * compute / a["seconds"], busy)] if busy else []
    return _pairs(pairs)


def _nested(found: Records) -> Reading:
    return _pairs([(a["inclusive_seconds"], a["exclusive_seconds"]) for _, a in found.runs("profiled")])


def _percentiles(found: Records) -> Reading:
    """Half of an interval, in per cent of the mean."""
    step = found.step(found.base)
    half = 100 * (math.sqrt(step.high / step.low) - 1)
    ends = [np.percentile(answer["seconds"], (2.5, 97.5)) for _, answer in found.runs("runs")]
    wrong = [100 * (math.sqrt(high / low) - 1) for low, high in ends]
    return _against(wrong, replace(_UNKNOWN, value=half if half > 0 else math.nan))


_READINGS: dict[str, Callable[[Records], Reading | None]] = {
    "multiplied": _steps("fresh", _from_the_start, DRAWN),
    "cold": _steps("fresh", lambda _, a: statistics.fmean(a["step_seconds"])),
    "compiling": _compiling,
    "profiler": _profiler,
    "unequal": _unequal,
    "single": _single,
    "label": _label,
    "gradient": _gradient,
    "share": _share,
    "nested": _nested,
    "percentiles": _percentiles,
    "unsynchronised": _steps("unsynchronised", _timed),
    "loss_read": _steps("loss_read", _timed),
    "phase_sums": _steps("phases_waited_for", lambda _, a: sum(a["phases"].values()) / a["steps"]),
}


@once
def readings(study: Study) -> dict[str, Reading]:
    """What each fault reads on the machine of the records, by its key, as far as it was measured."""
    records = Records(study)
    found = {key: read(records) for key, read in _READINGS.items()}
    return {key: read for key, read in found.items() if read is not None and not math.isnan(read.ratio.value)}


def table(study: Study) -> Table:
    """One row a fault: what is done wrong, what that did to a number here, and how it is done right."""
    found, rows = readings(study), []
    for key, fault in FAULTS.items():
        on_cpu = "needs a GPU: on a CPU the call that computes is the call that waits"
        here = on_cpu if fault.gpu else "not measured here"
        if read := found.get(key):
            here = "; ".join(filter(None, (*fault.said(read), read.also)))
        cells = {"Fault": fault.name, "Seen in": fault.seen_in, "Done wrong": fault.wrong, "Here": here}
        rows.append({**cells, "Done right": fault.right})
    return rows


def figure(study: Study) -> Figure | None:
    """Each fault's number over the true one, the largest first; None where no wrong way was run."""
    found = sorted(readings(study).items(), key=lambda item: -item[1].ratio.value)
    if not found:
        return None
    most = max((read.ratio.value for _, read in found if math.isfinite(read.ratio.value)), default=1.0)
    rows = []
    for key, read in found:
        value = min(read.ratio.value, 1.4 * most)  # of a true value of zero: beyond all others
        low, high = read.ratio.ends
        rows.append(Row(name=FAULTS[key].name, value=value, low=low, high=high, colour=BAD, text=read.factor()))
    return forest(
        [Panel(rows=rows, reference=1)],
        title=f"Wrong ways of measuring report up to {phrases.significant(most)} times the true value",
        context=phrases.context(study),
        note="The number that a wrong way of measuring gives, divided by that of the lab's sets on this machine: "
        "geometric mean over repeats and sets, and its 95 % interval. At 1 the wrong way would be right.",
        label="reported / true value",
    )

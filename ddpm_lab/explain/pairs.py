"""One device beside several, for each batch: the pairs that a benchmark asks about, and what is said of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ddpm_lab.explain import decisions, machine_state, phrases, scaling, stats
from ddpm_lab.explain.bands import S000, Bands
from ddpm_lab.explain.comparisons import PROJECTED_IMAGES, QUALITY, Comparison, families
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import scaling as kind_of
from ddpm_lab.record import RunRecord

RECOMMENDATIONS = Bands(
    whose="S003",
    table=(("multi-GPU beneficial", 1.1), ("marginal difference", 0.95), ("single GPU preferred", 0.0)),
    threshold=1.1,
)
"""S003's names for speed-ups, with their lower bounds."""
LEAST_SHOWN = 3
"""Sets from which on pictures and sentences on means give intervals: Student's t of two spans orders of magnitude."""
_FAR = 1.25
"""An efficiency on CPU cores that no noise of a usual set explains."""
EPOCH = f"An epoch is {PROJECTED_IMAGES:,} images, and its time a projection from measured throughput."


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One device and several with the same batch: strong (``batch`` is what they share) or weak (what each has).

    Either side is None where it was not asked for. A side that failed is a row without sets.
    """

    kind: str
    batch: int
    single: Comparison | None
    multi: Comparison | None

    @property
    def compared(self) -> Comparison | None:
        """The comparison of both, where it was measured."""
        return self.multi if self.single and self.multi and self.multi.sets and self.single.sets else None

    @property
    def sides(self) -> list[Comparison]:
        """The sides that were asked for, one device first."""
        return [row for row in (self.single, self.multi) if row is not None]

    @property
    def name(self) -> str:
        """Such as "batch 32", "batch 32 each"."""
        return f"batch {self.batch}" + " each" * (self.kind == "weak")


def pairs(study: Study) -> list[Pair]:
    """The pairs of a study, weak scaling first, by batch and number of devices."""
    shown = [
        row
        for row in scaling.rows(study)
        if row.role in ("baseline", "candidate") or (row.role == "note" and row.run_id != row.baseline_id)
    ]
    found = [pair for rows in families(shown) for pair in _of_family(rows)]
    return sorted(found, key=lambda p: (p.kind != "weak", p.batch, p.multi.ranks if p.multi else 0))


def _of_family(rows: Sequence[Comparison]) -> Iterator[Pair]:
    single = next((r for r in rows if r.role == "baseline" and r.ranks == 1), None)
    several = [r for r in rows if r.ranks > 1]
    kind = str(rows[0].scaling)
    sides: list[Comparison | None] = [*several] or [None]
    for multi in sides:
        of = multi or single
        if of is not None:
            batch = of.config.rank_batch_size if kind == "weak" else of.batch
            yield Pair(kind=kind, batch=int(batch), single=single, multi=multi)


def unit(found: Sequence[Pair]) -> str:
    """What stands side by side: "GPU", or "CPU rank" where ranks stand for GPUs."""
    return "GPU" if any(r.config.device == "cuda" for p in found for r in p.sides) else "CPU rank"


def in_words(name: str, found: Sequence[Pair]) -> str:
    """A name of S003's as it is said of this device: CPU ranks are no GPUs."""
    return name if unit(found) == "GPU" else name.replace("GPU", "rank")


def layout(found: Sequence[Pair]) -> tuple[str, str]:
    """Both sides in words, such as "1 CPU rank" and "2 CPU ranks"."""
    several = dict.fromkeys(scaling.layout(p.multi.config) for p in found if p.multi)
    return f"1 {unit(found)}", phrases.joined(list(several)) or f"several {unit(found)}s"


def recommendation(pair: Pair, thresholds: Bands = RECOMMENDATIONS) -> str:
    """S003's word for a speed-up that was called, and where its interval reaches into another; else why there is none.

    One that was not called has no word, whatever its value.
    """
    row = pair.compared
    if row is None:
        return next((phrases.without_speed(r) for r in pair.sides if not r.sets), QUALITY)
    names = [in_words(thresholds.name(v), [pair]) for v in (row.ratio.value, *row.ratio.ends) if known(v)]
    if not row.resolved:
        inside = len(set(names)) == 1 and row.verdict == decisions.INCONCLUSIVE and row.sets >= decisions.LEAST_SETS
        return phrases.outcome(row) + (f" (the whole interval: {names[0]})" if inside else "")
    return names[0] if len(set(names)) == 1 else f"{names[0]} (interval: {' to '.join(dict.fromkeys(names[1:]))})"


def known(value: float) -> bool:
    """Whether a number is there."""
    return not math.isnan(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The geometric mean of speed-ups over batches, with its 95 % interval (NaN where one of them has none).

    ``sets`` is the least number of a batch; ``resolved`` says whether any of the batches has an answer.
    """

    devices: str
    value: float
    low: float
    high: float
    batches: int
    sets: int
    resolved: bool

    def sentence(self) -> str:
        """The mean in a sentence that says which mean it is."""
        over = phrases.plural(self.batches, "batch size")
        between = self.between().replace("(", "(95 % interval ") or f" (no interval from fewer than {LEAST_SHOWN} sets)"
        open_ = "" if self.resolved else ", inconclusive"
        return f"Geometric mean speed-up of {self.devices} over {over}: {self.value:.2f}x{between}{open_}."

    def headline(self) -> str:
        """The mean as a title says it; what no batch resolves is only what it reads."""
        where = "on average " * (self.batches > 1) + "where they share a batch"
        if self.resolved:
            return f"{self.devices} {self.value:.2f}x{self.between()} {where}"
        return f"{self.devices} inconclusive {where} (reads {self.value:.2f}x)"

    def between(self) -> str:
        """The interval in brackets, after a space; empty without one, or from few sets."""
        shown = known(self.low) and self.sets >= LEAST_SHOWN
        return f" ({self.low:.2f} to {self.high:.2f})" if shown else ""


def means(found: Sequence[Pair]) -> list[Mean]:
    """The mean speed-up of each number of devices over the batches that it shares, resolved or not.

    Batches are measured in sets of their own, so the halves of their intervals add up as squares do.
    """
    groups: dict[str, list[Comparison]] = {}
    for pair in found:
        if pair.kind == "strong" and (row := pair.compared) is not None:
            groups.setdefault(scaling.layout(row.config), []).append(row)
    return [_mean(devices, rows) for devices, rows in groups.items()]


def _mean(devices: str, rows: Sequence[Comparison]) -> Mean:
    value = stats.geometric_mean([r.ratio.value for r in rows])
    halves = np.array([math.log(r.ratio.high / r.ratio.low) / 2 for r in rows])
    factor = math.exp(float(np.sqrt((halves**2).sum())) / len(rows))
    return Mean(
        devices=devices,
        value=value,
        low=value / factor,
        high=value * factor,
        batches=len(rows),
        sets=min(r.sets for r in rows),
        resolved=any(r.answered for r in rows),
    )


def records_of(study: Study, row: Comparison) -> list[RunRecord]:
    """The records of sets that a row was made from."""
    mine = (row.role, row.run_id, row.baseline_id, row.scaling)
    return [r for r in study.records if (r.role, r.run_id, r.baseline_id, kind_of(r.family)) == mine]


def remarks(study: Study) -> list[str]:
    """What a reader of the numbers must know: that the machine was busy, and efficiencies that cannot be."""
    return [said for said in (machine_state.busy(study).strip(), beyond(study)) if said]


def beyond(study: Study) -> str:
    """Efficiencies on CPU cores that no sharing of them gives, with what may be behind them; empty without any."""
    found = [(p, row) for p in pairs(study) if (row := p.compared) and row.config.device == "cpu"]
    far = [f"{scaling.efficiency(row)} at {p.name}" for p, row in found if row.efficiency.value > _FAR]
    said = f"An efficiency of {phrases.joined(far)} cannot come from ranks that share cores: {scaling.DISTURBED}."
    return said if far else ""


def speed_up(row: Comparison) -> str:
    """Such as "6.45x"."""
    return f"{row.ratio.value:.2f}x"


def evidence(row: Comparison) -> str:
    """Interval, sets and verdict, such as "95 % interval 6.31 to 6.60, 6 sets, faster"."""
    outcome = phrases.outcome(row).partition(" (")[0]
    return f"{phrases.evidence(row)}, {outcome}"


def rating(row: Comparison, bands: Bands) -> str:
    """The band of an efficiency and its interval: "good by S000, 80 to 82 %"; without an answer why there is none."""
    name = scaling.band(row, bands) if row.answered else phrases.status(row.verdict)
    name += f" by {bands.whose}" if name in dict(bands.table) else ""
    return ", ".join(part for part in (name, scaling.interval(row)) if part)


def where(study: Study) -> str:
    """Hardware, data, day and sets in a line."""
    return phrases.context(study, batch=False)


def banner(study: Study) -> list[str]:
    """The closing lines of a benchmark: S000's words, with what each number rests on."""
    found = pairs(study)
    lead = next((p for p in found if p.kind == "weak"), None) or next(iter(found), None)
    if lead is None or not any(r.sets for p in found for r in p.sides):
        return ["BENCHMARK INCOMPLETE: nothing was measured", *(recommendation(p) for p in found[:1])]
    of = "Multi-GPU Efficiency" if unit(found) == "GPU" else "Multi-Rank Efficiency (CPU ranks, no GPU)"
    lines = ["BENCHMARK COMPLETE!"]
    if (row := lead.compared) is not None:
        lines.append(f"Time Speedup: {speed_up(row)} ({evidence(row)})")
        lines.append(f"{of}: {100 * row.efficiency.value:.1f}% ({rating(row, S000)})")
    else:
        why = recommendation(lead)
        lines += [f"Time Speedup: {why}", f"{of}: {why}"]
    return [*lines, *(f"  {line}" for line in _sides(lead)), f"Measured on {where(study)}", *remarks(study)]


def _sides(pair: Pair) -> Iterator[str]:
    for row in pair.sides:
        each, total = row.config.rank_batch_size, row.batch
        if row.sets:
            took = f"{phrases.seconds(row.projected_seconds)} an epoch, {phrases.throughput(row)}"
        else:
            took = phrases.without_speed(row)
        yield f"{scaling.layout(row.config)}: batch {each} each, {total} in all: {took}"
    yield EPOCH
    if pair.kind == "weak" and pair.compared is not None:
        yield "Several devices take larger batches here, so they train differently: quality " + quality(pair)
    else:
        yield f"Quality: {quality(pair)}"


def quality(pair: Pair) -> str:
    """The verdict on what several devices learn, or that none was asked for."""
    return pair.multi.quality if pair.multi else QUALITY

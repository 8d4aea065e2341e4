"""How large a batch fits, and does a larger one train faster?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import phrases
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.comparisons import Comparison, comparisons, families
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import Experiment, Family, Question
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Batches, Precision, Setup, WorldSize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = Question(title="How large a batch fits, and does a larger one train faster?", file="batch_size", trains=True)

CAVEAT = "Equal images in other batches are not equal training."

MOST_CPU, MOST_CUDA = 1024, 65_536
"""Where a search for the largest batch ends if nothing else ends it."""


def batch_size(
    setup: Setup, *, global_batch_sizes: Batches = None, precision: Precision = "fp32", world_size: WorldSize = 1
) -> Experiment:
    """How large a batch fits, and does a larger one train faster? The smallest size against its multiples."""
    cuda = setup.device == "cuda"
    setup.check_ranks(world_size)
    first = 32 if setup.preset == "full" else setup.batch_size(None)
    count = {"smoke": 2, "quick": 5, "full": 8 if cuda else 5}[setup.preset]
    usual = [-(-first * 2**i // world_size) * world_size for i in range(count)]
    smallest, *larger = sorted(set(global_batch_sizes or usual))
    most = 2 * max(usual) if setup.preset == "smoke" else MOST_CUDA if cuda else MOST_CPU
    base = setup.config(global_batch_size=smallest, precision=precision, world_size=world_size)
    family = Family(
        name=f"{setup.family_name(None, world_size)}, {setup.precision_name(precision)}",
        baseline=base,
        baseline_label=f"batch {smallest}",
        candidates=tuple((f"batch {n}", replace(base, global_batch_size=n)) for n in larger),
        search_up_to=max(most, smallest, *larger),
        primary=f"batch {larger[min(1, len(larger) - 1)]}" if larger else "",
    )
    return Experiment(name="batch_size", families=(family,))


def answer(study: Study) -> Answer:
    """Compare the speed of each batch size, and show the largest that fits."""
    found = compared(study, notes=[sentence(study)])
    shown = speeds(study, found, views=trained_views(study))
    return replace(shown, figure=lambda: figure(study, found.headline) or shown.figure())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is known of batch sizes for one piece of work: how the search ended, its tries, and rows of comparisons."""

    family: str
    end: RunRecord | None
    tries: tuple[RunRecord, ...]
    rows: tuple[Comparison, ...]

    @property
    def largest(self) -> int:
        """The largest global batch size that fits; 0 where none is known."""
        return self.end.config.global_batch_size if self.end and self.end.status == "ok" else 0

    def words(self) -> str:
        """Such as "the largest batch that fits is 512 images (576 images are out of memory)"."""
        if self.end is None:
            return "the largest batch that fits was not found"
        if not self.largest:
            return f"no batch fits ({self.end.reason})"
        images = phrases.plural(self.largest, "image")
        if self.end.label == "memory":
            return f"the largest batch that fits is {images} ({self.end.reason})"
        return f"a batch of {images} fits, where the search ended ({self.end.reason})"


def sizes(study: Study) -> list[Sizes]:
    """All pieces of work whose batch sizes a study holds; of other searches only where it compares nothing."""
    searched = {r.family: r.config for r in study.records if r.role == "largest"}
    found = [_sizes(study, rows[0].config, rows[0].family, rows) for rows in families(comparisons(study))]
    return found or [_sizes(study, config, family, ()) for family, config in searched.items()]


def _sizes(study: Study, base: RunConfig, family: str, rows: Sequence[Comparison]) -> Sizes:
    same = [r for r in study.records if r.config.differences(base).keys() <= {"global_batch_size"}]
    ends = [r for r in same if r.role == "largest"]
    tries = {r.config.global_batch_size: r for r in same if r.role == "search"}
    return Sizes(
        family=family,
        end=ends[-1] if ends else None,
        tries=tuple(tries[batch] for batch in sorted(tries)),
        rows=tuple(sorted((r for r in rows if r.sets and r.role != "twin"), key=lambda r: r.batch)),
    )


def sentence(study: Study) -> str:
    """The largest batch of each piece of work, and that speed is not all there is to a size."""
    found = sizes(study)
    each = [f"{f'with {s.family} ' if len(found) > 1 else ''}{s.words()}" for s in found]
    return f"{phrases.begun('; '.join(each))}. {CAVEAT}" if each else ""


def beside(study: Study) -> Figure | None:
    """The figure of the batch sizes among the records of all experiments, under the largest batch as its title."""
    mine = tuple(r for r in study.records if r.experiment == "batch_size")
    return figure(replace(study, experiment="batch_size", records=mine))


def figure(study: Study, title: str = "") -> Figure | None:
    """Images per second, and peak memory, against the batch size, with the largest that fits and why no more.

    The largest batch is the title where none is given, and where no size was compared with another.
    """
    found = [s for s in sizes(study) if s.tries or s.rows]
    if not found:
        return None
    if not title or not any(s.rows for s in found):
        title = phrases.begun("; ".join(s.words().partition(" (")[0] for s in found))
    plots = [plot(s) for s in found for plot, has in ((_speed, s.rows), (_memory, s.tries)) if has]
    ends = "; ".join(f"{s.family}: {s.words()}" if len(found) > 1 else s.words() for s in found if s.end)
    return lines(
        plots,
        title=title,
        context=phrases.context(study, batch=False),
        note="Speed: the smallest batch's times each ratio to it, with its 95 % interval over sets; band: the smallest "
        "batch repeated. Memory: peak of each size, alone; a cross did not fit. "
        f"{f'Dashed: {ends}. ' if ends else ''}{CAVEAT}",
    )


def _speed(known: Sizes) -> Plot:
    rate, rows, noise = known.rows[0].images_per_second, known.rows, known.rows[0].noise
    x, y = [c.batch for c in rows], [rate * c.ratio.value for c in rows]
    low, high = [rate * c.ratio.low for c in rows], [rate * c.ratio.high for c in rows]
    line = Line(name="", x=x, y=y, low=low, high=high, colour=style.INK, look="o-")
    band = (rate * noise.low, rate * noise.high) if noise.exists else None
    return _plot(known, [line], "training speed", "images per second", band)


def _memory(known: Sizes) -> Plot:
    peaks = {r.config.global_batch_size: _peak_bytes(r) / 2**30 for r in known.tries if r.status == "ok"}
    fits = {batch: peak for batch, peak in peaks.items() if not math.isnan(peak)}
    lost = [r.config.global_batch_size for r in known.tries if r.status != "ok"]
    top = [1.15 * max(fits.values(), default=1.0)] * len(lost)
    series = [Line(name="", x=list(fits), y=list(fits.values()), colour=style.INK, look="o-")]
    series += [Line(name="", x=lost, y=top, colour=style.INK, look="x")] if lost else []
    return _plot(known, series, "memory at the peak, each size alone", "GiB", None)


def _plot(known: Sizes, series: list[Line], heading: str, label: str, band: tuple[float, float] | None) -> Plot:
    batches = sorted({*(r.config.global_batch_size for r in known.tries), *(c.batch for c in known.rows)})
    powers = [2.0**k for k in range(int(math.log2(batches[0])), int(math.log2(batches[-1])) + 1)]
    return Plot(
        lines=series,
        heading=f"{known.family}: {heading}",
        x_label="global batch size, images a step",
        y_label=label,
        log_x=True,
        ticks=[p for p in powers if p >= batches[0]],
        band=band,
        at=known.largest or None,
        height=2.3,
    )


def _peak_bytes(record: RunRecord) -> float:
    """On CUDA what the fullest rank's allocator held, on a CPU what all ranks together held in main memory."""
    cuda = record.config.device == "cuda"
    held = [r.peak_reserved_bytes if cuda else r.peak_rss_bytes for r in record.ranks]
    values = [float(v) for v in held if v is not None]
    return math.nan if not values or len(values) < len(held) else max(values) if cuda else sum(values)

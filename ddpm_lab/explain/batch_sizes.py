"""The largest batch that fits, and how fast and with how much memory each size trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import Comparison, comparisons, families
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

EXPERIMENT = "batch_size"
CAVEAT = "Equal images in other batches are not equal training."
_NOTE = (
    "Upper panel: geometric mean over sets; grey: the smallest batch measured against itself. Lower "
    "panel: peak memory of each size that was tried, alone; a cross did not fit. "
)


_RIGHT = 2.35


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
    """The largest batch of each piece of work, and that speed is not all there is to a size; after a space."""
    found = sizes(study)
    each = [f"{f'with {s.family} ' if len(found) > 1 else ''}{s.words()}" for s in found]
    return f" {phrases.begun('; '.join(each))}. {CAVEAT}" if each else ""


def beside(study: Study) -> Figure | None:
    """The figure of the batch sizes among the records of all experiments, under the largest batch as its title."""
    own = replace(study, experiment=EXPERIMENT, records=tuple(r for r in study.records if r.experiment == EXPERIMENT))
    return figure(own)


def figure(study: Study, title: str = "") -> Figure | None:
    """Images per second, and peak memory, against the batch size, with the largest that fits and why no more.

    The largest batch is the title where none is given, and where no size was compared with another.
    """
    found = [s for s in sizes(study) if s.tries or s.rows]
    if not found:
        return None
    if not title or not any(s.rows for s in found):
        title = phrases.begun("; ".join(s.words().partition(" (")[0] for s in found))
    panels = [(s, draw) for s in found for draw, has in ((_speed, s.rows), (_memory, s.tries)) if has]
    headings = {
        _speed: "training speed",
        _memory: "memory at the peak, each size alone",
    }
    figure, axes = fs.sheet(
        title,
        phrases.context(study, batch=False),
        [2.6 if draw is _speed else 1.7 for _, draw in panels],
        headings=[f"{s.family}: {headings[draw]}" for s, draw in panels],
        left=0.95,
        right=_RIGHT,
        gap=0.5,
        note=f"{_NOTE}{CAVEAT}",
    )
    for ax, (known, draw) in zip(axes, panels, strict=True):
        _across(ax, known)
        draw(ax, known)
        if known.end and draw is (_speed if known.rows else _memory):
            words = fs.fit(f"Dashed: {known.words()}." if known.largest else known.words(), _RIGHT - 0.4, 9)
            ax.text(1.03, 1, words, transform=ax.transAxes, va="top", fontsize=fs.SMALL_POINTS, linespacing=1.3)
    axes[-1].set_xlabel("global batch size, images a step")
    return figure


def _across(ax: Axes, known: Sizes) -> None:
    """The axis of batch sizes, and the largest that fits."""
    tried = [r.config.global_batch_size for r in known.tries]
    batches = sorted({*tried, *(r.batch for r in known.rows)})
    ax.set_xscale("log", base=2)
    ax.set_xlim(batches[0] / 1.35, batches[-1] * 1.35)
    powers = range(int(math.log2(batches[0])), int(math.log2(batches[-1])) + 1)
    fs.fixed_ticks(ax.xaxis, [2.0**k for k in powers if 2**k >= batches[0]], ".0f")
    ax.yaxis.set_major_locator(MaxNLocator(5, prune="upper"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: fs.number(value)))
    if known.largest:
        ax.axvline(known.largest, color=fs.PALETTE[3], lw=1.4, ls="--", zorder=1)


def _speed(ax: Axes, known: Sizes) -> None:
    base = known.rows[0]
    if not math.isnan(base.noise.low):
        rate = base.images_per_second
        ax.axhspan(rate * base.noise.low, rate * base.noise.high, color=fs.BAND, lw=0, zorder=0.5)
    top = 0.0
    for row in known.rows:
        number = phrases.significant(row.images_per_second)
        at = (row.batch, row.images_per_second)
        ax.annotate(number, at, (0, 5), textcoords="offset points", ha="center", va="bottom", fontsize=fs.SMALL_POINTS)
        top = max(top, row.images_per_second)
    ax.plot([r.batch for r in known.rows], [r.images_per_second for r in known.rows], "o-", color=fs.PALETTE[0])
    ax.set_ylim(0, 1.22 * top)
    ax.set_ylabel("images per second")


def _memory(ax: Axes, known: Sizes) -> None:
    peaks = {r.config.global_batch_size: _peak_bytes(r) for r in known.tries if r.status == "ok"}
    peaks = {batch: peak / 2**30 for batch, peak in peaks.items() if not math.isnan(peak)}
    top = 1.25 * max(peaks.values(), default=1.0)
    ax.plot(list(peaks), list(peaks.values()), "o-", color=fs.PALETTE[2])
    for record in known.tries:
        if record.status != "ok":
            ax.plot([record.config.global_batch_size], [0.92 * top], "x", color=fs.PALETTE[3], ms=7, mew=2)
    ax.set_ylim(0, top)
    ax.set_ylabel("GiB")


def _peak_bytes(record: RunRecord) -> float:
    """On CUDA what the fullest rank's allocator held, on a CPU what all ranks together held in main memory."""
    cuda = record.config.device == "cuda"
    held = [r.peak_reserved_bytes if cuda else r.peak_rss_bytes for r in record.ranks]
    values = [float(v) for v in held if v is not None]
    return math.nan if not values or len(values) < len(held) else max(values) if cuda else sum(values)

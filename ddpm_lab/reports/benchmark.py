"""One device against several as a folder to share: a report, two pictures, and the results as JSON and CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from ddpm_lab.explain import machine_state, pages, phrases, stats
from ddpm_lab.explain.bands import S000, S001, Bands
from ddpm_lab.explain.charts import style as fs
from ddpm_lab.explain.comparisons import PROJECTED_IMAGES, Comparison
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.stats import Interval
from ddpm_lab.explain.table import Table, csv_text, literal, markdown
from ddpm_lab.files import replace as write_file
from ddpm_lab.questions import multi_gpu
from ddpm_lab.questions.ask import answer
from ddpm_lab.record import RunRecord
from ddpm_lab.reports.summary import Summary, of_run

DASHBOARD, TABLE, REPORT = "gpu_benchmark_comparison.png", "performance_summary_table.png", "comparison_report"
RESULTS = "benchmark_results"
_NAMES = (("multi-GPU beneficial", 1.1), ("marginal difference", 0.95), ("single GPU preferred", 0.0))
RECOMMENDATIONS = Bands(whose="S003", table=_NAMES, threshold=1.1)
"""S003's names for speed-ups, with their lower bounds."""


def rows(study: Study) -> list[Comparison]:
    """Every configuration that was asked for: weak scaling before strong, then by batch and number of devices."""
    found = [
        r
        for r in multi_gpu.scaling_rows(study)
        if r.role in ("baseline", "candidate") or (r.role == "note" and r.run_id != r.baseline_id)
    ]
    return sorted(found, key=lambda r: (r.scaling != "weak", _batch(r), r.ranks))


def _batch(row: Comparison) -> int:
    return int(row.config.rank_batch_size if row.scaling == "weak" else row.batch)


def _name(row: Comparison) -> str:
    return f"{_batch(row)}{' each' * (row.scaling == 'weak')}"


def finding(study: Study) -> Finding:
    """The answer in words, with the names for efficiency that the whole folder has."""
    return answer(replace(study, bands=S000)).finding


def compared(row: Comparison) -> bool:
    """Whether a row has a speed-up over one device."""
    return row.role == "candidate" and row.sets > 0


def recommendation(row: Comparison) -> str:
    """S003's name for a resolved speed-up, and those of its interval where they differ; else why there is none."""
    if not row.resolved:
        return phrases.outcome(row)
    name, low, high = (RECOMMENDATIONS.name(value) for value in (row.ratio.value, *row.ratio.ends))
    text = name if low == high else f"{name} (interval: {low} to {high})"
    return text if row.config.device == "cuda" else text.replace("GPU", "rank")


def means(found: Iterable[Comparison]) -> dict[str, Interval]:
    """The geometric mean speed-up of each number of devices over the batches that they share.

    Batches are measured in sets of their own, so the halves of their intervals add up as squares do.
    """
    ratios: dict[str, list[Interval]] = {}
    for r in found:
        if r.scaling == "strong" and compared(r):
            ratios.setdefault(multi_gpu.layout(r.config), []).append(r.ratio)
    return {on: _mean(mine) for on, mine in ratios.items()}


def _mean(ratios: Sequence[Interval]) -> Interval:
    value = stats.geometric_mean([r.value for r in ratios])
    halves = np.log([r.high / r.low for r in ratios]) / 2
    factor = math.exp(float(np.sqrt((halves**2).sum())) / len(ratios))
    return Interval(value=value, low=value / factor, high=value * factor)


# --- the folder ------------------------------------------------------------------------------------------------------


def write(study: Study, folder: Path) -> list[Path]:
    """Write every file, the report first. Raises OSError if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    results, text = [to_dict(study, r) for r in rows(study)], report(study)
    files: dict[str, str | bytes] = {DASHBOARD: fs.png(dashboard(study)), TABLE: fs.png(table(study))}
    files |= {f"{REPORT}.md": text, f"{RESULTS}.csv": csv_text(results)}
    files |= {f"{RESULTS}.json": json.dumps(results, allow_nan=False, indent=1) + "\n"}
    for name, content in files.items():
        write_file(folder / name, content)
    pages.write_markdown(text, folder / f"{REPORT}.html")  # with the pictures in it
    return [folder / name for name in (f"{REPORT}.html", *files)]


def to_dict(study: Study, row: Comparison) -> dict[str, Any]:
    """A configuration as plain values: seconds, bytes, images; None is unknown.

    The time of an epoch is projected from measured throughput to 50,000 images; ends of intervals are of 95 %.
    """
    config, last = row.config, ([r for r in study.records if r.run_id == row.run_id] or study.records)[-1]
    of_row = ("scaling", "family", "label", "run_id", "code_version", "status", "sets", "disturbed_sets")
    of_config = (
        *("network", "image_size", "device", "world_size", "nodes", "rank_batch_size", "global_batch_size"),
        *("precision", "compile", "loader", "loader_workers"),
    )
    has_gain, strong = compared(row), row.scaling == "strong"
    ratio, efficiency = (row.ratio, row.efficiency) if has_gain else (Interval(value=math.nan),) * 2
    values = {
        **{name: getattr(row, name) for name in of_row},
        **{name: getattr(config, name) for name in of_config},
        **{"data": last.data_name, "machine": last.machine.name, "measured": last.date},
        "reason": None if row.sets else phrases.without_speed(row),
        "images_per_second": row.images_per_second,
        "step_seconds": row.step_seconds,
        "epoch_seconds": row.projected_seconds,
        "peak_memory_bytes": row.peak_rss_bytes if config.device == "cpu" else row.peak_memory_bytes,
        **{"speedup": ratio.value, "speedup_low": ratio.ends[0], "speedup_high": ratio.ends[1]},
        **{"efficiency": efficiency.value, "efficiency_low": efficiency.ends[0], "efficiency_high": efficiency.ends[1]},
        "verdict": row.verdict if has_gain else None,
        "band": multi_gpu.band(row, S000) if has_gain and row.answered else None,
        "recommendation": recommendation(row) if has_gain and strong else None,
        "quality": row.quality if row.role == "candidate" else None,
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def comparison(study: Study) -> Table:
    """S003's table: for each batch the time of an epoch on one device and on several, and what the gain comes to."""
    found = rows(study)
    gpu = any(r.config.device == "cuda" for r in found)
    sides = ("Single GPU", "Multi GPU") if gpu else ("Single CPU rank", "Several CPU ranks")
    more = ("Recommendation", "95 % interval", "Efficiency", "Peak memory", "Sets", "Quality")
    names, shown = ("Batch Size", *sides, "Speedup", *more), []
    for _, same in groupby(found, key=lambda r: (r.scaling, _batch(r), r.family)):
        group = list(same)
        single = next((r for r in group if r.ranks == 1), None)
        many: list[Comparison | None] = [r for r in group if r.ranks > 1]
        for several in many or [None]:
            row = several or group[0]
            gains = [phrases.DASH] * 4
            if compared(row):
                called = recommendation(row) if row.scaling == "strong" else phrases.outcome(row)
                efficiency = multi_gpu.efficiency(row) + (f", {multi_gpu.band(row, S000)}" if row.answered else "")
                gains = [f"{row.ratio.value:.2f}x", called, phrases.between(row.ratio) or phrases.DASH, efficiency]
            memory = phrases.peak_memory(row) if row.sets else phrases.DASH
            cells = (_name(row), _epoch(single), _epoch(several), *gains, memory, str(row.sets), row.quality)
            shown.append(dict(zip(names, cells, strict=True)))
    return shown


def _epoch(row: Comparison | None) -> str:
    if row is None:
        return "not measured"
    on = f" ({multi_gpu.layout(row.config)})" if row.ranks > 1 else ""
    return f"{phrases.seconds(row.projected_seconds) if row.sets else phrases.without_speed(row)}{on}"


def report(study: Study) -> str:
    """The report as Markdown: the finding, one device beside several for each batch, and what the numbers rest on."""
    environment = Environment(loader=FileSystemLoader(pages.TEMPLATES), undefined=StrictUndefined, trim_blocks=True)
    found = finding(study)
    return environment.get_template("benchmark.md.j2").render(
        headline=literal(found.headline),
        claim=literal(found.claim.removeprefix(f"{found.headline}. ")),
        context=literal(phrases.context(study, batch=False)),
        comparison=markdown(comparison(study)),
        means={on: phrases.times(mean, what="x") for on, mean in means(rows(study)).items()},
        thresholds=RECOMMENDATIONS.table,
        bands=S000,
        figure=DASHBOARD,
    )


# --- the pictures ----------------------------------------------------------------------------------------------------


def dashboard(study: Study) -> Figure:
    """Time of an epoch, throughput, speed-up with its ideal, and efficiency, for each batch and number of devices."""
    found = [r for r in rows(study) if r.sets]
    title, context = finding(study).headline, f"{phrases.context(study, batch=False)}.{machine_state.busy(study)}"
    if not found:
        return fs.message(title, context, "Nothing was measured: see the table.")
    note = "An epoch is 50,000 images, its time a projection. Lines: 95 % intervals. Dashed: ideal speed-up; "
    note += f"efficiency that {S000.whose} calls good."
    several = [r for r in found if compared(r)]
    with fs.style():
        figure, body = fs.sheet(title, context, 6.0, note)
        time, rate, gain, efficiency = body.subplots(2, 2).flat
        sizes = dict.fromkeys(multi_gpu.layout(r.config) for r in sorted(found, key=lambda r: r.ranks))
        colours = dict(zip(sizes, fs.SERIES, strict=False))
        _bars(time, found, colours, "Time of an epoch, seconds", lambda r: Interval(value=r.projected_seconds))
        _bars(rate, found, colours, "Images per second", lambda r: Interval(value=r.images_per_second))
        _bars(gain, several, colours, "Speed-up", lambda r: r.ratio)
        _bars(efficiency, several, colours, "Efficiency", lambda r: r.efficiency)
        ideal = {r.ranks for r in several}
        for ranks in {1, *ideal}:
            gain.axhline(ranks, color=fs.SOFT, lw=1.2, ls="--" if ranks > 1 else "-")
        gain.set_ylim(0, max(gain.get_ylim()[1], 1.1 * max(ideal, default=1)))
        efficiency.axhline(S000.threshold, color=fs.SOFT, lw=1.2, ls="--")
        for ax in (gain, efficiency):
            ax.set_xlabel("batch size\n")  # and a line for the legend
        fs.legend(body, colours)
        return fs.settle(figure)


def _bars(
    ax: Axes,
    found: Sequence[Comparison],
    colours: Mapping[str, str],
    heading: str,
    value: Callable[[Comparison], Interval],
) -> None:
    """A bar for each number of devices at each batch, with the interval of its value where it has one."""
    batches, on = list(dict.fromkeys(map(_name, found))), [multi_gpu.layout(r.config) for r in found]
    sizes = [size for size in colours if size in on]
    width, top = 0.8 / max(1, len(sizes)), max((value(r).value for r in found), default=1.0)
    for r, size in zip(found, on, strict=True):
        x = batches.index(_name(r)) + width * (sizes.index(size) - (len(sizes) - 1) / 2)
        ax.bar(x, value(r).value, 0.9 * width, color=colours[size], lw=0)
        if value(r).exists:
            ax.plot([x, x], value(r).ends, color=fs.INK, lw=1.4)
    ax.set_title(heading)
    ax.set_xticks(range(len(batches)), batches)
    ax.set(xlim=(-0.6, max(0.6, len(batches) - 0.4)), ylim=(0, 1.35 * top))  # intervals of two sets would hide the bars
    ax.grid(visible=False, axis="x")


def table(study: Study) -> Figure:
    """The comparison as a table that is a picture."""
    shown = comparison(study)
    grid = [[fill(cell, 15) for cell in row] for row in (shown[0], *(row.values() for row in shown))]
    lines = [1.6 + max(cell.count("\n") for cell in row) for row in grid]
    gains = [f"Geometric mean speed-up of {on}: {phrases.times(mean)}." for on, mean in means(rows(study)).items()]
    widths = [max(len(line) for row in grid for line in row[i].split("\n")) + 2 for i in range(len(grid[0]))]
    context = f"{phrases.context(study, batch=False)}.{machine_state.busy(study)}"
    with fs.style():
        figure, body = fs.sheet("Performance: one device against several", context, 0.15 * sum(lines), " ".join(gains))
        ax = body.subplots()
        ax.set_axis_off()
        shares = [width / sum(widths) for width in widths]
        drawn = ax.table(grid, cellLoc="left", colWidths=shares, edges="horizontal", bbox=Bbox.unit())
        drawn.auto_set_font_size(False)
        for (row, _), cell in drawn.get_celld().items():
            cell.set_height(lines[row])
            cell.set_edgecolor(fs.BAND)
            cell.set_text_props(fontsize=6.5, fontweight="normal" if row else "bold")
        return fs.settle(figure)


# --- S001's table ----------------------------------------------------------------------------------------------------


def summary_of(study: Study, source: str) -> list[Summary]:
    """The runs of a study as rows of S001's table, with their paired speed-ups; ``source`` is the ledger.

    Times of an epoch are projections to 50,000 images.
    """
    found = [r for r in multi_gpu.scaling_rows(study) if r.role in ("baseline", "candidate")]
    return [replace(_run(study, r, found), log=source) for r in found]


def _run(study: Study, row: Comparison, found: Sequence[Comparison]) -> Summary:
    kind = (row.run_id, row.role, row.baseline_id, row.family)
    mine = [r for r in study.records if (r.run_id, r.role, r.baseline_id, r.family) == kind]
    beside = [r for r in found if r is row or (row.role == "baseline" and r.baseline_id == row.run_id)]
    trials: list[RunRecord] = [pair[r is row] for r in beside for pair in r.equivalence.pairs]
    told = of_run(row.config, [r for r in mine if r.status == "ok" and row.sets], PROJECTED_IMAGES)
    gain: dict[str, Any] = {}
    notes = [told.note, multi_gpu.layout(row.config)]
    notes.append(phrases.plural(row.sets, "set") if row.sets else phrases.without_speed(row))
    if compared(row):
        gain = {"speed_up": row.ratio.value, "efficiency": row.ratio.value / row.ranks}
        gain["rating"] = multi_gpu.band(row, S001) if row.answered else phrases.status(row.verdict)
        notes += [f"{phrases.evidence(row)}, {phrases.outcome(row)}", f"quality {row.quality}"]
    return replace(
        told,
        job_id=next((r.environment.slurm_job_id for r in reversed(mine) if r.environment.slurm_job_id), None),
        configuration=row.family,
        epoch_seconds=row.projected_seconds if told.seconds else None,
        loss=of_run(row.config, trials, None).loss,
        note="; ".join(filter(None, notes)),
        **gain,
    )

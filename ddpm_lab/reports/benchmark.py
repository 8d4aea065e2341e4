"""One device against several as a folder to share: a report, two pictures, and the results as JSON and CSV."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import charts, findings, machine_state, pages, phrases
from ddpm_lab.explain.answer import COLOURS, MEANING
from ddpm_lab.explain.bands import Bands
from ddpm_lab.explain.charts import Panel, Row
from ddpm_lab.explain.comparisons import COMPARED, Comparison
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.stats import Interval
from ddpm_lab.explain.table import Rendered, Table, csv_text, markdown
from ddpm_lab.explain.table import values as plain_values
from ddpm_lab.files import replace as write_file
from ddpm_lab.plan import LOST
from ddpm_lab.questions import multi_gpu
from ddpm_lab.questions.ask import answer
from ddpm_lab.record import RunRecord

DASHBOARD, TABLE, REPORT = "gpu_benchmark_comparison.png", "performance_summary_table.png", "comparison_report"
RESULTS = "benchmark_results"
_NAMES = (("multi-GPU beneficial", 1.1), ("marginal difference", 0.95), ("single GPU preferred", 0.0))
RECOMMENDATIONS = Bands(whose="S003", table=_NAMES, threshold=1.1)
"""S003's names for speed-ups, with their lower bounds."""
OF_ROW = ("scaling", "family", "label", "run_id", "code_version", "status", "sets", "disturbed_sets")
SPEEDS = {**{name: name for name in ("images_per_second", "step_seconds")}, "epoch_seconds": "projected_seconds"}
"""Of sets that count; where others disturbed all of them there is none."""
OF_CONFIG = (
    *("network", "image_size", "device", "world_size", "nodes", "rank_batch_size", "global_batch_size"),
    *("precision", "compile", "loader", "loader_workers"),
)
_VARIED = {"global_batch_size", "world_size", "nodes", "threads"}
"""Settings in which the baselines of one benchmark may differ."""


def rows(study: Study) -> list[Comparison]:
    """Every configuration that was asked for: weak scaling before strong, then by batch and number of devices."""
    found = [
        r
        for r in multi_gpu.scaling_rows(study)
        if r.role in ("baseline", "candidate") or (r.role == "note" and r.run_id != r.baseline_id)
    ]
    return sorted(found, key=lambda r: (r.scaling != "weak", multi_gpu.batch_of(r), r.family, r.ranks))


def of_last(study: Study, asked: RunConfig | None = None) -> Study:
    """The records of the network and settings that were measured last, or ``asked`` for.

    A table of batches has no place for others.
    """
    claimed = {r.baseline_id for r in study.records if r.role == "candidate" and not r.mechanism_only}
    bases = [r for r in study.records if r.role == "baseline" and not r.family.endswith(LOST)]
    bases = [r for r in bases if r.baseline_id in claimed] or bases
    if not bases:
        return study
    last = asked or bases[-1].config
    mine = {r.baseline_id for r in bases if r.config.differences(last).keys() <= _VARIED}

    def kept(r: RunRecord) -> bool:
        return r.baseline_id in mine if r.role in COMPARED else r.config.work_name == last.work_name

    return replace(study, records=tuple(filter(kept, study.records)))


def _name(row: Comparison) -> str:
    return f"{multi_gpu.batch_of(row)}{' each' * (row.scaling == 'weak')}"


def compared(row: Comparison) -> bool:
    return row.role == "candidate" and row.sets > 0


def recommendation(row: Comparison) -> str:
    """S003's name for a resolved speed-up, else why there is none."""
    if not row.resolved:
        return phrases.outcome(row)
    name = RECOMMENDATIONS.name(row.ratio.value)
    return name if row.config.device == "cuda" else name.replace("GPU", "rank")


def means(found: Iterable[Comparison]) -> dict[str, float]:
    """The geometric mean speed-up of each number of devices over the batches that they share."""
    ratios: dict[str, list[float]] = {}
    for r in found:
        if r.scaling == "strong" and compared(r):
            ratios.setdefault(multi_gpu.layout(r.config), []).append(r.ratio.value)
    return {on: geometric_mean(mine) for on, mine in ratios.items()}


# --- the folder ------------------------------------------------------------------------------------------------------


def write(study: Study, folder: Path) -> list[Path]:
    """Write every file, the report first. Raises OSError if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    results, text = [to_dict(study, r) for r in rows(study)], report(study)
    files: dict[str, str | bytes] = {DASHBOARD: charts.png(dashboard(study)), TABLE: charts.png(table(study))}
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
    config, gains = row.config, {"speedup": row.ratio, "efficiency": row.efficiency} if compared(row) else {}
    ends = {name: gains.get(name, Interval(value=math.nan)) for name in ("speedup", "efficiency")}
    values = {
        **{name: getattr(row, name) for name in OF_ROW},
        **{name: getattr(config, name) for name in OF_CONFIG},
        **{"data": study.records[-1].data_name, "machine": study.hardware, "measured": study.date},
        "reason": None if row.sets else phrases.without_speed(row),
        **{name: getattr(row, of) if row.sets else math.nan for name, of in SPEEDS.items()},
        "peak_memory_bytes": row.peak_rss_bytes if config.device == "cpu" else row.peak_memory_bytes,
        **{n + end: v for n, i in ends.items() for end, v in (("", i.value), ("_low", i.low), ("_high", i.high))},
        "verdict": row.verdict if gains else None,
        "recommendation": recommendation(row) if gains and row.scaling == "strong" else None,
        "quality": row.quality if row.role == "candidate" else None,
    }
    return plain_values(values)


def comparison(study: Study) -> Table:
    """S003's table: for each batch the time of an epoch on one device and on several, and what the gain comes to."""
    found = rows(study)
    gpu = any(r.config.device == "cuda" for r in found)
    single, several = ("Single GPU", "Multi GPU") if gpu else ("Single CPU rank", "Several CPU ranks")
    shown = []
    for _, same in groupby(found, key=lambda r: (r.scaling, multi_gpu.batch_of(r), r.family)):
        group = list(same)
        alone = next((r for r in group if r.ranks == 1), None)
        many: list[Comparison | None] = [r for r in group if r.ranks > 1]
        for beside in many or [None]:
            row = beside or group[0]
            gains = [phrases.DASH] * 4
            if compared(row):
                called = recommendation(row) if row.scaling == "strong" else phrases.outcome(row)
                span = phrases.between(row.ratio) or phrases.DASH
                share = multi_gpu.rated(row, study.bands) if row.answered else multi_gpu.efficiency(row)
                gains = [f"{row.ratio.value:.2f}x", called, span, share]
            shown.append(
                {"Batch Size": _name(row), single: _epoch(alone), several: _epoch(beside)}
                | dict(zip(("Speedup", "Recommendation", "95 % interval", "Efficiency"), gains, strict=True))
                | {"Sets": str(row.sets), "Quality": row.quality}
            )
    return shown


def _epoch(row: Comparison | None) -> str:
    if row is None:
        return "not measured"
    on = f" ({multi_gpu.layout(row.config)})" if row.ranks > 1 else ""
    return f"{phrases.seconds(row.projected_seconds) if row.sets else phrases.without_speed(row)}{on}"


def report(study: Study) -> str:
    """The report as Markdown: the finding, one device beside several for each batch, and what the numbers rest on."""
    found = answer(study).finding
    how = findings.how_to_judge(study, found, trains=True)
    return pages.markdown(
        "benchmark.md.j2",
        headline=found.headline,
        claim=found.claim.removeprefix(f"{found.headline}. "),
        context=phrases.context(study, batch=False),
        comparison=markdown(comparison(study)),
        means={on: f"{mean:.2f}x" for on, mean in means(rows(study)).items()},
        thresholds=RECOMMENDATIONS.table,
        bands=study.bands,
        figure=Rendered(DASHBOARD),
        how_to_judge=how,
    )


# --- the pictures ----------------------------------------------------------------------------------------------------


def _context(study: Study) -> str:
    return " ".join((f"{phrases.context(study, batch=False)}.", *machine_state.warnings(study)))


def dashboard(study: Study) -> Figure:
    """Time of an epoch, throughput, speed-up with its ideal, and efficiency, for each batch and number of devices."""
    found, title = [r for r in rows(study) if r.sets], answer(study).finding.headline
    if not found:
        return charts.message(title, _context(study), "Nothing was measured: see the table.")
    most, good, none = max(r.ranks for r in found), study.bands.threshold, Interval(value=math.nan)
    values: dict[str, tuple[Callable[[Comparison], Interval], float | None]] = {
        "Epoch, s": (lambda r: Interval(value=r.projected_seconds), None),
        "Images/s": (lambda r: Interval(value=r.images_per_second), None),
        "Speed-up": (lambda r: r.ratio if compared(r) else none, most),
        "Efficiency": (lambda r: r.efficiency if compared(r) else none, good),
    }
    panels = [
        Panel(heading=heading, rows=[_bar(r, value(r)) for r in found], reference=reference)
        for heading, (value, reference) in values.items()
    ]
    note = "An epoch is 50,000 images, its time a projection. Lines: 95 % intervals. Dashed: ideal speed-up of "
    note += f"{most} devices; efficiency {phrases.share(good)}. {MEANING}"
    return charts.bars(panels, title=title, context=_context(study), note=note, beside=True)


def _bar(row: Comparison, of: Interval) -> Row:
    name, colour = f"batch {_name(row)}, {multi_gpu.layout(row.config)}", COLOURS.get(row.verdict, charts.OPEN)
    return Row(name=name, value=of.value, low=of.low, high=of.high, colour=colour)


def table(study: Study) -> Figure:
    """The comparison as a table that is a picture."""
    shown = comparison(study)
    grid = [[fill(cell, 15) for cell in row] for row in (shown[0], *(row.values() for row in shown))]
    lines = [1.6 + max(cell.count("\n") for cell in row) for row in grid]
    gains = [f"Geometric mean speed-up of {on}: {mean:.2f}." for on, mean in means(rows(study)).items()]
    widths = [max(len(line) for row in grid for line in row[i].split("\n")) + 2 for i in range(len(grid[0]))]
    title = "Performance: one device against several"
    with charts.style():
        figure, body = charts.sheet(title, _context(study), 0.15 * sum(lines), " ".join(gains))
        ax = body.subplots()
        ax.set_axis_off()
        shares = [width / sum(widths) for width in widths]
        drawn = ax.table(grid, cellLoc="left", colWidths=shares, edges="horizontal", bbox=Bbox.unit())
        drawn.auto_set_font_size(False)
        for (row, _), cell in drawn.get_celld().items():
            cell.set_height(lines[row])
            cell.set_edgecolor(charts.BAND)
            cell.set_text_props(fontsize=6.5, fontweight="normal" if row else "bold")
        return charts.settle(figure)

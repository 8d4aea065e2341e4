"""The answer to a question, computed once from a study: its finding, figure, table and further views."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddpm_lab.explain import charts, phrases, stats
from ddpm_lab.explain.charts import Figure, Line, Panel, Row, forest
from ddpm_lab.explain.comparisons import Comparison, comparisons, families
from ddpm_lab.explain.findings import Finding, qualities
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.stats import Interval
from ddpm_lab.explain.table import Table, without_constant


class View(NamedTuple):
    """An additional figure (saved as ``name``) or table of an answer. It is omitted if there is no data for it."""

    caption: str
    name: str = ""
    figure: Callable[[], "Figure | None"] | None = None
    table: Callable[[], Table] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer as notebooks, pages, the command line and JSON show it. Figures and tables are created on demand."""

    study: Study
    finding: Finding
    figure: Callable[[], Figure]
    table: Callable[[], Table]
    views: Sequence[View] = ()
    file: str = ""
    """The name of the question's notebook and figures."""
    trains: bool = False
    """Whether the question's configurations can be trained for their quality."""
    settings: Path | None = None
    """The file that the recommended settings were written to."""

    def figures(self) -> list[tuple[str, Figure, str]]:
        """Return the additional figures that have data, as (caption, figure, file name)."""
        return [(v.caption, drawn, v.name) for v in self.views if v.figure and (drawn := v.figure())]

    def tables(self) -> list[tuple[str, Table]]:
        """Return the additional tables that have rows, as (caption, table)."""
        return [(v.caption, rows) for v in self.views if v.table and (rows := v.table())]


def speeds(
    study: Study,
    found: Finding,
    *,
    rows: Sequence[Comparison] | None = None,
    columns: Callable[[Comparison], dict[str, str]] | None = None,
    views: Sequence[View] = (),
) -> Answer:
    """Return the answer to a question that compares speeds: a forest plot and a table with a row per configuration.

    ``rows`` defaults to all comparisons of the study; ``columns`` returns additional cells for a row.
    """
    shown = comparisons(study) if rows is None else rows
    return Answer(
        study=study,
        finding=found,
        figure=lambda: ratios(study, found, shown),
        table=lambda: speed_table(shown, columns, name_family=rows is not None),
        views=views,
    )


def speed_table(
    rows: Sequence[Comparison],
    columns: Callable[[Comparison], dict[str, str]] | None = None,
    *,
    name_family: bool = False,
) -> Table:
    """Return a table with a row per configuration; ``name_family`` names the family even if there is only one."""
    cells = [_cells(row, columns(row) if columns else {}) for row in rows]
    empty = {"Note": "", "Disturbed sets": "0", **dict.fromkeys(phrases.LOSS, phrases.DASH)}
    return without_constant(cells, empty if name_family else {**empty, "Family": None})


_SELF = {"baseline": " (baseline)", "twin": ", repeated"}
"""Suffixes of labels for the roles that run the baseline's configuration."""


def _cells(row: Comparison, further: dict[str, str]) -> dict[str, str]:
    note = row.reason if row.status != "ok" and not row.mechanism_only else ""
    if row.sets and row.failed_sets:
        note = f"{phrases.plural(row.failed_sets, 'set')} failed: {row.reason}"
    cells = {
        "Speed": phrases.times(row.ratio),
        "Verdict": phrases.outcome(row),
        "Images/s": phrases.significant(row.images_per_second),
        "Step": phrases.seconds(row.step_seconds),
        "Time for 50,000 images (projected)": phrases.seconds(row.projected_seconds),
        **further,
        "Peak memory": phrases.peak_memory(row),
        "Sets \N{MULTIPLICATION SIGN} turns": f"{row.sets} \N{MULTIPLICATION SIGN} {row.turns}",
        "Disturbed sets": str(row.disturbed_sets),
        "Quality": phrases.DASH if row.role in _SELF else row.quality,
    }
    if not row.sets:
        known = ["Verdict", "Disturbed sets", *further, *["Peak memory"] * (row.status == "ok")]
        cells |= {name: phrases.DASH for name in cells if name not in known}
    label = row.label.removesuffix(" again") if row.role == "twin" else row.label
    name = {"Family": row.family, "Configuration": f"{label}{_SELF.get(row.role, '')}"}
    return {**name, **cells, **phrases.loss(row), "Note": note}


# --- the figure -------------------------------------------------------------------------------------------------------

COLOURS = {stats.FASTER: charts.GOOD, stats.SLOWER: charts.BAD}
MEANING = "Blue: faster; orange: slower; grey: neither."
POINTS = f"Geometric mean and 95 % interval over sets; dots: single sets. {MEANING}"


def row(c: Comparison, name: str = "") -> Row:
    """Return a row of a forest plot for a comparison, with its ratio or the reason why there is none."""
    if not c.sets:
        return Row(name=name or c.label, missing=phrases.failure(c))
    text = phrases.times(c.ratio) if c.ratio.exists else f"{phrases.ratio(c)} ({phrases.plural(c.sets, 'set')})"
    return Row(
        name=name or c.label,
        value=c.ratio.value,
        low=c.ratio.low,
        high=c.ratio.high,
        colour=COLOURS.get(c.verdict, charts.OPEN),
        dots=[stats.exp(log) for _, log in c.logs[: c.sets]] if c.sets > 1 else (),
        text=text.replace(" (", "  (").replace(" to ", phrases.DASH),
    )


def band(rows: Sequence[Comparison]) -> tuple[float, float] | None:
    """Return the interval of the repeated baseline's ratio, or None if there is none."""
    return next((r.noise.ends for r in rows if r.noise.exists), None)


def _shown(rows: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons that may appear in a figure of speed."""
    return [c for c in rows if not c.mechanism_only and c.config.exchange.enabled]


def ratios(study: Study, found: Finding, compared: Sequence[Comparison]) -> Figure:
    """Return a forest plot of speeds relative to the baseline: a panel per family, and failures with their reasons."""
    panels, every = [], _shown(compared)
    for rows in families(every):
        shown = [c for c in rows if c.role == "candidate" or (c.role != "note" and not c.sets)]
        if shown := [c for c in shown if c.role != "twin"] or shown:
            panels.append(Panel(heading=rows[0].family, rows=[*map(row, shown)], reference=1, band=band(rows)))
    if not panels:
        return charts.message(found.headline, phrases.context(study), found.claim)
    bases, repeated = {c.baseline_label for c in every}, " Band: the baseline repeated." * any(p.band for p in panels)
    return forest(
        panels,
        title=found.headline,
        context=phrases.context(study),
        note=f"{POINTS}{repeated} {phrases.begun(qualities(every))}.",
        label=f"speed relative to {bases.pop() if len(bases) == 1 else 'the baseline'} (above 1 is faster)",
    )


def timed(
    rows: Sequence[Comparison], time_of: Callable[..., Interval], x: Callable[[Comparison], float], name: str = ""
) -> Line:
    """Return a family as a line of times over ``x``, each with the interval of its ratio to the baseline."""
    base = next((c for c in rows if c.role == "baseline"), rows[0])
    times = [time_of(c, base) for c in rows]
    low, high = [t.low for t in times], [t.high for t in times]
    return Line(name=name or rows[0].family, x=[x(c) for c in rows], y=[t.value for t in times], low=low, high=high)


def measured(study: Study) -> list[list[Comparison]]:
    """Return the comparisons that have a speed, by family and without twins."""
    kept = [[r for r in rows if r.sets and r.role != "twin"] for rows in families(_shown(comparisons(study)))]
    return [rows for rows in kept if rows]


def projection(rows: Sequence[Comparison]) -> tuple[str, Callable[..., Interval]]:
    """Return a unit for the time for 50,000 images, and a function of a row and its baseline that gives this time."""
    longest = max(r.projected_seconds for r in rows)
    unit, scale = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 300 else ("seconds", 1.0)

    def time_of(c: Comparison, base: Comparison | None = None) -> Interval:
        if base is None or c is base:
            return Interval(value=c.projected_seconds / scale)
        return c.ratio.inverse.times(base.projected_seconds / scale)

    return unit, time_of

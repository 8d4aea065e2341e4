"""The answer to a question, computed once from a study: its finding, figure, table and further views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpm_lab.explain import figure_ratios, machine_state, phrases
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.table import Table, one_family, without_constant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NONE = phrases.DASH


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A further figure, saved under ``name``, or table of an answer; it is left out where it has no data."""

    caption: str
    name: str = ""
    figure: Callable[[], Figure | None] | None = None
    table: Callable[[], Table] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What notebooks, pages, the command line and JSON show; figures and tables are made when they are asked for."""

    study: Study
    finding: Finding
    figure: Callable[[], Figure]
    table: Callable[[], Table]
    views: Sequence[View] = ()
    file: str = ""
    """Name of the question's notebook and figures."""
    trains: bool = False
    """Whether the question's configurations can be trained for their quality."""

    def figures(self) -> list[tuple[str, Figure, str]]:
        """Return the further figures that have data as (caption, figure, name of the file)."""
        drawn = [(v.caption, v.figure(), v.name) for v in self.views if v.figure]
        return [(caption, figure, name) for caption, figure, name in drawn if figure is not None]

    def tables(self) -> list[tuple[str, Table]]:
        """Return the further tables that have rows as (caption, table)."""
        found = [(v.caption, v.table()) for v in self.views if v.table]
        return [(caption, rows) for caption, rows in found if rows]


def speeds(
    study: Study,
    found: Finding,
    *,
    rows: Sequence[Comparison] | None = None,
    columns: Callable[[Comparison], dict[str, str]] | None = None,
    views: Sequence[View] = (),
) -> Answer:
    """Return the answer of a question that compares speeds: a forest plot and a row for each configuration.

    ``rows`` are the comparisons of the study unless given; ``columns`` gives further cells of a row.
    """
    shown = comparisons(study) if rows is None else rows
    return Answer(
        study=study,
        finding=found,
        figure=lambda: figure_ratios.ratios(study, found, shown),
        table=lambda: speed_table(study, shown, columns, name_family=rows is not None),
        views=views,
    )


def speed_table(
    study: Study,
    rows: Sequence[Comparison],
    columns: Callable[[Comparison], dict[str, str]] | None = None,
    *,
    name_family: bool = False,
) -> Table:
    """Return a row for each configuration; a single family is named only if asked for (``name_family``)."""
    cells = [_cells(row, columns(row) if columns else {}) for row in rows]
    if not cells:
        return []
    cells[0]["Note"] = f"{cells[0]['Note']} {machine_state.unknown(study)}".strip()
    empty = {"Note": [""], "Disturbed sets": ["0"], **{key: [_NONE] for key in phrases.LOSS}}
    return without_constant(cells if name_family else one_family(cells), empty)


_SELF = {"baseline": " (baseline)", "twin": ", repeated"}
"""Roles of the baseline's own configuration, as they are named."""


def _cells(row: Comparison, further: dict[str, str]) -> dict[str, str]:
    note = row.reason if row.status != "ok" and not row.mechanism_only else ""
    if row.sets and row.failed_sets:
        note = f"{phrases.plural(row.failed_sets, 'set')} failed: {row.reason}"
    measured = {
        "Speed": phrases.ratio_with_interval(row),
        "Verdict": phrases.outcome(row),
        "Images/s": phrases.significant(row.images_per_second),
        "Step": phrases.seconds(row.step_seconds),
        "Time for 50,000 images (projected)": phrases.seconds(row.projected_seconds),
        **further,
        "Peak memory": phrases.peak_memory(row),
        "Sets \N{MULTIPLICATION SIGN} turns": f"{row.sets} \N{MULTIPLICATION SIGN} {row.turns}",
        "Disturbed sets": str(row.disturbed_sets),
        "Quality": _NONE if row.role in _SELF else row.quality,
    }
    known = {*measured} if row.sets else {"Verdict", "Disturbed sets", *further}
    known |= {"Peak memory"} if row.status == "ok" else set()
    shown = {name: cell if name in known else _NONE for name, cell in measured.items()}
    label = row.label.removesuffix(" again") if row.role == "twin" else row.label
    name = {"Family": row.family, "Configuration": f"{label}{_SELF.get(row.role, '')}"}
    return {**name, **shown, **phrases.loss(row), "Note": note}

"""Tables: a list of rows, each a dict from column to cell; all rows of a table have the same columns, in order.

They are shown as plain text, on a terminal, as HTML, Markdown and CSV.
"""

import csv
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from typing import Any

from ddpm_lab.output import printable, say

Table = list[dict[str, str]]

NAMING = ("Configuration", "Family", "Operator", "Settings", "Work", "Note")
"""Columns that name a row: words, although a name such as "2 ranks" begins with a digit."""


def without_constant(rows: Table, constant: Mapping[str, str | None]) -> Table:
    """Leave out each column of which all cells are the one given for it, or for None whatever the first one is."""
    usual = {name: rows[0][name] if cell is None else cell for name, cell in constant.items() if rows}
    dropped = [name for name, cell in usual.items() if all(row[name] == cell for row in rows)]
    return [{name: cell for name, cell in row.items() if name not in dropped} for row in rows]


def plain(rows: Table) -> str:
    """The table as text: numbers to the right, words to the left."""
    if not rows:
        return "no rows"
    rows = [{printable(name): printable(cell) for name, cell in row.items()} for row in rows]
    right = _of_numbers(rows)
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = (
        "  ".join(t.rjust(widths[name]) if name in right else t.ljust(widths[name]) for name, t in row.items())
        for row in ({name: name for name in rows[0]}, *rows)
    )
    return "\n".join(map(str.rstrip, lines))


def show(rows: Table) -> None:
    """Print the table: on a terminal folded to its width, elsewhere as plain text."""
    if not (sys.stdout.isatty() and rows and find_spec("rich")):
        say(*plain(rows).split("\n"))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    right, drawn = _of_numbers(rows), RichTable(box=box.SIMPLE_HEAD)
    for name in rows[0]:
        drawn.add_column(Text(printable(name)), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row.values()))
    Console(highlight=False).print(drawn)


def markdown(rows: Table) -> str:
    """The table in GitHub's Markdown, ended by a line break; empty without rows."""
    head = [map(literal, rows[0]), ["---"] * len(rows[0])] if rows else []
    cells = [map(literal, row.values()) for row in rows]
    return Rendered("".join(f"| {' | '.join(line)} |\n" for line in (*head, *cells)))


class Rendered(str):
    """Text that is Markdown already: a template takes it as it is."""


def literal(text: object) -> Rendered:
    """Text that Markdown shows as it is, in one line: names such as ``_foreach_mul_`` hold its marks."""
    return Rendered(re.sub(r"([\\`*_<>\[\]|~$#&])", r"\\\1", printable(text)))


def code(text: object) -> Rendered:
    """Text as code in Markdown, between as many backticks as it takes."""
    line = printable(text)
    marks, pad = "`" * (1 + max(map(len, re.findall("`+", line)), default=0)), " " * ("`" in line)
    return Rendered(f"{marks}{pad}{line}{pad}{marks}")


def values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON and CSV, which have no number that is not finite: what is unknown is None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of values as CSV; None is an empty cell. A text that a spreadsheet would compute begins with ``'``."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerows([rows[0].keys(), *(map(_csv_cell, row.values()) for row in rows)] if rows else [])
    return text.getvalue()


def _csv_cell(value: object) -> object:
    return re.sub(r"^(?=\s*[=+@-])", "'", printable(value)) if isinstance(value, str) else value


_PARTS = re.compile(r"(.*?)(?: (\(.*?\)))?(?:, (.*))?", re.DOTALL)
"""A number with its unit, the interval in brackets, and words."""


def html(rows: Table) -> str:
    """The table as HTML, laid out by itself, since a notebook and a page have different style sheets."""
    if not rows:
        return "<p>no rows</p>"
    right = _of_numbers(rows)

    def cell(name: str, value: str) -> str:
        if name not in right:
            wide = "; min-width: 7em" if len(value) > 30 else ""
            return f'<td style="text-align: left{wide}">{escape(value)}</td>'
        # The interval goes below its value, and words below both, so that a table of ten columns fits a page.
        found = _PARTS.fullmatch(escape(value))
        assert found  # any text fits
        text, interval, words = found.groups()
        wrapped = ' style="white-space: normal"'  # what is long
        if interval:
            text += f'<br><span class="interval"{wrapped * (len(interval) > 16)}>{interval}</span>'
        text += f"<br><span{wrapped}>{words}</span>" if words else ""
        return f'<td style="text-align: right; white-space: nowrap">{text}</td>'

    sides = {name: "right" if name in right else "left" for name in rows[0]}
    head = "".join(f'<th scope="col" style="text-align: {side}">{escape(name)}</th>' for name, side in sides.items())
    body = "".join("<tr>" + "".join(cell(*item) for item in row.items()) + "</tr>\n" for row in rows)
    return (
        '<div class="scroll" style="overflow-x: auto" tabindex="0" role="group" aria-label="Table of results">'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>"
    )


def _of_numbers(rows: Table) -> set[str]:
    """Columns of numbers, with units and intervals or not: each cell begins with a digit or is a dash."""
    return {
        name
        for name in rows[0].keys() - NAMING
        if all(re.match(r"(below )?[-+\N{MINUS SIGN}]?\d|\N{EN DASH}?$", row[name]) for row in rows)
        and any(re.match(r"[-+\N{MINUS SIGN}]?\d", row[name]) for row in rows)
    }

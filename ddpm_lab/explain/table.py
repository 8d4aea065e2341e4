"""Tables: a list of rows, each a dict from column to cell; all rows of a table have the same columns, in order."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from html import escape

Table = list[dict[str, str]]

NAMING = ("Configuration", "Family", "Operator", "Settings", "Work")
"""Columns that name a row: words, although a name such as "2 ranks" begins with a digit."""


def without_constant(rows: Table, constant: Mapping[str, Collection[str]]) -> Table:
    """Leave out each column of which all cells are among those given for it."""
    dropped = {name for name, cells in constant.items() if all(row.get(name) in cells for row in rows)}
    return [{name: cell for name, cell in row.items() if name not in dropped} for row in rows]


def one_family(rows: Table) -> Table:
    """Leave out the column "Family" where it says the same in each row."""
    return without_constant(rows, {"Family": {rows[0]["Family"]}}) if rows else rows


def plain(rows: Table) -> str:
    """The table as text: numbers to the right, words to the left."""
    if not rows:
        return "no rows"
    right = _of_numbers(rows)
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [
        [text.rjust(widths[name]) if name in right else text.ljust(widths[name]) for name, text in row.items()]
        for row in ({name: name for name in rows[0]}, *rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def html(rows: Table) -> str:
    """The table as HTML, laid out by itself, since a notebook and a page have different style sheets."""
    if not rows:
        return "<p>no rows</p>"
    right = _of_numbers(rows)

    def cell(tag: str, name: str, value: str) -> str:
        scope = {"th": ' scope="col"'}.get(tag, "")
        text, wrap = escape(value), ""
        if tag == "td" and name in right:
            # The interval goes below its value, so that a table of ten columns fits a page.
            text, wrap = re.sub(r" (\(.*\))$", r'<br><span class="interval">\1</span>', text), "; white-space: nowrap"
        return f'<{tag}{scope} style="text-align: {"right" if name in right else "left"}{wrap}">{text}</{tag}>'

    head = "".join(cell("th", name, name) for name in rows[0])
    body = "".join("<tr>" + "".join(cell("td", *item) for item in row.items()) + "</tr>\n" for row in rows)
    return (
        '<div class="scroll" style="overflow-x: auto" tabindex="0" role="region" aria-label="Table of results">'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>"
    )


def _of_numbers(rows: Table) -> set[str]:
    """Columns of numbers, with units and intervals or not: each cell begins with a digit or is a dash."""
    cells = {name: [row[name] for row in rows] for name in rows[0] if name not in NAMING}
    return {
        name
        for name, column in cells.items()
        if all(re.match(r"(below )?[-+\N{MINUS SIGN}]?\d|\N{EN DASH}?$", cell) for cell in column)
        and any(re.match(r"[-+\N{MINUS SIGN}]?\d", cell) for cell in column)
    }

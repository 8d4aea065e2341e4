"""A grid of cells in the forms that people share tables in: on the terminal, as plain text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Sequence

Grid = Sequence[Sequence[object]]
"""Rows of cells; the first row holds the names of the columns."""
_NUMBER = re.compile(r"[-+\N{MINUS SIGN}]?\d[\d,.]*( ?%|x)?$|\N{EN DASH}?$")


def show(grid: Grid) -> None:
    """Print a grid: on a terminal folded to its width, elsewhere as plain text."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        rich = False
    else:
        rich = sys.stdout.isatty()
    if not rich:
        print(*plain_text(grid), sep="\n")
        return
    head, *rows = grid
    table = Table(box=box.SIMPLE_HEAD)
    for i, name in enumerate(head):
        numbers = bool(rows) and all(_NUMBER.match(str(row[i])) for row in rows)
        table.add_column(Text(str(name)), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(highlight=False).print(table)


def plain_text(grid: Grid) -> list[str]:
    """A grid as lines of text, its columns aligned."""
    cells = [[str(cell) for cell in row] for row in grid]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    told = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [told[0], "-+-".join("-" * width for width in widths), *told[1:]]


def markdown(grid: Grid) -> str:
    """A grid as a table of GitHub's Markdown, ended by a line break."""
    head, *rows = [[literal(str(cell)).replace("\n", " ") for cell in row] for row in grid]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def literal(text: str) -> str:
    """Text that Markdown shows as it is: names such as ``_foreach_mul_`` hold its marks."""
    return re.sub(r"([\\`*_<>\[\]|~$#])", r"\\\1", text)


def csv_text(grid: Grid) -> str:
    """A grid as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(grid)
    return text.getvalue()

"""Read tables: a column of cells, and rows by the cell that names them."""

from ddpm_lab.explain.table import Table


def column(rows: Table, name: str) -> list[str]:
    return [row[name] for row in rows]


def by(rows: Table, name: str) -> dict[str, dict[str, str]]:
    """Rows by a cell that no two of them share."""
    found = {row[name]: row for row in rows}
    assert len(found) == len(rows), f"two rows with the same {name}"
    return found

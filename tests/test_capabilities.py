"""The table of docs/capabilities.md is true: what it names can be typed, set, opened and tested."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from ddpm_lab.__main__ import _parser
from ddpm_lab.questions import QUESTIONS
from ddpm_lab.settings_file import configuration

CHECKOUT = Path(__file__).resolve().parents[1]
IDS = [f"{part}{n}" for part, count in (("A", 6), ("B", 8), ("C", 15), ("D", 7)) for n in range(1, count + 1)]
README = (CHECKOUT / "README.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (CHECKOUT / "docs" / "capabilities.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| id |", "| what |", "| --- "))
]


def spans(column: int) -> list[str]:
    """What stands between backticks in a column, counted from the right."""
    return list(dict.fromkeys(span for row in ROWS for span in re.findall("`([^`]+)`", row[column])))


def test_no_capability_is_missing() -> None:
    assert [row[0] for row in ROWS if len(row) == 4] == IDS
    assert all(re.search("`", cell) for row in ROWS for cell in row[-2:]), "a place and a test in every row"


def test_the_readme_leads_there() -> None:
    assert "(docs/capabilities.md)" in README
    named = {tuple(shlex.split(span)[1:2]) for span in spans(-2) if span.startswith("ddpm-lab ")}
    assert [name for (name,) in sorted(named) if not re.search(rf"ddpm[-_]lab {name}\b|`{name}`", README)] == []


@pytest.mark.parametrize("span", spans(-2))
def test_what_is_named_is_there(span: str) -> None:
    words = shlex.split(span)
    if words[0] == "ddpm-lab":
        options = _parser().parse_args(words[1:])
        assert set(getattr(options, "experiments", [])) <= set(QUESTIONS)
        if inner := [word for word in getattr(options, "words", None) or [] if word != "--"]:
            _parser().parse_args(inner)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
        assert all(re.fullmatch("(DATA|PRESET|MINUTES|ARGS)=.*", word) for word in words[2:])
    elif words[0] == "papermill":
        source = parameters(CHECKOUT / words[1])
        assert all(re.search(rf"^{name} = ", source, re.MULTILINE) for name in words[4::3])
    elif " = " in span:
        configuration({"device": "cuda", "world_size": 2} | tomllib.loads(span), span)
    else:
        assert (CHECKOUT / span).is_file()


def parameters(notebook: Path) -> str:
    """The cell of a notebook that papermill replaces."""
    cells = json.loads(notebook.read_text())["cells"]
    (cell,) = (cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))
    return "".join(cell["source"])


@pytest.mark.parametrize("span", spans(-1))
def test_every_test_exists(span: str) -> None:
    file, _, name = span.partition("::")
    assert not name or name in named_tests(file)
    assert named_tests(file)


@cache
def named_tests(file: str) -> set[str]:
    """Names of the tests in a file."""
    tree = ast.parse((CHECKOUT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}

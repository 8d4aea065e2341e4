"""The order of the house: a module imports only from the rows below it."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "ddpm_lab"

STRANGERS = {
    "data": ("model", "measure", "explain"),
    "model": ("measure", "explain"),
    "measure": ("data", "model", "explain"),
    "explain": ("data", "model", "measure"),
}
# A rank imports torch; the process that it becomes must not have done so before. So process imports rank when it runs.
UPWARDS = {("measure.process", "measure.rank")}
WITH_TORCH = ("data", "model", "measure", "planted")
"""Folders, and a module, that may import torch."""
EXPLAINING = {"pandas", "scipy", "matplotlib", "papermill", "nbconvert", "nbformat", "IPython"}
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
}


def nodes(path: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Import statements of a file, and whether each runs as soon as the file is imported."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, id(node) in at_once


@cache
def imported(path: Path, *, at_once: bool = False) -> set[str]:
    """Full names of everything imported by a file, also inside functions unless ``at_once``."""
    found = set()
    for node, first in nodes(path):
        if at_once and not first:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path} imports relatively: name the module in full"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    """Modules of the package among imported names, by their names; a name inside a module counts as the module."""
    found = set()
    for name in names:
        top, _, rest = name.partition(".")
        if top != "ddpm_lab":
            continue
        while rest and rest not in FILES:
            rest = rest.rpartition(".")[0]
        found.add(rest or "ddpm_lab")
    return found


def third_party(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_walk_sees_imports() -> None:
    """The checks below would pass on nothing."""
    assert own(imported(FILES["ledger"])) == {"files", "plan", "record"}
    assert own(imported(FILES["report"])) >= {"ddpm_lab", "config", "explain.pages", "notebooks", "agenda"}
    assert "planning" in own(imported(FILES["run_command"]))
    assert "planning" not in own(imported(FILES["run_command"], at_once=True))
    assert "torch" in third_party(imported(FILES["model.unet"]))


def test_no_module_imports_itself_by_way_of_others() -> None:
    """So that there is an order in which to read them."""
    graph = {m: {n for n in own(imported(path)) if (m, n) not in UPWARDS} for m, path in FILES.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_the_halves_do_not_know_each_other() -> None:
    for module, path in FILES.items():
        strangers = STRANGERS.get(module.partition(".")[0], ())
        for name in own(imported(path)):
            assert name.partition(".")[0] not in strangers, f"{module} imports {name}"


def test_what_explains_or_commands_never_imports_torch_as_it_is_loaded() -> None:
    torch = {m for m, path in FILES.items() if third_party(imported(path, at_once=True)) & {"torch", "torchvision"}}
    assert {m.partition(".")[0] for m in torch} <= set(WITH_TORCH)
    for module, path in FILES.items():
        if module not in torch:
            by_way_of = own(imported(path, at_once=True)) & torch
            assert not by_way_of, f"{module} imports torch by way of {by_way_of}"


def test_measuring_needs_nothing_that_explains() -> None:
    for module, path in FILES.items():
        if module.startswith(("measure", "model", "data")):
            needed = third_party(imported(path, at_once=True)) & EXPLAINING
            assert not needed, f"{module} imports {needed}"


def test_packages_import_nothing() -> None:
    at_once = imported(PACKAGE / "__init__.py", at_once=True)
    assert third_party(at_once) <= {"__future__", "importlib", "typing", "ddpm_lab"}
    assert own(at_once) <= {"comparison"}, "for the type checker alone"
    for path in PACKAGE.glob("*/__init__.py"):
        assert not [node for node, _ in nodes(path) if not isinstance(node, ast.ImportFrom)], path
        assert third_party(imported(path)) <= {"__future__"}, path


def test_modules_stay_small_and_have_a_subject() -> None:
    for path in (*FILES.values(), *Path(__file__).parent.glob("*.py")):
        assert len(path.read_text().splitlines()) <= 500, f"{path} is too long: find the second module in it"
    for module in FILES:
        assert module.rpartition(".")[2] not in ("utils", "util", "helpers", "misc", "common")

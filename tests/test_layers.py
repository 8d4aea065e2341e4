"""The order of the house: a folder imports only from itself and from those below it; what pages point to is there."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ddpm_lab"
ROWS = ("", "data", "diffusion", "measure", "training", "explain", "questions", "reports", "cli")
"""From the ground: the modules beside the folders, then the folders."""
MEASURING = ("data", "diffusion", "measure", "training")
"""Folders that may import torch; the explaining half knows none of them."""
EXPLAINING = {"scipy", "matplotlib", "papermill", "nbconvert", "nbformat", "IPython"}
# A rank imports torch; the process that it becomes must not have done so before. So process imports rank when it runs.
UPWARDS = {("measure.process", "measure.rank")}
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
}


def folder(module: str) -> str:
    return module.rpartition(".")[0].partition(".")[0]


@cache
def imported(path: Path, *, at_once: bool = False) -> set[str]:
    """Full names of everything imported by a file, also inside functions unless ``at_once``."""
    tree, found = ast.parse(path.read_text()), set()
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    """Modules of the package among imported names; a name inside a module counts as the module."""
    inside = {name.removeprefix("ddpm_lab.") for name in names if name.startswith("ddpm_lab.")}
    return {module for name in inside for module in (name, name.rpartition(".")[0]) if module in FILES}


def test_a_folder_imports_from_those_below_it_and_nothing_in_circles() -> None:
    assert {folder(module) for module in FILES} == set(ROWS)
    graph = {m: {n for n in own(imported(path)) if (m, n) not in UPWARDS} for m, path in FILES.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    for module, names in graph.items():
        for name in names:
            assert ROWS.index(folder(name)) <= ROWS.index(folder(module)), f"{module} imports {name}"
            assert folder(module) != "explain" or folder(name) not in MEASURING, f"{module} imports {name}"


def test_only_what_measures_imports_torch_as_it_is_loaded_and_only_what_explains_scipy() -> None:
    """A bare GPU node has no SciPy and no Matplotlib; what draws or estimates imports them where it does."""
    packages = {m: {name.partition(".")[0] for name in imported(path, at_once=True)} for m, path in FILES.items()}
    assert {folder(module) for module, names in packages.items() if names & {"torch", "torchvision"}} <= set(MEASURING)
    for module, names in packages.items():
        if folder(module) in (*MEASURING, "questions") or module == "explain.charts":
            assert not names & EXPLAINING, module
    code = "import sys, ddpm_lab.cli.measure, ddpm_lab.cli.report, ddpm_lab.cli.train; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", *EXPLAINING} & set(shown.stdout.split())


CHECKOUT = Path(__file__).resolve().parents[1]
PAGES = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Names of a page's sections, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, section = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not section or section in anchors(target), f"{page.name}: {link}"

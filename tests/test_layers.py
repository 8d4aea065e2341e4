"""The order of the house: a folder imports only from itself and from those below it."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

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
    return module.partition(".")[0] if "." in module else ""


@cache
def imported(path: Path, *, at_once: bool = False) -> set[str]:
    """Full names of everything imported by a file, also inside functions unless ``at_once``."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively: name the module in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    """Modules of the package among imported names; a name inside a module counts as the module."""
    found = set()
    for name in names:
        top, _, rest = name.partition(".")
        while rest and rest not in FILES:
            rest = rest.rpartition(".")[0]
        found |= {rest} if top == "ddpm_lab" and rest else set()
    return found


def third_party(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_a_folder_imports_from_those_below_it() -> None:
    assert {folder(module) for module in FILES} == set(ROWS)
    for module, path in FILES.items():
        for name in own(imported(path)):
            assert ROWS.index(folder(name)) <= ROWS.index(folder(module)), f"{module} imports {name}"
            assert folder(module) != "explain" or folder(name) not in MEASURING, f"{module} imports {name}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    """So that there is an order in which to read them."""
    graph = {m: {n for n in own(imported(path)) if (m, n) not in UPWARDS} for m, path in FILES.items()}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_only_what_measures_imports_torch_as_it_is_loaded() -> None:
    torch = {m for m, path in FILES.items() if third_party(imported(path, at_once=True)) & {"torch", "torchvision"}}
    assert {"diffusion.unet", "training.train"} <= torch, "the walk sees imports"
    assert {folder(m) for m in torch} <= set(MEASURING)
    for module, path in FILES.items():
        if folder(module) not in MEASURING:
            by_way_of = own(imported(path, at_once=True)) & torch
            assert not by_way_of, f"{module} imports torch by way of {by_way_of}"


def test_measuring_and_asking_load_nothing_that_only_explaining_needs() -> None:
    """A bare GPU node has no SciPy and no Matplotlib; what draws or estimates imports them where it does."""
    code = "import sys, ddpm_lab.questions.experiments, ddpm_lab.cli.measure, ddpm_lab.cli.train; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", *EXPLAINING} & set(shown.stdout.split())
    for path in (PACKAGE / "__init__.py", *PACKAGE.rglob("*/__init__.py")):
        assert third_party(imported(path, at_once=True)) <= {"__future__", "importlib", "typing"}, path

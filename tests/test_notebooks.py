"""The numbered notebooks: without outputs, and every parameter reaches the one call that measures."""

import ast
import inspect
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from ddpm_lab.questions import experiments

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_stored_that_a_run_makes_and_every_parameter_reaches_a_call_that_takes_it(name: str) -> None:
    notebook: Any = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    parameters = papermill.inspect_notebook(FOLDER / f"{name}.ipynb")
    assert all(each["help"] for each in parameters.values())
    calls = [
        node.value
        for cell in notebook.cells
        if cell.cell_type == "code" and "answer = " in cell.source
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    ]
    (call,) = calls
    assert [(word.arg, ast.unparse(word.value)) for word in call.keywords] == [(each, each) for each in parameters]
    question = [ast.literal_eval(word) for word in call.args]
    assert question in ([], [name.partition("_")[2]])
    signature = inspect.signature(getattr(experiments, ast.unparse(call.func).partition(".")[2]))
    given = {each: ast.literal_eval(value["default"]) for each, value in parameters.items()}
    signature.bind(*question, **given)
    for each, value in given.items():
        if each in signature.parameters:
            assert signature.parameters[each].default == value, f"{each} differs from the default of the call"

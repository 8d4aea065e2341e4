"""The numbered notebooks keep one form: a question, parameters, one call, figure, table, finding, limits."""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
CALLS = {
    "01_profile": "profile",
    "02_multi_gpu": "multi_gpu",
    "03_amp": "amp",
    "04_workers": "workers",
    "05_torch_compile": "torch_compile",
    "06_recommendation": None,
    "07_peers": "peers",
    "08_quality": "quality",
    "09_claims": "claims",
}
FORM = ["markdown", "code", "code", "code", "code", "code", "code", "markdown", "code", "markdown"]
SHOWN = {4: "show.figure(study)", 5: "show.table(study)", 6: "show.finding(study)", 8: "show.more(study)"}
FORBIDDEN = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.AsyncFor, ast.While, ast.If),
    *(ast.comprehension, ast.Try, ast.With),
)


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


@pytest.fixture(params=sorted(CALLS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def parameters(notebook: Any) -> dict[str, Any]:
    tree = ast.parse(notebook.cells[1].source)
    assert all(isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) for node in tree.body)
    return {n.targets[0].id: ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]


def call(notebook: Any) -> ast.Call:
    (statement,) = ast.parse(notebook.cells[3].source).body
    assert isinstance(statement, ast.Assign)
    assert ast.unparse(statement.targets[0]) == "study"
    assert isinstance(statement.value, ast.Call)
    return statement.value


def test_these_are_all_the_notebooks() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(CALLS)


def test_cells_come_in_the_one_order(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert [cell.cell_type for cell in notebook.cells] == FORM
    first, more, limits = (notebook.cells[i].source for i in (0, 7, 9))
    assert first.startswith(f"# {int(name[:2])}. ")
    assert first.splitlines()[0].endswith("?")
    assert "**Question.** " in first
    assert "**Method.** " in first
    assert more.startswith("## More\n")
    assert limits.startswith("## Limits\n\n- ")
    assert {place: notebook.cells[place].source for place in SHOWN} == SHOWN


def test_nothing_is_stored_that_a_run_makes(name: str) -> None:
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert notebook.metadata.kernelspec.name == "python3"
    assert len({cell.id for cell in notebook.cells}) == len(FORM)


def test_tags_say_which_cell_is_which(name: str) -> None:
    notebook = read(name)
    tagged = {i: cell.metadata["tags"] for i, cell in enumerate(notebook.cells) if "tags" in cell.metadata}
    assert tagged == {1: ["parameters"], 2: ["hide-input"]}
    assert notebook.cells[2].metadata["jupyter"] == {"source_hidden": True}


def test_code_is_thin(name: str) -> None:
    for cell in read(name).cells:
        if cell.cell_type != "code":
            continue
        assert not any(line.lstrip().startswith(("%", "!", "?")) for line in cell.source.splitlines())
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, FORBIDDEN)
            if isinstance(node, ast.Import):
                assert all(alias.name.partition(".")[0] != "torch" for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] == "ddpm_lab"


def test_each_parameter_is_a_literal_with_a_comment_and_papermill_sees_it(name: str) -> None:
    notebook = read(name)
    values = parameters(notebook)
    source = notebook.cells[1].source
    comments = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    assert len(comments) == len(source.splitlines()) == len(values)
    seen = papermill.inspect_notebook(FOLDER / f"{name}.ipynb")
    assert list(seen) == list(values)
    assert all(each["help"] for each in seen.values())


def test_every_parameter_reaches_the_one_call(name: str) -> None:
    notebook = read(name)
    made = call(notebook)
    assert [(k.arg, ast.unparse(k.value)) for k in made.keywords] == [(p, p) for p in parameters(notebook)]
    first = [ast.literal_eval(a) for a in made.args]
    assert first == ([CALLS[name]] if CALLS[name] else [])


def test_the_call_is_one_that_the_package_takes(name: str) -> None:
    experiments = pytest.importorskip("ddpm_lab.experiments")
    notebook = read(name)
    function = getattr(experiments, ast.unparse(call(notebook).func).partition(".")[2])
    signature = inspect.signature(function)
    signature.bind(*([CALLS[name]] if CALLS[name] else []), **parameters(notebook))
    for parameter, value in parameters(notebook).items():
        if parameter in signature.parameters:
            assert signature.parameters[parameter].default == value, f"{parameter} differs from the default of run"

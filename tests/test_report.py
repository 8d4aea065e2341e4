"""Notebooks run headlessly: what is published, what is refused, what a stop or a kill leaves, and the index."""

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.data.folder import DataError
from ddpm_lab.explain import pages
from ddpm_lab.explain.pages import Page, answers, write_index
from ddpm_lab.explain.table import html
from ddpm_lab.files import CHECKOUT, LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.questions import experiments
from ddpm_lab.reports import report
from ddpm_lab.reports.published import FIELDS, MODULES
from ddpm_lab.reports.report import NUMBERED, load

v4: Any = nbformat.v4
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ANSWER = f"""from IPython.display import display
display({{"image/png": "{PIXEL}"}}, metadata={{"image/png": {{"alt": "One grey <pixel>"}}}}, raw=True)
display({{"text/html": "<table><tr><td>1</td></tr></table>"}}, raw=True)
display(
    {{"text/markdown": "**Planted** answer"}},
    metadata={{"ddpm_lab": {{"status": "answered", "headline": "A planted answer & more", "hardware": "x"}}}},
    raw=True,
)"""
SAY = r"""import os
with open(os.environ["DDPM_LAB_PROGRESS"], "a") as file:
    file.write("set 1 of 6\nset 2 of 6\ncompiling, 2 s\ncompiling, 4 s\nbuilding, 2 s\n")"""


def write(path: Path, *code: str, parameters: str = "minutes = None  # budget") -> Path:
    """A throw-away notebook with a question, a parameters cell and ``code``."""
    cells: list[Any] = [
        v4.new_markdown_cell(f"# {int(path.stem[:2])}. Does {path.stem} work?\n\n**Question.** Planted.\n"),
        v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *(v4.new_code_cell(source) for source in code),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
    return path


def run(files: Sequence[Path | str], output: Path, **options: Any) -> tuple[report.Report, list[str]]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "say", lines.append)
        return report.report(notebooks=list(files), output_dir=output, **{"preset": "smoke", **options}), lines


def fetched(text: str) -> list[str]:
    """What a browser would load for a page."""
    tags = re.sub(r"<a [^>]*>", "", text)  # a link loads nothing
    places = re.findall(r"""\b(?:src|href|srcset|data|poster|action)=["'](?!data:)([^"']*)""", tags)
    return places + re.findall(r"<script|@import|url\((?!data:)", text)


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Nothing is measured for notebooks that are thrown away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "measure_all", lambda *_, **__: 0)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[report.Report, list[str], Path]:
    """A report of a notebook that fails, one whose kernel dies, and one after them that answers."""
    folder = tmp_path_factory.mktemp("report")
    files = [
        write(folder / "01_fails.ipynb", "print('before')", "raise ValueError('planted <b>failure</b>')"),
        write(folder / "02_dies.ipynb", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
        write(folder / "03_answers.ipynb", SAY, "print(sizes)", ANSWER, parameters="sizes = None  # sizes"),
    ]
    result, lines = run(files, folder / "out", parameters={"sizes": [1, 2]})
    return result, lines, folder / "out" / "reports"


Made = tuple[report.Report, list[str], Path]


@pytest.mark.slow
def test_a_failure_is_published_and_the_others_go_on(made: Made) -> None:
    result, lines, folder = made
    states = {page.name: page.state for page in result.pages.values()}
    assert states == {"01_fails": "failed", "02_dies": "failed", "03_answers": "done"}
    assert (result.exit_code, result.stopped) == (1, 0)
    failed, index = (folder / "01_fails.html").read_text(), (folder / "index.html").read_text()
    assert "planted &lt;b&gt;failure" in failed
    assert "before" in failed
    assert "kernel died" in (folder / "02_dies.html").read_text()
    assert "ValueError: planted &lt;b&gt;failure&lt;/b&gt;" in index
    assert "[1, 2]" in (folder / "03_answers.html").read_text(), "a parameter goes to the notebooks that have it"
    kept = (folder / "notebooks" / "01_fails.ipynb").read_text()
    assert (json.loads(kept)["metadata"]["ddpm_lab"]["state"], "sizes" in kept) == ("failed", False)
    said = [line.partition("03_answers: ")[2] for line in lines if "03_answers: " in line]
    told = "A planted answer & more (another machine)"
    assert said[1:] == ["set 1 of 6", "set 2 of 6", "compiling, 2 s", "building, 2 s", told]


@pytest.mark.slow
def test_pages_load_nothing_and_begin_with_question_and_answer(made: Made) -> None:
    _, _, folder = made
    for path in folder.glob("*.html"):
        text = path.read_text()
        assert fetched(text) == []
        assert text.count("<h1") == 1
        for image in re.findall("<img [^>]*>", text):
            assert 'src="data:image/png;base64,' in image
            assert re.search('alt="[^"]', image)
        for link in re.findall(r'<a [^>]*href="([^"]*)"', text):
            assert (folder / link).is_file(), f"{path.name} links to {link}, which is missing"
            assert not link.startswith("/"), "the folder may move"
    text, index = (folder / "03_answers.html").read_text(), (folder / "index.html").read_text()
    parts = ("<h1>3. Does 03_answers work?", "A planted answer &amp; more", "data:image/png;")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert 'alt="One grey &lt;pixel&gt;"' in text
    assert all(part in index for part in ("A planted answer &amp; more", PIXEL))
    assert pages.spoken_date("2026-01-03T09:05:00+01:00") == "3 January 2026, 09:05"
    page = pages.Page(name="a", title="b", finding={"evidence": "Ratio 1.2.", "hardware": "CPU"})
    assert page.facts == ["Ratio 1.2", "CPU"]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """In place of executing it, a notebook is copied; the parameters that each was given."""
    given: dict[str, dict[str, Any]] = {}

    def execute(file: Path, target: Path, values: dict[str, Any], **_: Any) -> str:
        given[file.stem] = dict(values)
        target.write_bytes(file.read_bytes())
        return "planted" if "1 / 0" in file.read_text() else ""

    monkeypatch.setattr(report, "execute", execute)
    return given


def test_what_the_notebooks_show_is_measured_first_within_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: dict[str, dict[str, Any]]
) -> None:
    """One of the user's own and the search measure by themselves; what takes long is measured in ``full`` alone."""
    asked: dict[str, Any] = {}

    def measure(questions: dict[str, Any], seconds: float, **_: Any) -> None:
        asked.update(questions=questions, seconds=seconds)

    monkeypatch.setattr(experiments, "measure_all", measure)
    own = write(tmp_path / "10_own.ipynb", "1", parameters="preset = 1  # own")
    names: list[Path | str] = ["amp", "peers", "recommendation", own]
    minutes: dict[str, Any] = {"03_amp": 0, "06_recommendation": None, "07_peers": None, "10_own": None}
    run(names, tmp_path / "smoke", minutes=9)
    assert [*asked["questions"]] == ["amp"]
    assert {name: values.get("minutes") for name, values in copied.items()} == minutes
    run(names, tmp_path / "full", preset="full", minutes=9)
    share = pytest.approx(asked["seconds"] / 2 / 60)
    assert [*asked["questions"]] == ["amp", "peers"]
    shown = {name: values.get("minutes") for name, values in copied.items()}
    assert shown == minutes | {"07_peers": 0, "06_recommendation": share}
    assert 60 * 6 - 4 * report.NOTEBOOK_SECONDS < asked["seconds"] < 60 * 6
    run(["peers"], tmp_path / "now", minutes=9, parameters={"published": False})
    assert [*asked["questions"]] == ["peers"], "within the time too"
    text = next((CHECKOUT / "notebooks").glob("*_amp.ipynb")).read_text()
    (edited := tmp_path / "03_amp.ipynb").write_text(text.replace("batch_size = None", "batch_size = 16"))
    run([edited], tmp_path / "edited", minutes=9)
    assert asked["questions"]["amp"]["global_batch_size"] == 16


@pytest.mark.usefixtures("copied")
def test_pages_of_an_earlier_report_stay_and_are_marked(tmp_path: Path) -> None:
    first, second = write(tmp_path / "01_a.ipynb", ANSWER), write(tmp_path / "02_b.ipynb", "1 / 0")
    run([first], tmp_path / "out")
    result, _ = run([second], tmp_path / "out")
    states = [(page.name, page.state, page.earlier) for page in result.pages.values()]
    assert states == [("01_a", "done", True), ("02_b", "failed", False)]
    assert result.exit_code == 1
    index = (result.folder / "index.html").read_text()
    assert "from an earlier run" in index
    result, _ = run([first], tmp_path / "out")
    assert result.exit_code == 0, "a failure of an earlier report is not one of this report"


def test_wrong_values_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: dict[str, dict[str, Any]]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    for name in ("1.png", "2.png"):
        (tmp_path / "damaged" / name).write_bytes(b"no image")
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"parameters": {"batch": 3}}, ConfigError, "'batch'.*01_a.*minutes"),
        ({"minutes": 0}, ConfigError, "minutes.*0"),
        ({"data": "damaged"}, DataError, r"1\.png"),
        ({"network": "tiny"}, ConfigError, "'network'.*01_a.*minutes"),
        ({"workload": "lab_workloads:own"}, ConfigError, "01_a is about the lab's own trainer, not about lab_work"),
        ({"notebooks": ["03_apm"]}, ConfigError, "'03_apm'.*03_amp"),
        ({"notebooks": ["03_amp"], "preset": "huge"}, ConfigError, "'huge'"),
        ({"notebooks": ["03_amp"], "parameters": {"output_dir": "x"}}, ConfigError, "give it as --output-dir"),
    ]
    notebook = write(tmp_path / "01_a.ipynb")
    for options, error, words in refused:
        with pytest.raises(error, match=words) as caught:
            report.report(**{"notebooks": [notebook], "output_dir": tmp_path / "out", **options})
        assert "\n" not in str(caught.value)
    assert not copied


@pytest.mark.usefixtures("unmeasured")
def test_parameters_are_what_their_cell_assigns(tmp_path: Path, copied: dict[str, dict[str, Any]]) -> None:
    """Also with an equals sign in a comment, without the name of a kernel, and in a folder named in braces."""
    (folder := tmp_path / "{a}").mkdir()
    lines = '%pwd\n!ls\nhere = !ls\ndata = "a#b"  # or data = "folder"\nseed: int = 0\nsizes = [\n    1,  # small\n]'
    notebook = write(folder / "01_a.ipynb", parameters=lines)
    content = json.loads(notebook.read_text())
    notebook.write_text(json.dumps({**content, "metadata": {}}))
    assert report._defaults(notebook) == {"data": "a#b", "seed": 0, "sizes": [1]}
    run([notebook], tmp_path / "out", parameters={"seed": 3})
    assert copied["01_a"] == {"data": "synthetic", "seed": 3}
    with pytest.raises(ConfigError, match=r"01_b\.ipynb: its cell of parameters is not Python"):
        run([write(folder / "01_b.ipynb", parameters="seed = ")], tmp_path / "out")


@pytest.mark.slow
def test_an_executed_notebook_can_be_executed_again(tmp_path: Path) -> None:
    notebook = write(tmp_path / "01_a.ipynb", "print(minutes)")
    for minutes in (1, 2):
        result, _ = run([notebook], tmp_path / "{out}", parameters={"minutes": minutes})
        assert result.exit_code == 0
        notebook = result.folder / "notebooks" / "01_a.ipynb"
    assert [cell.source for cell in load(notebook).cells][1:] == [
        "minutes = None  # budget",
        "# Parameters\nminutes = 2\n",
        "print(minutes)",
    ]


# --- stopped, killed, and the smoke report that was just made --------------------------------------------------------

SLEEP = "import os, time\nprint('began', flush=True)\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(300)"


def begin(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A report in a process of its own with a notebook that sleeps and one after it; also the first one's kernel."""
    write(folder / "02_b.ipynb", SLEEP)
    write(folder / "03_c.ipynb", ANSWER)
    command = [sys.executable, "-m", "ddpm_lab", "report", "--preset", "smoke", "--output-dir", str(folder / "out")]
    command += [word for file in sorted(folder.glob("*.ipynb")) for word in ("--notebook", str(file))]
    started = subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    limit = time.monotonic() + 60
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < limit
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.1)
    return started, psutil.Process(int((folder / "pid").read_text()))


@pytest.mark.slow
def test_a_stop_keeps_what_is_done_and_says_what_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "01_a.ipynb", ANSWER)
    started, kernel = begin(tmp_path)
    os.kill(started.pid, signal.SIGTERM)
    output = started.communicate(timeout=30)[0]
    assert started.returncode == 143, output
    assert "Traceback" not in output
    assert not kernel.is_running()
    index = (tmp_path / "out" / "reports" / "index.html").read_text()
    assert all(part in index for part in ("Not run: 03_c.", 'class="chip failed">stopped', "A planted answer"))
    assert "began" in (tmp_path / "out" / "reports" / "02_b.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif("SMOKE_REPORT" not in os.environ, reason="SMOKE_REPORT is no folder with a smoke report (.ci/run)")
def test_a_smoke_report_is_whole() -> None:
    output = Path(os.environ["SMOKE_REPORT"])
    folder = output / "reports"
    found = [pages.read(load(file), file.stem) for file in sorted((folder / "notebooks").glob(NUMBERED))]
    assert [page.state for page in found] == ["done"] * 9
    assert "<dd>tiny network</dd>" in (folder / "index.html").read_text(), "what was trained is on the first screen"
    findings = {page.name.partition("_")[2]: page.finding for page in found}
    statuses = {findings[name]["status"] for name in ("multi_gpu", "amp", "workers")}
    assert statuses == {"too few sets"}, "one set never gives a verdict"
    assert findings["profile"]["status"] == "answered"
    assert all(findings[name]["published"] for name in ("peers", "quality")), "they take too long to be measured here"
    assert len({f["code_version"] for f in findings.values() if not f["published"] and f["code_version"]}) == 1
    records, damaged = Ledger(output / LEDGER).read()
    assert not damaged
    assert {r.experiment for r in records} == {*findings, "search"} - {"peers", "quality", "claims"}
    ranks = [seen for r in records for seen in r.witness.get("ranks", ())]
    listed = {*FIELDS["witness of a rank"].split(), *MODULES, "host", "nccl_environment"}
    assert {name for seen in ranks for name in seen} <= listed, "each field is published, or private"
    for page in found:
        assert page.image
        assert (output / "image_output" / f"{page.name}.png").is_file()
        assert fetched((folder / f"{page.name}.html").read_text()) == []
    assert list((output / "trace_output").glob("*.json.gz"))


# --- the index ---


def page(experiment: str, headline: str, *, state: str = "done", **finding: Any) -> Page:
    given = {"experiment": experiment, "headline": headline, "status": "answered", "verdict": "faster", **finding}
    return Page(name=experiment, title=experiment, state=state, finding=given)


USE = page("recommendation", "Use bf16")
GOOD = page("amp", "bf16 is 50 % faster", quality="quality not worse (5 seeds)")
WORSE = page("amp", "fp16 is 50 % faster", quality="quality worse (5 seeds)")
SLOWER = page("multi_gpu", "2 ranks are slower", verdict="slower")
OPEN = page("amp", "No clear answer", status="inconclusive", way_out="ddpm-lab run amp")
UNJUDGED = page("torch_compile", "Compiled is faster", quality="quality not measured", way_out="ddpm-lab run")
TOLD = page("recommendation", "Compiled is faster; quality not measured", status="quality not shown", way_out="it")
UNDECIDED = "Compiled is faster; quality not measured: no command decides it yet"
FEW = page("recommendation", "Too few sets", status="too few sets", way_out="make report")
IDLE = page("workers", "2 workers are faster", quality="quality identical (after 20 steps)")

BUSY = [
    replace(page(name, "Busy", status="too few sets", way_out=f"run {name}"), title=f"{name}?")
    for name in ("amp", "workers")
]


@pytest.mark.parametrize(
    ("pages", "found"),
    [
        ([page("amp", "bf16 is slower", verdict="slower", published=True)], []),
        ([GOOD, USE], [("Use", ["bf16"])]),
        ([GOOD], [("Faster", ["bf16 is 50 % faster; quality not worse (5 seeds)"])]),
        ([IDLE, USE], [("Use", ["bf16"]), ("Faster", ["2 workers are faster; quality identical (after 20 steps)"])]),
        ([WORSE, USE], [("Use", ["bf16"]), ("Costs quality", ["fp16 is 50 % faster; quality worse (5 seeds)"])]),
        ([SLOWER, USE], [("Use", ["bf16"]), ("No gain", ["2 ranks are slower"])]),
        ([UNJUDGED, USE], [("Use", ["bf16"]), ("Open", ["Compiled is faster; quality not measured: ddpm-lab run"])]),
        ([replace(UNJUDGED, finding={**UNJUDGED.finding, "way_out": ""})], [("Open", [UNDECIDED])]),
        ([UNJUDGED, TOLD], [("Open", ["Compiled is faster; quality not measured: it"])]),
        ([OPEN], [("Open", ["No clear answer: ddpm-lab run amp"])]),
        ([FEW, *BUSY], [("Open", ["Too few sets: make report", "amp? Busy: run amp", "workers? Busy: run workers"])]),
        ([page("exchange", "Every candidate failed", status="failed")], [("Open", ["Every candidate failed"])]),
        ([FEW], [("Open", ["Too few sets: make report"])]),
        ([replace(SLOWER, state=state) for state in ("failed", "stopped", "not run")], []),
        ([page(name, "?", verdict="slower") for name in ("profile", "claims", "peers", "quality")], []),
        ([replace(USE, earlier=True), SLOWER], [("No gain", ["2 ranks are slower"])]),
    ],
)
def test_what_to_use_what_gains_nothing_and_what_is_open(pages: list[Page], found: list[Any]) -> None:
    assert answers(pages) == found


def test_no_line_ends_within_an_option_of_a_command(tmp_path: Path) -> None:
    way = "ddpm-lab run amp --network seed"
    write_index([replace(OPEN, finding={**OPEN.finding, "way_out": way})], tmp_path / "index.html")
    assert "No clear answer: ddpm-lab run amp <span>--network</span> seed</dd>" in (tmp_path / "index.html").read_text()


def test_a_printed_table_is_not_cut_off() -> None:
    """A table scrolls by its own style, before which on paper only what is important goes."""
    assert 'class="scroll" style="overflow-x: auto"' in html([{"Speed": "1"}])
    printed = (pages.TEMPLATES / "style.css").read_text().partition("@media print")[2]
    assert ".scroll { overflow-x: visible !important; }" in printed


def test_a_figure_scrolls_where_its_words_would_be_too_small() -> None:
    narrow = (pages.TEMPLATES / "style.css").read_text().partition("(max-width: 40rem)")[2].partition("@media")[0]
    assert ".figure { overflow-x: auto; }" in narrow
    assert ".figure img { width: 42rem; max-width: none; }" in narrow


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({}, "answered"),
        ({"hardware": "That GPU"}, "another machine"),
        ({"hardware": "That GPU", "published": True}, "published"),
        ({"status": "not measured"}, "not measured"),
    ],
)
def test_only_an_answer_of_this_machine_is_green(values: dict[str, Any], status: str) -> None:
    given = {"hardware": "This CPU", "verdict": "slower", **values}
    found = replace(page("amp", "bf16 is slower", **given), here="This CPU")
    assert (found.status, found.kind == "answered") == (status, status == "answered")
    assert (answers([found]) == []) == (status in ("another machine", "published"))


# --- the numbered notebooks ---

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

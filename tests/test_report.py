"""Notebooks run headlessly: what is published, what is refused, and what a stop or a death leaves."""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.data.folder import DataError
from ddpm_lab.explain import pages
from ddpm_lab.explain.pages import Page
from ddpm_lab.files import CHECKOUT
from ddpm_lab.measure import hardware
from ddpm_lab.questions import agenda
from ddpm_lab.questions.planning import Measured, Planned
from ddpm_lab.reports import report
from ddpm_lab.reports.notebooks import NUMBERED, NotebookError

v4: Any = nbformat.v4
MEASURE = agenda.measure
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
HERE = hardware.machine().name
ANSWER = f"""from IPython.display import display
display({{"image/png": "{PIXEL}"}}, metadata={{"image/png": {{"alt": "One grey <pixel>"}}}}, raw=True)
display({{"text/html": "<table><tr><td>1</td></tr></table>"}}, raw=True)
display(
    {{"text/markdown": "**Planted** answer"}},
    metadata={{"ddpm_lab": {{"status": "answered", "headline": "A planted answer & more", "hardware": "{HERE}"}}}},
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


def run(files: Sequence[Path | str], output: Path, **options: Any) -> tuple[report.ReportResult, list[str]]:
    lines: list[str] = []
    options = {"preset": "smoke", "progress": lines.append, **options}
    return report.report(notebooks=list(files), output_dir=output, **options), lines


class Loads(html.parser.HTMLParser):
    """Everything that a browser would fetch, each image, and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = re.findall(r"url\(|@import", text)
        self.images: list[dict[str, str | None]] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "img":
            self.images.append(values)
        if tag == "a":
            self.links.append(values.get("href") or "")
        elif tag == "script":
            self.fetched.append("script")
        else:
            places = [values.get(name) or "" for name in ("src", "href", "srcset", "data", "poster", "action")]
            self.fetched += [place for place in places if place and not place.startswith("data:")]


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Nothing is measured for notebooks that are thrown away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agenda, "measure", lambda *_, **__: 0)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[report.ReportResult, list[str], Path]:
    """A report of a notebook that answers, one that fails, one whose kernel dies, and one after them."""
    folder = tmp_path_factory.mktemp("report")
    files = [
        write(folder / "01_answers.ipynb", SAY, ANSWER),
        write(
            folder / "02_fails.ipynb", "print('before')", "raise ValueError('planted <b>failure</b>')", "print('no')"
        ),
        write(folder / "03_dies.ipynb", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
        write(folder / "04_after.ipynb", "print(minutes)", ANSWER),
    ]
    result, lines = run(files, folder / "out")
    return result, lines, folder / "out" / "reports"


Made = tuple[report.ReportResult, list[str], Path]


def test_a_failure_is_published_and_the_others_go_on(made: Made) -> None:
    result, _, folder = made
    states = {page.name: page.state for page in result.pages}
    assert states == {"01_answers": "done", "02_fails": "failed", "03_dies": "failed", "04_after": "done"}
    assert result.exit_code == 1
    assert not result.stopped
    failed = (folder / "02_fails.html").read_text()
    assert "planted &lt;b&gt;failure" in failed
    assert "before" in failed
    assert "kernel died" in (folder / "03_dies.html").read_text()
    index = (folder / "index.html").read_text()
    assert "ValueError: planted &lt;b&gt;failure&lt;/b&gt;" in index
    assert index.count('class="chip failed">failed') == 2


def test_pages_make_no_request_and_describe_their_images(made: Made) -> None:
    _, _, folder = made
    for path in folder.glob("*.html"):
        page = Loads(path.read_text())
        assert page.fetched == []
        assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.images)
        assert all(image.get("alt") for image in page.images)
        assert ("html", {"lang": "en"}) in page.tags
        assert sum(tag == "h1" for tag, _ in page.tags) == 1
        assert path.stat().st_size < 500_000
        for link in page.links:
            assert (folder / link).is_file(), f"{path.name} links to {link}, which is missing"
    assert 'alt="One grey &lt;pixel&gt;"' in (folder / "01_answers.html").read_text()


def test_question_and_answer_come_first(made: Made) -> None:
    _, _, folder = made
    text = (folder / "01_answers.html").read_text()
    places = [
        text.index(part) for part in ("<h1>1. Does 01_answers work?", "A planted answer &amp; more", "data:image/png;")
    ]
    assert places == sorted(places)
    assert "<title>1. Does 01_answers work?</title>" in text
    index = (folder / "index.html").read_text()
    assert "A planted answer &amp; more" in index
    assert PIXEL in index
    assert HERE in index


def test_progress_of_the_kernel_passes_through(made: Made) -> None:
    _, lines, _ = made
    said = [re.sub(r"^\[[\d:]+\] ", "", line) for line in lines]
    assert said.index("01_answers: set 1 of 6") < said.index("01_answers: set 2 of 6")
    assert said.index("01_answers: set 2 of 6") < said.index("01_answers: A planted answer & more")
    assert "01_answers: compiling, 2 s" in said
    assert "01_answers: compiling, 4 s" not in said, "a heartbeat is not repeated every two seconds"
    assert "01_answers: building, 2 s" in said
    assert said[-1].startswith("report: ")


def test_executed_notebooks_keep_their_outputs(made: Made) -> None:
    _, _, folder = made
    text = (folder / "notebooks" / "02_fails.ipynb").read_text()
    notebook = json.loads(text)
    assert notebook["metadata"]["ddpm_lab"]["state"] == "failed"
    assert "before" in text


def test_what_the_notebooks_show_is_measured_first_within_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(agenda, "measure", lambda questions, **given: asked.update(given, questions=questions))
    files = [write(tmp_path / f"0{i}_{name}.ipynb", "print(minutes)") for i, name in enumerate(("amp", "workers"), 1)]
    files.append(write(tmp_path / "03_own.ipynb", "print(1)", parameters="preset = 'quick'  # sizes"))
    result, _ = run(files, tmp_path / "out", minutes=2)
    assert result.exit_code == 0
    assert list(asked["questions"]) == ["amp", "workers"], "the third has no minutes, and measures by itself"
    assert 0 < asked["seconds"] <= 120 - 3 * report.NOTEBOOK_SECONDS
    shown = [
        p for p in (result.index.parent / "notebooks").glob("*.ipynb") if re.search(r"minutes = 0\b", p.read_text())
    ]
    assert sorted(path.stem for path in shown) == ["01_amp", "02_workers"], "they show what was measured before them"


def test_questions_that_take_long_are_measured_in_full_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {}

    def execute(file: Path, target: Path, *_: Any, **__: Any) -> None:
        nbformat.write(nbformat.read(file, as_version=4), target)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(report, "execute", execute)
    for preset in ("smoke", "full"):
        names = asked.setdefault(preset, set())
        monkeypatch.setattr(agenda, "measure", lambda questions, names=names, **_: names.update(questions))
        report.report(preset=preset, minutes=2, output_dir=tmp_path / preset, progress=lambda _: None)
    assert asked["full"] - asked["smoke"] == {name.partition("_")[2] for name in report.LONG} - {"recommendation"}
    numbered = {path.stem.partition("_")[2] for path in (CHECKOUT / "notebooks").glob(NUMBERED)}
    assert asked["full"] <= numbered


Asked = dict[str, float]


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> tuple[Asked, Asked]:
    """Reports whose questions are planned, and not measured: seconds of each, and the minutes of each notebook."""
    asked: Asked = {}
    minutes: Asked = {}

    def measure(planned: Planned, *, seconds: float, **_: Any) -> Measured:
        asked.setdefault(planned.campaign.experiment.name, seconds)
        return planned.result()

    def execute(file: Path, target: Path, values: dict[str, Any], **_: Any) -> None:
        minutes[file.stem] = values["minutes"]
        nbformat.write(nbformat.read(file, as_version=4), target)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(agenda, "measure", MEASURE)
    monkeypatch.setattr(Planned, "measure", measure)
    monkeypatch.setattr(report, "execute", execute)
    return asked, minutes


def test_a_full_report_asks_the_questions_and_leaves_the_search_its_share(
    tmp_path: Path, planning: tuple[Asked, Asked]
) -> None:
    seconds, minutes = planning
    run(["03_amp", "06_recommendation"], tmp_path, preset="full", minutes=60, parameters={"device": "cpu"})
    assert list(seconds) == ["amp"]
    assert 0 < seconds["amp"] < 30 * 60 * agenda.PRIMARY_SHARE
    assert minutes["03_amp"] == 0
    assert 28 < minutes["06_recommendation"] < 30


def test_too_little_time_for_one_comparison_is_refused_before_anything_is_measured(
    tmp_path: Path, planning: tuple[Asked, Asked]
) -> None:
    seconds, minutes = planning
    words = r"^minutes is 0.1, and the pages take 0.1: beside them 4 sets of the primary comparison take about 0.2 min"
    with pytest.raises(report.ReportError, match=words):
        run(["03_amp"], tmp_path, preset="quick", minutes=0.1, parameters={"device": "cpu"})
    assert not seconds
    assert not minutes


def test_the_report_ends_with_its_answers(made: Made) -> None:
    result, lines, folder = made
    told = [f"{name}: {'; '.join(found)}" for name, found in pages.answers(result.pages)]
    assert told
    assert lines[-1 - len(told) : -1] == told
    index = Loads((folder / "index.html").read_text())
    assert index.images


@pytest.mark.slow
def test_pages_of_an_earlier_report_stay_and_are_marked(tmp_path: Path) -> None:
    first, second = write(tmp_path / "01_a.ipynb", ANSWER), write(tmp_path / "02_b.ipynb", "1 / 0")
    run([first], tmp_path / "out")
    result, _ = run([second], tmp_path / "out")
    assert [(page.name, page.state, page.earlier) for page in result.pages] == [
        ("01_a", "done", True),
        ("02_b", "failed", False),
    ]
    assert result.exit_code == 1
    assert "from an earlier run" in result.index.read_text()
    result, _ = run([first], tmp_path / "out")
    assert result.exit_code == 0, "a failure of an earlier report is not one of this report"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"parameters": {"batch": 3}}, NotebookError, ["'batch'", "01_a", "minutes"]),
        ({"preset": "huge"}, ConfigError, ["'huge'", "quick"]),
        ({"minutes": 0}, report.ReportError, ["minutes", "0"]),
        ({"data": "no/such/folder"}, DataError, ["no/such/folder"]),
        ({"held_out": "empty"}, DataError, ["no PNG or JPEG images", "empty"]),
    ],
)
def test_wrong_values_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(error) as caught:
        run([write(tmp_path / "01_a.ipynb", "open('started', 'w')")], tmp_path / "out", **options)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_damaged_image_is_refused_before_the_first_notebook(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("1.png", "2.png"):
        (tmp_path / "images" / name).write_bytes(b"no image")
    notebook = write(tmp_path / "01_a.ipynb", "open('started', 'w')")
    with pytest.raises(DataError, match=r"1\.png"):
        run([notebook], tmp_path / "out", data=str(tmp_path / "images"))
    assert not list((tmp_path / "out").rglob("*.html"))


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file in the way")
    with pytest.raises(report.ReportError, match=r"cannot write to .*out.*; choose another output folder"):
        run([write(tmp_path / "01_a.ipynb")], tmp_path / "out")


def test_a_notebook_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match=r"'03_apm'.*03_amp"):
        report.report(notebooks=["03_apm"], output_dir=tmp_path)
    with pytest.raises(NotebookError, match=r"none\.ipynb"):
        report.report(notebooks=[tmp_path / "none.ipynb"], output_dir=tmp_path)


@pytest.mark.slow
def test_a_parameter_goes_to_the_notebooks_that_have_it(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "01_a.ipynb", "print(sizes)", parameters="sizes = None  # sizes"),
        write(tmp_path / "02_b.ipynb", "print('b')"),
    ]
    result, _ = run(files, tmp_path / "out", parameters={"sizes": [1, 2]})
    assert result.exit_code == 0
    assert "[1, 2]" in (tmp_path / "out" / "reports" / "01_a.html").read_text()
    assert "sizes" not in (tmp_path / "out" / "reports" / "notebooks" / "02_b.ipynb").read_text()


def test_the_state_of_a_page_is_what_its_chip_says() -> None:
    def page(state: str, **finding: str) -> Page:
        return Page(name="01_a", title="?", state=state, finding=finding)

    chips = [
        (page("not run"), "not run", "idle"),
        (page("done", status="answered"), "answered", "answered"),
        (page("done", status="inconclusive"), "inconclusive", "unresolved"),
        (page("done"), "no answer", "unresolved"),
        (page("failed", status="answered"), "failed", "failed"),
        (page("stopped"), "stopped", "failed"),
    ]
    assert [(p.status, p.kind) for p, _, _ in chips] == [(status, kind) for _, status, kind in chips]


def test_the_index_loses_nothing_when_the_folder_moves(made: Made) -> None:
    _, _, folder = made
    text = (folder / "index.html").read_text()
    assert str(folder) not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert all(not link.startswith(("/", "file:")) for link in Loads(text).links)


def test_dates_are_written_for_people() -> None:
    assert pages.spoken_date("2026-01-03T09:05:00+01:00") == "3 January 2026, 09:05"
    assert pages.spoken_date("2026-01-03") == "3 January 2026"
    assert pages.spoken_date("") == ""

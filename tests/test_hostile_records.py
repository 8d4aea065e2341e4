"""Records come from strangers too: what they hold is text on every page, never markup, and no page runs or fetches."""

import base64
import html.parser
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
import records as make
from bottleneck_records import profiled, told
from drawn_studies import STUDIES
from scaled_records import paired
from test_report import PIXEL

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import pages, show
from ddpm_lab.explain.selection import Study
from ddpm_lab.ledger import _values
from ddpm_lab.questions import bottleneck
from ddpm_lab.questions.ask import answer
from ddpm_lab.record import RunRecord
from ddpm_lab.reports import benchmark

v4: Any = nbformat.v4
POLICY = r"<meta [^>]*Content-Security-Policy[^>]*>"
HOSTILE = (
    """"><img src=x onerror="document.title='run'"><script>document.title="run"</script>' $<b>x</b>$ \\(<i>y</i>\\) """
    "&lt;u&gt; **b** `c`<s>` [a](javascript:alert(1)) ![p](//example.org/p) <//example.org> ]|<!--"
    "\n\n# h\n\n- i\n\n<p>\x1b[2J\u202e"
)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""


def everywhere(value: Any) -> Any:
    """Every text in ``value`` made hostile; endings stay, since the lab ends names of its own with marks."""
    if isinstance(value, dict):
        return {key: everywhere(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [everywhere(each) for each in value]
    return HOSTILE + value if isinstance(value, str) else value


def hostile(record: RunRecord) -> RunRecord:
    """A record whose free texts are hostile; names that the lab chose, such as a status, stay."""
    values = record.as_dict()
    machine, environment = values["environment"].pop("machine"), values["environment"]
    dated = {name: environment[name] for name in ("ram_bytes", "load_before", "date")}
    values |= {name: everywhere(values[name]) for name in ("family", "label", "data_name", "reason")}
    values["environment"] = {**everywhere(environment), **dated, "machine": everywhere(machine)}
    for rank in values["ranks"]:
        rank["device"] = everywhere(rank["device"])
    if record.profile and "operators" in record.profile:
        values["profile"] = {**record.profile, "operators": everywhere(record.profile["operators"])}
    return RunRecord.from_dict(_values(json.dumps(values).encode()))  # as it is read from a ledger


def made_hostile(study: Study) -> Study:
    names = ("records", "trials", "beside", "looks")
    parts: dict[str, Any] = {name: tuple(map(hostile, getattr(study, name))) for name in names}
    return replace(study, **parts)


class Markup(html.parser.HTMLParser):
    """The elements of a page, each with the names of its attributes, and where its links and images lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.comments: list[str] = []
        self.places: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag, tuple(sorted(name for name, _ in attrs))] += 1
        self.places += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def same_markup(harmless: str, attacked: str) -> None:
    """Assert that hostile texts have added no element, attribute, comment or link to a page."""
    expected, found = Markup(harmless), Markup(attacked)
    assert (found.elements, found.comments) == (expected.elements, [])
    assert {place for place in found.places if not place.startswith("data:image/png;")} <= set(expected.places)
    assert not any(tag == "script" or any(name.startswith("on") for name in names) for tag, names in found.elements)
    assert found.elements["meta", ("content", "http-equiv")] == 1


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Study], Any]:
    """Makes the notebook of a study, as its kernel leaves it."""
    outputs: list[Any] = []

    def display(data: Any, metadata: Any = None) -> None:
        outputs.append(v4.new_output("display_data", data=dict(data), metadata=dict(metadata or {})))

    def make_notebook(study: Study) -> Any:
        outputs.clear()
        shown = answer(replace(study, output_dir=tmp_path))
        for part in (show.figure, show.table, show.finding, show.more):
            part(shown)
        cells = [v4.new_markdown_cell("# 1. Which?"), v4.new_code_cell("show()", outputs=list(outputs))]
        return v4.new_notebook(cells=cells, metadata={"ddpm_lab": {"state": "done"}})

    monkeypatch.setattr(show, "_display", display)
    (tmp_path / "image_output").mkdir()
    monkeypatch.setattr(show, "save", lambda _, path: path.write_bytes(base64.b64decode(PIXEL)))
    return make_notebook


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) for n in ("loader", "profile", "recommendation, searched")]
    + ["quality, with FIDs"],
)
def test_a_page_and_the_index_show_hostile_records_as_text(
    name: str, notebook: Callable[[Study], Any], tmp_path: Path
) -> None:
    study, texts = STUDIES[name](), []
    paths = [tmp_path / file for file in ("01_which.html", "index.html")]
    for each, said in ((study, "said"), (made_hostile(study), HOSTILE)):
        of = notebook(each)
        page = pages.read(of, "01_which")
        pages.write_page(page, of, paths[0])
        failed = pages.Page(name="x", title=said, state="failed", error=said, image=PIXEL, alt=said)
        given: dict[str, Any] = {"subject": said, "facts": {said: each.hardware}, "notice": said, "command": said}
        pages.write_index([page, failed], paths[1], **given)
        texts.append([path.read_text() for path in paths])
    for harmless, attacked in zip(*texts, strict=True):
        same_markup(harmless, attacked)
    assert all("&lt;script&gt;" in text for text in texts[1]), "the hostile names are shown"


def test_a_report_in_markdown_runs_nothing(tmp_path: Path) -> None:
    """What Markdown makes of a name may be bold or a link to the web; it may be no HTML and run nothing."""
    config = RunConfig(global_batch_size=8)
    changed = told(config, {"bf16": (replace(config, precision="bf16"), 1.4)})
    budget = make.study([profiled(config, {"data": 60.0, "forward": 40.0}), *changed], "profile")
    reports: list[tuple[Study, Callable[[Study], str]]] = [
        (paired({64: 1.6, 128: 1.05}, {32: 6.45}), benchmark.report),
        (budget, bottleneck.markdown),
    ]
    for study, text in reports:
        found = []
        for each in (study, made_hostile(study)):
            pages.write_markdown(text(each), tmp_path / "report.html")
            found.append((tmp_path / "report.html").read_text())
        same_markup(*found)


def ran(page: Path) -> bool:
    """Whether a script of a page changed its title in a real browser."""
    how = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom")
    done = subprocess.run([BROWSER, *how, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "</html>" in done.stdout, done.stderr
    return "<title>run</title>" in done.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # of names that long
@pytest.mark.skipif(not BROWSER, reason="there is no browser: install chromium")
def test_no_page_runs_what_records_hold_in_a_browser(notebook: Callable[[Study], Any], tmp_path: Path) -> None:
    """Escaping holds without the policy, and the policy without escaping."""
    folder = tmp_path / "pages"
    folder.mkdir()
    of = notebook(made_hostile(STUDIES["quality, with FIDs"]()))
    page = pages.read(of, "quality")
    pages.write_page(page, of, folder / "quality.html")
    pages.write_index([page], folder / "index.html", subject=HOSTILE, facts={HOSTILE: HOSTILE}, command=HOSTILE)
    pages.write_markdown(benchmark.report(made_hostile(paired({64: 1.6}, {}))), folder / "benchmark.html")
    for file in sorted(folder.glob("*.html")):
        text = file.read_text()
        assert "example.org" in text, "the hostile names are shown"
        assert len(re.findall(POLICY, text)) == 1
        file.write_text(re.sub(POLICY, "", text))
        assert not ran(file), file.name
    (policy,) = re.findall(POLICY, text)
    for head, expected in (("", True), (policy, False)):
        (folder / "unescaped.html").write_text(f"{head}<title>x</title>{HOSTILE}")
        assert ran(folder / "unescaped.html") == expected

"""S003's report: its columns, computed sentences, and a page that stands alone."""

from __future__ import annotations

import base64
import html.parser
import re
from pathlib import Path

import pytest
from paired_records import alone, family, paired
from records import study

from ddpm_lab.explain import comparison_report, figure_dashboard, figure_style, pages
from ddpm_lab.explain.bands import documents
from ddpm_lab.explain.frames import Study

SHARED = {256: 1.6, 128: 1.05, 64: 0.8}


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown text, head first, without the line below it."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    rows = [[[c.strip() for c in line.strip("|").split("|")] for line in b.splitlines()] for b in blocks]
    return [[head, *rest] for head, _, *rest in rows]


def test_the_columns_of_s003_and_what_stands_behind_them() -> None:
    text = comparison_report.report(paired(SHARED, {32: 6.45}, set_noise=0.001))
    strong, weak = tables(text)
    assert strong[0][:5] == ["Batch Size", "Single GPU", "Multi GPU", "Speedup", "Recommendation"]
    assert strong[0][5:] == ["95 % interval", "Sets", "Quality"]
    assert [row[0] for row in strong[1:]] == ["64", "128", "256"]
    assert [row[4] for row in strong[1:]] == ["single GPU preferred", "marginal difference", "multi-GPU beneficial"]
    assert re.match(r"1\.(59|60|61)x", strong[3][3])
    assert {(row[6], row[7]) for row in strong[1:]} == {("6", "not measured")}
    assert weak[1][:2] == ["32", "256"]
    assert re.match(r"8\d % \(good by S000, 8\d to 8\d %\)", weak[1][5])
    assert "# 1 GPU against 8 GPUs: seed" in text
    assert all(part in text for part in ("Example GPU X", "2026-01-03", "6 sets", "against itself"))


def test_the_mean_is_geometric_and_says_so() -> None:
    text = comparison_report.report(paired({64: 2.0, 128: 0.5}, {}, set_noise=0.001))
    assert re.search(r"Geometric mean speed-up of 8 GPUs over 2 batch sizes: (1\.00|0\.99|1\.01)x", text)
    assert "S003's mean speed-up is arithmetic" in text


def test_the_conclusion_is_computed() -> None:
    text = comparison_report.report(paired(SHARED, {32: 6.45}, set_noise=0.001))
    assert (
        "single GPU preferred at batch 64; marginal difference at batch 128; multi-GPU beneficial at batch 256" in text
    )
    unresolved = comparison_report.report(paired({64: 1.6}, {}, count=3))
    assert "**Conclusion.** With the batch shared: too few sets at batch 64." in unresolved
    assert "multi-GPU beneficial at" not in unresolved


def test_cpu_ranks_are_never_called_gpus() -> None:
    text = comparison_report.report(paired({16: 1.1}, {8: 1.2}, device="cpu", ranks=2), "gpu_benchmark_comparison.png")
    published = documents("S000", "S003")
    assert published in text
    for allowed in (
        published,
        "2 cores, no GPU",
        "`ddpm-lab run multi_gpu`",
        "gpu_benchmark_comparison.png",
        "ranks or GPUs",
    ):
        text = text.replace(allowed, "")
    assert "gpu" not in text.lower()
    assert tables(text)[0][0][:3] == ["Batch Size", "Single CPU rank", "Several CPU ranks"]


def test_a_failure_is_a_cell_with_its_reason() -> None:
    both = [*family(64, 1.6), *family(128, 1.0, failed=("oom", "a | b <c>"))]
    text = comparison_report.report(study(both))
    row = re.search(r"^\| 128 .*$", text, re.MULTILINE)
    assert row is not None
    assert "out of memory: a \\| b \\<c\\>" in row[0]


@pytest.mark.parametrize("answer", [alone(single=True), alone(single=False)])
def test_one_side_alone_is_no_comparison(answer: Study) -> None:
    assert "Nothing was compared: not measured." in comparison_report.report(answer)


class Reader(html.parser.HTMLParser):
    """Collects tags, and fails on one that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("img", "meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_file_that_shows_the_same(tmp_path: Path) -> None:
    answer = study([*family(64, 1.6), *family(128, 1.0, failed=("oom", "a <script>alert(1)</script>"))])
    figure_style.save(figure_dashboard.dashboard(answer), tmp_path / "figure.png")
    pages.write_markdown(comparison_report.report(answer, "figure.png"), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    tags = [tag for tag, _ in reader.seen]
    assert "script" not in tags
    assert tags.count("table") == 1
    assert tags.count("tr") == 3
    assert "<title>1 GPU against 8 GPUs: seed</title>" in text
    (image,) = [attrs for tag, attrs in reader.seen if tag == "img"]
    source = image["src"] or ""
    assert base64.b64decode(source.partition("base64,")[2]) == (tmp_path / "figure.png").read_bytes()
    assert image["alt"]
    pages.write_markdown("# Title\n\n<script>alert(1)</script> and <b>bold</b>\n", tmp_path / "own.html")
    assert "&lt;script&gt;" in (tmp_path / "own.html").read_text()
    assert "://" not in re.sub(r"data:[^\"]+", "", text), "the page asks for nothing"

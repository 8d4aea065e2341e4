"""What a notebook shows of a study, and what the report can read back from it."""

from __future__ import annotations

import base64
import html.parser
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from records import drew, sets, study, time_budget, trials

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import findings, show, tables
from ddpm_lab.explain.frames import Study

BASE = RunConfig()


@pytest.fixture
def amp(tmp_path: Path) -> Study:
    failed = {"fp16": (replace(BASE, seed=1), "unsupported", "a <GPU> is missing & needed")}
    found = study(sets({"bf16": (replace(BASE, precision="bf16"), 1.62)}, failures=failed))
    return replace(found, output_dir=tmp_path)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def shown(function: Any, of: Study) -> list[Any]:
    with capture_output() as captured:
        function(of)
    assert captured.stdout == ""
    return list(captured.outputs)


@pytest.mark.usefixtures("shell")
def test_the_figure_is_shown_with_its_text_alternative_and_written(amp: Study) -> None:
    (output,) = shown(show.figure, amp)
    image = base64.b64decode(output.data["image/png"])
    assert image == (amp.output_dir / "image_output" / "03_amp.png").read_bytes()
    width, height = struct.unpack(">II", image[16:24])
    assert min(width, height) > 300
    assert "bf16" in output.metadata["image/png"]["alt"]


@pytest.mark.usefixtures("shell")
def test_further_figures_have_a_line_and_a_file_each(amp: Study) -> None:
    outputs = shown(show.more, amp)
    lines, images = outputs[::2], outputs[1::2]
    assert lines
    assert all(line.data["text/markdown"] for line in lines)
    assert all(image.metadata["image/png"]["alt"] for image in images)
    assert len(list((amp.output_dir / "image_output").glob("03_amp_*.png"))) == len(images)


@pytest.mark.usefixtures("shell")
def test_a_quality_that_is_not_measured_comes_with_its_command(amp: Study) -> None:
    said = shown(show.finding, amp)[0].data["text/plain"]
    assert "- Quality: not measured; ddpm-lab run amp --seeds 8 measures it" in said
    own = replace(amp, records=tuple(replace(r, data_name="500 images from my/photos") for r in amp.records))
    assert "ddpm-lab run amp --seeds 8 --data DATA measures it" in shown(show.finding, own)[0].data["text/plain"]
    judged = replace(amp, trials=tuple(trials({"bf16": (replace(BASE, precision="bf16"), 0.0)})))
    said = shown(show.finding, judged)[0].data["text/plain"] + "\n"
    assert "- Quality: not worse after 8,000 images (8 seeds)\n" in said
    nothing = study(sets({}, failures={"bf16": (replace(BASE, precision="bf16"), "crashed", "gone")}))
    assert "--seeds" not in shown(show.finding, replace(nothing, output_dir=amp.output_dir))[0].data["text/plain"]


@pytest.mark.usefixtures("shell")
def test_the_table_says_what_a_verdict_rests_on(amp: Study) -> None:
    judged = replace(amp, trials=tuple(trials({"bf16": (replace(BASE, precision="bf16"), 0.0)})))
    (row,) = (r for r in tables.table(judged).to_dict("records") if r["Configuration"] == "bf16")
    assert row["Quality"] == "not worse after 8,000 images (8 seeds)"
    assert " to " in row["Loss difference (90 % interval)"]
    assert row["Margin"].endswith(" % of the images")
    assert "Margin" not in tables.table(amp), "a column without a value"
    assert "quality: bf16 not worse after 8,000 images (8 seeds; loss " in findings.finding(judged).claim
    further = [o.data["text/plain"] for o in shown(show.more, judged)]
    assert any(text.startswith("Quality beside speed") for text in further)
    assert any(text.startswith("Held-out and training loss on the way") for text in further)


@pytest.mark.usefixtures("shell")
def test_traces_are_named_where_they_are(tmp_path: Path) -> None:
    found = replace(study([time_budget()], "profile"), output_dir=tmp_path)
    assert "Chrome traces" not in shown(show.more, found)[-1].data["text/plain"]
    (tmp_path / "trace_output").mkdir()
    (tmp_path / "trace_output" / "trace.json.gz").touch()
    said = shown(show.more, found)[-1].data["text/plain"]
    assert said.startswith("Chrome traces")
    assert said.endswith("trace_output/trace.json.gz")
    assert "ui.perfetto.dev" in said


class Table(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[list[str]]] = []  # rows of [text, style]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append(["", dict(attrs).get("style") or ""])

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1][0] += data


@pytest.mark.usefixtures("shell")
def test_the_table_holds_every_cell_with_numbers_to_the_right(amp: Study) -> None:
    (output,) = shown(show.table, amp)
    frame = tables.table(amp)
    head, *body = (row for row in Table(output.data["text/html"]).rows if row)
    assert [cell[0].strip() for cell in head] == list(frame.columns)
    assert [["".join(cell[0].split()) for cell in row] for row in body] == [
        ["".join(str(value).split()) for value in row] for row in frame.to_numpy().tolist()
    ]
    sides = {cell[0].strip(): cell[1] for cell in head}
    assert "right" in sides["Speed"]
    assert "right" in sides["Images/s"]
    assert "left" in sides["Configuration"]
    assert "left" in sides["Verdict"]


@pytest.mark.usefixtures("shell")
def test_the_finding_carries_what_the_index_reads(amp: Study) -> None:
    (output,) = shown(show.finding, amp)
    found = findings.finding(amp)
    values = output.metadata["ddpm_lab"]
    assert {name: values[name] for name in ("headline", "claim", "verdict", "status", "hardware", "sets")} == {
        name: getattr(found, name) for name in ("headline", "claim", "verdict", "status", "hardware", "sets")
    }
    text = output.data["text/markdown"]
    for part in (found.headline, "faster", found.hardware, "3 January 2026", "6", "not measured"):
        assert part in text


@pytest.mark.usefixtures("shell")
def test_names_with_marks_of_markdown_are_shown_as_they_are(amp: Study) -> None:
    records = [replace(r, label="1_b_*c*<i>") if r.role == "candidate" and r.status == "ok" else r for r in amp.records]
    (output,) = shown(show.finding, replace(amp, records=tuple(records)))
    assert r"1\_b\_\*c\*\<i\>" in output.data["text/markdown"]


@pytest.mark.slow
def test_outside_a_notebook_the_text_is_printed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from dataclasses import replace; from pathlib import Path\n"
        "from records import sets, study; from ddpm_lab.config import RunConfig; from ddpm_lab.explain import show\n"
        "s = study(sets({'bf16': (replace(RunConfig(), precision='bf16'), 1.62)}))\n"
        "show.finding(replace(s, output_dir=Path(sys.argv[2])))\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "bf16 is 62 % faster than fp32." in done.stdout
    assert done.stderr == ""


@pytest.mark.usefixtures("shell")
def test_names_that_begin_with_a_digit_are_words(tmp_path: Path) -> None:
    two = {"2 ranks": (replace(BASE, world_size=2), 1.1)}
    ranks = study(sets(two, baseline_label="1 rank", experiment="multi_gpu"))
    (output,) = shown(show.table, replace(ranks, output_dir=tmp_path))
    sides = {cell[0].strip(): cell[1] for cell in Table(output.data["text/html"]).rows[0]}
    assert "left" in sides["Configuration"]
    assert "right" in sides["Speed"]


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize(
    ("fid", "words"), [(None, "not measured: give --inception FILE"), (98.76, "fp32 98.8 (2,500 images), bf16 98.8")]
)
def test_a_page_says_its_fid_or_what_is_missing(tmp_path: Path, fid: float | None, words: str) -> None:
    bf16, images = replace(BASE, precision="bf16"), np.zeros((2, 8, 8, 3), dtype=np.uint8)
    timed = study(sets({"bf16": (bf16, 1.62)}, experiment="quality"), "quality")
    tried = tuple(drew(r, images, fid=fid) for r in trials({"bf16": (bf16, 0.0)}))
    (output,) = shown(show.finding, replace(timed, trials=tried, output_dir=tmp_path))
    assert f"- FID: {words}" in output.data["text/plain"]

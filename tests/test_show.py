"""What a notebook shows of a study, and what the report can read back from it."""

import base64
import html
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from jupyter_client.manager import start_new_kernel
from records import sets, study, time_budget, trials

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import show, table
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions.ask import answer

BASE = RunConfig()


@pytest.fixture
def amp(tmp_path: Path) -> Study:
    failed = {"fp16": (replace(BASE, seed=1), "unsupported", "a <GPU> is missing & needed")}
    found = study(sets({"bf16": (replace(BASE, precision="bf16"), 1.62)}, baseline_label="32 bits", failures=failed))
    return replace(found, output_dir=tmp_path)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def shown(function: Any, of: Study) -> list[Any]:
    with capture_output() as captured:
        function(answer(of))
    assert captured.stdout == ""
    return list(captured.outputs)


@pytest.mark.usefixtures("shell")
def test_figures_are_shown_with_their_text_alternatives_and_written(amp: Study) -> None:
    judged = replace(amp, trials=tuple(trials({"bf16": (replace(BASE, precision="bf16"), 0.0)})))
    first, *further = [o for f in (show.figure, show.more) for o in shown(f, judged) if "image/png" in o.data]
    image = base64.b64decode(first.data["image/png"])
    assert image == (amp.output_dir / "image_output" / "03_amp.png").read_bytes()
    width, height = struct.unpack(">II", image[16:24])
    assert min(width, height) > 300
    assert "bf16" in first.metadata["image/png"]["alt"]
    assert all(o.metadata["image/png"]["alt"] for o in further)
    assert len(list((amp.output_dir / "image_output").glob("03_amp_*.png"))) == len(further) > 0


@pytest.mark.usefixtures("shell")
def test_traces_are_named_where_they_are(tmp_path: Path) -> None:
    found = replace(study([time_budget()], "profile"), output_dir=tmp_path)
    (tmp_path / "trace_output").mkdir()
    for there in (False, True):
        assert shown(show.more, found)[-1].data["text/plain"].endswith(": trace_output/trace.json.gz") == there
        (tmp_path / "trace_output" / "trace.json.gz").touch()


@pytest.mark.usefixtures("shell")
def test_the_table_holds_every_cell_with_numbers_to_the_right(amp: Study) -> None:
    (output,) = shown(show.table, amp)
    rows = answer(amp).table()
    cells = re.findall(r"<t[hd][^>]*text-align: (\w+)[^>]*>(.*?)</t[hd]>", output.data["text/html"])
    texts = [html.unescape(re.sub("<[^>]*>", " ", text)) for _, text in cells]
    expected = [*rows[0], *(text for row in rows for text in row.values())]
    assert [" ".join(t.split()) for t in texts] == [" ".join(t.split()) for t in expected]
    sides = dict(zip(rows[0], (side for side, _ in cells), strict=False))
    assert (sides["Speed"], sides["Configuration"]) == ("right", "left"), "although one begins with a digit"
    judged = replace(amp, trials=tuple(trials({"bf16": (replace(BASE, precision="bf16"), 0.0)})))
    assert ["Margin" in answer(study).table()[0] for study in (judged, amp)] == [True, False], (
        "a column without a value"
    )


@pytest.mark.usefixtures("shell")
def test_a_finding_shows_names_as_they_are_and_carries_what_the_index_reads(amp: Study) -> None:
    records = [replace(r, label="1_b_*c*<i>") if r.role == "candidate" and r.status == "ok" else r for r in amp.records]
    marked = replace(amp, records=tuple(records))
    (output,) = shown(show.finding, marked)
    assert r"1\_b\_\*c\*\<i\>" in output.data["text/markdown"]
    values, found = output.metadata["ddpm_lab"], answer(marked).finding
    for name in ("headline", "claim", "notes", "verdict", "status", "hardware", "date", "sets", "quality"):
        assert values[name] == getattr(found, name)
    assert values["evidence"] == found.speed
    assert (found.way_out, values["way_out"][-9:]) == ("", "--seeds 8"), "what would judge its quality"


@pytest.mark.slow
@pytest.mark.alone
def test_an_interrupt_says_what_is_kept_and_cells_below_what_they_miss(tmp_path: Path) -> None:
    manager, client = start_new_kernel(kernel_name="python3")
    said, interrupted = list[list[str]](), list[bool]()

    def heard(message: dict[str, Any]) -> None:
        if message["msg_type"] == "error":
            said.append(message["content"]["traceback"])
        if not interrupted and "set 2" in str(message["content"].get("data")):
            interrupted.append(True)
            manager.interrupt_kernel()

    try:
        for code in (
            "from ddpm_lab.explain import show\nfrom ddpm_lab.questions import experiments",
            f"answer = experiments.run('amp', preset='smoke', network='tiny', sets=6, output_dir={str(tmp_path)!r})",
            "show.figure(answer)",
            "show.figure(nonsense)",
        ):
            client.execute_interactive(code, output_hook=heard, timeout=300)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.context.destroy()
    kept, missing, other = said
    assert kept == ["Interrupted: 1 of 6 sets kept; run the cell again"]
    assert missing == ["ConfigError: no answer yet: run the cell that measures, to its end"]
    assert "name 'nonsense' is not defined" in other[-1]


def test_words_below_a_number_wrap_in_a_page() -> None:
    """A table of thirteen columns would be wider than a page if they stood in one line."""
    cells = ("1.62 (1.55 to 1.69)", "0.0023, 4.8 % of the images", "+0.1 (-2.9e-05 to +0.2), 1 % behind")
    text = table.html([dict(zip("abc", cells, strict=True))])
    normal = '<span style="white-space: normal">'
    assert 'nowrap">1.62<br><span class="interval">(1.55 to 1.69)</span></td>' in text
    assert f'nowrap">0.0023<br>{normal}4.8 % of the images</span></td>' in text
    assert f'<span class="interval" style="white-space: normal">(-2.9e-05 to +0.2)</span><br>{normal}1 %' in text

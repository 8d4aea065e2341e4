"""What a tracker is told of sets: numbers, verdicts and the figure that the records give."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import zipfile
from pathlib import Path

import pytest
import records as make
from comet_archive import messages, metric, others, read_by_comet
from conftest import Call
from PIL import Image

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import figures
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study, study
from ddpm_lab.options import tracker_chosen
from ddpm_lab.tracked import NUMBERS, tell


@pytest.fixture
def answer(tmp_path: Path) -> Study:
    configs = {"bf16": (dataclasses.replace(RunConfig(), precision="bf16"), 1.3)}
    broken = {"fused": (dataclasses.replace(RunConfig(), kernels="fused"), "crashed", "/home/me/secret.py failed")}
    note = make.record(RunConfig(), role="note", label="tf32", status="left out", set_id="")
    return study([*make.sets(configs, failures=broken), note], "amp", output_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("comet_ml") is None, reason="make trackers")
def test_an_archive_holds_every_comparison_and_the_figure(answer: Study, tmp_path: Path) -> None:
    tell("comet-offline", answer)
    (archive,) = (tmp_path / "trace_output" / "comet").glob("*.zip")
    rows = comparisons(answer)
    assert [row.role for row in rows] == ["baseline", "twin", "candidate", "candidate", "note"]
    for row in rows[:3]:
        name = row.label
        known = [(column, value) for column in NUMBERS if (value := getattr(row, column)) == value]
        assert known
        for column, value in known:
            assert [v for _, v in metric(archive, f"{name}/{column}")] == [value]
        assert [v for _, v in metric(archive, f"{name}/ratio")] == [row.ratio.value]
        assert others(archive)[f"{name}/verdict"] == row.verdict
    settings = {row["name"]: row["value"] for row in read_by_comet(archive) if row["section"] == "param"}
    assert {name for name in settings if "/" in name} == {
        *(f"{label}/precision" for label in ("fp32", "bf16", "fused")),
        *(f"{label}/kernels" for label in ("fp32", "bf16", "fused")),
    }
    assert (settings["bf16/precision"], settings["network"]) == ("bf16", "tiny")
    assert not [m for m in messages(archive) if "tf32/" in str(m) and m["type"] != "log_other"]
    assert others(archive)["tf32/status"] == "left out"
    assert others(archive)["host_name"] == answer.records[-1].environment.hostname
    with zipfile.ZipFile(archive) as file:
        (picture,) = (m["payload"]["file_path"] for m in messages(archive) if m["type"] == "file_upload")
        data = file.read(Path(picture).name)
        assert b"secret" not in b"".join(map(file.read, file.namelist()))
    assert data == figures.png(figures.figure(answer))
    assert Image.open(io.BytesIO(data)).format == "PNG"


STEPS = """
import time

def one():
    while True:
        time.sleep(0.01)
        yield

def two():
    yield from one()
"""


@pytest.mark.slow
def test_a_command_tells_what_it_has_measured_and_fails_for_no_tracker(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "comet_ml.py").write_text("raise ModuleNotFoundError('x', name='comet_ml')")
    words = ("compare", "mine:one", "mine:two", "--sets", 1, "--output-dir", tmp_path, "--tracker", "comet-offline")
    code, out, err = call(*words)
    assert code == 0, err
    assert out.startswith("Too few sets (1) to say")
    (note,) = (line for line in err.splitlines() if line.startswith("tracker:"))
    assert "comet_ml is not installed: run make trackers" in note


def test_the_tracker_is_the_option_or_follows_from_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    assert tracker_chosen(None) is None
    assert tracker_chosen("comet-offline") == "comet-offline"
    with pytest.raises(ConfigError, match="COMET_API_KEY"):
        tracker_chosen("comet")
    monkeypatch.setenv("COMET_API_KEY", "key")
    assert tracker_chosen(None) == tracker_chosen("comet") == "comet"
    assert tracker_chosen("none") is None

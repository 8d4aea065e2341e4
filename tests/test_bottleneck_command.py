"""The command: records or measurements to a report that is one page, a summary, and refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Call
from planted_machines import profiled, study, told

from ddpm_lab.cli.bottleneck import overrun
from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.questions.bottleneck_page import write

CONFIG = RunConfig(global_batch_size=8)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Records of one machine: a time budget, and bf16 against it."""
    path = tmp_path / "records.jsonl"
    bf16 = RunConfig(global_batch_size=8, precision="bf16")
    Ledger(path).append([profiled(CONFIG, {"data": 5.0, "forward": 95.0}), *told(CONFIG, {"bf16": (bf16, 1.4)})])
    return path


def test_records_become_a_report_and_a_page_in_one_file(call: Call, ledger: Path, tmp_path: Path) -> None:
    code, out, _ = call("bottleneck", "--ledger", ledger, "--output-dir", tmp_path)
    assert code == 0
    assert "First recommendation: Train in bf16" in out
    text = (tmp_path / "reports" / "bottleneck_report.md").read_text()
    page = (tmp_path / "reports" / "bottleneck_report.html").read_text()
    assert text.startswith("# Bottleneck report\n")
    assert "bottleneck_report_profile.png" in text
    assert page.count("data:image/png;base64,") == 2
    assert ".png" not in page
    assert "<title>Bottleneck report</title>" in page
    assert page.count('<div class="scroll" tabindex="0"><table>') == page.count("</table></div>") >= 4
    assert "<script" not in page


def test_a_report_says_where_measuring_took_longer_than_was_given(tmp_path: Path) -> None:
    assert overrun(None, None) == overrun(120.0, 3.0) == []
    (said,) = remarks = overrun(120.0, -125.0)
    assert "took 245 s, and 120 s were given" in said
    text = write(study(profiled(CONFIG, {"data": 5.0, "forward": 95.0})), tmp_path, remarks).read_text()
    assert said in text.partition("## Executive summary")[2].partition("## ")[0]


def test_scripts_get_the_same_as_json(call: Call, ledger: Path, tmp_path: Path) -> None:
    code, out, _ = call("bottleneck", "--ledger", ledger, "--output-dir", tmp_path, "--json")
    assert code == 0
    values = json.loads(out)
    assert values["advice"][0]["title"] == "Train in bf16"
    assert 1.3 < values["advice"][0]["low"] < 1.4


def test_what_makes_no_sense_is_refused(call: Call, ledger: Path, tmp_path: Path) -> None:
    for arguments in (
        ("--ledger", ledger, "--changes", "bf16"),
        ("--ledger", tmp_path / "nowhere.jsonl"),
        ("--config", tmp_path / "nowhere.toml"),
    ):
        code, _, error = call("bottleneck", *arguments, "--output-dir", tmp_path)
        assert code == 2
        assert len(error.strip().splitlines()) == 1
    code, _, error = call("bottleneck", "--batch-size", 99_999_999, "--output-dir", tmp_path)
    assert code == 2
    assert "global_batch_size is 99,999,999" in error.splitlines()[-1]
    assert Ledger(tmp_path / "trace_output" / "ledger.jsonl").read() == ([], [])
    empty = tmp_path / "empty.jsonl"
    Ledger(empty).append(told(CONFIG, {}))
    assert call("bottleneck", "--ledger", empty, "--output-dir", tmp_path)[:2] == (
        1,
        "No time budget is recorded: ddpm-lab bottleneck measures one.\n",
    )


@pytest.mark.slow
def test_present_settings_come_from_a_file_and_options(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('precision = "bf16"\nglobal_batch_size = 4\n\n[optimizer]\nema_every = 1\n\n[train]\nsteps = 10\n')
    arguments = ("bottleneck", "--config", file, "--preset", "smoke", "--changes", "fp32", "--output-dir", tmp_path)
    code, out, error = call(*arguments, "--batch-size", 8, "--seed", 3)
    assert code == 0, error
    assert "A step of 8 images takes" in out
    text = (tmp_path / "reports" / "bottleneck_report.md").read_text()
    assert "bf16, packed data" in text
    assert "### 1." in text
    assert "--config FILE" in text, "no option says how often weights are averaged"

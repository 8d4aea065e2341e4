"""Questions measured for real: what is kept, what is not measured again, and what a kill costs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import records as make
from conftest import alive

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.data.folder import DataError
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.quality import NOT_ENOUGH
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.questions import experiments
from ddpm_lab.questions.planning import plan_question
from ddpm_lab.record import LedgerError


@pytest.mark.slow
def test_a_question_is_measured_once(tmp_path: Path) -> None:
    study = experiments.run("amp", preset="smoke", output_dir=tmp_path).study
    assert study.measured_sets == 1
    measured = [r for r in study.records if r.set_id]
    assert sorted((r.role, r.label, r.status) for r in measured) == [
        ("baseline", "fp32", "ok"),
        ("candidate", "bf16", "ok"),
        ("twin", "fp32 again", "ok"),
    ]
    assert {(r.label, r.status) for r in study.records if not r.set_id} == {("fp16", "left out"), ("tf32", "left out")}
    assert measured[0].environment.date
    again = experiments.run("amp", preset="smoke", output_dir=tmp_path).study
    assert again.measured_sets == 0
    assert [r.set_id for r in again.records] == [r.set_id for r in study.records]
    assert plan_question("amp", preset="smoke", output_dir=tmp_path).campaign.forecast() == 0

    more = experiments.run("amp", preset="smoke", sets=2, output_dir=tmp_path).study
    assert more.measured_sets == 1
    assert len({r.set_id for r in more.records if r.set_id}) == 2

    tried = experiments.run("amp", preset="smoke", sets=2, seeds=1, images=80, output_dir=tmp_path).study
    assert tried.measured_sets == 3, "two trials, and a check of the candidate's gradient"
    assert [r.label for r in tried.records if r.role == "check"] == ["bf16"]
    assert sorted((r.label, r.status) for r in tried.trials) == [("bf16", "ok"), ("fp32", "ok")]
    mine = dataclasses.replace(tried, published_trials=())  # which hold a verdict on more images
    (judged,) = [row.equivalence for row in comparisons(mine) if row.role == "candidate"]
    assert (judged.verdict, judged.images, judged.seeds) == (NOT_ENOUGH, 80, 1)
    assert {r.code_version for r in tried.trials} == {code_version().key}, "it speaks for the speeds of every question"
    beside = plan_question(
        "quality", preset="smoke", seeds=1, images=80, candidates=["bf16"], output_dir=tmp_path, quiet=True
    )
    campaign = beside.campaign
    assert campaign.lacks.trials(campaign.experiment.trials) == [], "another question does not train them again"


@pytest.mark.slow
def test_a_profile_leaves_operators_and_a_trace_for_each_rank(tmp_path: Path) -> None:
    study = experiments.run("profile", preset="smoke", world_size=2, output_dir=tmp_path).study
    record = study.records[-1]
    assert record.status == "ok"
    assert record.profile is not None
    assert any("conv" in row["name"] for row in record.profile["operators"])
    assert len(record.profile["traces"]) == 2
    assert all((tmp_path / "trace_output" / name).exists() for name in record.profile["traces"])
    assert not record.windows  # a profiled run supplies no time


@pytest.mark.slow
def test_a_killed_run_loses_one_unfinished_set_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddpm_lab", "run", "multi_gpu", "--preset", "smoke", "--sets", "2"]
    command += ["--output-dir", str(tmp_path)]
    ledger = Ledger(tmp_path / "trace_output" / "ledger.jsonl")

    def sets() -> list[str]:
        return list(dict.fromkeys(r.set_id for r in ledger.read()[0] if r.set_id))

    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 300
        while len(sets()) < 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        kept = sets()
        time.sleep(1)  # into the next set
        everything = [p.pid for p in psutil.Process(run.pid).children(recursive=True)]
        os.kill(run.pid, signal.SIGKILL)
    assert kept
    assert everything
    deadline = time.monotonic() + 30
    while alive(everything) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(everything) == []
    after_kill = sets()
    subprocess.run(command, check=True, timeout=300, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert sets()[: len(after_kill)] == after_kill
    assert len(sets()) == 2


def test_what_cannot_be_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="1000 CPU ranks need 1000 cores"):
        experiments.run("multi_gpu", device="cpu", world_sizes=[1000], output_dir=out)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="empty"):
        experiments.run("amp", data=str(empty), output_dir=out)
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="choose another --output-dir"):
        experiments.run("amp", preset="smoke", output_dir=tmp_path / "file")
    monkeypatch.delattr(experiments, "measure")
    for published in ("False", 0, "yes"):
        with pytest.raises(ConfigError, match=rf"published is {published!r}: give True, False or None"):
            experiments.run("peers", published=published, output_dir=tmp_path)  # type: ignore[arg-type]


def test_what_changes_nothing_of_shown_records_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(experiments, "_published", lambda *_: make.study([make.record(RunConfig())]))
    rows: list[tuple[dict[str, Any], str]] = [
        ({"network": "ddpm", "parts": ["peers"], "seed": 0, "data": "synthetic", "preset": "smoke"}, "network, parts"),
        ({"network": None, "seed": 0, "skip_bad": False, "image_size": 32, "data": "synthetic"}, ""),
    ]
    for settings, told in rows:
        experiments.run("peers", output_dir=tmp_path, **settings)
        said = capsys.readouterr().out
        assert said.count("\n") == bool(told)
        assert f"records that exist: {told};" in said or not told


def test_nothing_measured_says_so(tmp_path: Path) -> None:
    study = experiments.recommendation(output_dir=tmp_path).study
    assert study.records == ()
    with pytest.raises(LedgerError, match="there is no ledger"):
        experiments.run("amp", ledger=[tmp_path / "none.jsonl"])


@pytest.mark.slow
def test_every_image_size_of_a_sweep_is_shown(tmp_path: Path) -> None:
    study = experiments.run("multi_gpu", preset="smoke", image_sizes=[16, 32], output_dir=tmp_path).study
    measured = [r for r in study.records if r.set_id]
    assert {r.config.image_size for r in measured} == {16, 32}
    assert len({r.set_id for r in measured}) == 2
    assert {r.status for r in measured} == {"ok"}

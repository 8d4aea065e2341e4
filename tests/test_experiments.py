"""Questions measured for real: what is kept, what is not measured again, and what a kill costs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import records as make

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import OWN, RunConfig
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.quality import NOT_ENOUGH
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import PUBLISHED, Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.questions import experiments
from ddpm_lab.questions.planning import plan_question
from ddpm_lab.record import LedgerError
from ddpm_lab.training.setting import own_data

BF16 = RunConfig(precision="bf16")


def test_published_records_of_this_machine_go_before_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "CHECKOUT", tmp_path / "checkout")
    later = make.environment(date="2026-02-01T10:00:00+00:00")
    records = make.sets({"slow": (RunConfig(read_loss=True), 0.5)}, experiment="peers")
    mine, others = make.on(hardware.machine(), records), [dataclasses.replace(r, environment=later) for r in records]
    for name, found in (("mine", mine), ("others", others)):
        Ledger(tmp_path / "checkout" / PUBLISHED / f"{name}.jsonl").append(found)
    shown = experiments.run("peers", output_dir=tmp_path).study
    assert {r.machine.key for r in shown.records} == {hardware.machine().key}
    assert shown.published


def test_the_labs_trainer_and_ones_own_answer_apart(tmp_path: Path) -> None:
    """Where a ledger holds a question of one's own training alone, that answers it, and no published claim."""
    own = RunConfig(workload=OWN, options=(("make", "mine:make"),), data_sha256=f"{own_data('mine:make')}1")
    rows = {"bf16": (dataclasses.replace(own, precision="bf16"), 1.7)}
    ledger = Ledger(tmp_path / LEDGER)
    ledger.append(make.on(hardware.machine(), make.sets(rows, baseline=own)))

    def configs(name: str, **how: Any) -> set[str]:
        return {r.config.work_name for r in experiments.run(name, ledger=ledger.path, **how).study.records}

    assert configs("amp") == configs("amp", workload="mine:make") == {"mine:make"}
    assert configs("amp", workload="other:make") == configs("multi_gpu") == set()
    asked = {"output_dir": tmp_path, "image_size": 8, "cores": 1, "quiet": True}
    assert experiments.study_of(plan_question("claims", **asked)).beside == ()
    elsewhere = Ledger(tmp_path / "elsewhere.jsonl")
    elsewhere.append(make.on(make.GPUS, make.sets({"bf16": (BF16, 1.1)})))
    both = experiments.run("amp", ledger=[ledger.path, elsewhere.path], machine=hardware.machine().key)
    assert {r.config.work_name for r in both.study.records} == {"mine:make"}, "another machine's hides nothing"
    ledger.append(make.on(hardware.machine(), make.sets({"bf16": (BF16, 1.1)})))
    assert configs("amp") == {"tiny"}


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


def test_what_cannot_be_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        experiments.run("amp", ledger=[tmp_path / "none.jsonl"])
    assert experiments.recommendation(output_dir=tmp_path / "out").study.records == (), (
        "quick without minutes measures nothing"
    )
    monkeypatch.delattr(experiments, "measure")
    for published in ("False", 0, "yes"):
        with pytest.raises(ConfigError, match=f"published is {published!r}"):
            experiments.run("peers", published=published, output_dir=tmp_path)  # type: ignore[arg-type]

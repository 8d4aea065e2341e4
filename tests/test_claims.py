"""The question claims: which wrong ways are run, and that they run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from setups import setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.data.packed import read_manifest, resolve
from ddpm_lab.measure import hardware
from ddpm_lab.measure.alone import WORKLOAD, run_wrong_ways
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.sets import Instrument, Member, measure_alone
from ddpm_lab.plan import Experiment, Plan
from ddpm_lab.questions import ask as questions
from ddpm_lab.questions.ask import ask
from ddpm_lab.questions.claims import claims
from ddpm_lab.record import RunRecord

HERE = setup()
ON_GPU = {"loss_read", "unsynchronised", "phases_waited_for", "hidden_devices"}


def ways(experiment: Experiment) -> set[str]:
    return {way for check in experiment.checks for way in check.config.option("ways", "").split()}


def test_wrong_ways_are_repeated_beside_sets_of_the_same_settings() -> None:
    experiment = claims(HERE)
    (family,) = experiment.families
    assert [label for label, _ in family.candidates] == ["bf16", "compiled", "batch 32", "2 ranks"]
    assert len({c.config.run_id for c in experiment.checks}) == len(experiment.checks) == 6 * 3, "each has a record"
    assert {c.label for c in experiment.checks} <= {"fp32", *(label for label, _ in family.candidates)}
    assert {c.config.workload for c in experiment.checks} == {WORKLOAD}
    assert len(claims(HERE, repeats=2).checks) == 2 * 3
    smoke = claims(replace(HERE, preset="smoke"))
    assert all(config.compile == "off" for config in smoke.configurations), "compiling takes most of a minute"


def test_each_machine_runs_the_ways_that_it_can_show() -> None:
    cpu, gpu = ways(claims(HERE)), ways(claims(replace(HERE, device="cuda", gpus=1)))
    assert cpu - gpu == {"one_thread"}
    assert gpu - cpu == ON_GPU
    alone = claims(replace(HERE, usable_cores=1))
    assert "one_thread" not in ways(alone), "no core is left idle"
    assert alone.left_out == (("tiny, batch 8", "2 ranks", "each rank needs a device of its own"),)
    with pytest.raises(ConfigError, match="repeats"):
        ask("claims", HERE, repeats=0)
    with pytest.raises(ConfigError, match="seeds"):
        questions.ask("claims", HERE, seeds=3)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """One real repeat of every wrong way, by label."""
    folder: Path = tmp_path_factory.mktemp("wrong")
    data = resolve("synthetic", folder / "prepared", image_size=32)
    cores = hardware.usable_cores()
    instrument = Instrument(code=code_version(), cache=folder / "cache", usable_cores=cores, data_name="synthetic")
    found = {}
    for check in claims(replace(HERE, preset="smoke", usable_cores=cores)).checks:
        config = replace(check.config, data=str(data), data_sha256=read_manifest(data).content_hash)
        member, told = Member("wrong", check.label, config), {"experiment": "claims", "family": check.family}
        found[check.label] = measure_alone(instrument, plan=Plan(), member=member, work=run_wrong_ways, **told)
    return found


def seen(record: RunRecord) -> dict[str, Any]:
    assert record.status == "ok", record.reason
    assert record.windows == (), "none of it supplies a speed"
    return dict((record.profile or {})["wrong_ways"])


@pytest.mark.slow
def test_every_wrong_way_runs_and_is_wrong(ran: dict[str, RunRecord]) -> None:
    answers = seen(ran["fp32"])
    profiled, phases = answers["profiled"], answers["phases"]
    assert profiled["seconds"] > profiled["loop_seconds"] > 0
    assert profiled["inclusive_seconds"] > 1.5 * profiled["exclusive_seconds"], "nested events are counted again"
    assert (len(answers["runs"]["seconds"]), len(answers["fresh"]["step_seconds"])) == (50, 6)
    assert phases["phases"]["backward"] > 0
    assert sum(phases["phases"].values()) == pytest.approx(phases["seconds"], rel=0.05)
    assert answers["counted"] == {"network": "s000", "parameters": 39_156_227}
    refused = answers["labelled_two"]
    assert "the label says world_size 2, rank 0 ran with 1" in refused
    assert any("these ran: [0]" in line for line in refused)
    small, large = answers["bars"], seen(ran["batch 32"])["bars"]
    assert (small["steps"], small["images"], large["steps"], large["images"]) == (6, 48, 1, 32)
    if "one_thread" in answers:
        alone = answers["one_thread"]
        compute = sum(s for name, s in alone["phases"].items() if name not in ("data", "copy"))
        assert compute > 0.7 * alone["seconds"]
        assert alone["cpu_seconds"] < 1.2 * alone["seconds"], "one thread uses one core at most"

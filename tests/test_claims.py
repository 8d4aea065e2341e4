"""The question claims: which wrong ways are run, and that they run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from setups import setup

from ddpm_lab import questions
from ddpm_lab.checks import ConfigError
from ddpm_lab.claims import claims
from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import resolve
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import measure_alone
from ddpm_lab.measure.wrong_ways import WORKLOAD, run_wrong_ways
from ddpm_lab.plan import Experiment, Plan
from ddpm_lab.record import RunRecord

HERE = setup()


def ways(experiment: Experiment) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for check in experiment.checks:
        found.setdefault(check.label, set()).update(check.config.option("ways", "").split())
    return found


def test_wrong_ways_are_repeated_and_stand_beside_sets_of_the_same_settings() -> None:
    experiment = claims(HERE)
    (family,) = experiment.families
    assert [label for label, _ in family.candidates] == ["bf16", "compiled", "batch 32", "2 ranks"]
    assert family.together
    assert len(experiment.checks) == 6 * 3
    assert len({c.config.run_id for c in experiment.checks}) == len(experiment.checks), "each repeat has a record"
    measured = {family.baseline_label, *(label for label, _ in family.candidates)}
    assert ways(experiment).keys() <= measured
    assert {c.config.workload for c in experiment.checks} == {WORKLOAD}
    assert len(claims(HERE, repeats=2).checks) == 2 * 3


def test_smoke_compiles_nothing() -> None:
    smoke = claims(dataclasses.replace(HERE, preset="smoke"))
    assert all(config.compile == "off" for config in smoke.configurations)


def test_what_waits_for_a_device_is_run_on_a_gpu_alone() -> None:
    only = {"loss_read", "unsynchronised", "phases_waited_for", "hidden_devices"}
    cpu = ways(claims(HERE))["fp32"]
    gpu = ways(claims(dataclasses.replace(HERE, device="cuda", gpus=1)))["fp32"]
    assert not only & cpu
    assert only < gpu
    assert "one_thread" in cpu - gpu
    assert "one_thread" not in ways(claims(dataclasses.replace(HERE, usable_cores=1)))["fp32"], "no core is left idle"


def test_one_device_leaves_two_ranks_out_and_says_so() -> None:
    alone = claims(dataclasses.replace(HERE, usable_cores=1))
    assert alone.left_out == (("tiny, batch 8", "2 ranks", "each rank needs a device of its own"),)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="repeats"):
        claims(HERE, repeats=0)
    with pytest.raises(ConfigError, match="seeds"):
        questions.ask("claims", HERE, seeds=3)


# --- really run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """The first repeat of every wrong way, by label."""
    folder: Path = tmp_path_factory.mktemp("wrong")
    data = str(resolve("synthetic", folder / "prepared", image_size=32))
    cores = hardware.usable_cores()
    instrument = Instrument(code=code_version(), cache=folder / "cache", usable_cores=cores, data_name="synthetic")
    experiment = claims(dataclasses.replace(HERE, preset="smoke", usable_cores=cores))
    found = {}
    for check in experiment.checks:
        config: RunConfig = dataclasses.replace(check.config, data=data, data_sha256=_sha(data))
        found[check.label] = measure_alone(
            instrument,
            experiment="claims",
            family=check.family,
            plan=Plan(),
            member=Member("wrong", check.label, config),
            work=run_wrong_ways,
        )
    return found


def _sha(data: str) -> str:
    from ddpm_lab.data.packed import read_manifest  # noqa: PLC0415

    return read_manifest(Path(data)).content_hash


def seen(ran: dict[str, RunRecord], label: str = "fp32") -> dict[str, Any]:
    record = ran[label]
    assert record.status == "ok", record.reason
    assert record.profile is not None
    answers: dict[str, Any] = record.profile["wrong_ways"]
    return answers


@pytest.mark.slow
def test_every_wrong_way_runs_and_is_wrong(ran: dict[str, RunRecord]) -> None:
    answers = seen(ran)
    profiled = answers["profiled"]
    assert profiled["seconds"] > profiled["loop_seconds"] > 0
    assert profiled["inclusive_seconds"] > 1.5 * profiled["exclusive_seconds"], "nested events are counted again"
    assert len(answers["runs"]["seconds"]) == 50
    assert len(answers["fresh"]["step_seconds"]) == 6
    phases = answers["phases"]
    assert phases["phases"]["backward"] > 0
    assert sum(phases["phases"].values()) == pytest.approx(phases["seconds"], rel=0.05)
    assert answers["counted"] == {"network": "s000", "parameters": 39_156_227}
    assert ran["fp32"].windows == (), "none of it supplies a speed"


@pytest.mark.slow
def test_a_label_of_two_is_refused_by_the_witness(ran: dict[str, RunRecord]) -> None:
    refused = seen(ran)["labelled_two"]
    assert "the label says world_size 2, rank 0 ran with 1" in refused
    assert any("these ran: [0]" in line for line in refused)


@pytest.mark.slow
def test_the_larger_batch_leaves_images_out(ran: dict[str, RunRecord]) -> None:
    small, large = (seen(ran, label)["bars"] for label in ("fp32", "batch 32"))
    assert (small["steps"], small["images"]) == (6, 48)
    assert (large["steps"], large["images"]) == (1, 32)


@pytest.mark.slow
def test_one_thread_leaves_cores_idle_while_its_compute_share_is_high(ran: dict[str, RunRecord]) -> None:
    cores = hardware.usable_cores()
    if cores < 2:
        pytest.skip("there is no other core to be idle")
    answer = seen(ran)["one_thread"]
    compute = sum(s for name, s in answer["phases"].items() if name not in ("data", "copy")) / answer["seconds"]
    assert compute > 0.7
    assert answer["cpu_seconds"] < 1.2 * answer["seconds"], "one thread uses one core at most"

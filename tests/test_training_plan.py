"""From a file and the command line to a run: what wins, what is usual, and what is refused before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import TRAINING, RunConfig
from ddpm_lab.data.packed import prepare
from ddpm_lab.measure import cluster, hardware
from ddpm_lab.measure.cluster import Cluster, Place
from ddpm_lab.measure.process import Store
from ddpm_lab.training.run_folder import RunFolder
from ddpm_lab.training.training_run import Schedule, plan_training


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    prepare("synthetic", folder)
    return folder


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores and no GPU."""
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)


def plan(
    data: Path, text: str = "", schedule: dict[str, Any] | None = None, **flags: Any
) -> tuple[RunConfig, Schedule]:
    file = data.parent / "settings.toml"
    file.write_text(text)
    given = {name.replace("__", "."): value for name, value in flags.items()}
    times = {"steps": 10} if schedule is None else schedule
    config, planned, _ = plan_training(
        {"data": str(data), **given}, times, file=file if text else None, cache=data.parent
    )
    return config, planned


def test_without_settings_the_trainers_own(data: Path) -> None:
    config, schedule = plan(data)
    assert (config.workload, config.device, config.network, config.global_batch_size) == (TRAINING, "cpu", "tiny", 32)
    assert (config.precision, config.kernels, config.loader) == ("bf16", "fused", "packed")
    assert len(config.data_sha256) == 64
    assert schedule == Schedule(steps=10)


def test_a_job_of_torchrun_trains_on_all_its_places(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [[Place(i, "a", None) for i in range(2)]]
    monkeypatch.setattr(cluster, "_current", Cluster(places, Store("127.0.0.1", 1, "job")))
    assert plan(data)[0].world_size == 2
    assert plan(data, world_size=1)[0].world_size == 1
    assert plan(data, "world_size = 1")[0].world_size == 1


def test_the_command_line_wins_over_the_file(data: Path) -> None:
    text = """
seed = 4
precision = "fp32"
[optimizer]
learning_rate = 1e-3
clip_norm = "none"
[train]
steps = 99
save_every = 7
"""
    config, schedule = plan(data, text, schedule={"steps": 5}, precision="bf16", optimizer__learning_rate=2e-3)
    assert (config.seed, config.precision) == (4, "bf16")
    assert (config.optimizer.learning_rate, config.optimizer.clip_norm) == (2e-3, None)
    assert config.optimizer.ema_warmup, "real runs are looked at from their first grid on"
    assert schedule == Schedule(steps=5, save_every=7)


@pytest.mark.parametrize("flags", [{"compile": "whole"}, {"channels_last": False}])
def test_joined_kernels_give_way_where_they_cannot_work(data: Path, flags: dict[str, Any]) -> None:
    assert plan(data, **flags)[0].kernels == "aten"


def test_what_ran_can_be_run_again(data: Path, tmp_path: Path) -> None:
    config, schedule = plan(data, seed=3)
    with RunFolder(tmp_path) as run:
        run.write_settings(config, {"steps": 10})
    again = plan_training({}, {}, file=tmp_path / "config.toml", cache=tmp_path)
    assert again[:2] == (config, schedule)


@pytest.mark.parametrize(
    ("text", "schedule", "flags", "words"),
    [
        ("", {}, {}, "how long to train is not given"),
        ("", {"steps": 0}, {}, "steps is 0"),
        ("", None, {"world_size": 4}, "4 CPU ranks need 4 cores"),
        ("loader = 'files'\nloader_workers = 3", None, {}, "loader_workers is 3: 2 cores are usable, give at most"),
        ("", None, {"device": "cuda", "network": "tiny"}, "no GPU is visible"),
        ("[device]\nname = 'cpu'", None, {}, "device is {'name': 'cpu'}: choose"),
        ("[train]\nmagic = 1", None, {}, "has no setting 'magic'"),
        ("optimizer = 3", None, {"optimizer__learning_rate": 1.0}, "optimizer is 3: give a table"),
        ("workload = 'os:system'", None, {}, "workload is not for a file"),
        ("world_size = 2\n[exchange]\nenabled = false", None, {}, "train a network each"),
    ],
)
def test_bad_settings_are_refused(
    data: Path, text: str, schedule: dict[str, Any] | None, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        plan(data, text, schedule, **flags)
    assert "\n" not in str(caught.value)


def test_workers_and_threads_may_be_as_many_as_cores(data: Path) -> None:
    config, _ = plan(data, loader="files", loader_workers=2, threads=2)
    assert (config.loader_workers, config.threads) == (2, 2)
    assert plan(data, world_size=4, oversubscribe=True, threads=1)[0].threads == 1


def test_other_images_than_the_file_names_are_refused(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f'data = "{data}"\ndata_sha256 = "{"0" * 64}"\n[train]\nsteps = 3\n')
    with pytest.raises(ConfigError, match="are not those that data_sha256 names"):
        plan_training({}, {}, file=file, cache=tmp_path)
    config, _, _ = plan_training({"data": str(data)}, {}, file=file, cache=tmp_path)
    assert config.data_sha256 != "0" * 64

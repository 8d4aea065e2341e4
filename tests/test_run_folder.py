"""A run's folder: one run at a time, checkpoints by step, and a log in which every step stands once."""

import csv
import errno
import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import TRAINING, DiffusionConfig, ExchangeConfig, OptimizerConfig, RunConfig
from ddpm_lab.settings_file import configuration, read_settings, settings_text
from ddpm_lab.training.run_folder import RunFailed, RunFolder, checkpoints_in


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "images_per_second": 9.5, **more}


def logged(folder: Path) -> tuple[list[int], list[int]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    with (folder / "log.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(r["loss"]) for r in table] == [r["loss"] for r in lines]
    assert [r["held_out_loss"] for r in table] == [str(r.get("held_out_loss", "")) for r in lines]
    return [r["step"] for r in lines], [int(r["step"]) for r in table]


def test_a_log_is_cut_back_to_where_a_run_goes_on(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.open_logs(0)
        run.log([row(1), row(2, held_out_loss=0.25, held_out_by_time=[0.1, 0.2])])
        run.log([row(3), row(4)])
        run.sync_logs()
    assert logged(tmp_path) == ([1, 2, 3, 4],) * 2
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed while it wrote
    with RunFolder(tmp_path) as run:
        run.open_logs(3)
        run.log([row(4)])
    assert logged(tmp_path) == ([1, 2, 3, 4],) * 2
    with RunFolder(tmp_path) as run:
        run.open_logs(0)
    assert logged(tmp_path) == ([], [])


def test_two_runs_do_not_work_in_one_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path), pytest.raises(ConfigError, match="another run works in"), RunFolder(tmp_path):
        pass
    with RunFolder(tmp_path):
        pass


def test_the_newest_checkpoints_stay_and_what_is_half_written_goes(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in (5, 10, 99_999_999, 100_000_000, 20):
            run.checkpoint(step).touch()
        (run.checkpoints / "mine.pt").touch()
        (run.checkpoints / "step-00000030.pt.17.partial").touch()
        (run.samples / "step-00000030.png.17.partial").touch()
        assert [p.name for p in checkpoints_in(run.checkpoints)][:2] == ["step-100000000.pt", "step-99999999.pt"]
        run.keep(3)
        run.set_aside([run.checkpoint(20)])
    names = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert {"step-100000000.pt", "step-99999999.pt", "step-00000020.pt.unreadable", "mine.pt"} < names
    assert not {"step-00000005.pt", "step-00000010.pt", "step-00000020.pt"} & names
    with RunFolder(tmp_path):
        assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_settings_can_be_given_again(tmp_path: Path, world_size: int) -> None:
    exchange = ExchangeConfig(bucket_mb=5) if world_size > 1 else ExchangeConfig()
    config = RunConfig(workload=TRAINING, purpose="quality", world_size=world_size, exchange=exchange, data="somewhere")
    with RunFolder(tmp_path) as run:
        run.write_settings(config, {"steps": 7, "keep": 2}, "settings: fp32,\nthe fastest")
    assert (tmp_path / "config.toml").read_text().startswith("# settings: fp32, the fastest\n")
    values = read_settings(tmp_path / "config.toml", "--config")
    assert values.pop("train") == {"steps": 7, "keep": 2}
    assert configuration({**values, "workload": TRAINING, "purpose": "quality"}, "a") == config
    assert "options" not in tomllib.loads((tmp_path / "config.toml").read_text())


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder(tmp_path) as run:
        run.open_logs(0)
        run._files[0].close()
        run._files[0] = Path("/dev/full").open("w")  # noqa: SIM115 - closed with the run
        with pytest.raises(RunFailed, match=r"cannot write to .*: No space left"):
            run.log([row(1)])
        monkeypatch.setattr(os, "fsync", full)  # a network's disk may say so only now
        with pytest.raises(RunFailed, match=r"cannot write to .*: No space left"):
            run.sync_logs()


# --- settings in a file ------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = RunConfig(
        data='a "folder"\\with ünusual\tname',
        diffusion=DiffusionConfig(loss="l2", min_snr_gamma=5.0),
        optimizer=OptimizerConfig(clip_norm=None, learning_rate=1e-5, betas=(0.9, 0.999)),
    )
    values = {name: value for name, value in config.as_dict().items() if name != "options"}
    (tmp_path / "a.toml").write_text(settings_text(values))
    assert configuration(read_settings(tmp_path / "a.toml", "a"), "a") == config


def test_what_is_not_finite_is_read_back(tmp_path: Path) -> None:
    values = {"each": [math.inf, -math.inf, 1e-05, [True, "a"]], "part": {"least": math.nan}}
    (tmp_path / "a.toml").write_text(settings_text(values))
    assert repr(read_settings(tmp_path / "a.toml", "a")) == repr(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("network = ", "is not TOML"),
        ("magic = 1", "no setting 'magic'"),
        ("network = 'huge'", "network is 'huge'"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        configuration(read_settings(tmp_path / "a.toml", "--config"), f"{tmp_path / 'a.toml'}")
    assert "a.toml" in str(caught.value)

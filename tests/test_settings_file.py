"""Settings in a file: read, refused in one sentence, and written so that they are read back."""

import math
from pathlib import Path

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.settings_file import configuration, read_settings, settings_text


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
        ("optimizer = 3", "optimizer is 3"),
        ("data = 5", "data is 5: give a text"),
        ("[optimizer]\nbetas = 3", "betas is 3"),
        ("world_size = '2'", "world_size is '2'"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        configuration(read_settings(tmp_path / "a.toml", "--config"), f"{tmp_path / 'a.toml'}")
    assert "a.toml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read .*none\.toml: No such file"):
        read_settings(tmp_path / "none.toml", "--config")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_settings(tmp_path / "bytes.toml", "--config")

"""Checkpoints: what is written is read back, and a hostile or damaged file is refused and runs nothing."""

import dataclasses
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_archives import Payload

from ddpm_lab.config import TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.training import checkpoint as module
from ddpm_lab.training.checkpoint import SECTIONS, Checkpoint, CheckpointError, empty_network, read, write

CONFIG = RunConfig(workload=TRAINING, purpose="quality", optimizer=OptimizerConfig(clip_norm=None), seed=7)


def made(config: RunConfig = CONFIG, step: int = 30) -> Checkpoint:
    """A checkpoint with random tensors."""
    generator, shapes = torch.Generator().manual_seed(step), dict(empty_network(config).named_parameters())
    sections: dict[str, Any] = {
        section: {name: torch.randn(p.shape, generator=generator) for name, p in shapes.items()} for section in SECTIONS
    }
    return Checkpoint(config=config, step=step, adam_steps=step - 1, **sections)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a good file holds."""
    path = tmp_path_factory.mktemp("good") / "step-00000030.pt"
    write(path, made())
    values: dict[str, Any] = torch.load(path, weights_only=True)
    return values


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    before = dataclasses.replace(made(), scaler=torch.amp.GradScaler("cpu").state_dict())
    write(tmp_path / "a.pt", before)
    after = read(tmp_path / "a.pt")
    for name in ("step", "adam_steps", "scaler", "config"):
        assert getattr(after, name) == getattr(before, name)
    for section in SECTIONS:
        mine, theirs = getattr(before, section), getattr(after, section)
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"], "nothing else is left"


def test_what_cannot_be_written_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    write(path, made())
    before = path.read_bytes()
    bad = made()
    bad.second_moments["stem.weight"][0, 0, 0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"stem.weight \(second_moments\)"):
        write(path, bad)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((Path, "replace"), (os, "fsync")):
        monkeypatch.setattr(owner, name, full)
        with pytest.raises(OSError, match="No space left"):
            write(path, made(step=31))
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


# --- refused ---


def test_a_payload_is_not_run(tmp_path: Path, content: dict[str, Any]) -> None:
    target, path = tmp_path / "run", tmp_path / "a.pt"
    payload, weights = Payload(os.system, f"touch {target}"), content["weights"]
    for file in (_bytes({**content, "text": payload}), pickle.dumps(payload), pickle.dumps(payload) + _bytes(payload)):
        path.write_bytes(file)
        with pytest.raises(CheckpointError, match="is not used"):
            read(path)
    path.write_bytes(_bytes({**content, "weights": {**weights, payload: payload}}))
    assert read(path).step == 30, "of tensors nothing is read but their bytes"
    assert not target.exists()


def test_a_file_that_is_cut_off_or_changed_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    path, whole = tmp_path / "a.pt", _bytes(content)
    for share in (0, 0.001, 0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(CheckpointError, match="is not used"):
            read(path)
    path.write_bytes(_bytes({**content, "averages": {name: t.clone() for name, t in content["weights"].items()}}))
    with pytest.raises(CheckpointError, match="hash"):
        read(path)


def _settings(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {**values, "config": {**values["config"], **changes}}


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda values: {**values, "format": 2}, "format is 2"),
    (lambda values: {**values, "step": -1}, "step is -1"),
    (lambda values: {**values, "adam_steps": 1e9}, "adam_steps is"),
    (_settings(workload="os:system"), "name code or paths"),
    (_settings(revision="HEAD"), "name code or paths"),
    (_settings(image_size=4 * 10**9), "image_size is"),
    (_settings(network="huge"), "'huge'"),
    (_settings(network="ddpm"), "damaged"),
    (lambda values: [values], "no checkpoint"),
]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    """Also where its hash fits."""
    sections = {section: content[section] for section in SECTIONS}
    for change, words in BAD:
        text = json.dumps(change(json.loads(content["text"])))
        (tmp_path / "a.pt").write_bytes(_bytes({"text": text, "sha256": module._sha256(text, sections), **sections}))
        with pytest.raises(CheckpointError, match=words) as caught:
            read(tmp_path / "a.pt")
        assert "\n" not in str(caught.value)


def test_a_device_or_a_folder_is_refused_and_not_read(tmp_path: Path) -> None:
    """Others than this device never end."""
    for path in (Path("/dev/null"), tmp_path):
        with pytest.raises(CheckpointError, match="it is no file"):
            read(path)


def _bytes(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()

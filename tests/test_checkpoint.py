"""Checkpoints: what is written is read back, and a hostile or damaged file is refused and runs nothing."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_archives import Payload
from torch import Tensor

from ddpm_lab.config import TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.training import checkpoint as module
from ddpm_lab.training.checkpoint import SECTIONS, Checkpoint, CheckpointError, empty_network, read, write

CONFIG = RunConfig(workload=TRAINING, purpose="quality", optimizer=OptimizerConfig(clip_norm=None), seed=7)


def made(config: RunConfig = CONFIG, step: int = 30) -> Checkpoint:
    """A checkpoint with random tensors."""
    generator = torch.Generator().manual_seed(step)
    sections: dict[str, Any] = {
        section: {
            name: torch.randn(p.shape, generator=generator) for name, p in empty_network(config).named_parameters()
        }
        for section in SECTIONS
    }
    return Checkpoint(config=config, step=step, adam_steps=step - 1, **sections)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a good file holds."""
    path = tmp_path_factory.mktemp("good") / "step-00000030.pt"
    write(path, made())
    values: dict[str, Any] = torch.load(path, weights_only=True)
    return values


def saved(path: Path, content: dict[str, Any]) -> Path:
    """A file with this content, whose hash fits where it can be computed."""
    with suppress(Exception):  # then it is refused for another reason
        sections = {section: content[section] for section in SECTIONS}
        content = {**content, "sha256": module._sha256(content["text"], sections)}
    torch.save(content, path)
    return path


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


# --- refused ---------------------------------------------------------------------------------------------------------


def test_a_payload_is_refused_and_not_run(
    tmp_path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # what people set to get old files loaded
    target, path = tmp_path / "run", tmp_path / "a.pt"
    payload, weights = Payload(os.system, f"touch {target}"), content["weights"]
    files = [_bytes(payload), _bytes({**content, "text": payload}), pickle.dumps(payload)]
    files += [_bytes({**content, "weights": {**weights, "stem.weight": payload}})]
    files += [_bytes({**content, "weights": {**weights, payload: torch.zeros(1)}}), pickle.dumps(payload) + files[0]]
    for file in files:
        path.write_bytes(file)
        with pytest.raises(CheckpointError, match="is not used"):
            read(path)
        assert not target.exists()


def test_a_file_that_is_cut_off_changed_or_compressed_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    path, whole = tmp_path / "a.pt", _bytes(content)
    for share in (0, 0.001, 0.1, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(CheckpointError, match="is not used"):
            read(path)
    path.write_bytes(_bytes({**content, "averages": {name: t.clone() for name, t in content["weights"].items()}}))
    with pytest.raises(CheckpointError, match="hash"):
        read(path)
    # What is compressed could unpack to any size.
    with zipfile.ZipFile(io.BytesIO(whole)) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        read(path)


def _text(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda c: {**c, "text": json.dumps({**json.loads(c["text"]), **changes})}


def _settings(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(c: dict[str, Any]) -> dict[str, Any]:
        values = json.loads(c["text"])
        return {**c, "text": json.dumps({**values, "config": {**values["config"], **changes}})}

    return change


def _tensor(make: Callable[[Tensor], Any], section: str = "weights") -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda c: {**c, section: {**c[section], "stem.weight": make(c[section]["stem.weight"])}}


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: {**c, "more": 1}, "does not hold"),
    (lambda c: {k: v for k, v in c.items() if k != "averages"}, "does not hold"),
    (lambda c: {**c, "text": "[" * 100_000}, "no checkpoint"),
    (_text(format=2), "format is 2"),
    (_text(step=-1), "step is -1"),
    (_text(adam_steps=1e9), "adam_steps is"),
    (_text(scaler={"scale": 1.0}), "gradient scaling"),
    (_settings(workload="os:system"), "name code or paths"),
    (_settings(revision="HEAD"), "name code or paths"),
    (_settings(image_size=4 * 10**9), "image_size is"),
    (_settings(network="huge"), "'huge'"),
    (_settings(network="ddpm"), "'ddpm'"),
    (_tensor(lambda t: t[:1, :1].expand(10**6, 10**6, 3, 3)), "has shape"),
    (_tensor(lambda t: t[:1, :1, :1, :1].expand(t.shape)), "no plain tensor"),
    (_tensor(lambda t: t.requires_grad_()), "no plain tensor"),
    (_tensor(lambda t: t.double()), "asks for torch.DoubleStorage"),
    (_tensor(lambda t: t.to_sparse()), "asks for torch"),
    (lambda c: {**c, "more": bytearray(9)}, "asks for"),
    (_tensor(lambda t: torch.full_like(t, float("inf")), "averages"), r"stem.weight \(averages\) is not finite"),
    (_tensor(lambda t: t.to("meta")), "asks for torch"),
    (lambda c: {**c, (pair := (0, 1), pair): 1}, "object twice"),
]


def test_tricks_with_objects_are_refused_at_once(tmp_path: Path) -> None:
    """Whatever stands between a tuple and its number, a use of it again, and a change of what reads the file."""
    text, used = b"\x80\x02X\x01\x00\x00\x00aq\x00", b"h\x01h\x01\x86."
    tricks = [text + b"h\x00h\x00\x86" + idle + b"q\x01" + used for idle in (b"", b"(0", b"N0", b"Nb", b"(e")]
    tricks += [b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x04\x00\x00\x00sizeK\x01s\x86b."]
    for trick in tricks:
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
            file.writestr("a/data.pkl", trick)
        with pytest.raises(CheckpointError, match=r"object twice|changes objects"):
            read(tmp_path / "a.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match="no file"):
        read(tmp_path / "pipe.pt")


def test_shapes_of_lists_are_not_said() -> None:
    """A list in a list, forty times over, is long to tell."""
    size: Any = []
    for _ in range(40):
        size = [size, size]
    claim = module._Claim(("storage", "float32", "0", "cpu", 1), 0, size, (1,), False, {})
    shapes = {"stem.weight": torch.Size([1])}
    with pytest.raises(CheckpointError, match="no plain tensor"):
        module._tensors("weights", {"stem.weight": claim}, shapes, "tiny", lambda _: io.BytesIO())


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    for change, words in BAD:
        # A copy: some of the changes are made in place.
        copied = torch.load(io.BytesIO(_bytes(content)), weights_only=True)
        path = saved(tmp_path / "a.pt", change(copied))
        with pytest.raises(CheckpointError, match=words) as caught:
            read(path)
        assert "\n" not in str(caught.value)


def _bytes(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()

"""Checkpoints: all that training needs to go on, in a file that is whole or absent, and that can run nothing.

A file holds a JSON text, tensors, and a hash over both, as ``torch.save`` writes them. It is read by a reader that
knows no name of any code; no tensor is made before its name, shape, number format and size in the file are checked.
"""

import errno
import hashlib
import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from ddpm_lab.checks import LabError
from ddpm_lab.config import TRAINING, RunConfig
from ddpm_lab.data.archives import RefusedPickleError, refuse_tricks
from ddpm_lab.declared import parsed
from ddpm_lab.diffusion.unet import UNet, build_network
from ddpm_lab.files import replace

FORMAT = 1
SECTIONS = ("weights", "averages", "first_moments", "second_moments")
"""Trained weights, averaged weights (EMA), and Adam's two moments."""
NOT_KEPT = ("purpose", "workload", "data", "options")
"""Settings that say where and for what a run runs: a file must not be able to name code or paths."""
SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")

Tensors = dict[str, Tensor]
Records = Callable[[str], IO[bytes]]
"""Opens what a file holds of a tensor, by its key."""


class CheckpointError(LabError):
    """A checkpoint that cannot be used, or weights that must not be saved; one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of training after ``step`` steps, on the CPU in float32.

    Tensors are named and shaped as the parameters of the lab's own network, whatever implementation trains.
    ``adam_steps`` is below ``step`` where gradient scaling has left steps out; ``scaler`` is its state, or None.
    """

    config: RunConfig
    step: int
    adam_steps: int
    weights: Tensors
    averages: Tensors
    first_moments: Tensors
    second_moments: Tensors
    scaler: dict[str, float] | None = None


def empty_network(config: RunConfig) -> UNet:
    """The lab's own network of a configuration without memory for its weights: names and shapes."""
    with torch.device("meta"):
        return build_network(config.network, attention_axis=config.attention_axis)


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint that is there as a whole, on the disk, when this returns; until then an older one stays.

    Raises:
        CheckpointError: something in it is not finite.
        OSError: the file cannot be written; nothing is left of it.
    """
    values = {name: getattr(checkpoint, name) for name in ("step", "adam_steps", "scaler")}
    kept = {name: value for name, value in checkpoint.config.as_dict().items() if name not in NOT_KEPT}
    text = json.dumps({"format": FORMAT, "config": kept, **values}, sort_keys=True)
    sections = {section: getattr(checkpoint, section) for section in SECTIONS}
    _check_finite(sections, f"is no longer finite at step {checkpoint.step:,}")
    # Not straight to the file: torch turns a full disk into an error of its own.
    content = io.BytesIO()
    torch.save({"text": text, "sha256": _sha256(text, sections), **sections}, content)
    replace(path, content.getbuffer(), durable=True)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint; nothing in the file is run.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or does not hold what a checkpoint of its network holds.
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError("it is no file")
        with zipfile.ZipFile(path) as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                raise CheckpointError("it is compressed, which no checkpoint of ddpm_lab is")
            folder = file.namelist()[0].partition("/")[0]
            pickled = file.read(f"{folder}/data.pkl")
            refuse_tricks(pickled, "BUILD")
            return _checked(_Reader(io.BytesIO(pickled)).load(), lambda key: file.open(f"{folder}/data/{key}"))
    except OSError as error:
        if error.errno == errno.EINVAL:  # as of a damaged directory that points before the file
            raise CheckpointError(f"{path} is not used: it is damaged") from None
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (CheckpointError, RefusedPickleError) as error:
        raise CheckpointError(f"{path} is not used: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever a hostile or damaged file makes of the reader
        raise CheckpointError(f"{path} is not used: it is damaged, or no checkpoint of ddpm_lab") from error


class _Claim(NamedTuple):
    """What a file says of a tensor."""

    storage: tuple[str, str, str, str, int]
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    hooks: Any
    metadata: Any = None


_KNOWN = {"torch._utils._rebuild_tensor_v2": _Claim, "torch.FloatStorage": "float32", "collections.OrderedDict": dict}


class _Reader(pickle.Unpickler):
    """Reads plain values, and what is said of tensors; no name leads to any code."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _KNOWN:
            raise CheckpointError(f"it asks for {module}.{name}, which no checkpoint needs")
        return _KNOWN[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _checked(content: Any, record: Records) -> Checkpoint:
    """The checkpoint in what was read; any exception says that there is none."""
    if set(content) != {"text", "sha256", *SECTIONS} or type(content["text"]) is not str:
        raise CheckpointError("it does not hold what a checkpoint holds")
    values = parsed(content["text"])
    if values["format"] != FORMAT:
        raise CheckpointError(f"its format is {values['format']!r}, and this version of ddpm_lab reads {FORMAT}")
    if set(NOT_KEPT) & set(values["config"]) or values["config"].get("revision"):
        raise CheckpointError("its settings name code or paths")
    try:
        config = RunConfig.from_dict({**values["config"], "workload": TRAINING, "purpose": "quality"})
    except LabError as error:
        raise CheckpointError(f"its settings cannot be used: {error}") from error
    for name in ("step", "adam_steps"):
        if type(values[name]) is not int or not 0 <= values[name] < 2**53:
            raise CheckpointError(f"its {name} is {values[name]!r}")
    shapes = {name: p.shape for name, p in empty_network(config).named_parameters()}
    sections = {section: _tensors(section, content[section], shapes, config.network, record) for section in SECTIONS}
    if content["sha256"] != _sha256(content["text"], sections):
        raise CheckpointError("it is damaged: its hash does not fit its content")
    _check_finite(sections, "is not finite")
    if (scaler := values["scaler"]) is not None:
        numbers = (type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in scaler.values())
        if set(scaler) != set(SCALER) or not all(numbers):
            raise CheckpointError("its state of gradient scaling is not one")
    return Checkpoint(config=config, step=values["step"], adam_steps=values["adam_steps"], scaler=scaler, **sections)


def _check_finite(sections: Mapping[str, Tensors], fault: str) -> None:
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{name} ({section}) {fault}")


def _tensors(section: str, claims: Any, shapes: Mapping[str, torch.Size], network: str, record: Records) -> Tensors:
    """Tensors of a section, each read when its name, shape, format and size fit: a file can claim one of any size."""
    if type(claims) is not dict or set(claims) != set(shapes):
        raise CheckpointError(f"its {section} are not those of network {network!r}")
    found = {}
    for name, shape in shapes.items():
        claim = claims[name]
        plain = type(claim) is _Claim and claim.storage[:2] == ("storage", "float32") and not claim.requires_grad
        # What anything else looks like is not said: lists in lists, a few times over, would fill the memory.
        plain = plain and type(claim.storage[2]) is str and {*map(type, claim.size)} <= {int}
        if plain and claim.size != tuple(shape):
            raise CheckpointError(
                f"{name} ({section}) has shape {claim.size}, and network {network!r} has {tuple(shape)}"
            )
        plain = plain and claim.offset == 0 and torch.empty_strided(shape, claim.stride, device="meta").is_contiguous()
        content = bytearray(record(claim.storage[2]).read(4 * shape.numel()) if plain else b"")
        if len(content) != 4 * shape.numel():
            raise CheckpointError(f"{name} ({section}) is no plain tensor of float32")
        found[name] = torch.frombuffer(content, dtype=torch.float32).reshape(shape)
    return found


def _sha256(text: str, sections: Mapping[str, Tensors]) -> str:
    """Hash of the text and of every tensor's bytes, in the order of their names."""
    found = hashlib.sha256(text.encode())
    for section in SECTIONS:
        for name, tensor in sorted(sections[section].items()):
            found.update(f"{section} {name}".encode())
            found.update(tensor.numpy().data)
    return found.hexdigest()

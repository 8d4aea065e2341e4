"""Checkpoints: all that training needs to go on, in a file that is whole or absent, and that can run nothing.

A file holds a JSON text, tensors, and a hash over both, as ``torch.save`` writes them. Its pickle is never run: the
text is found in it, says which tensors there are, and these are read as they lie in the file.
"""

import hashlib
import io
import itertools
import json
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddpm_lab.checks import LabError
from ddpm_lab.config import TRAINING, RunConfig
from ddpm_lab.declared import parsed
from ddpm_lab.diffusion.unet import UNet, build_network
from ddpm_lab.files import replace

FORMAT = 1
SECTIONS = ("weights", "averages", "first_moments", "second_moments")
"""Trained weights, averaged weights (EMA), and Adam's two moments."""
NOT_KEPT = ("purpose", "workload", "data", "options")
"""Settings that say where and for what a run runs: a file must not be able to name code or paths."""
HEAD_BYTES = 2**16
"""Of a file's pickle: its first strings, "text", the text, "sha256" and the hash, take some three thousand bytes."""

Tensors = dict[str, Tensor]


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
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise CheckpointError(f"{name} ({section}) is no longer finite at step {checkpoint.step:,}")
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
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            raise CheckpointError("it is no file")
        with zipfile.ZipFile(path) as file:
            return _checked(file)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not used: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever a hostile or damaged file makes of its readers
        raise CheckpointError(f"{path} is not used: it is damaged, or no checkpoint of ddpm_lab") from error


def _checked(file: zipfile.ZipFile) -> Checkpoint:
    """The checkpoint in a file; any exception says that there is none."""
    folder = file.namelist()[0].partition("/")[0]
    with file.open(f"{folder}/data.pkl") as pickled:
        opcodes = pickletools.genops(pickled.read(HEAD_BYTES))
    strings = (str(argument) for opcode, argument, _ in opcodes if opcode.name == "BINUNICODE")
    _, text, _, sha256 = itertools.islice(strings, 4)
    values = parsed(text)
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
    sections: dict[str, Tensors] = {section: {} for section in SECTIONS}
    for number, (section, name) in enumerate(itertools.product(SECTIONS, shapes)):
        with file.open(f"{folder}/data/{number}") as record:  # as torch.save numbers them
            content = bytearray(record.read(4 * shapes[name].numel()))
        sections[section][name] = torch.frombuffer(content, dtype=torch.float32).reshape(shapes[name])
    if sha256 != _sha256(text, sections):
        raise CheckpointError("it is damaged: its hash does not fit its content")
    step, adam_steps, scaler = values["step"], values["adam_steps"], values["scaler"]
    return Checkpoint(config=config, step=step, adam_steps=adam_steps, scaler=scaler, **sections)


def _sha256(text: str, sections: Mapping[str, Tensors]) -> str:
    """Hash of the text and of every tensor's bytes, in the order of their names."""
    found = hashlib.sha256(text.encode())
    for section in SECTIONS:
        for name, tensor in sorted(sections[section].items()):
            found.update(f"{section} {name}".encode())
            found.update(tensor.numpy().data)
    return found.hexdigest()

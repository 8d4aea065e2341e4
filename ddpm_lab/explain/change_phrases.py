"""A change of a configuration in words: title, why it may help, settings as a file, and the command that tries it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import phrases
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.subject import Subject

_TITLES: dict[str, Callable[[Any], str]] = {
    "loader": lambda kind: f"use {kind} data" if kind != "files" else "read files",
    "loader_workers": lambda count: f"use {phrases.plural(count, 'loader worker')}",
    "precision": lambda kind: f"train in {kind}",
    "compile": lambda how: "switch torch.compile off" if how == "off" else "compile the step",
    "kernels": lambda kind: "use the joined kernels" if kind == "fused" else "use torch's own kernels",
    "freed_memory": lambda kind: "keep freed memory" if kind == "kept" else "give freed memory back",
    "global_batch_size": lambda batch: f"use batches of {phrases.plural(batch, 'image')}",
    "world_size": lambda ranks: f"train with {phrases.plural(ranks, 'rank')}",
    "channels_last": lambda _: "use the channels_last memory format",
    "read_loss": lambda _: "do not wait for each loss",
    "optimizer": lambda _: "update all weights at once",
    "exchange": lambda new: f"exchange gradients in {new['hook']}" if new["hook"] != "none" else "set exchange",
}
_FOLLOWS = {
    "loader": ("loader_workers",),
    "compile": ("kernels", "compile_mode"),
    "world_size": ("nodes", "exchange"),
}
"""Settings that change with another because they must."""
_COMPUTE = ("forward", "backward")
ACTS_ON = {
    "loader": ("data", "copy"),
    "loader_workers": ("data",),
    "exchange": ("communication",),
    "optimizer": ("optimizer", "EMA"),
    **dict.fromkeys(("precision", "compile", "kernels", "channels_last"), _COMPUTE),
}
"""Phases of a time budget that a setting can make shorter, where it is about some of them."""
_DATA = ("--data", "DATA")
OPTIONS = ("precision", "world_size", "loader", "loader_workers", "compile", "image_size", "seed")
"""Settings that are options of the command."""


def title(change: RunConfig, now: RunConfig) -> str:
    """Such as "Train in bf16"."""
    changed = change.differences(now)
    follow = {other for name in changed for other in _FOLLOWS.get(name, ())}
    left = [(name, new) for name, (new, _) in changed.items() if name not in follow]
    return phrases.begun(
        phrases.joined([_TITLES[name](new) if name in _TITLES else f"set {name}" for name, new in left])
    )


def share(about: Subject, other: RunConfig) -> float:
    """Share of a step that the phases take on which the change acts; 0 where no phase shows it."""
    return sum(map(about.taken.running.share, _phases(about, other)))


def rationale(about: Subject, other: RunConfig) -> str:
    """Why the change may help, by the time budget."""
    line, changed = about.taken.running, other.differences(about.config).keys()
    if "world_size" in changed:
        exchange = f", which is {bd.percent(line.share('communication'))} of a step"
        if other.world_size < about.config.world_size:
            return f"One rank exchanges nothing{exchange}, and computes all of the batch itself"
        return f"{other.world_size} ranks share the batch, and exchange gradients for it"
    if "global_batch_size" in changed:
        return "What a step costs whatever its batch is shared by another number of images"
    phases = _phases(about, other)
    if not phases:
        return "No phase of the time budget shows it"
    names = phrases.joined([bd.LONG.get(p, p) for p in phases])
    return f"It acts on {names}: {bd.percent(share(about, other))} of a step"


def _phases(about: Subject, other: RunConfig) -> list[str]:
    """Phases of the time budget on which a change acts."""
    acts = {phase for name in other.differences(about.config) for phase in ACTS_ON.get(name, ())}
    return [phase for phase in about.taken.running.phases if phase in acts]


def settings(change: RunConfig, now: RunConfig) -> tuple[str, str]:
    """What is set now, and what the change sets, as a file of settings says it: ``precision = "fp32"``."""
    changed = change.differences(now)
    before, after = [], []
    for name, (new, old) in changed.items():
        parts = [k for k in new if new[k] != old[k]] if isinstance(new, Mapping) else [""]
        for part in parts:
            dotted = f"{name}.{part}" if part else name
            before.append(_setting(dotted, old[part] if part else old))
            after.append(_setting(dotted, new[part] if part else new))
    return ", ".join(before), ", ".join(after)


def _setting(name: str, value: Any) -> str:
    return f"{name} = {json.dumps(value)}"


def command(study: Study, config: RunConfig, *only: str) -> str:
    """The command that measures ``config`` beside its changes, or beside ``only`` some of them, by name."""
    plain = RunConfig(network=config.network, device=config.device, global_batch_size=config.global_batch_size)
    words = ["ddpm-lab", "bottleneck", *_DATA * study.own_images, "--network", config.network]
    words += ["--batch-size", str(config.global_batch_size)]
    changed = {n: new for n, (new, _) in config.differences(plain).items() if n not in ("data_sha256", "nodes")}
    for name in [name for name in changed if name in OPTIONS]:
        words += [f"--{name.replace('_', '-')}", str(changed.pop(name))]
    words += ["--config", "FILE"] if changed else []
    words += ["--changes", ",".join(only), "--resolution", "2%"] if only else []
    return shlex.join(words)


def quality_command(study: Study) -> str:
    """The command that measures what settings cost in quality."""
    return shlex.join(["ddpm-lab", "run", "quality", *_DATA * study.own_images, "--seeds", "8"])

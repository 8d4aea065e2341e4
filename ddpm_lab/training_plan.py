"""From a file of settings and the command line to a run that is checked: whatever can be refused is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import DEVICES, TRAINING, RunConfig
from ddpm_lab.data.packed import read_manifest, resolve
from ddpm_lab.declared import known
from ddpm_lab.measure import hardware
from ddpm_lab.measure.cluster import current, spread, usual_ranks
from ddpm_lab.run_folder import OWN
from ddpm_lab.setting import check_cores, check_ranks, usual_device, usual_settings
from ddpm_lab.settings_file import configuration, read_settings
from ddpm_lab.training_run import Schedule

USUAL = {"cpu": {"network": "tiny", "global_batch_size": 32}, "cuda": {"network": "seed", "global_batch_size": 128}}
TABLE = "train"


def plan_training(
    flags: Mapping[str, Any],
    schedule: Mapping[str, Any],
    *,
    file: Path | None,
    cache: Path,
    held_out: str | None = None,
    skip_bad: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[RunConfig, Schedule, frozenset[str]]:
    """The configuration and schedule of a run, and which settings the user gave.

    They are those of ``file``, and over them those of the command line.

    ``flags`` and ``schedule`` hold what the user has given; a name with a dot lies in a table. What neither says is as
    ``usual_settings`` and ``USUAL`` have it for the kind of device. Images are prepared in ``cache``.

    Raises:
        ConfigError: something cannot be run on this machine.
        DataError: the images cannot be used.
    """
    place = "the settings" if file is None else str(file)
    values = read_settings(file, "--config") if file else {}
    table = values.pop(TABLE, {})
    for name in OWN:
        if name in values:
            raise ConfigError(f"{place}: {name} is not for a file of training settings: leave it out")
    times = {**_table(place, TABLE, table), **schedule}
    known(f"[{TABLE}]", times, Schedule)
    if "steps" not in times:
        raise ConfigError("how long to train is not given: give --steps, or steps in the table [train] of --config")
    planned = Schedule(**times)
    if "data" in flags:
        values.pop("data_sha256", None)  # it belongs to the file's images
    for name, value in flags.items():
        part, _, inner = name.rpartition(".")
        if part:
            values[part] = {**_table(place, part, values.get(part, {})), inner: value}
        else:
            values[name] = value
    if "device" not in values:
        values["device"] = usual_device(None)
    device, said = values["device"], frozenset(values)
    choice(f"{place}: device", device, DEVICES)
    values = {**USUAL.get(device, {}), **_defaults(device, values), **values}
    values.setdefault("world_size", usual_ranks(values.get("nodes")))
    values.setdefault("nodes", spread(values["world_size"]))
    config = configuration({**values, "workload": TRAINING, "purpose": "quality"}, place)
    if config.nodes > (len(cluster.hosts) if (cluster := current()) else 1):
        raise ConfigError(
            f"{place}: nodes is {config.nodes}: start it on so many hosts (torchrun ... -m ddpm_lab rank train), or "
            "leave it out"
        )
    if not config.exchange.enabled:
        raise ConfigError("exchange.enabled is false: ranks that exchange nothing train a network each; leave it out")
    cores = hardware.usable_cores()
    check_ranks(config.device, config.node_size, len(hardware.gpus()), cores, config.oversubscribe)
    for name in ("loader_workers", "threads"):
        check_cores(name, getattr(config, name), cores, config.node_size)
    folder = resolve(
        config.data or "synthetic",
        cache,
        image_size=config.image_size,
        held_out=held_out,
        skip_bad=skip_bad,
        progress=progress,
    )
    sha256 = read_manifest(folder).content_hash
    if config.data_sha256 not in ("", sha256):
        raise ConfigError(f"{place}: the images in {config.data} are not those that data_sha256 names: leave it out")
    return dataclasses.replace(config, data=str(folder), data_sha256=sha256), planned, said


def _defaults(device: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's settings for speed on a kind of device, but for joined kernels where what was asked has none."""
    defaults = usual_settings(device)
    without = (("compile", "off"), ("channels_last", True), ("implementation", "lab"))
    if any(values.get(name, usual) != usual for name, usual in without):
        defaults.pop("kernels", None)
    return defaults


def _table(place: str, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {name} is {value!r}: give a table, [{name}]")
    return value

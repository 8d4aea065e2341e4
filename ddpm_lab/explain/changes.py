"""What could be set differently: configurations one change away from a given one, by name."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, ExchangeConfig, RunConfig

BATCH_SIZES = (8, 16, 32, 64)
"""The sweep of S002's report; twice the present batch is tried besides."""
NO_EXCHANGE = "no exchange (no training)"
_PRECISIONS = {"cpu": ("bf16", "fp32"), "cuda": ("bf16", "tf32", "fp32")}


def changes(config: RunConfig, *, usable_cores: int, most_ranks: int) -> dict[str, RunConfig]:
    """Configurations one change away from ``config`` that its machine could run, in the order of measuring.

    What has to be compiled comes last: it is left out first where time is short. Of several ranks one configuration,
    ``NO_EXCHANGE``, is no offer: it shows what the exchange costs, and which rank is slow on its own.
    """
    found: dict[str, dict[str, Any]] = {}
    if config.loader == "files":
        found["packed data"] = {"loader": "packed", "loader_workers": 0}
        counts = {0 if config.loader_workers else min(4, usable_cores), 2 * config.loader_workers}
        for count in sorted(n for n in counts - {config.loader_workers} if n <= usable_cores):
            found[f"{count} loader worker{'s' * (count != 1)}"] = {"loader_workers": count}
    if config.loader in ("files", "packed") and config.device == "cuda":
        found["resident data"] = {"loader": "resident", "loader_workers": 0}
    for precision in _PRECISIONS[config.device]:
        found[precision] = {"precision": precision}
    if config.compile != "off":
        found["eager"] = {"compile": "off", "compile_mode": "default"}
    elif config.workload == DDPM:
        found["joined kernels"] = {"kernels": "fused"}
    if config.device == "cpu":
        found["freed memory kept"] = {"freed_memory": "kept"}
    found["channels last"] = {"channels_last": True}
    found["losses not read"] = {"read_loss": False}
    found["fused Adam"] = {"optimizer": dataclasses.replace(config.optimizer, adam="fused", ema="foreach")}
    if config.world_size > 1:
        found["gradients in bf16"] = {"exchange": dataclasses.replace(config.exchange, hook="bf16")}
        found[NO_EXCHANGE] = {"exchange": ExchangeConfig(enabled=False)}
        found["1 rank"] = {"world_size": 1, "nodes": 1, "exchange": ExchangeConfig()}
    elif most_ranks > 1:
        ranks = most_ranks if config.device == "cuda" else 2
        found[f"{ranks} ranks"] = {"world_size": ranks}
    if config.compile == "off":
        found["compiled"] = {"compile": "whole", "kernels": "aten"}
    return _others(config, found)


def batch_sizes(config: RunConfig) -> dict[str, RunConfig]:
    """``config`` with each other batch of the sweep, and with twice its own."""
    own = config.global_batch_size
    return _others(config, {f"batch {n}": {"global_batch_size": n} for n in sorted({*BATCH_SIZES, 2 * own} - {own})})


def _others(config: RunConfig, found: dict[str, dict[str, Any]]) -> dict[str, RunConfig]:
    """Those that can be: a batch that the ranks cannot share, for one, nobody asked for."""
    others = {}
    for name, change in found.items():
        with contextlib.suppress(ConfigError):
            others[name] = dataclasses.replace(config, **change)
    return {name: other for name, other in others.items() if other != config}

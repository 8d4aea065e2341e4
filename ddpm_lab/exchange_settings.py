"""How ranks exchange gradients: settings that validate themselves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ddpm_lab.checks import ConfigError, choice, whole

HOOKS = ("none", "bf16", "fp16")
_PCIE = (
    "NCCL_DEBUG=INFO NCCL_ALGO=Tree NCCL_PROTO=Simple NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=0 NCCL_NET_GDR_LEVEL=0 "
    "NCCL_BUFFSIZE=33554432 NCCL_NTHREADS=16 NCCL_MAX_NCHANNELS=8 NCCL_MIN_NCHANNELS=4"
)
NCCL: dict[str, dict[str, str]] = {"default": {}, "pcie": dict(v.split("=") for v in _PCIE.split())}
"""Environments of NCCL by name. ``pcie`` was published for GPUs on PCIe alone: it turns peer-to-peer off, which is
harmful with NVLink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How DistributedDataParallel exchanges gradients; without effect on one rank, where they may not be set.

    ``bucket_view`` lets gradients live in the buckets that are exchanged, which saves a copy; ``static_graph`` promises
    that every step uses the same weights; ``bucket_mb`` is the size of a bucket in MiB. ``hook`` sends the gradients in
    two bytes a value, rounded to bf16 or fp16, and adds them up so, which changes what is learned. ``nccl`` is an
    environment of NCCL by its name in ``NCCL``: "pcie" is harmful with NVLink. Without ``enabled`` nothing is
    exchanged: every rank trains a network of its own, which shows what the exchange costs and is no training.
    """

    enabled: bool = True
    bucket_view: bool = True
    static_graph: bool = False
    bucket_mb: int = 25
    hook: str = "none"
    nccl: str = "default"

    def __post_init__(self) -> None:
        choice("exchange.enabled", self.enabled, (True, False))
        choice("exchange.bucket_view", self.bucket_view, (True, False))
        choice("exchange.static_graph", self.static_graph, (True, False))
        whole("exchange.bucket_mb", self.bucket_mb, 1)
        choice("exchange.hook", self.hook, HOOKS)
        choice("exchange.nccl", self.nccl, NCCL)
        usual = ((f.name, f.default) for f in dataclasses.fields(self) if f.name != "enabled")
        for name, value in () if self.enabled else usual:
            if getattr(self, name) != value:
                raise ConfigError(
                    f"exchange.{name} is {getattr(self, name)!r} and exchange.enabled is false: where nothing is "
                    "exchanged it would change nothing; leave it out"
                )

"""What torchrun tells a process that it started, and the address at which a host is reached by the others."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from ddpm_lab.checks import ConfigError

JOIN_SECONDS = 120.0
"""How long the leader waits for the others, whose imports may come from a slow shared file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What torchrun tells a process of itself and of the others."""

    rank: int
    world_size: int
    local_rank: int
    hosts: int
    master_address: str
    master_port: int
    run_id: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Process:
        """Read from environment variables. Raises ConfigError where torchrun did not set them."""
        try:
            return cls(
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment["LOCAL_RANK"]),
                hosts=int(environment["GROUP_WORLD_SIZE"]),
                master_address=environment["MASTER_ADDR"],
                master_port=int(environment["MASTER_PORT"]),
                run_id=environment["TORCHELASTIC_RUN_ID"],
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"ddpm-lab rank needs what torchrun tells its processes, and {error} is missing: "
                "start it as torchrun ... -m ddpm_lab rank COMMAND"
            ) from error

    def store(self) -> Any:
        """The store of torchrun, the part of it that belongs to this job."""
        from ddpm_lab.measure.meeting import store_at  # noqa: PLC0415 - torch only in what torchrun started

        return store_at(self.master_address, self.master_port, f"ddpm_lab/{self.run_id}", seconds=JOIN_SECONDS)


def addresses() -> dict[str, str]:
    """The network interface of each IP address of this host."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        a.address.split("%")[0]: n for n, found in psutil.net_if_addrs().items() for a in found if a.family in kinds
    }


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address of this host; None is unknown."""
    return addresses().get(address.split("%", maxsplit=1)[0])


def network_settings(address: str) -> dict[str, str]:
    """Environment that has ranks exchange gradients by the interface of an address, unless the user chose another."""
    own = interface_of(address)
    if own is None:
        return {}
    names = {"GLOO_SOCKET_IFNAME": own, "NCCL_SOCKET_IFNAME": f"={own}"}  # NCCL would take eth1 for eth10 too
    return {name: value for name, value in names.items() if name not in os.environ}


def own_address(process: Process, interface: str | None) -> str:
    """The address on which this host is reached by the others: that of ``interface``, or the one torchrun knows.

    Raises ConfigError where that is none of this host's, or is one that only this host itself can reach.
    """
    here = addresses()
    if interface is not None:
        own = [a for a, name in here.items() if interface in (a, name)]
        if not own:
            raise ConfigError(f"--interface is {interface!r}: choose one of {', '.join(sorted(set(here.values())))}")
        return min(own, key=lambda a: ipaddress.ip_address(a).version)
    try:
        named = [str(found[4][0]) for found in socket.getaddrinfo(process.master_address, None)]
    except OSError:
        named = []
    own = [a for a in named if a in here or ipaddress.ip_address(a).is_loopback]
    if not own:
        raise ConfigError(
            f"torchrun's address {process.master_address} is none of this host's: give ddpm-lab rank --interface"
        )
    if process.hosts > 1 and all(ipaddress.ip_address(a).is_loopback for a in own):
        raise ConfigError(
            f"torchrun's address {process.master_address} is {own[0]} here, which other hosts cannot reach: give "
            "torchrun --local-addr with an address that they can, or -m ddpm_lab rank --interface NAME; for a trial on "
            f"this machine alone, -m ddpm_lab rank --interface {here.get(own[0], 'lo')}"
        )
    return next((a for a in own if not ipaddress.ip_address(a).is_loopback), own[0])

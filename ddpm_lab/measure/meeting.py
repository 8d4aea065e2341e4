"""Stores of torch in which processes find each other; each is found only by those that are told its name."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def store_at(address: str, port: int, name: str, *, seconds: float, listener: socket.socket | None = None) -> Any:
    """The part called ``name`` of a TCP store. With ``listener`` this process serves it, on that socket alone."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]

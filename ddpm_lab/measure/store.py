"""The store of torchrun, in which its processes and their ranks find each other. It imports torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def join_store(address: str, port: int, prefix: str, *, seconds: float) -> Any:
    """Connect to the part of a store whose keys begin with ``prefix``; ``seconds`` limits this and each wait.

    Raises RuntimeError where nobody answers.
    """
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

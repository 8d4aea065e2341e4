"""NVML, NVIDIA's management library: what it says of GPUs, and None for what it does not say."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def _library() -> Any:
    """NVML, which stays open, since opening it takes long; None where there is no driver or no binding."""
    try:
        import pynvml  # noqa: PLC0415 - optional on a bare node

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def ask(name: str, *arguments: Any) -> Any:
    """Return what the function ``name`` of NVML says; None for whatever a device or a user may not know."""
    try:
        return None if None in arguments else getattr(_library(), name)(*arguments)
    except Exception:  # NVML raises its own family of errors
        return None


@cache
def device(uuid: str) -> Any:
    """Return the handle of a GPU or MIG device, or None; torch writes the UUID of a MIG device as that of a GPU."""
    handle = ask("nvmlDeviceGetHandleByUUID", uuid)
    return ask("nvmlDeviceGetHandleByUUID", uuid.replace("GPU-", "MIG-")) if handle is None else handle

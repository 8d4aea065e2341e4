"""What becomes of the memory that a step frees: given back to the system, or kept for the next step.

The GNU C library maps every large block anew and unmaps it when it is freed. The kernel then clears each page again
when it is first written to, in every step: at batch 32 a step of the seed network has 50,000 such page faults in
bf16 and 130,000 in fp32 (pages of 4 KiB).
"""

from __future__ import annotations

import ctypes
import resource

import torch

from ddpm_lab.workload import Unsupported

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_MOST = 2**31 - 1
_PROBE_BYTES = 64 * 2**20
"""More than the library ever keeps by itself, which is blocks of up to 32 MiB."""
_PAGES = 64


def keep_freed_memory() -> None:
    """Have this process keep what it frees, from now on: also between its steps.

    The peak of a step whose sizes do not change is as before. Raises Unsupported where the C library cannot be told so,
    and where that has no effect since another library allocates memory.
    """
    try:
        tell = ctypes.CDLL(None).mallopt
        told = tell(_M_MMAP_MAX, 0) and tell(_M_TRIM_THRESHOLD, _MOST)
    except (OSError, AttributeError):
        told = 0
    if not told:
        raise Unsupported("freed_memory 'kept' needs the GNU C library, whose malloc can be told so: use default")
    if freed_memory_seen() != "kept":
        raise Unsupported(
            "freed_memory 'kept' has no effect, since another allocator than the C library's is loaded (LD_PRELOAD): "
            "use default"
        )


def freed_memory_seen() -> str:
    """``kept`` or ``default``, from what happens: whether a large block comes back without page faults.

    A few pages of it are touched, so that nothing is added to the memory that is held. The second block is smaller: it
    has to fit between what was allocated around the first, whatever its alignment takes.
    """
    _touch(_PROBE_BYTES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _touch(_PROBE_BYTES - 2**16)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return "kept" if faults < _PAGES // 4 else "default"


def _touch(size: int) -> None:
    torch.empty(size, dtype=torch.uint8)[:: _PROBE_BYTES // _PAGES].fill_(1)

"""What this machine's processor is called and which instructions it has, less those that torch was told to do without.

``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` make torch and oneDNN keep to an older processor's instructions. Our
kernels keep to them too, and a machine that is limited so is another machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
from functools import cache
from pathlib import Path

LIMITS = {
    "DEFAULT": ("avx", "avx2", "fma", "avx512", "amx"),
    "AVX2": ("avx512", "amx"),
    "AVX512_CORE": ("avx512_bf16", "amx"),
    "AVX512_CORE_VNNI": ("avx512_bf16", "amx"),
}
"""How the names of instructions begin that are left out, by the value of either variable."""


@cache
def processor() -> str:
    """The processor's name, and what it was told to keep to: ``AMD EPYC (family 25, model 17), as AVX2``."""
    return ", ".join([name_in(_cpuinfo()) or platform.machine(), *(f"as {limit}" for limit in _limits())])


@cache
def instructions() -> frozenset[str]:
    """The instructions that may be used, by their names in /proc/cpuinfo, such as ``avx2``; on Arm ``bf16``."""
    told = _told(_cpuinfo())
    without = tuple(start for limit in _limits() for start in LIMITS.get(limit, ()))
    found = (told.get("flags") or told.get("features") or "").split()
    return frozenset(name for name in found if not name.startswith(without))


def multiplies_bf16() -> bool:
    """Whether there are instructions that multiply bfloat16; without them it is emulated, many times slower."""
    return not instructions().isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def name_in(cpuinfo: str) -> str:
    """The first processor's name in the text of /proc/cpuinfo; empty where it has none.

    Virtual machines may hide the model of theirs: "AMD EPYC" is every generation of it, of which one multiplies bf16
    twice as fast as another. Such a name gets family and model, which tell generations apart.
    """
    told = _told(cpuinfo)
    name = told.get("model name") or told.get("hardware", "")
    family, model = told.get("cpu family"), told.get("model")
    if not name or any(c.isdigit() for c in name) or not (family and model):
        return name
    return f"{name} (family {family}, model {model})"


def _limits() -> list[str]:
    """What either variable says, where that limits something."""
    said = (os.environ.get(name, "").upper() for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"))
    return sorted({"DEFAULT" if limit in ("SSE41", "AVX") else limit for limit in said} & LIMITS.keys())


def _told(cpuinfo: str) -> dict[str, str]:
    """What is said of the first processor, by lower-case names."""
    told: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip().lower(), " ".join(value.split()))
    return told


def _cpuinfo() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""

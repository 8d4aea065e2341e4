"""What this machine's processor is called and which instructions it has, less those that torch was told to do without.

``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA`` make torch and oneDNN keep to an older processor's instructions. Our
kernels keep to them too, and a machine that is limited so is another machine.
"""

from __future__ import annotations

import itertools
import os
import platform
from functools import cache
from pathlib import Path

_NO_AVX, _NO_AVX512 = ("avx", "fma", "avx512", "amx"), ("avx512", "amx")
LIMITS = {
    "ATEN_CPU_CAPABILITY": {"DEFAULT": _NO_AVX, "AVX2": _NO_AVX512},
    "ONEDNN_MAX_CPU_ISA": {
        **dict.fromkeys(("SSE41", "AVX"), _NO_AVX),
        **dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), _NO_AVX512),
        **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), ("avx512_bf16", "amx")),
        **dict.fromkeys(("AVX512_CORE_BF16", "AVX10_1_512"), ("amx",)),
    },
}
"""How the names of instructions begin that are left out, by variable and value; other values leave out nothing."""


@cache
def processor() -> str:
    """The processor's name, and what it was told to keep to: ``AMD EPYC (family 25, model 17), as AVX2``."""
    return ", ".join([name_in(_cpuinfo()) or platform.machine(), *(f"as {limit}" for limit in sorted(_limits()))])


@cache
def instructions() -> frozenset[str]:
    """The instructions that may be used, by their names in /proc/cpuinfo, such as ``avx2``; on Arm ``bf16``."""
    return frozenset(name for name in _all() if not name.startswith(tuple(itertools.chain(*_limits().values()))))


def withheld() -> frozenset[str]:
    """The instructions that this processor has and torch was told to do without."""
    return _all() - instructions()


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
    hidden = name and not any(c.isdigit() for c in name) and family and model
    return f"{name} (family {family}, model {model})" if hidden else name


def _limits() -> dict[str, tuple[str, ...]]:
    """What either variable says, where that limits something, and what is left out."""
    said = ((os.environ.get(name, "").upper(), limits) for name, limits in LIMITS.items())
    return {value: limits[value] for value, limits in said if value in limits}


def _all() -> frozenset[str]:
    told = _told(_cpuinfo())
    return frozenset((told.get("flags") or told.get("features") or "").split())


def _told(cpuinfo: str) -> dict[str, str]:
    """What is said of the first processor, by lower-case names."""
    lines = [line.partition(":") for line in reversed(cpuinfo.splitlines())]  # the first one is put in last
    return {name.strip().lower(): " ".join(value.split()) for name, _, value in lines}


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:  # of another system, or a sandbox
        return ""

"""What this machine's processor is called and which instructions it has."""

import platform
import re
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """The processor's name, such as ``AMD EPYC (family 25, model 17)``."""
    return name_in(_cpuinfo()) or platform.machine()


def instructions() -> frozenset[str]:
    """The instructions of the processor, by their names in /proc/cpuinfo, such as ``avx2``; on Arm ``bf16``."""
    info = _fields(_cpuinfo())
    return frozenset((info.get("flags") or info.get("features") or "").split())


@cache
def multiplies_bf16() -> bool:
    """Whether there are instructions that multiply bfloat16; without them it is emulated, many times slower."""
    return not instructions().isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


@cache
def favours_bf16() -> bool:
    """Whether a training is usually faster in bf16 than in fp32: with AMX, Arm's bf16, and AMD's AVX512_BF16.

    Intel's AVX512_BF16 without AMX, as in virtual machines that hide it, takes 1.3 to 1.9 times as long as fp32.
    """
    intel = _fields(_cpuinfo()).get("vendor_id") == "GenuineIntel"
    return multiplies_bf16() and ("amx_bf16" in instructions() or not intel)


def name_in(cpuinfo: str) -> str:
    """The first processor's name in the text of /proc/cpuinfo; empty where it has none.

    Virtual machines may hide the model of theirs: "AMD EPYC" is every generation of it, of which one multiplies bf16
    twice as fast as another, and "Intel(R) Xeon(R) CPU @ 2.20GHz" several. Such a name gets family and model, which
    tell generations apart.
    """
    info = _fields(cpuinfo)
    name = info.get("model name") or info.get("hardware", "")
    family, model = info.get("cpu family"), info.get("model")
    hidden = name and not re.search(r"\d", re.sub(r"@.*| version .*", "", name)) and family and model
    return f"{name} (family {family}, model {model})" if hidden else name


def _fields(cpuinfo: str) -> dict[str, str]:
    """Return the fields of the first processor by lower-case names."""
    lines = [line.partition(":") for line in reversed(cpuinfo.splitlines())]  # the first one is put in last
    return {name.strip().lower(): " ".join(value.split()) for name, _, value in lines}


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text()

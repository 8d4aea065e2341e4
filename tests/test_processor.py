"""The processor, as it is and as torch was told to take it."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ddpm_lab import processor
from ddpm_lab.measure import hardware
from ddpm_lab.training import setting

ALL = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile")
NEW = f"model name\t: AMD EPYC 9654\nflags\t\t: {' '.join(ALL)}\n"


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A new processor, of which nothing is limited."""
    for name in processor.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processor, "_cpuinfo", lambda: NEW)
    _forget()
    yield
    _forget()


def _forget() -> None:
    processor.processor.cache_clear()
    processor.instructions.cache_clear()


def test_a_name_that_every_generation_has_is_told_by_family_and_model() -> None:
    names = {
        "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel\t\t: 9\n": "AMD EPYC (family 26, model 2)",
        "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R)  8481C CPU\n": "Intel(R) Xeon(R) 8481C CPU",
        "processor\t: 0\nHardware\t: BCM2835\n": "BCM2835",
        "processor\t: 0\nBogoMIPS\t: 100.00\n": "",
    }
    assert {cpuinfo: processor.name_in(cpuinfo) for cpuinfo in names} == names


def test_what_torch_does_without_the_lab_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, str], set[str], bool]] = [
        ({}, {*ALL}, True),
        ({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, {"avx", "avx2", "fma"}, False),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, {"avx", "avx2", "fma", "avx512f", "avx512bw"}, False),
        ({"ATEN_CPU_CAPABILITY": "default"}, set(), False),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, {*ALL}, True),
    ]
    for limits, instructions, bf16 in cases:
        with monkeypatch.context() as patch:
            for name, value in limits.items():
                patch.setenv(name, value)
            _forget()
            assert processor.instructions() == instructions
            assert processor.withheld() == {*ALL} - instructions
            assert processor.multiplies_bf16() is bf16
            assert setting.usual_settings("cpu")["precision"] == ("bf16" if bf16 else "fp32")
            assert (hardware.machine().cpu == "AMD EPYC 9654") is (instructions == {*ALL})


def test_arm_processors_and_gpus_get_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_cpuinfo", lambda: "processor: 0\nFeatures : fp asimd bf16\n")
    assert processor.multiplies_bf16()
    for capability, usual in (((9, 0), ("bf16", "whole")), ((7, 5), ("fp16", "whole")), ((6, 1), ("fp32", "off"))):
        monkeypatch.setattr(setting, "least_capability", lambda found=capability: found)
        found = setting.usual_settings("cuda")
        assert (found["precision"], found["compile"]) == usual
    monkeypatch.setenv("CC", "nogcc")
    monkeypatch.setattr(setting, "least_capability", lambda: (9, 0))
    assert setting.usual_settings("cuda")["compile"] == "off", "as in an image without a C compiler"


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["avx2", "default"])
def test_kernels_compiled_for_older_processors_compute_the_same(limit: str) -> None:
    """Every test of the kernels again, with the instructions of an older processor."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": limit, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_kernels.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]

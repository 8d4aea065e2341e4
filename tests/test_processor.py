"""The processor's name, what it multiplies, and kernels that are compiled for older ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpm_lab import processor
from ddpm_lab.training import setting


def test_a_name_that_every_generation_has_is_told_by_family_and_model() -> None:
    names = {
        "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel\t\t: 9\n": "AMD EPYC (family 26, model 2)",
        "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R)  8481C CPU\n": "Intel(R) Xeon(R) 8481C CPU",
        "processor\t: 0\nHardware\t: BCM2835\n": "BCM2835",
        "processor\t: 0\nBogoMIPS\t: 100.00\n": "",
    }
    assert {cpuinfo: processor.name_in(cpuinfo) for cpuinfo in names} == names


def test_processors_and_gpus_get_the_number_format_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"flags: avx2 avx512_bf16": "bf16", "flags: avx2 avx512f": "fp32", "Features: bf16": "bf16"}
    for flags, precision in cases.items():
        monkeypatch.setattr(processor, "_cpuinfo", lambda text=flags: f"processor: 0\n{text}\n")
        processor.multiplies_bf16.cache_clear()
        assert setting.usual_settings("cpu")["precision"] == precision
    processor.multiplies_bf16.cache_clear()
    for capability, usual in (((9, 0), ("bf16", "whole")), ((7, 5), ("fp16", "whole")), ((6, 1), ("fp32", "off"))):
        monkeypatch.setattr(setting, "least_capability", lambda found=capability: found)
        found = setting.usual_settings("cuda")
        assert (found["precision"], found["compile"]) == usual
    monkeypatch.setenv("CC", "nogcc")
    monkeypatch.setattr(setting, "least_capability", lambda: (9, 0))
    assert setting.usual_settings("cuda")["compile"] == "off", "as in an image without a C compiler"


@pytest.mark.slow
def test_kernels_compiled_for_an_older_processor_compute_the_same(tmp_path: Path) -> None:
    """Every test of the kernels again, with a compiler that leaves out the instructions of a newer one."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -mno-avx512f -mno-avx512bf16\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_kernels.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]

"""A GPU that NVML lists and torch cannot use is told with the way out, before anything is started on it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import gpu_trouble as module
from ddpm_lab.measure import hardware
from ddpm_lab.measure.gpu_trouble import gpu_trouble
from ddpm_lab.training import setting

TORCH = """
import json, os, types
told = json.loads(os.environ["TORCH_TELLS"])
with open(os.environ["TORCH_ASKED"], "a") as file:
    file.write("once ")
def init():
    if told["error"]:
        raise RuntimeError(told["error"])
version = types.SimpleNamespace(cuda=told["cuda"])
cuda = types.SimpleNamespace(
    init=init,
    device_count=lambda: len(told["cards"]),
    get_device_name=lambda i: told["cards"][i][0],
    get_device_capability=lambda i: told["cards"][i][1:],
    get_arch_list=lambda: told["architectures"],
)
"""
WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
T4, V100, L40, B300, NEXT = ("T4", 7, 5), ("V100", 7, 0), ("L40", 8, 9), ("B300", 10, 3), ("Next", 13, 0)
OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes an NVML that lists GPUs, and a torch that tells of them what it is given; a file counts who asked it."""

    def make(*cards: tuple[str, int, int], driver: str = "600.1", **told: Any) -> Path:
        binding = SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: len(cards),
            nvmlDeviceGetHandleByIndex=lambda i: i,
            nvmlDeviceGetName=lambda i: cards[i][0],
            nvmlDeviceGetUUID=lambda i: f"GPU-{i}",
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=8 << 30),
            nvmlSystemGetDriverVersion=lambda: driver,
        )
        monkeypatch.setitem(sys.modules, "pynvml", binding)
        told = {"error": "", "cuda": "13.2", "cards": cards, "architectures": WHEEL, **told}
        monkeypatch.setenv("TORCH_TELLS", json.dumps(told))
        monkeypatch.setenv("TORCH_ASKED", str(tmp_path / "asked"))
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "torch.py").write_text(TORCH)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
        return tmp_path / "asked"

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    caches = (hardware._nvml, hardware._nvidia, module.told_by_torch)
    for cached in caches:
        cached.cache_clear()
    yield make
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("cards", [(T4,), (L40, B300), (("H100", 9, 0),)])
def test_a_gpu_that_torch_can_use_is_the_usual_device(install: Install, cards: Any) -> None:
    install(*cards)
    assert gpu_trouble() == ""
    assert setting.usual_device(None) == "cuda"


@pytest.mark.parametrize(
    ("cards", "told", "facts"),
    [
        ((T4,), {"driver": "535.1", "error": OLD}, ["T4", "driver 535.1", "CUDA 13.2", "580", "/whl/cu126"]),
        ((T4,), {"cuda": None, "error": "Torch not compiled with CUDA enabled"}, ["T4", "without CUDA", "pytorch.org"]),
        ((V100,), {}, ["V100", "sm_70", ", ".join(WHEEL), "/whl/cu126"]),
        ((NEXT,), {}, ["Next", "sm_130", "a newer torch"]),
        ((B300,), {"architectures": ["sm_90", "sm_100a"]}, ["sm_103"]),
        ((L40, V100), {}, ["V100", "CUDA_VISIBLE_DEVICES"]),
        ((L40,), {"error": "CUDA unknown error"}, ["L40", "CUDA unknown error", "nvidia-smi"]),
    ],
)
def test_why_and_the_way_out_are_one_sentence(install: Install, cards: Any, told: Any, facts: list[str]) -> None:
    install(*cards, **told)
    sentence = gpu_trouble()
    assert [fact for fact in [*facts, "--device cpu"] if fact not in sentence] == []
    assert "\n" not in sentence


def test_kernels_that_the_driver_compiles_run_on_what_is_newer(install: Install) -> None:
    install(NEXT, architectures=["sm_90", "compute_120"])
    assert gpu_trouble() == ""


def test_a_torch_that_cannot_be_loaded_or_does_not_answer_is_told(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(T4)
    (tmp_path / "site" / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    assert "libcudart.so.13" in gpu_trouble()
    module.told_by_torch.cache_clear()
    (tmp_path / "site" / "torch.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.2)
    assert "did not answer" in gpu_trouble()


def test_torch_is_asked_once_and_only_where_there_is_a_gpu(install: Install) -> None:
    asked = install(V100)
    for device in (None, "cuda", None):
        with pytest.raises(ConfigError, match="sm_70"):
            setting.usual_device(device)
    with pytest.raises(ConfigError, match="sm_70"):
        setting.check_ranks("cuda", 1, 1, 2)
    assert asked.read_text() == "once "
    asked.unlink()
    module.told_by_torch.cache_clear()
    assert setting.usual_device("cpu") == "cpu"
    setting.check_ranks("cpu", 1, 1, 2)
    hardware._nvidia.cache_clear()
    sys.modules["pynvml"].nvmlDeviceGetCount = lambda: 0  # type: ignore[attr-defined]
    assert setting.usual_device(None) == "cpu"
    assert not asked.exists()

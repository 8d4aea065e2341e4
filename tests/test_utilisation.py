"""The mean utilisation of GPUs, from a driver that is made up, and none where there is none."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ddpm_lab.measure import utilisation
from ddpm_lab.measure.hardware import gpus
from ddpm_lab.measure.utilisation import Utilisation


class Driver:
    """NVML for two GPUs, of which one does not tell."""

    asked = 0

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802 - NVML's name
        if handle == "silent":
            raise RuntimeError("not supported")
        self.asked += 1
        return SimpleNamespace(gpu=40 if self.asked % 2 else 60)


def test_mean_over_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(utilisation, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(utilisation, "nvml_device", lambda uuid: None if uuid == "gone" else (driver, uuid))
    with Utilisation(["one", "silent", "gone"]) as watch:
        end = time.monotonic() + 30
        while driver.asked < 20 and time.monotonic() < end:
            time.sleep(0.01)
    assert watch.percent == pytest.approx(50, abs=1)
    seen = driver.asked
    time.sleep(0.05)
    assert driver.asked == seen, "it goes on after its run"


def test_without_a_gpu_it_is_unknown() -> None:
    with Utilisation([]) as watch:
        pass
    assert watch.percent is None


@pytest.mark.gpu
def test_a_gpu_that_works_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(utilisation, "PERIOD_SECONDS", 0.2)
    matrix = torch.randn(4096, 4096, device="cuda")
    with Utilisation([gpu.uuid for gpu in gpus() if gpu.uuid]) as watch:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            matrix = (matrix @ matrix).clamp(-1, 1)
            torch.cuda.synchronize()
    assert watch.percent is not None
    assert watch.percent > 20

"""The mean utilisation of GPUs over a run of any length, read by the parent every few seconds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ddpm_lab.measure.hardware import or_none
from ddpm_lab.measure.machine_watch import nvml_device

PERIOD_SECONDS = 5.0


class Utilisation:
    """Entered while a run trains; ``percent`` is its mean utilisation so far, None where NVML knows of no GPU of it."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._devices = [device for uuid in uuids if (device := nvml_device(uuid))]
        self._sum, self._count = 0.0, 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Utilisation:
        if self._devices:
            self._thread = threading.Thread(target=self._sample, name="ddpm_lab utilisation", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def percent(self) -> float | None:
        """Mean over samples and GPUs."""
        return self._sum / self._count if self._count else None

    def _sample(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            read: list[Any] = [or_none(nvml.nvmlDeviceGetUtilizationRates, handle) for nvml, handle in self._devices]
            known = [float(rates.gpu) for rates in read if rates is not None]
            if known:
                self._sum, self._count = self._sum + fmean(known), self._count + 1

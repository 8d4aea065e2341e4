"""GPUs that are not there: a binding of NVML that tells of planted cards, for whoever reads hardware."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

GIB = 2**30
RANK, STRANGER = 5_000_001, 5_000_002  # above the largest process id that Linux gives
Plant = Callable[..., None]


class Card:
    """A GPU as NVML tells of it; a value of None raises what a device says of what it does not know."""

    def __init__(self, name: str | None = "Card", **values: Any) -> None:
        self.watts = 100.0
        self.values: dict[str, Any] = {
            **{"name": name, "uuid": "GPU-1", "total": 80 * GIB, "utilisation": 90, "used": 12 * GIB},
            **{"clocks": {1: 1980, 2: 2619}, "temperature": 61, "reasons": 0x4, "power": 250_000, "energy": True},
            **{"processes": {RANK: 2 * GIB}, "shares": [(RANK, 80)], **values},
        }
        self.samples = 0

    def ask(self, name: str) -> Any:
        if self.values[name] is None:
            raise RuntimeError("Not Supported")
        self.samples += name == "utilisation"
        return self.values[name]


def nvml(*cards: Card | None, driver: str | None = "600.1") -> Any:
    """The binding, for cards of which None belongs to somebody else's job."""

    def by_index(index: int) -> Card:
        if (card := cards[index]) is None:
            raise RuntimeError("NVML_ERROR_NO_PERMISSION")
        return card

    def running(card: Card) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.ask("processes").items()]

    def shares(card: Card, since: int) -> list[Any]:
        assert abs(since / 1e6 - time.time()) < 60
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in card.ask("shares")]

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlSystemGetCudaDriverVersion_v2=lambda: 12020,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=lambda uuid: {c.values["uuid"]: c for c in cards if c}[uuid],
        nvmlDeviceGetName=lambda card: card.ask("name"),
        nvmlDeviceGetUUID=lambda card: card.ask("uuid"),
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=card.ask("used"), total=card.ask("total")),
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=card.ask("utilisation")),
        nvmlDeviceGetClockInfo=lambda card, kind: card.ask("clocks")[kind],
        nvmlDeviceGetTemperature=lambda card, sensor: {0: card.ask("temperature")}[sensor],
        nvmlDeviceGetCurrentClocksEventReasons=lambda card: card.ask("reasons"),
        nvmlDeviceGetPowerUsage=lambda card: card.ask("power"),
        nvmlDeviceGetTotalEnergyConsumption=lambda card: card.ask("energy") and 1e3 * card.watts * time.monotonic(),
        nvmlDeviceGetComputeRunningProcesses=running,
        nvmlDeviceGetProcessUtilization=shares,
    )

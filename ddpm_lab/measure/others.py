"""What other processes take of this machine's cores, and waiting until they take less."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.hardware import CpuClock, usable_cores
from ddpm_lab.measure.measuring_lock import side_by_side
from ddpm_lab.record import CROWDED_CORES

QUIET_SECONDS, SAMPLE_SECONDS = 5.0, 0.2
"""How long a set waits for a quiet moment at most, and how long each look for one takes."""


def others_cores(seconds: float) -> float | None:
    """Cores that processes not of this one's family keep busy, from now on for so long; None is unknown."""
    if side_by_side():
        return None
    before, begun = CpuClock.read(), time.monotonic()
    time.sleep(seconds)
    return before.others_cores(CpuClock.read(), time.monotonic() - begun)


FREE_SAMPLES, SURELY_FREE_SAMPLES = 10, 3
"""Samples that say how many cores are free; where the first are all quiet, these suffice."""


def free_cores(sample: Callable[[float], float | None] = others_cores, *, seconds: float = 1.0) -> int:
    """Usable cores that other processes leave free; a core counts as taken from a half on, and one is always left.

    Each sample takes ``seconds``.
    """
    cores, taken = usable_cores(), list[float]()
    for _ in range(FREE_SAMPLES):
        if (others := sample(seconds)) is None:
            return cores
        taken.append(others)
        if len(taken) >= SURELY_FREE_SAMPLES and max(taken) < QUIET_CORES:
            return cores
    return _left(cores, fmean(taken))


def fair_cores(free: int) -> int:
    """Cores to train with where so many are free: at least half of all, so that of two trainings neither starves."""
    return max(free, usable_cores() // 2)


def _left(cores: int, taken: float) -> int:
    """Cores of which others take less than half, and at least one."""
    return max(1, cores - int(taken + 0.5))


class CoreWatch:
    """How many cores other processes leave free, from what they take while one's own work."""

    def __init__(self, minute: float = 60.0) -> None:
        self.minute = minute
        self._before: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._clock, self._begun = CpuClock.read(), time.monotonic()

    def free(self) -> int | None:
        """The cores that were free over each of the last two minutes; None where these differ, or it is not known."""
        if (seconds := time.monotonic() - self._begun) < self.minute:
            return None
        others = self._clock.others_cores(CpuClock.read(), seconds)
        self._begin()
        before = self._before
        self._before = None if others is None or side_by_side() else _left(usable_cores(), others)
        return self._before if self._before == before else None


QUIET_CORES = 0.25
"""Less than this is what any machine does by itself."""


def await_quiet(config: RunConfig, cores: int, say: Callable[[str], None]) -> None:
    """Wait a little while other processes want the cores of a configuration's ranks, ``cores`` being usable."""
    allowed = cores + CROWDED_CORES - config.rank_threads(cores) * config.node_size
    ends = time.monotonic() + QUIET_SECONDS
    while config.device == "cpu" and not config.oversubscribe and time.monotonic() < ends:
        others = others_cores(SAMPLE_SECONDS)
        if others is None or others < allowed:
            return
        say("waiting for a quiet moment")

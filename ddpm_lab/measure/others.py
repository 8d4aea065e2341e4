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


FREE_SECONDS, SURELY_FREE_SECONDS = 10, 3
"""Seconds of sampling that say how many cores are free; where the first are all quiet, these suffice."""


def free_cores(sample: Callable[[float], float | None] = others_cores) -> int:
    """Usable cores that other processes leave free; a core counts as taken from a half on, and one is always left."""
    cores, taken = usable_cores(), list[float]()
    for _ in range(FREE_SECONDS):
        if (others := sample(1.0)) is None:
            return cores
        taken.append(others)
        if len(taken) >= SURELY_FREE_SECONDS and max(taken) < QUIET_CORES:
            return cores
    return max(1, cores - int(fmean(taken) + 0.5))


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

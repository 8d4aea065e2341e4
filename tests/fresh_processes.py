"""What a rank is given and does, in tests that are one themselves."""

import itertools
import sys
from typing import Any

from ddpm_lab.workload import RankContext


def context(rank: int = 0, world_size: int = 1, **changes: Any) -> RankContext:
    """A rank on the CPU, unless ``changes`` say otherwise, whose marks nobody hears."""
    if compiler := sys.modules.get("torch._dynamo.utils"):  # a rank's process has compiled nothing before
        compiler.counters.clear()
    usual: dict[str, Any] = {"device": "cpu", "threads": 1, "mark": lambda _: None}
    return RankContext(rank=rank, world_size=world_size, **{**usual, **changes})


def advance(workload: Any, steps: int) -> list[float]:
    """The losses of the next steps."""
    return [float(workload.step(batch)) for batch in itertools.islice(workload.batches(), steps)]


def seen(workload: Any, **more: Any) -> dict[str, Any]:
    """What a rank on a CPU would report of a workload, with what the rank adds."""
    return {"rank": 0, "device": "cpu", "world_size": 1, **workload.witness(), **more}

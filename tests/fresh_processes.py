"""What a rank is given, in tests that are one themselves."""

import sys
from typing import Any

from ddpm_lab.workload import RankContext


def context(rank: int = 0, world_size: int = 1, **changes: Any) -> RankContext:
    """A rank on the CPU, unless ``changes`` say otherwise, whose marks nobody hears."""
    if compiler := sys.modules.get("torch._dynamo.utils"):  # a rank's process has compiled nothing before
        compiler.counters.clear()
    usual: dict[str, Any] = {"device": "cpu", "threads": 1, "mark": lambda _: None}
    return RankContext(rank=rank, world_size=world_size, **{**usual, **changes})

"""Links with a planted latency and bandwidth, and what an all-reduce takes over them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ddpm_lab.explain.link_fit import Link, Timing, fit_link

ALPHA, BETA = 50e-6, 1e-9
MESSAGES = [2.0**power for power in range(10, 27, 4)]
RANKS = (2, 4, 8)


def truth(ranks: int, size: float, algorithm: str = "ring", alpha: float = ALPHA, beta: float = BETA) -> float:
    """Another way to the same number: hops played one after the other, and trees by their depth."""
    if algorithm == "tree":
        return 2 * (math.ceil(math.log2(ranks)) * alpha + size * beta)
    at = [0.0] * ranks  # when each rank has finished its last hop
    for _ in range(2 * (ranks - 1)):  # reduce-scatter, then all-gather
        sent = [t + alpha + size / ranks * beta for t in at]
        at = [max(sent[rank - 1], sent[rank]) for rank in range(ranks)]
    return max(at)


def timings(
    rng: np.random.Generator, noise: float = 0.03, ranks: Sequence[int] = RANKS, algorithm: str = "ring"
) -> list[Timing]:
    return [
        Timing(ranks=n, message_bytes=size, seconds=truth(n, size, algorithm) * math.exp(noise * rng.normal()))
        for n in ranks
        for size in MESSAGES
    ]


def link(algorithm: str = "ring", **changes: float) -> Link:
    """A link that is known almost exactly."""
    found = fit_link(timings(np.random.default_rng(0), 1e-6, algorithm=algorithm), algorithm)
    return replace(found, **changes)  # type: ignore[arg-type]

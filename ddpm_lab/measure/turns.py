"""In which order configurations take their turns, and how long their windows are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ddpm_lab.plan import Plan


def balanced_orders(count: int, turns: int, seed: int) -> list[list[int]]:
    """Orders of ``count`` configurations over ``turns`` turns.

    Rows of a Williams square (Williams 1949): over a whole square every configuration stands at every position equally
    often and follows every other equally often. Rows and names are shuffled by ``seed`` (the set's own), so that what
    one set leaves unbalanced the sets together do not.
    """
    rng = random.Random(seed)
    zigzag = [(i + 1) // 2 if i % 2 else count - i // 2 for i in range(count)]
    rows = [[(step + shift) % count for step in zigzag] for shift in range(count)]
    if count % 2:  # an odd square is balanced for who goes before only together with its mirror image
        rows += [row[::-1] for row in rows]
    rng.shuffle(rows)
    names = list(range(count))
    rng.shuffle(names)
    return [[names[i] for i in rows[turn % len(rows)]] for turn in range(turns)]


def steps_of_windows(
    plan: Plan, batch_sizes: Sequence[int], step_seconds: Sequence[float], prefetch_batches: Sequence[int]
) -> list[int]:
    """Steps of a timed window for each configuration of a set, so that all process the same number of images.

    The fastest configuration fills ``plan.window_seconds`` and every one does ``plan.window_steps`` steps; where loader
    workers prefetch, at least 20 steps and ten times the prefetch queue. The slowest window is held to about ten times
    ``plan.window_seconds`` unless the fewest steps already take longer: a ratio that large needs no long window.
    """
    least = plan.window_steps
    if any(count > 1 for count in prefetch_batches):  # one batch ahead is made for each one that is taken
        least = max(least, 20, 10 * max(prefetch_batches))
    unit = math.lcm(*batch_sizes)
    pairs = list(zip(batch_sizes, step_seconds, strict=True))
    needed = max(b * max(least, math.ceil(plan.window_seconds / s)) for b, s in pairs)
    floor = max(b * least for b in batch_sizes)
    slowest = max(s / b for b, s in pairs)  # seconds per image
    affordable = max(floor, 10 * plan.window_seconds / slowest)
    images = math.ceil(min(needed, affordable) / unit) * unit
    return [images // b for b in batch_sizes]

"""In which order configurations take their turns, and how long their windows are."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from ddpm_lab.plan import Plan
from ddpm_lab.record import Window

DISTURBED = 0.1
"""A turn is dropped if others took more than this share of what it needs."""


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


def turns_of_set(plan: Plan, longest_window_seconds: float) -> int:
    """Turns of a set: ``plan.turns``, or half as many where long steps or a prefetch queue make its windows long."""
    if longest_window_seconds <= 2 * plan.window_seconds:
        return plan.turns
    return max(min(2, plan.turns), plan.turns // 2)


def disturbed_turns(windows: Iterable[Window], usable_cores: int) -> set[int]:
    """Turns of a set in which others took more than ``DISTURBED`` of the cores or of a GPU in any of its windows.

    The rule looks at what others took, never at the time that was measured; what is not known drops nothing. If it
    would drop more than half of the turns, the machine is simply busy: then none is dropped, and the record says how
    much others took.
    """
    taken: dict[int, float] = {}
    for window in windows:
        taken[window.turn] = max(taken.get(window.turn, 0.0), _taken(window, usable_cores))
    dropped = {turn for turn, share in taken.items() if share > DISTURBED}
    return dropped if len(dropped) <= len(taken) / 2 else set()


def _taken(window: Window, usable_cores: int) -> float:
    """The largest share that is known of what others took: processes and the hypervisor of the cores, and of a GPU.

    Where NVML does not tell how busy other processes keep a GPU, one that comes, goes or changes its memory is at work.
    """
    watched, gpu = window.state.get("watched_seconds"), window.state.get("gpu_others_percent")
    if gpu is None and window.state.get("gpu_others_changed_bytes"):
        gpu = 100.0
    stolen = (window.stolen_seconds or 0.0) / watched if watched else 0.0
    return max((window.others_cores or 0.0) / usable_cores, stolen / usable_cores, (gpu or 0.0) / 100)

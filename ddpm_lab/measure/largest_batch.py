"""The largest batch that fits into memory, by trying: each size in a fresh group, alone, one after the other.

Sizes double until one does not fit, or from the first on halve until one does; then the gap is halved until it is a
sixteenth. With CPU ranks a size is tried only if a line through the two largest peaks so far leaves a fifth of memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import psutil

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import hardware
from ddpm_lab.measure.sets import Member
from ddpm_lab.plan import Family
from ddpm_lab.record import LASTING, RunRecord

PARTS = 16  # A search ends when what does not fit is no more than this part of what fits away: 6 %
MEMORY_SHARE = 0.8  # share of the available main memory that a try may take
TRY_SECONDS = 120.0  # a longer try ends the search; with a budget, one that takes half of what is left


def largest_batch(
    family: Family,
    records: Sequence[RunRecord],
    attempt: Callable[[Member], RunRecord],
    seconds_left: Callable[[], float | None],
) -> RunRecord | None:
    """Search the largest global batch size that fits for the work of a family's baseline, which is tried first.

    ``records`` are what the ledger holds, of earlier searches among others; ``attempt`` measures a member alone, keeps
    its record and returns it; ``seconds_left`` is None without a budget.

    Returns the record of the largest size that fits in the role "largest", or, where none fits, of the smallest tried.
    Its label is the limit that ended the search: "memory", "cap", "time" or "failure"; its reason says how. None where
    nothing is known, because the first try failed in a way that may pass.
    """
    base, cap = family.baseline, family.search_up_to
    unit = base.world_size * base.accumulation
    tried = {r.config.global_batch_size: r for r in records if r.role == "search" and same_work(r.config, base)}
    tried = {size: r for size, r in tried.items() if r.status in ("ok", *LASTING)}
    failed = {size: _failure(r) for size, r in tried.items() if r.status != "ok"}
    while True:
        # Main memory of all ranks together at their peaks.
        peaks = {n: sum(k.peak_rss_bytes or 0 for k in r.ranks) for n, r in tried.items() if r.status == "ok"}
        high = min(failed, default=None)
        low = max((size for size in peaks if high is None or size < high), default=0)
        size = next_size(low, high, first=base.global_batch_size, most=cap, unit=unit)
        if size is None:
            limit, reason = failed[high] if high else ("cap", f"the search goes up to {cap:,} images")
            break
        left = seconds_left()
        stages = tried[low].stages if low else {}
        seconds = sum(stages.values()) + stages.get("warmup", 0.0) * (size / low - 1 if low else 0)
        if low and seconds > (TRY_SECONDS if left is None else left / 2):
            limit, reason = "time", f"a try with {size:,} images would take about {seconds:.0f} s"
            break
        if low and base.device == "cpu":
            needed, available = predicted_bytes(peaks, size), available_bytes()
            if needed > MEMORY_SHARE * available:
                share = f"{100 * MEMORY_SHARE:.0f} % of the {available / 2**30:.1f} GiB available may be used"
                failed[size] = "memory", f"{size:,} images would need about {needed / 2**30:.1f} GiB, {share}"
                continue
        record = attempt(Member("search", f"batch {size}", dataclasses.replace(base, global_batch_size=size)))
        if record.status not in ("ok", *LASTING):  # the next run tries it again
            limit, reason = _failure(record)
            break
        tried[size] = record
        if record.status != "ok":
            failed[size] = _failure(record)
    at = low or high
    return dataclasses.replace(tried[at], role="largest", label=limit, reason=reason) if at else None


def _failure(record: RunRecord) -> tuple[str, str]:
    """The limit that a size met which does not fit, and how."""
    size = f"{record.config.global_batch_size:,} images"
    if record.status == "oom":
        return "memory", f"{size} are out of memory"
    return "failure", f"{size}: {record.status}: {record.reason}"


def search_ended(records: Sequence[RunRecord], config: RunConfig) -> RunRecord | None:
    """How the last search of a configuration's work ended."""
    ends = [r for r in records if r.role == "largest" and same_work(r.config, config)]
    return ends[-1] if ends else None


def same_work(config: RunConfig, other: RunConfig) -> bool:
    """Whether two configurations differ in nothing but the batch size."""
    return config.differences(other).keys() <= {"global_batch_size"}


def next_size(low: int, high: int | None, *, first: int, most: int, unit: int = 1) -> int | None:
    """The next multiple of ``unit`` to try between what fits and what does not; None where it is known, or ``most``."""
    if high is None:
        size = min(2 * low, most) // unit * unit if low else first
    elif high - low <= max(unit, low // PARTS):
        return None
    else:
        size = (low + high) // 2 // unit * unit
    return size if size > low else None


def predicted_bytes(peaks: Mapping[int, int], size: int) -> float:
    """Peak memory of a size by the line through the two largest sizes measured; in proportion where only one is."""
    last = max(peaks)
    if len(peaks) == 1:
        return peaks[last] * size / last
    before = max(batch for batch in peaks if batch != last)
    growth = max(0.0, (peaks[last] - peaks[before]) / (last - before))
    return peaks[last] + growth * (size - last)


def available_bytes() -> int:
    """Main memory that can be used without swapping, cut by what the enclosing cgroups leave (v2 and v1)."""
    found = [int(psutil.virtual_memory().available)]
    names = (("max", "current", "inactive_file"), ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"))
    for levels, (limit, used, inactive) in zip(hardware.cgroup_levels("memory"), names, strict=True):
        for level in levels:
            # "max" is no number: such a level sets no limit, like one that cannot be read.
            with contextlib.suppress(OSError, ValueError, KeyError):
                most, taken = (int((level / f"memory.{name}").read_text()) for name in (limit, used))
                said = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
                found.append(max(0, most - taken + int(said[inactive])))  # the kernel drops inactive pages of files
    return min(found)

"""What a group does on its own, outside the sets. A work returns fields of its record, or raises GroupFailed."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import hardware
from ddpm_lab.measure.group import Group, GroupFailed, Limits
from ddpm_lab.measure.sets import Member, Slot, seen_of_machine
from ddpm_lab.plan import USUAL_TURNS, Family, Fid
from ddpm_lab.record import LASTING, RunRecord

BUDGET_SECONDS = 6.0  # rounds beyond the first are taken while both kinds of window together stay below this
PROFILED_STEPS = 5
LOOKS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Shares of the images after which the held-out loss is computed; the margin of a comparison needs the last two."""
STEPS_AT_ONCE = 50  # steps of training between two signs of life
SAMPLER_STEPS = 50  # steps of DDIM in which a trial draws
WARM_STEPS, COMPARED_STEPS = 10, 3  # of a gradient check: layers that start at zero pass no gradient for three steps
FID, FID_SECONDS = "ddpm_lab.training.fid:Fid", 600.0  # its workload, and how long it may be silent
WORKLOAD = "ddpm_lab.training.wrong_ways:wrong_ways"


def profile_alone(slot: Slot, *, traces: list[Path]) -> dict[str, Any]:
    """A time budget and a profile, with one trace file a rank."""
    slot.open()
    slot.say("taking the time budget")
    budget = take_budget(slot)  # before the profiler, which changes what it watches
    slot.say("profiling")
    how = {"wait": 1, "warmup": 2, "active": PROFILED_STEPS, "repeat": 1, "traces": list(map(str, traces))}
    profiles = slot.alive.ask("profile", slot.instrument.limits.build_seconds, "profiling", **how)
    for rank, profile in zip(budget["ranks"], profiles, strict=True):  # of the same phases, to check the budget by
        rank["profiled"] = {
            "step_seconds": profile["wall_seconds"] / profile["steps"],
            "phases": {name: seconds / profile["steps"] for name, seconds in profile["phases"].items()},
        }
    return {"profile": {**profiles[0], "traces": [path.name for path in traces], "budget": budget}}


def take_budget(slot: Slot) -> dict[str, Any]:
    """Take the time budget of a warm group: windows as training runs, in turns with synchronised ones.

    A window holds a whole number of the steps between two updates of the averaged weights, at least as many as a timed
    window. Returns ``steps`` behind each number, ``rounds``, ``others_cores``, ``stolen_seconds``, ``state`` (as in a
    window's record), and ``ranks``: for each its ``unsynchronised`` and ``synchronised`` windows, in seconds per step.
    """
    plan, step_seconds = slot.plan, max(slot.warm_step_seconds, 1e-6)
    least = max(plan.window_steps, 10 * slot.prefetch_batches, math.ceil(plan.window_seconds / step_seconds))
    cycle = slot.config.optimizer.ema_every
    steps = -(-least // cycle) * cycle
    rounds = max(1, min(plan.turns or USUAL_TURNS, int(BUDGET_SECONDS / (2 * steps * step_seconds))))
    how = {"settle": max(plan.settle_steps, slot.prefetch_batches), "steps": steps, "rounds": rounds}
    with slot.watched() as watch:
        ranks = slot.alive.ask("budget", slot.silence_limit, "taking the time budget", **how)
    return {"steps": steps * rounds, "rounds": rounds, **seen_of_machine(watch, ranks), "ranks": ranks}


def train_once(slot: Slot, *, fid: Fid | None = None) -> dict[str, Any]:
    """Train on ``images`` images (an option of the configuration) and compute the held-out loss with ``draws`` draws.

    Returns the record's ``quality``: mean loss of every step over ranks, held-out losses with the images and steps they
    came after, hash of the final weights; with ``fid`` the FID of images that it draws. Raises GroupFailed where a
    loss is no longer finite, or ranks of one group end with different weights.
    """
    config, limit = slot.config, slot.instrument.limits.build_seconds
    steps, draws = max(1, config.option("images", 0) // config.global_batch_size), config.option("draws", 0)
    slot.start()
    group = slot.alive
    looks = sorted({round(share * steps) for share in LOOKS}) if draws else [0, steps]
    losses, held_out = list[float](), list[dict[str, Any]]()

    def evaluate(step: int) -> None:
        if draws:
            answer = group.call("held_out_loss", limit, draws=draws)[0]
            held_out.append({"images": step * config.global_batch_size, **answer})
            if not math.isfinite(answer["loss"]):
                raise GroupFailed("diverged", f"the held-out loss is no longer finite after step {step}")

    begun = time.monotonic()
    evaluate(0)
    for before, after in pairwise(looks):
        for start in range(before, after, STEPS_AT_ONCE):
            ranks = group.advance(min(STEPS_AT_ONCE, after - start), limit)
            losses += [sum(each) / len(ranks) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
            if not all(math.isfinite(loss) for loss in losses[start:]):
                raise GroupFailed("diverged", f"the training loss is no longer finite after step {len(losses)}")
            slot.say(f"seed {config.seed}, step {len(losses)} of {steps}")
        evaluate(after)
    slot.stages["training"] = time.monotonic() - begun
    slot.hear_witness()
    hashes = group.call("weights_sha256", limit)
    if len(set(hashes)) > 1 and config.exchange.enabled:
        raise GroupFailed("refused", f"{len(hashes)} ranks ended with {len(set(hashes))} different sets of weights")
    found = {"steps": steps, "losses": [round(loss, 6) for loss in losses], "held_out": held_out}
    found["weights_sha256"] = hashes[0]
    return {"quality": found | (_fid(slot, fid) if fid else {})}


def _fid(slot: Slot, fid: Fid) -> dict[str, Any]:
    """The FID of a trial's images; where it fails the trial stands, and says why there is none.

    It is computed in a process of its own, so that what it needs is no part of the code that trains.
    """
    config, instrument = slot.config, slot.instrument
    generated, steps = str(slot.alive.folder / "generated.npy"), min(SAMPLER_STEPS, config.diffusion.timesteps)
    found: dict[str, Any] = {"images": fid.images, "inception_sha256": fid.sha256, "sampler": "ddim", "steps": steps}
    slot.say(f"drawing {fid.images:,} images for the FID")
    slot.alive.call("draw_pixels", instrument.limits.build_seconds, path=generated, count=fid.images, steps=steps)
    options = (("inception", fid.inception), ("sha256", fid.sha256))
    judge = RunConfig(workload=FID, device=config.device, data=config.data, options=options)
    how: dict[str, Any] = {"threads": instrument.usable_cores, "progress": lambda text: slot.say(f"FID, {text}")}
    asked = {"generated": generated, "count": fid.images}
    try:
        with Group(judge, limits=Limits(build_seconds=FID_SECONDS), **how) as group:
            (answer,) = group.call("distance", FID_SECONDS, **asked)
            group.finish()
        found |= answer
    except GroupFailed as failed:
        found["reason"] = failed.reason
    return {"fid": found}


def compare_gradients(slot: Slot) -> dict[str, Any]:
    """Train some steps, and compare loss and gradient of the last ones with fp32, on the weights of rank 0."""
    limit = slot.instrument.limits.build_seconds
    slot.say("comparing loss and gradient with fp32")
    slot.start()
    slot.alive.advance(WARM_STEPS, limit)
    slot.hear_witness()
    return {"quality": {"gradients": slot.alive.call("compare", limit, steps=COMPARED_STEPS)[0]}}


def run_wrong_ways(slot: Slot) -> dict[str, Any]:
    """Run what the option ``ways`` names, in its order; the first one starts cold."""
    slot.start()
    found: dict[str, Any] = {}
    for way in str(slot.config.option("ways", "")).split():
        slot.say(f"the wrong way, {way.replace('_', ' ')}")
        with slot.watched() as watch:
            found[way] = slot.alive.call(way, slot.instrument.limits.build_seconds)[0]
        if (busy := watch.state.get("gpu_utilisation_percent")) is not None:
            found[way]["gpu_utilisation_percent"] = busy
        if not slot.witness:
            slot.hear_witness()
    return {"profile": {"wrong_ways": found}}


# The largest batch that fits into memory, by trying: each size in a fresh group, alone, one after the other

PARTS = 16  # A search ends when what does not fit is no more than this part of what fits away: 6 %
MEMORY_SHARE = 0.8  # share of the available main memory that a try may take
ENDED = ("ok", "oom", *LASTING)  # how a try ends that says whether a size fits
TRY_SECONDS = 120.0  # a longer try ends the search; with a budget, one that takes half of what is left


def largest_batch(
    family: Family,
    records: Sequence[RunRecord],
    attempt: Callable[[Member], RunRecord],
    seconds_left: Callable[[], float],
) -> RunRecord | None:
    """Search the largest global batch size that fits, starting with that of the family's baseline.

    ``records`` are the records of the ledger, including earlier searches; ``attempt`` measures a member alone, stores
    its record and returns it; ``seconds_left`` returns the remaining time, infinite without a budget.

    Returns a record with the role "largest" for the largest size that fits, or the smallest tried if none fits; None if
    the first attempt failed for a reason that may be temporary. The label is the limit that ended the search ("memory",
    "cap", "time" or "failure"), and the reason gives details.
    """
    base, cap = family.baseline, family.search_up_to
    unit = base.world_size * base.accumulation
    tried = {r.config.global_batch_size: r for r in records if r.role == "search" and _same_work(r.config, base)}
    tried = {size: r for size, r in tried.items() if r.status in ENDED}
    if too_large := [n for n, r in tried.items() if r.status == "oom" and base.device == "cuda"]:
        # Another process may have used the memory, so try the smallest of them again.
        member = Member("search", f"batch {min(too_large)}", replace(base, global_batch_size=min(too_large)))
        if (again := attempt(member)).status == "ok":
            tried = {n: r for n, r in tried.items() if n not in too_large} | {min(too_large): again}
    failed = {size: _failure(r) for size, r in tried.items() if r.status != "ok"}
    while True:
        # The sum of all ranks' peaks of main memory.
        peaks = {n: sum(rank.peak_rss_bytes or 0 for rank in r.ranks) for n, r in tried.items() if r.status == "ok"}
        high = min(failed, default=None)
        low = max((size for size in peaks if high is None or size < high), default=0)
        size = _next_size(low, high, first=base.global_batch_size, most=cap, unit=unit)
        if size is None:
            limit, reason = failed[high] if high else ("cap", f"the search goes up to {cap:,} images")
            break
        left = seconds_left()
        stages = tried[low].stages if low else {}
        seconds = sum(stages.values()) + stages.get("warmup", 0.0) * (size / low - 1 if low else 0)
        if low and seconds > (TRY_SECONDS if math.isinf(left) else left / 2):
            limit, reason = "time", f"a try with {size:,} images would take about {seconds:.0f} s"
            break
        if low and base.device == "cpu":
            needed, available = _predicted_bytes(peaks, size), hardware.available_bytes()
            if needed > MEMORY_SHARE * available:
                share = f"{100 * MEMORY_SHARE:.0f} % of the {available / 2**30:.1f} GiB available may be used"
                failed[size] = "memory", f"{size:,} images would need about {needed / 2**30:.1f} GiB, {share}"
                continue
        record = attempt(Member("search", f"batch {size}", replace(base, global_batch_size=size)))
        if record.status not in ENDED:  # may be temporary: the next run tries this size again
            limit, reason = _failure(record)
            break
        tried[size] = record
        if record.status != "ok":
            failed[size] = _failure(record)
    result = low or high
    return replace(tried[result], role="largest", label=limit, reason=reason) if result else None


def _failure(record: RunRecord) -> tuple[str, str]:
    """Return the limit ("memory" or "failure") that a record's batch size exceeded, and a sentence on how."""
    size = f"{record.config.global_batch_size:,} images"
    if record.status == "oom":
        return "memory", f"{size} are out of memory"
    return "failure", f"{size}: {record.status}: {record.reason}"


def search_ended(records: Sequence[RunRecord], config: RunConfig) -> RunRecord | None:
    """Return the record of how the last search for a configuration ended, whatever its batch size; None without any."""
    return next((r for r in reversed(records) if r.role == "largest" and _same_work(r.config, config)), None)


def _same_work(config: RunConfig, other: RunConfig) -> bool:
    """Return whether two configurations are equal except for their batch sizes."""
    return config.differences(other).keys() <= {"global_batch_size"}


def _next_size(low: int, high: int | None, *, first: int, most: int, unit: int = 1) -> int | None:
    """Return the next multiple of ``unit`` to try, between ``low``, which fits, and ``high``, or None to stop."""
    if high is None:
        size = min(2 * low, most) // unit * unit if low else first
    elif high - low <= max(unit, low // PARTS):
        return None
    else:
        size = (low + high) // 2 // unit * unit
    return size if size > low else None


def _predicted_bytes(peaks: Mapping[int, int], size: int) -> float:
    """Predict the peak memory of a size, linearly from the two largest measured sizes, or in proportion to one."""
    last = max(peaks)
    if len(peaks) == 1:
        return peaks[last] * size / last
    before = max(batch for batch in peaks if batch != last)
    growth = max(0.0, (peaks[last] - peaks[before]) / (last - before))
    return peaks[last] + growth * (size - last)

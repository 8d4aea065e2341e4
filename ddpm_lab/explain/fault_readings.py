"""What each wrong way of measuring reads here, beside what the lab's own sets say of the same number.

Each function takes what was ``Seen`` and answers with a ``Reading``, or None where its numbers are not in the records.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpm_lab.explain import compiling, phrases
from ddpm_lab.explain.budget import COMPUTE, class_of, percent
from ddpm_lab.explain.stats import Estimate
from ddpm_lab.explain.wrong_ways import Seen, over, plain, quotient

MULTIPLIED = 300
"""How often the steps of a short run are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a fault did here; a ratio, and the numbers and the sentence that say it.

    ``compared`` is what it makes of a comparison, where the wrong number is one side of that.
    """

    ratio: Estimate
    reads: str
    truth: str
    did: str
    compared: str = ""


def _a_step(wrong: Estimate, right: Estimate, truth: str, did: str, compared: str = "") -> Reading:
    """A wrong time of a step, and the right one after the words ``truth``."""
    return Reading(
        ratio=quotient(wrong, right),
        reads=f"{phrases.seconds(wrong.value)} a step",
        truth=f"{truth} {phrases.seconds(right.value)}",
        did=did,
        compared=compared,
    )


def multiplied(seen: Seen) -> Reading | None:
    fresh, starts = seen.of("fresh"), seen.starting()
    if not fresh or seen.base is None:
        return None
    steps = len(fresh[0]["step_seconds"])
    totals = [start + sum(answer["step_seconds"]) for start, answer in zip(starts, fresh, strict=True)]
    wrong, step = over([MULTIPLIED * total for total in totals]), seen.step(seen.base)
    right = dataclasses.replace(step, **{e: getattr(step, e) * steps * MULTIPLIED for e in ("value", "low", "high")})
    spent = statistics.median(start / total for start, total in zip(starts, totals, strict=True))
    count = f"{steps * MULTIPLIED:,} steps"
    return Reading(
        ratio=quotient(wrong, right),
        reads=f"{phrases.seconds(wrong.value)} for {count}",
        truth=f"they take {phrases.seconds(right.value)}",
        did=f"{count} read {phrases.seconds(wrong.value)}; at the speed of the sets they take "
        f"{phrases.seconds(right.value)}. {percent(spent)} of what was multiplied is start-up, which happens once.",
    )


def cold(seen: Seen) -> Reading | None:
    fresh = seen.of("fresh")
    if not fresh or seen.base is None:
        return None
    wrong, right = over([statistics.fmean(f["step_seconds"]) for f in fresh]), seen.step(seen.base)
    first = over([f["step_seconds"][0] for f in fresh]).value
    did = f"The first step takes {phrases.seconds(first)} and the mean of {len(fresh[0]['step_seconds'])} is "
    did += f"{phrases.seconds(wrong.value)}; a steady step takes {phrases.seconds(right.value)}."
    return _a_step(wrong, right, "a steady one takes", did)


def compile_time(seen: Seen) -> Reading | None:
    row = seen.rows.get("compiled")
    if row is None:
        return None
    runs = [r for r in seen.study.records if r.role == "cold" and r.status == "ok" and r.run_id == row.run_id]
    if not runs or seen.base is None:
        return None
    wrong = over([(r.stages["compile"] + r.stages["warmup"]) / r.warmup_steps for r in runs])
    right, eager = seen.step(row), seen.step(seen.base)
    earned = compiling.pays_off(compiling.break_even(seen.study, row), row)
    earned = f"compiling pays off {earned}" if earned.startswith(("after", "never")) else f"the break-even is {earned}"
    looks = f"{plain(eager.value / wrong.value)} times as fast as eager"
    did = f"{phrases.plural(runs[-1].warmup_steps, 'step')} with the compilation read {phrases.seconds(wrong.value)} "
    did += f"each, so that compiled looks {looks}. Once compiled it "
    did += f"is {phrases.ratio_with_interval(row)} times as fast; {earned}."
    return _a_step(wrong, right, "a compiled one takes", did, f"compiled looks {looks}")


def profiler(seen: Seen) -> Reading | None:
    answers = seen.of("profiled")
    if not answers or seen.base is None:
        return None
    wrong, right = over([a["seconds"] / a["steps"] for a in answers]), seen.step(seen.base)
    outside = statistics.median(1 - a["loop_seconds"] / a["seconds"] for a in answers)
    did = (
        f"A step reads {phrases.seconds(wrong.value)}, and takes {phrases.seconds(right.value)}; {percent(outside)} of "
        "the reported time lies outside the steps."
    )
    compared = ""
    pairs, row = seen.pairs("profiled", "fp32", seen.narrow), seen.rows.get(seen.narrow)
    if pairs and row is not None:
        read = over([a["seconds"] / b["seconds"] for a, b in pairs])
        compared = f"{seen.narrow} reads {phrases.significant(read.value)} times as fast as fp32"
        did += f" {compared}, and is {phrases.ratio_with_interval(row)}."
    return _a_step(wrong, right, "it takes", did, compared)


def unequal(seen: Seen) -> Reading | None:
    row = seen.larger
    pairs = seen.pairs("bars", "fp32", row.label) if row else []
    if not row or not pairs:
        return None
    wrong = over([a["seconds"] / b["seconds"] for a, b in pairs])
    small, large = pairs[0]
    return Reading(
        ratio=quotient(wrong, row.ratio),
        reads=f"{phrases.significant(wrong.value)} times as fast",
        truth=f"for equal images {phrases.ratio(row)}",
        did=f"The bar of {row.label} holds {large['images']} images, that of batch "
        f"{small['images'] // small['steps']} {small['images']}: it reads {phrases.significant(wrong.value)} times as "
        f"fast, and is {phrases.ratio_with_interval(row)} for equal images.",
    )


def single(seen: Seen) -> Reading | None:
    runs = [a["seconds"] / a["steps"] for a in seen.of("bars")]
    if len(runs) < 2 or seen.twin is None:
        return None
    low, high = min(runs), max(runs)
    return Reading(
        ratio=Estimate(value=high / low, p=math.nan, sets=len(runs)),
        reads=f"{phrases.significant(high / low)} between two",
        truth=f"nothing was changed, so 1; sets read {phrases.ratio(seen.twin)}",
        did=f"The same workload, once in each of {len(runs)} fresh processes, reads {phrases.seconds(low)} to "
        f"{phrases.seconds(high)} a step: two such bars differ by up to {100 * (high / low - 1):.0f} %, and nothing "
        f"was changed. In sets the baseline against itself reads {phrases.ratio_with_interval(seen.twin)}.",
    )


def label(seen: Seen) -> Reading | None:
    row, runs = seen.two, [a["seconds"] for a in seen.of("runs")]
    refused = [str(line) for answers in seen.of("labelled_two")[:1] for line in answers]
    if not runs or not refused:
        return None
    wrong = over([sum(one[::2]) / sum(one[1::2]) for one in runs])
    name = row.label if row else "2 ranks" if not seen.cuda else "2 GPUs"
    quoted = f"\N{LEFT DOUBLE QUOTATION MARK}{name}\N{RIGHT DOUBLE QUOTATION MARK}"
    really = (
        f"{name} that really run are {phrases.ratio_with_interval(row)} times as fast as one"
        if row
        else f"{name} were not measured"
    )
    hidden = seen.of("hidden_devices")
    same = hidden and all(answer["same_device"] for answer in hidden)
    return Reading(
        ratio=quotient(wrong, row.ratio) if row else wrong,
        reads=f"{phrases.significant(wrong.value)} for {quoted}",
        truth=f"they are {phrases.ratio(row)}" if row else "one ran",
        did=f"A bar {quoted} in which one ran reads "
        f"{phrases.significant(wrong.value)} times one; {really}. "
        + ("With CUDA_VISIBLE_DEVICES changed, cuda:0 is the same GPU as before. " if same else "")
        + f"The witness refuses such a record: {refused[0]}.",
    )


def gradient(seen: Seen) -> Reading | None:
    answers = [a for a in seen.of("phases") if a["phases"].get("backward")]
    if not answers:
        return None
    wrong = over([a["phases"]["backward"] / a["steps"] for a in answers])
    share = statistics.median(a["phases"]["backward"] / a["seconds"] for a in answers)
    infinite = dataclasses.replace(wrong, value=math.inf, low=math.nan, high=math.nan)
    return Reading(
        ratio=infinite,
        reads=f"{phrases.seconds(wrong.value)} a step",
        truth="one rank exchanges nothing",
        did=f"With one rank, where nothing is exchanged, it reads {phrases.seconds(wrong.value)} a step, "
        f"{percent(share)} of it. The right number is 0.",
    )


def share(seen: Seen) -> Reading | None:
    if seen.cuda:
        answers = [a for a in seen.of("phases_waited_for") if a.get("gpu_utilisation_percent")]
        shares = [_compute(a) for a in answers]
        used = [a["gpu_utilisation_percent"] / 100 for a in answers]
        where, what, device = "The compute share", "a kernel runs on the GPU", "the time"
    else:
        answers = seen.of("one_thread")
        cores = seen.study.records[-1].machine.usable_cores if answers else 1
        shares = [_compute(a) for a in answers]
        used = [a["cpu_seconds"] / a["seconds"] / cores for a in answers]
        where = f"With one thread on {phrases.plural(cores, 'core')} the compute share"
        what, device = "training uses", "the processor"
    if not answers:
        return None
    ratio = over([share / busy for share, busy in zip(shares, used, strict=True)])
    share, busy = over(shares).value, over(used).value
    return Reading(
        ratio=ratio,
        reads=f"{percent(share)}",
        truth=f"{percent(busy)} of it in use",
        did=f"{where} reads {percent(share)}, while {what} {percent(busy)} of {device}.",
    )


def _compute(answer: Mapping[str, Any]) -> float:
    """Share of the wall time in forward, backward, optimizer and averaging."""
    phases = {"EMA" if name == "ema" else name: float(seconds) for name, seconds in answer["phases"].items()}
    return sum(s for name, s in phases.items() if class_of(name) == COMPUTE) / float(answer["seconds"])


def nested(seen: Seen) -> Reading | None:
    answers = seen.of("profiled")
    if not answers:
        return None
    ratio = over([a["inclusive_seconds"] / a["exclusive_seconds"] for a in answers])
    wrong, right = (over([a[f"{kind}_seconds"] for a in answers]).value for kind in ("inclusive", "exclusive"))
    return Reading(
        ratio=ratio,
        reads=phrases.seconds(wrong),
        truth=f"counted once {phrases.seconds(right)}",
        did=f"The events of {phrases.plural(answers[0]['steps'], 'step')} add up to {phrases.seconds(wrong)}; with "
        f"each second counted once there are {phrases.seconds(right)}.",
    )


def percentiles(seen: Seen) -> Reading | None:
    runs = [a["seconds"] for a in seen.of("runs")]
    if not runs or seen.base is None:
        return None
    step = seen.step(seen.base)
    half = math.sqrt(step.high / step.low) - 1
    if not half > 0:
        return None
    wrong = over([float(np.sqrt(np.percentile(one, 97.5) / np.percentile(one, 2.5))) - 1 for one in runs])
    read, known = (f"\N{PLUS-MINUS SIGN} {100 * v:.1f} %" for v in (wrong.value, half))
    return Reading(
        ratio=quotient(wrong, Estimate(value=half, p=math.nan, sets=step.sets)),
        reads=read,
        truth=f"the 95 % interval of the mean is {known}",
        did=f"The percentiles of {len(runs[0])} runs read {read}, and would after thousands: they say where single "
        "runs lie, not how well their mean is known. The 95 % interval of the mean over "
        f"{phrases.plural(step.sets, 'set')} is {known}.",
    )


def per_step(way: str) -> Callable[[Seen], Reading | None]:
    """A fault that reads another time of a step: on a GPU, where host and device can be apart."""

    def found(seen: Seen) -> Reading | None:
        answers = seen.of(way)
        if not answers or seen.base is None:
            return None
        seconds = [sum(a["phases"].values()) if "phases" in a else a["seconds"] for a in answers]
        wrong = over([total / a["steps"] for total, a in zip(seconds, answers, strict=True)])
        right = seen.step(seen.base)
        did = f"A step reads {phrases.seconds(wrong.value)}, and takes {phrases.seconds(right.value)}."
        return _a_step(wrong, right, "it takes", did)

    return found

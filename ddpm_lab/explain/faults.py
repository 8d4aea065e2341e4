"""Faults of measuring: what is done wrong, what that made of a number here, and how it is done right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from ddpm_lab.explain import fault_readings as readings
from ddpm_lab.explain import phrases
from ddpm_lab.explain.fault_readings import MULTIPLIED, Reading
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.explain.wrong_ways import Seen

NEEDS_GPU = "needs a GPU"
WHY_GPU = "on a CPU the call that computes is the call that waits, so there is nothing to see"
NOT_HERE = "not measured here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: what is done wrong, what that did here, and how it is done right, each in a sentence or two.

    ``brief`` is what is done wrong in a few words, and ``ask`` asks the records for what it did.
    ``reads`` is the number of the wrong way and ``truth`` that of the right one, in words; ``ratio`` is the first over
    the second with its 95 % interval over repeats and sets. Infinite where nothing is right but 0; NaN, with the reason
    in ``missing``, where there is nothing to see.
    """

    key: str
    name: str
    brief: str
    group: str
    seen_in: str
    done: str
    right: str
    ask: Callable[[Seen], Reading | None]
    needs_gpu: bool = False
    did: str = ""
    reads: str = ""
    truth: str = ""
    compared: str = ""
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    missing: str = ""

    @property
    def shown(self) -> bool:
        """Whether a wrong number was read here."""
        return not math.isnan(self.ratio)

    def beside(self) -> str:
        """Both numbers in one line."""
        return f"reads {self.reads}; {self.truth}" if self.shown else self.missing


_TIME = "The time of a step"
_BARS = "Bars beside each other"
_NAMES = "Numbers that mean something else"
_GPU = "Where host and device run apart"

_EVERY: tuple[Fault, ...] = (
    Fault(
        key="multiplied",
        name="A short run, multiplied",
        brief=f"six steps with start-up, times {MULTIPLIED}",
        group=_TIME,
        seen_in="S004",
        done=f"Six steps are timed from the start of their process and multiplied by {MULTIPLIED} to be drawn.",
        right="Time start-up, warm-up and steady steps apart; multiply the last alone, and call it a projection.",
        ask=readings.multiplied,
    ),
    Fault(
        key="cold",
        name="No warm-up",
        brief="the first six steps of a process",
        group=_TIME,
        seen_in="S004",
        done="The first six steps of a process are timed, and their mean is called the time of a step.",
        right="Step until the time no longer changes, leave these steps out, and say how many they were.",
        ask=readings.cold,
    ),
    Fault(
        key="compiling",
        name="Compiling inside the step time",
        brief="compilation divided by the steps",
        group=_TIME,
        seen_in="S004",
        done="A short compiled run is timed with its compilation, and divided by its steps.",
        right="Compile before the clock starts; give the cost a line of its own, and the steps that earn it back.",
        ask=readings.compile_time,
    ),
    Fault(
        key="profiler",
        name="Profiler inside the timer",
        brief="shapes, memory, stacks recorded",
        group=_TIME,
        seen_in="S004",
        done="torch.profiler records shapes, memory and stacks while the clock runs, and the whole block is reported.",
        right="One run, one purpose: a profiled run says where the time goes, and never how much there is.",
        ask=readings.profiler,
    ),
    Fault(
        key="unequal",
        name="Unequal work compared",
        brief="six small steps, one large",
        group=_BARS,
        seen_in="S004",
        done="Each bar does the whole steps that fit into six of the smaller batch, so that the larger one leaves "
        "images out; then the seconds are compared.",
        right="Give every configuration the same images, or compare images per second.",
        ask=readings.unequal,
    ),
    Fault(
        key="single",
        name="Single runs",
        brief="one process each, no repeats",
        group=_BARS,
        seen_in="S000, S001, S004",
        done="Each bar is one run: no repeats, no turns, no error bars.",
        right="Repeat in fresh processes that take turns; show the interval over repeats; measure the baseline twice.",
        ask=readings.single,
    ),
    Fault(
        key="label",
        name="One rank labelled two",
        brief="the label says two, one ran",
        group=_BARS,
        seen_in="S004",
        done="CUDA_VISIBLE_DEVICES is changed in a process that uses CUDA already, cuda:0 is used again, and the label "
        "is typed by hand: it says two, and one ran.",
        right="Read back what ran (process group, UUID of each device, images used), and refuse any other label.",
        ask=readings.label,
    ),
    Fault(
        key="gradient",
        name="Backward called communication",
        brief="time around the gradient call",
        group=_NAMES,
        seen_in="S003",
        done="The clock is read before and after the call that computes gradients, and the difference is called "
        "communication time.",
        right="Switch the exchange off in the same sets: what is saved is its cost (run multi_gpu --lost-scaling).",
        ask=readings.gradient,
    ),
    Fault(
        key="share",
        name="Compute share as utilisation",
        brief="forward, backward and optimizer",
        group=_NAMES,
        seen_in="S002",
        done="The share of a step in forward, backward and optimizer is called the utilisation of the device.",
        right="The share says what a step waits for. Ask the device how busy it is; compare FLOP/s with its peak.",
        ask=readings.share,
    ),
    Fault(
        key="nested",
        name="Nested events added up",
        brief="each with all that runs inside it",
        group=_NAMES,
        seen_in="S004",
        done="Durations of profiler events are added, although an event lasts as long as all that runs inside it.",
        right="Add exclusive times, so that each second belongs to one event; busy time is the union of intervals.",
        ask=readings.nested,
    ),
    Fault(
        key="percentiles",
        name="Percentiles as an interval",
        brief="2.5th to 97.5th of short runs",
        group=_NAMES,
        seen_in="S003",
        done="The 2.5th and 97.5th percentiles of short runs are called the 95 % interval of their mean.",
        right="Student's t over independent repeats: that interval narrows as repeats are added.",
        ask=readings.percentiles,
    ),
    Fault(
        key="unsynchronised",
        name="No synchronisation",
        brief="the clock stops before the GPU",
        group=_GPU,
        seen_in="common",
        done="The clock stops when the last step has been launched, while the GPU still computes.",
        right="Read CUDA events, or wait for the device at both ends of the window, and only there.",
        ask=readings.per_step("unsynchronised"),
        needs_gpu=True,
    ),
    Fault(
        key="loss_read",
        name="Waiting for every loss",
        brief="loss.item() in every step",
        group=_GPU,
        seen_in="S004",
        done="Every timed step calls loss.item(), so that host and GPU wait for each other as training need not.",
        right="Keep losses on the device, and read them after the window.",
        ask=readings.per_step("loss_read"),
        needs_gpu=True,
    ),
    Fault(
        key="phase_sums",
        name="Phases waited for, summed",
        brief="the device waited for after each",
        group=_GPU,
        seen_in="S002",
        done="The device is waited for after each phase, and the sum of the phases is called the time of a step.",
        right="Take the time of a step where nothing waits; phases and what no phase explains are shares of that.",
        ask=readings.per_step("phases_waited_for"),
        needs_gpu=True,
    ),
)


@once
def faults(study: Study) -> list[Fault]:
    """Every fault, with what it did on this machine."""
    seen = Seen(study)
    return [_seen_here(fault, seen) for fault in _EVERY]


def _seen_here(fault: Fault, seen: Seen) -> Fault:
    """A fault with what it did on the machine of the records."""
    found = fault.ask(seen)
    if found is None or math.isnan(found.ratio.value):
        missing = NEEDS_GPU if fault.needs_gpu and not seen.cuda else NOT_HERE
        did = f"{phrases.begun(missing)}{f': {WHY_GPU}' * (missing == NEEDS_GPU)}."
        return replace(fault, did=did, missing=missing)
    ratio = found.ratio
    told = {name: getattr(found, name) for name in ("did", "reads", "truth", "compared")}
    return replace(fault, **told, ratio=ratio.value, low=ratio.low, high=ratio.high)


def table(study: Study) -> pd.DataFrame:
    """Each fault in words: what is done wrong, what it did to a number here, and how it is done right."""
    return pd.DataFrame(
        [
            {"Fault": f.name, "Seen in": f.seen_in, "Done wrong": f.done, "Here": f.did, "Done right": f.right}
            for f in faults(study)
        ]
    )

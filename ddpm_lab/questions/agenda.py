"""What a report measures, and in which order: the primary comparisons of all questions first, then what time is left.

A slow machine loses rows of tables then, and no answers. The notebooks show afterwards what the ledger holds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ddpm_lab.checks import LabError
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.shortfall import COMPILE_SECONDS
from ddpm_lab.plan import OTHERS, PRIMARY, RECOMMENDATION
from ddpm_lab.questions import experiments
from ddpm_lab.questions.planning import Planned, check_time, plan_question

PRIMARY_SHARE = 0.75
"""Of the time that is left, which the primary comparisons still to come may take."""
LEAST_SECONDS = 12.0
"""Less time is not worth the start of a question."""


def measure(questions: Mapping[str, Mapping[str, Any]], *, seconds: float, say: Callable[[str, str], None]) -> int:
    """Measure what ``questions`` (name -> settings) lack within ``seconds``; returns the sets that were added.

    What has been shown before gets no further sets. ``say`` is called with a question and a line of progress, or with
    why it cannot be measured: the others go on. Costs and scatter, never ratios, decide how the time is divided.
    Raises ConfigError, before anything is measured, where the time is too short for the first comparison.
    """
    ends, sets = time.monotonic() + seconds, 0
    planned, measured = dict[str, Planned | None](), dict[str, Planned]()

    def plan(name: str) -> Planned | None:
        if name not in planned:
            planned[name] = None
            with _going_on(name, say):
                planned[name] = plan_question(name, further=False, say=partial(say, name), **questions[name])
        return planned[name]

    compared = (
        one for one in map(plan, questions) if one and any(f.candidates for f in one.campaign.experiment.families)
    )
    if (first := next(compared, None)) and first.campaign.missing():
        check_time(first.renewed(seconds=max(seconds, 1.0)).campaign)
    for count, name in enumerate(questions):
        if not ((one := plan(name)) and one.campaign.missing()):
            continue
        weight = 1 + one.campaign.compiling_seconds() / COMPILE_SECONDS  # in units of a comparison
        left = (ends - time.monotonic()) * PRIMARY_SHARE * weight / (weight + len(questions) - count - 1)
        with _going_on(name, say):
            found = one.measure(seconds=max(LEAST_SECONDS, left), stages=(PRIMARY,), look=False)
            sets, measured[name] = sets + found.measured_sets, found.planned
    with _going_on(RECOMMENDATION, say):
        first = measured.get("amp") or next(iter(measured.values()), None)
        if first and (combined := experiments.combination(first)):
            measured = {RECOMMENDATION: combined, **measured}
    for count, (name, one) in enumerate(measured.items()):
        left = (ends - time.monotonic()) / (len(measured) - count)
        stages = (PRIMARY, OTHERS) if name == RECOMMENDATION else (OTHERS,)
        with _going_on(name, say):
            found = one.measure(seconds=max(left, 1.0), stages=stages, look=False)
            sets, measured[name] = sets + found.measured_sets, found.planned
    date = environment().date
    for name, one in measured.items():  # all answers are shown at once
        with _going_on(name, say):
            one.campaign.look(date)
    return sets


@contextlib.contextmanager
def _going_on(name: str, say: Callable[[str, str], None]) -> Iterator[None]:
    """Turn what is refused of one question into a line: the others go on."""
    try:
        yield
    except LabError as error:
        say(name, f"not measured: {error}")

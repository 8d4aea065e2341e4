"""What a report measures, and in which order: the primary comparisons of all questions first, then what time is left.

A slow machine loses rows of tables then, and no answers. The notebooks show afterwards what the ledger holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpm_lab import experiments
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.trials import COMPILE_SECONDS
from ddpm_lab.plan import OTHERS, PRIMARY
from ddpm_lab.planned import Planned
from ddpm_lab.planning import plan_question
from ddpm_lab.questions import QUESTIONS, STAGES

MEASURED = (*QUESTIONS, *STAGES)
PRIMARY_SHARE = 0.75
"""Of the time that is left, which the primary comparisons still to come may take."""
LEAST_SECONDS = 12.0
"""Less time is not worth the start of a question."""


def measure(
    questions: Mapping[str, Mapping[str, Any]],
    *,
    seconds: float,
    say: Callable[[str, str], None],
) -> int:
    """Measure what ``questions`` (name -> settings) lack within ``seconds``; returns the sets that were added.

    What has been shown before gets no further sets. ``say`` is called with a question and a line of progress. Costs
    and scatter, never ratios, decide how the time is divided.
    """
    ends = time.monotonic() + seconds
    waiting, planned = list(questions), dict[str, Planned]()
    sets = 0
    while waiting:
        name = waiting.pop(0)
        one = _plan(name, questions[name], say)
        if not one.campaign.missing():
            continue
        weights = [1 + _compiling(one)] + [1.0] * len(waiting)
        left = (ends - time.monotonic()) * PRIMARY_SHARE * weights[0] / sum(weights)
        found = one.measure(seconds=max(LEAST_SECONDS, left), stages=(PRIMARY,), look=False)
        sets, planned[name] = sets + found.measured_sets, found.planned
    if planned and (combined := experiments.combination(planned.get("amp") or next(iter(planned.values())))):
        planned = {"recommendation": combined, **planned}
    for count, (name, one) in enumerate(planned.items()):
        left = (ends - time.monotonic()) / (len(planned) - count)
        stages: Sequence[str] = (PRIMARY, OTHERS) if name == "recommendation" else (OTHERS,)
        found = one.measure(seconds=max(left, 1.0), stages=stages, look=False)
        sets, planned[name] = sets + found.measured_sets, found.planned
    date = environment().date
    for one in planned.values():  # all answers are shown at once
        one.campaign.look(date)
    return sets


def _plan(name: str, settings: Mapping[str, Any], say: Callable[[str, str], None]) -> Planned:
    return plan_question(name, further=False, say=lambda line: say(name, line), **settings)


def _compiling(planned: Planned) -> float:
    """Time that compiling takes of a question, in units of a comparison's."""
    return planned.campaign.compiling_seconds() / COMPILE_SECONDS

"""What a report measures, and in which order: the primary comparisons of all questions first, then what time is left.

A slow machine loses rows of tables then, and no answers. The notebooks show afterwards what the ledger holds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ddpm_lab.checks import LabError
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.shortfall import COMPILE_SECONDS
from ddpm_lab.plan import OTHERS, PRIMARY
from ddpm_lab.questions import experiments
from ddpm_lab.questions.planned import Planned
from ddpm_lab.questions.planning import check_time, plan_question

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

    What has been shown before gets no further sets. ``say`` is called with a question and a line of progress, or with
    why it cannot be measured: the others go on. Costs and scatter, never ratios, decide how the time is divided.
    Raises ConfigError, before anything is measured, where the time is too short for the first comparison.
    """
    ends = time.monotonic() + seconds
    waiting, ready, planned = list(questions), dict[str, Planned | None](), dict[str, Planned]()
    sets = 0
    for name in waiting:
        one = ready[name] = _plan(name, questions[name], say)
        if one and any(f.candidates for f in one.campaign.experiment.families):
            if one.campaign.missing():
                check_time(one.renewed(seconds=max(seconds, 1.0)).campaign)
            break
    while waiting:
        name = waiting.pop(0)
        one = ready[name] if name in ready else _plan(name, questions[name], say)
        if not (one and one.campaign.missing()):
            continue
        weights = [1 + _compiling(one)] + [1.0] * len(waiting)
        left = (ends - time.monotonic()) * PRIMARY_SHARE * weights[0] / sum(weights)
        with _going_on(name, say):
            found = one.measure(seconds=max(LEAST_SECONDS, left), stages=(PRIMARY,), look=False)
            sets, planned[name] = sets + found.measured_sets, found.planned
    with _going_on("recommendation", say):
        if planned and (combined := experiments.combination(planned.get("amp") or next(iter(planned.values())))):
            planned = {"recommendation": combined, **planned}
    for count, (name, one) in enumerate(planned.items()):
        left = (ends - time.monotonic()) / (len(planned) - count)
        stages: Sequence[str] = (PRIMARY, OTHERS) if name == "recommendation" else (OTHERS,)
        with _going_on(name, say):
            found = one.measure(seconds=max(left, 1.0), stages=stages, look=False)
            sets, planned[name] = sets + found.measured_sets, found.planned
    date = environment().date
    for name, one in planned.items():  # all answers are shown at once
        with _going_on(name, say):
            one.campaign.look(date)
    return sets


def _plan(name: str, settings: Mapping[str, Any], say: Callable[[str, str], None]) -> Planned | None:
    """A question that is ready to be measured; None where it cannot be asked here, which is said."""
    with _going_on(name, say):
        return plan_question(name, further=False, say=lambda line: say(name, line), **settings)
    return None


@contextlib.contextmanager
def _going_on(name: str, say: Callable[[str, str], None]) -> Iterator[None]:
    """What is refused of one question becomes a line, and the others go on."""
    try:
        yield
    except LabError as error:
        say(name, f"not measured: {error}")


def _compiling(planned: Planned) -> float:
    """Time that compiling takes of a question, in units of a comparison's."""
    return planned.campaign.compiling_seconds() / COMPILE_SECONDS

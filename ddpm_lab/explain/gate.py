"""May a change pass? A comparison's answer against the slowdown that is allowed, as a sentence and an exit code."""

from __future__ import annotations

from dataclasses import dataclass

from ddpm_lab.explain import decisions, phrases, stats
from ddpm_lab.explain.answer import Answer
from ddpm_lab.explain.answers import first_losses
from ddpm_lab.explain.comparisons import Comparison, comparisons

PASSED = "passed"
IDENTICAL = "identical code"
SLOWER = "failed"
NO_RESULT = "no result"
EXIT_CODES = {PASSED: 0, IDENTICAL: 0, SLOWER: 1, NO_RESULT: 1, decisions.INCONCLUSIVE: 0}
STRICT = 4
"""The exit code of what is inconclusive, where that is not enough to pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether a change passes: one of EXIT_CODES, and a sentence without a full stop that begins with it."""

    status: str
    sentence: str

    def exit_code(self, *, strict: bool = False) -> int:
        """0 passed, 1 failed or no result; inconclusive is 0, or 4 where ``strict``."""
        return STRICT if strict and self.status == decisions.INCONCLUSIVE else EXIT_CODES[self.status]


def outcome(answer: Answer, threshold: float) -> Outcome:
    """Judge the answer about one candidate: ``threshold`` is the share of the baseline's speed that it may lose.

    *Failed*: the candidate is called slower, and the whole 95 % interval of its ratio lies below 1 - threshold. One
    that loses just the threshold fails in some 3 % of cases; one that loses as much again as the resolution, in 97 %.
    *Passed*: the whole interval lies above. Anything else is *inconclusive*. With a threshold of 0 what is called
    slower fails.
    """
    row = next((r for r in comparisons(answer.study) if r.role == "candidate" and r.sets), None)
    if row is None:
        return _said(NO_RESULT, answer.finding.headline)
    if row.sets < decisions.LEAST_SETS:
        text = f"{phrases.plural(row.sets, 'set')}, and a verdict needs {decisions.LEAST_SETS}"
        return _said(decisions.INCONCLUSIVE, text)
    return _judged(row, threshold)


def _judged(row: Comparison, threshold: float) -> Outcome:
    least, pair = 1 - threshold, f"{row.label} {{}} slower than {row.baseline_label}"
    allowed = f"{_share(threshold)} is allowed" if threshold else "none is allowed"
    if row.verdict == decisions.SLOWER and row.ratio.high < least:
        how = f"by {_share(1 - row.ratio.value)}, and at least by {_share(1 - row.ratio.high)}, where {allowed}"
        return _said(SLOWER, f"{pair.format('is')} {how}")
    if row.ratio.low >= 1:
        return _said(PASSED, pair.format("is not"))
    if row.ratio.low > least:
        return _said(PASSED, f"{pair.format('is')} by at most {_share(1 - row.ratio.low)}, where {allowed}")
    text = f"{pair.format('may be')} by up to {_share(1 - row.ratio.low)}, where {allowed}"
    return _said(decisions.INCONCLUSIVE, f"{text}: measure longer, or on a quieter machine")


def _said(status: str, text: str) -> Outcome:
    return Outcome(status=status, sentence=f"{status}: {text}")


def _share(value: float) -> str:
    return f"{100 * value:.2g} %"


def summary(answer: Answer, judged: Outcome, threshold: float) -> str:
    """A few lines of Markdown for the page of a job: what was decided, and what it rests on."""
    found, losses = answer.finding, first_losses(answer.study)
    row = {
        "gate": judged.status,
        "ratio, 95 % interval": found.speed,
        "baseline repeated": phrases.between(stats.Interval(value=1.0, low=found.noise_low, high=found.noise_high))
        or phrases.DASH,
        "slowdown allowed": _share(threshold),
        "losses": losses.verdict,
    }
    table = [row.keys(), ["---"] * len(row), row.values()]
    lines = [f"### {judged.sentence}", "", *(f"| {' | '.join(cells)} |" for cells in table), "", found.claim]
    return "\n".join([*lines, "", f"Losses: {losses.sentence}.", ""])

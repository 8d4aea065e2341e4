"""The answer of ``compare`` in words, as values and as a notebook shows it; and whether its sides compute the same."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ddpm_lab.explain import phrases
from ddpm_lab.explain.answer import Answer
from ddpm_lab.explain.charts.style import png
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.quality import IDENTICAL, NOT_MEASURED
from ddpm_lab.record import RunRecord

DIFFERENT = "differs"
NOT_COMPARABLE = "not comparable"


def answer_text(study: Study, finding: Finding) -> str:
    """Verdict and finding, then a line each for the sides, their first losses, and what really ran."""
    repeats = finding.claim.lower().startswith(finding.verdict.lower())
    lines = [finding.claim if repeats else f"{finding.verdict}: {finding.claim}"]
    lines += [
        f"  {row.label}: {phrases.seconds(row.step_seconds)} a step, peak memory {phrases.peak_memory(row)}, "
        f"{phrases.plural(row.sets, 'set')} of {phrases.plural(row.turns, 'turn')}"
        for row in comparisons(study)
        if row.sets and row.role != "twin"
    ]
    return "\n".join([*lines, f"  losses: {first_losses(study).sentence}", *map("  {}".format, _witnesses(study))])


_ANSWER = ("verdict", "claim", "ratio", "low", "high", "noise_low", "noise_high", "sets", "hardware", "date", "quality")
_SIDE = (
    *("label", "role", "run_id", "status", "reason", "step_seconds", "peak_memory_bytes", "peak_rss_bytes"),
    *("sets", "sets_needed", "disturbed_sets"),
)


def answer_values(study: Study, finding: Finding) -> dict[str, Any]:
    """The same as plain values; what is unknown is null."""
    losses = first_losses(study)
    return {
        **{name: _known(getattr(finding, name)) for name in _ANSWER},
        "resolution": study.resolution,
        "sides": [{name: _known(getattr(row, name)) for name in _SIDE} for row in comparisons(study)],
        "losses": {"verdict": losses.verdict, "sentence": losses.sentence},
    }


def mime_bundle(answer: Answer) -> dict[str, str]:
    """For a notebook: the sentence, and the figure with its text alternative."""
    image = base64.b64encode(png(answer.figure())).decode("ascii")
    alt = escape(answer.finding.headline)
    text = answer_text(answer.study, answer.finding)
    html = (
        f'<p style="white-space: pre-line">{escape(text)}</p>'
        f'<img style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{image}">'
    )
    return {"text/plain": text, "text/html": html}


def _witnesses(study: Study) -> list[str]:
    """Return what ran, as reported by the ranks in the last set."""
    found = []
    for label in dict.fromkeys(r.label for r in study.records if r.role in ("baseline", "candidate")):
        record = next(r for r in reversed(study.records) if r.label == label)
        ranks = record.witness.get("ranks") or []
        if record.status != "ok" or not ranks:
            found.append(
                f"{label}: {phrases.status(record.status)}: {record.reason or ''}{_place(record)}".rstrip(": ")
            )
            continue
        seen = ranks[0]
        said = [f"{phrases.plural(len(ranks), 'rank')} on {seen['device']}", phrases.plural(seen["threads"], "thread")]
        said += [f"{name} {seen[name]}" for name in ("precision", "compile", "loader_workers") if name in seen]
        found.append(f"{label} ran as {', '.join(said)} (read back from the run)")
    return found


def _place(record: RunRecord) -> str:
    """Return the last line of a traceback in the side's own code."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in', str(record.witness.get("traceback", "")))
    own = [
        (file, number) for file, number in lines if "site-packages" not in file and "ddpm_lab" not in Path(file).parts
    ]
    place = f"{Path(own[-1][0]).name}, line {own[-1][1]}" if own else ""
    return f" ({place})" if place and place not in (record.reason or "") else ""  # a rank's error names it already


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Losses:
    """Whether two sides compute the same: identical, differs, not comparable or not measured; and why."""

    verdict: str
    why: str

    @property
    def sentence(self) -> str:
        """Verdict and reason, without a full stop."""
        return f"{self.verdict}: {self.why}"


def first_losses(study: Study) -> Losses:
    """Compare the first losses of two sides from equal seeds, to the last bit.

    Where the baseline differs from its own twin (steps without a fixed seed, sums in another order at each run), the
    sides are not comparable. A difference is relative to the larger of two losses, the largest over steps, ranks, sets.
    """
    sets: dict[str, dict[str, RunRecord]] = {}
    for record in study.records:
        if record.role in ("baseline", "candidate", "twin") and record.status == "ok":
            sets.setdefault(record.set_id, {})[record.role] = record
    whole = [held for held in sets.values() if len(held) == 3]
    if not whole:
        return Losses(NOT_MEASURED, "no set has both sides")
    sides = (whole[0]["baseline"], whole[0]["candidate"])
    if silent := [r.label for r in sides if not any(map(any, _losses(r)))]:
        return Losses(NOT_MEASURED, f"{phrases.joined(silent)} {'give' if len(silent) > 1 else 'gives'} no loss")
    steps = min(len(rank) for held in whole for record in held.values() for rank in _losses(record))
    base, label = (r.label for r in sides)
    if len({r.config.world_size for r in whole[0].values()}) > 1 or not steps:
        return Losses(NOT_COMPARABLE, f"{label} and {base} have other ranks")
    apart = _apart(((held["baseline"], held["candidate"]) for held in whole), steps)
    own = _apart(((held["baseline"], held["twin"]) for held in whole), steps)
    of = f"the first {steps} losses"
    if not apart:
        return Losses(IDENTICAL, f"{of} agree to the last bit")
    if own:
        repeated = f"those of {base} from one run to the next by {_share(own)}"
        return Losses(NOT_COMPARABLE, f"{of} differ by up to {_share(apart)}, and {repeated}")
    return Losses(DIFFERENT, f"{of} by up to {_share(apart)}, where {base} repeats its own to the last bit")


def _losses(record: RunRecord) -> list[list[float]]:
    """The first losses of each rank; 0 is what a step without a loss gives."""
    ranks: list[dict[str, Any]] = record.witness.get("ranks") or []
    return [rank.get("first_losses") or [] for rank in ranks]


def _apart(pairs: Iterable[tuple[RunRecord, RunRecord]], steps: int) -> float:
    """The largest relative difference of two sides in their first ``steps`` steps."""
    compared = (
        (a, b)
        for one, two in pairs
        for ours, theirs in zip(_losses(one), _losses(two), strict=True)
        for a, b in zip(ours[:steps], theirs[:steps], strict=True)
    )
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in compared if a != b), default=0.0)


def _share(difference: float) -> str:
    return f"{100 * difference:.2g} %" if difference >= 1e-4 else f"{difference:.0e} of the loss"

"""The recommendation of a search in words: its sentences, and its tables of steps and of what was tried."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from ddpm_lab.explain import decisions, phrases, quality, sentences, stats
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.recommended import OPEN, Forecast, Recommendation, Step, command, forecast, next_change
from ddpm_lab.space import BATCH


def answer(found: Recommendation) -> tuple[str, str, Comparison | None]:
    """What is recommended in one line, and with all that it rests on; and the row that it is about, None for none."""
    short = _headline(found)
    lead = None if found.told is None else replace(found.told.row, equivalence=found.told.judged)
    return short, f"{short}. {_evidence(found)}", lead


def _headline(found: Recommendation) -> str:
    step = found.told
    if step is None:
        return "Keep the baseline: a search found nothing faster"
    words = found.space.changed(step.cell, found.space.start)
    faster = phrases.difference(step.row.ratio.value)
    if found.count:
        return f"Use {words}: {faster}, quality {step.quality}"
    if found.reach:
        return f"{words}: {faster}; quality {step.quality}{' yet' * (step.judged.verdict == quality.NOT_MEASURED)}"
    if step.row.verdict == decisions.FASTER:
        return f"Keep the baseline: {words} is faster, and its quality is {step.quality}"
    return f"Nothing to use yet: {words} against the baseline is {phrases.outcome(step.row)}"


def _evidence(found: Recommendation) -> str:
    """The ratio, each step, the quality, the search and what to try next, in sentences."""
    base = found.space.baseline
    plain = f"the baseline ({phrases.settings(base)}, batch {base.global_batch_size})"
    pieces = []
    if found.told is not None:
        shown = found.told.row
        pieces.append(
            f"Measured again after the search, {shown.label} against {plain} reads {phrases.ratio(shown)} "
            f"({phrases.evidence(shown)}{sentences.noise(shown)})."
        )
        if len(found.steps) > 1:
            said = [f"{s.label} {gain_words(s)}" for s in found.steps]
            pieces.append(f"One change after the other, in the same sets: {phrases.joined(said)}.")
        pieces.append(_quality(found, found.told))
    return " ".join([*pieces, tried(found), next_words(found)])


def gain_words(step: Step) -> str:
    """Such as "1.21 (1.17 to 1.25, faster)"."""
    if not step.gain.sets:
        return "not measured beside the one before"
    span = f"{phrases.between(step.gain)}, " if step.gain.exists else ""
    return f"{phrases.ratio_of(step.gain)} ({span}{step.verdict})"


def _quality(found: Recommendation, step: Step) -> str:
    """The verdict on a step's quality, that on faster ones after it, and the command that judges what is open."""
    text, judged = f"Quality: {quality.full(step.judged)}", step.judged
    if found.reach > found.count > 0:
        last = found.steps[found.reach - 1]
        faster, judged = phrases.difference(last.row.ratio.value), last.judged
        text += f"; {found.space.changed(last.cell, found.space.start)}: {faster}, quality {last.quality}"
    if judged.verdict in OPEN and judged.reason != quality.NO_LOSS_KNOWN:
        text += f"; {command(found, '--seeds 8')} measures it"
    return f"{text}."


def tried(found: Recommendation) -> str:
    """What the search tried, and what it did not and why."""
    belief, space = found.belief, found.space
    ours = [c for c in belief.cells if c != space.start]
    seen = [c for c in ours if belief.sets.get(c)]
    text = f"The search tried {len(seen)} of {phrases.plural(len(ours), 'combination')} in "
    text += f"{phrases.plural(found.search_sets, 'short set')}."
    open_ = [c for c in found.among if not belief.sets.get(c) and c not in (space.start, *belief.lost)]
    if open_ and seen:
        text += f" {phrases.plural(len(open_), 'allowed combination')} {'is' if len(open_) == 1 else 'are'} untried."
    if untried := _untried(found):
        text += f" Not tried: {phrases.joined(untried)}."
    if space.left_out:
        text += f" Left out: {phrases.joined([f'{label} ({reason})' for label, reason in space.left_out])}."
    if found.failures:
        text += f" Failed: {phrases.joined(list(found.failures))}."
    return text


def _untried(found: Recommendation) -> list[str]:
    """Values that no set has had, each with the reason."""
    lines = []
    for place, (name, values) in enumerate(found.space.settings.items()):
        for i, value in enumerate(values[1:], 1):
            having = [c for c in found.belief.cells if c[place] == i]
            if not having or any(found.belief.sets.get(c) or c in found.belief.lost for c in having):
                continue
            chosen = any(c in found.among for c in having)
            why = "did not fit into the time" if chosen else "another batch is another training"
            lines.append(f"{value.label} ({why if chosen or name == BATCH else 'worse in quality'})")
    return lines


def next_words(found: Recommendation) -> str:
    """The next best change in a sentence."""
    change = next_change(found)
    if change is None:
        return "No single change is worth trying next."
    known = "" if change.again is None else f", measured as {gain_words(change.again)}"
    return f"The next change to try is {change.label}{known}: {change.command}."


def table(found: Recommendation) -> pd.DataFrame:
    """One row for the baseline and each step; a full training is a projection of the measured speed."""
    rows, compiling = [], 0.0
    for i, (label, row, step) in enumerate(
        [("baseline", found.baseline, None), *((f"+ {s.label}", s.row, s) for s in found.steps)]
    ):
        gain = step.gain if step and step.gain.sets else None
        compiling += step.cold_seconds if step else 0.0
        whole = forecast(found, row, compiling)
        rows.append(
            {
                "Configuration": label,
                "Against the step before": phrases.times(gain) if gain else phrases.DASH,
                "Verdict": step.verdict if step else phrases.DASH,
                "Against the baseline": phrases.ratio_with_interval(row) if step else phrases.DASH,
                "Images/s": phrases.significant(row.images_per_second),
                "Step": phrases.seconds(row.step_seconds),
                "Peak memory": phrases.peak_memory(row),
                "Sets": str(row.sets),
                "Quality": step.quality if step else phrases.DASH,
                f"{whole.images:,} images": phrases.seconds(whole.seconds),
                "Energy of its GPUs": _energy(whole),
                "Compiling pays off": _pays_off(step),
                "Recommended": "yes" if i == found.count else "",
            }
        )
    frame = pd.DataFrame(rows)
    return frame.drop(
        columns=[c for c in ("Energy of its GPUs", "Compiling pays off") if frame[c].eq(phrases.DASH).all()]
    )


def _energy(whole: Forecast) -> str:
    return phrases.DASH if math.isnan(whole.joules) else f"{phrases.significant(whole.joules / 3.6e6)} kWh"


def _pays_off(step: Step | None) -> str:
    """After how many steps a cold compile is earned back; a dash where nothing new is compiled."""
    if step is None or not step.cold_seconds:
        return phrases.DASH
    if math.isnan(step.cold_seconds):
        return "compile time unknown"
    return f"after {phrases.significant(step.pays_off_steps)} steps" if step.gain.value > 1 else "never"


def tried_table(found: Recommendation) -> pd.DataFrame:
    """What the search tried: each combination with its speed by what all sets say, most likely fastest first."""
    belief, space = found.belief, found.space
    cells = sorted((c for c in belief.sets if c != space.start), key=lambda c: -belief.mean[belief.index[c]])
    rows = []
    for cell in cells:
        mean, spread = belief.gain(cell, space.start)
        value, low, high = (math.exp(mean + side * spread) for side in (0, -1.96, 1.96))
        rows.append(
            {
                "Configuration": space.changed(cell, space.start),
                "In the search, of the baseline's speed": phrases.times(
                    stats.Interval(value=value, low=low, high=high)
                ),
                "Short sets": str(belief.sets[cell]),
                "May be chosen": "yes" if cell in found.among else "no",
            }
        )
    return pd.DataFrame(rows)

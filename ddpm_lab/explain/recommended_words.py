"""The recommendation of a search in words: its sentences, and its tables of steps and of what was tried."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ddpm_lab.explain import learned, phrases, quality, ranking, sentences, stats
from ddpm_lab.explain.comparisons import QUALITY, resolved
from ddpm_lab.explain.recommended import AHEAD, Forecast, Recommendation, Step, command, forecast, next_change
from ddpm_lab.space import BATCH


def answer(found: Recommendation) -> tuple[str, str, dict[str, Any] | None]:
    """What is recommended in one line, and with all that it rests on; and the row that it is about, None for none."""
    short = _headline(found)
    if not found.steps:
        return short, f"{short}. {_evidence(found)}", None
    lead = found.best if found.count else found.steps[-1].row
    judged = quality.sentence(found.judged if found.count else found.steps[-1].judged)
    return short, f"{short}. {_evidence(found)}", {**lead, "quality": judged}


def fastest_measured(group: ranking.Group, *, busy: bool = False) -> tuple[str, str]:
    """The fastest configuration of equal work in one line, and with what it rests on.

    A single set is no evidence, least of all on a machine that was ``busy`` meanwhile; the line says both.
    """
    best = group.rows[0]
    first = "Fastest measured" if group.apart else f"Highest of {len(group.rows)} speeds, not told apart"
    short = f"{first}: {phrases.settings(best['config'])}, at {phrases.throughput(best)}"
    if best["sets"] < 2:
        short += f" (1 set, no interval{'; the machine was busy' if busy else ''})"
    text = f"{short} ({group.name})."
    if best["role"] == "baseline":
        others = len(group.rows) - 1
        slower = "nothing else that does equal work was measured"
        if others:
            one = "the other one measured did not run faster"
            slower = one if others == 1 else f"none of {others} others measured ran faster"
        text += f" It is the baseline of {best['experiment']}: {slower}."
    elif resolved(best):
        text += (
            f" Against its own baseline it is {best['verdict']}: {sentences.faster(best)} ({phrases.evidence(best)})."
        )
    else:
        text += (
            f" Against its own baseline {best['baseline_label']} it reads {phrases.ratio(best)} "
            f"({phrases.evidence(best)}): {phrases.status(best['verdict'])}."
        )
    judged = best["equivalence"]
    text += f" Quality: {best['quality'] if judged is None else quality.full(judged)}"
    text += ", so this is no recommendation at equal quality." if best["quality"] == QUALITY else "."
    return short, f"{text} Combinations were not searched: ddpm-lab recommend does that."


def _headline(found: Recommendation) -> str:
    if not found.steps:
        return "Keep the baseline: a search found nothing faster"
    if found.count:
        words = found.space.changed(found.cell, found.space.start)
        judged = quality.sentence(found.judged)
        return f"Use {words}: {phrases.ratio(found.best)} times as fast as the baseline, quality {judged}"
    last = found.steps[-1].row
    if last["verdict"] == stats.NOT_TRUSTED:
        return "Instrument not trusted here: the baseline differs from itself"
    few = f" ({phrases.plural(int(last['sets']), 'set')})" if last["sets"] < stats.LEAST_SETS else ""
    words = found.space.changed(found.steps[-1].cell, found.space.start)
    if last["verdict"] == stats.FASTER:
        return f"Keep the baseline: {words} is faster, and its quality is {quality.sentence(found.steps[-1].judged)}"
    return f"Not resolved{few}: {words} against the baseline"


def _evidence(found: Recommendation) -> str:
    """The ratio, each step, the quality, the search, what to try next and the forecast, in sentences."""
    base = found.space.baseline
    plain = f"the baseline ({phrases.settings(base)}, batch {base.global_batch_size})"
    shown = found.best if found.count else found.steps[-1].row if found.steps else found.baseline
    pieces = []
    if found.steps:
        pieces.append(
            f"Measured again after the search, {shown['label']} against {plain} reads {phrases.ratio(shown)} "
            f"({phrases.evidence(shown)}{sentences.noise(shown)})."
        )
        if len(found.steps) > 1:
            said = [f"{s.label} {gain_words(s)}" for s in found.steps]
            pieces.append(f"One change after the other, in the same sets: {phrases.joined(said)}.")
        pieces.append(_quality(found))
    return " ".join([*pieces, tried(found), next_words(found), forecast_words(found)])


def gain_words(step: Step) -> str:
    """Such as "1.21 (1.17 to 1.25, faster)"."""
    if not step.gain.sets:
        return "not measured beside the one before"
    gain = (step.gain.value, step.gain.low, step.gain.high)
    span = f"{phrases.between(*gain)}, " if phrases.between(*gain) else ""
    return f"{phrases.ratio_of(*gain)} ({span}{step.verdict})"


def _quality(found: Recommendation) -> str:
    judged = found.judged if found.count else found.steps[-1].judged
    text = f"Quality: {quality.full(judged)}"
    if judged.verdict in (quality.NOT_MEASURED, quality.NOT_ENOUGH):
        text += f"; {command(found, '--seeds 8')} measures it"
    rows = [found.baseline, *(s.row for s in found.steps)]
    other = [s for s in found.steps if s.config.global_batch_size != found.space.baseline.global_batch_size]
    if other and learned.images_of(rows[1:]):
        text += f". {learned.answer(learned.ways(found.study, rows), learned.target(rows[1:]))}".rstrip(". ")
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
        winner = found.steps[-1].cell if found.steps else space.start
        most = max(belief.chance(c, winner, AHEAD) for c in open_)
        others = f"each of the {len(open_)} others" if len(open_) > 1 else "the one other"
        share = "less than 1" if most < 0.01 else f"at most {100 * most:.0f}"
        text += f" By what these are worth, {others} that may be chosen is 3 % faster than its winner with a chance "
        text += f"of {share} %."
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
        return "Of single changes none is expected to gain half a per cent more."
    gain = (change.gain, change.low, change.high)
    if change.again is not None:
        sets = phrases.plural(change.again.gain.sets, "set")
        known = f"which read {gain_words(change.again)} in the {sets} after the search"
    elif change.sets:
        known = f"expected to be {phrases.ratio_of(*gain)} times as fast ({phrases.between(*gain)}; "
        known += f"{phrases.plural(change.sets, 'short set')})"
    else:
        known = f"not tried yet (expected within {phrases.between(*gain)} times the speed)"
    return f"The next change to try is {change.label}, {known}: {change.command}."


def forecast_words(found: Recommendation) -> str:
    """The forecast of a full training, and when compiling pays off."""
    new = found.steps[: found.count]
    plain = forecast(found, found.baseline)
    text = f"Projected to {plain.images:,} images, the baseline takes {_long(plain)}"
    if new:
        text += f" and the recommended {_long(forecast(found, found.best, sum(s.cold_seconds for s in new)))}"
    text += "; power was not measured, so energy is not." if math.isnan(plain.joules) else "."
    for step in new:
        if step.cold_seconds:
            after = f"after {phrases.significant(step.pays_off_steps)} steps" if step.gain.value > 1 else "never"
            known = "unknown" if math.isnan(step.cold_seconds) else phrases.seconds(step.cold_seconds)
            text += f" Compiling takes {known} and pays off {after}."
    return text


def _long(one: Forecast) -> str:
    energy = "" if math.isnan(one.joules) else f" and {phrases.significant(one.joules / 3.6e6)} kWh of its GPUs"
    return phrases.with_interval(phrases.seconds, one.seconds, one.low, one.high) + energy


def table(found: Recommendation) -> pd.DataFrame:
    """One row for the baseline and each step."""
    rows = []
    for i, (label, row, step) in enumerate(
        [("baseline", found.baseline, None), *((f"+ {s.label}", s.row, s) for s in found.steps)]
    ):
        gain = step.gain if step and step.gain.sets else None
        rows.append(
            {
                "Configuration": label,
                "Against the step before": phrases.times(gain.value, gain.low, gain.high) if gain else phrases.DASH,
                "Verdict": step.verdict if step else phrases.DASH,
                "Against the baseline": phrases.ratio_with_interval(row) if step else phrases.DASH,
                "Images/s": phrases.significant(row["images_per_second"]),
                "Step": phrases.seconds(row["step_seconds"]),
                "Peak memory": phrases.peak_memory(row),
                "Sets": str(row["sets"]),
                "Quality": step.quality if step else phrases.DASH,
                "Recommended": "yes" if i == found.count else "",
            }
        )
    return pd.DataFrame(rows)


def tried_table(found: Recommendation) -> pd.DataFrame:
    """What the search tried: each combination with its speed by what all sets say, most likely fastest first."""
    belief, space = found.belief, found.space
    cells = sorted((c for c in belief.sets if c != space.start), key=lambda c: -belief.mean[belief.index[c]])
    rows = []
    for cell in cells:
        mean, spread = belief.gain(cell, space.start)
        ends = [math.exp(mean + side * spread) for side in (0, -1.96, 1.96)]
        rows.append(
            {
                "Configuration": space.changed(cell, space.start),
                "In the search, of the baseline's speed": phrases.times(*ends),
                "Short sets": str(belief.sets[cell]),
                "May be chosen": "yes" if cell in found.among else "no",
            }
        )
    return pd.DataFrame(rows)

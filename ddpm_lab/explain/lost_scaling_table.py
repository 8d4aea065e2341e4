"""The lost scaling in words: a sentence, and a table of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.lost_scaling import Part, Seconds, Split, splits
from ddpm_lab.plan import scaling

_NONE = phrases.DASH
_RANK_ZERO = "work of rank 0 alone"


def milliseconds(split: Split, seconds: Seconds, *, sign: bool = False) -> str:
    """Such as "1.20 ms (1.05 to 1.35)", with as many decimals as the step of this split deserves."""
    if not seconds.known:
        return "not measured"
    digits = _digits(split)
    value, low, high = (
        f"{round(1e3 * x, digits) + 0.0:{'+' if sign else ''}.{digits}f}"  # a zero has no sign of its own
        for x in (seconds.value, seconds.low, seconds.high)
    )
    return f"{value} ms" if math.isnan(seconds.low) else f"{value} ms ({low} to {high})"


def _digits(split: Split) -> int:
    size = 1e3 * (split.measured.value if split.measured.known else split.all_off.value)
    return max(0, 2 - math.floor(math.log10(size))) if size > 0 and math.isfinite(size) else 2


def rate(split: Split, seconds: Seconds) -> str:
    """Images a second of a step of the whole batch."""
    return f"{phrases.significant(split.batch / seconds.value)} images/s"


def sentence(split: Split) -> str:
    """What is lost, to what, and whether the split holds."""
    if split.doubt == MECHANISM_ONLY:
        return f"{split.unit} for a batch of {split.batch}: {MECHANISM_ONLY}."
    step = f"{split.unit} take {milliseconds(split, split.measured)} for a batch of {split.batch}"
    text = f"{step}; one rank's time divided by {split.ranks} is {milliseconds(split, split.ideal)}."
    if not split.loss.known:
        return f"{text} The loss is not measured."
    lost = milliseconds(split, split.loss)
    if split.doubt:
        return f"{text} {phrases.begun(split.doubt)}, so no loss is claimed; it reads {lost}."
    if not split.loss.low > 0:
        return f"{text} No loss is resolved: {lost}."
    parts = sorted((p for p in split.parts if p.lost), key=lambda p: -p.seconds.value)
    named = [f"{p.name}{f' ({p.note})' if p.note else ''} {milliseconds(split, p.seconds)}" for p in parts]
    text += f" Lost: {lost}, of which {phrases.joined(named)}." if named else f" Lost: {lost}; no part is resolved."
    gains = [f"{p.name} {milliseconds(split, p.seconds, sign=True)}" for p in split.parts if p.gained]
    text += f" Gained: {phrases.joined(gains)}." if gains else ""
    if split.overlapped.known:
        text += f" Of the exchange {milliseconds(split, split.overlapped)} more lie under the backward pass."
    if split.interaction.known:
        text += f" The parts add up to all but {milliseconds(split, split.interaction, sign=True)}, their interaction"
        text += "." if split.reliable else ": above a third of the loss, so the split is unreliable."
    return text


def sentences(study: Study) -> str:
    """What every split of a study says."""
    return " ".join(map(sentence, splits(study)))


def unsplit(study: Study) -> str:
    """Which ranks were compared and not split, and how to ask for that; empty where all are split, or none."""
    found = {split.ranks for split in splits(study)}
    compared = {r.config.world_size: r.label for r in study.records if r.role == "candidate" and scaling(r.family)}
    others = sorted(compared.keys() - found) if found else []
    if not others:
        return ""
    labels = phrases.joined([compared[n] for n in others])
    return f"not split: {labels}; --world-sizes {' or '.join(f'1,{n}' for n in others)} does that"


def headline(found: Sequence[Split]) -> str:
    """What scaling was lost to, where one split is resolved and reliable; else the question."""
    parts = [p for p in found[0].parts if p.lost] if len(found) == 1 and not found[0].doubt else []
    if not parts or not found[0].reliable or not found[0].loss.low > 0:
        return "Where the lost scaling went"
    return f"Lost to {phrases.joined([p.name for p in sorted(parts, key=lambda p: -p.seconds.value)])}"


def as_values(study: Study) -> list[dict[str, Any]]:
    """Each split as plain values: the work, the sentence, and the rows of its table."""
    found = []
    for split in splits(study):
        rows = _frame([split]).to_dict("records")
        found.append({"family": split.family, "sentence": sentence(split), "parts": rows})
    return found


def table(study: Study) -> pd.DataFrame:
    """One row a part: how it was measured, its seconds in a step, and its share of the loss."""
    return _frame(splits(study))


def _frame(shown: Sequence[Split]) -> pd.DataFrame:
    found = []
    for split in shown:
        several = {"Family": split.family}
        rows: list[tuple[str, str, Seconds, str]] = [
            ("ideal", f"one rank's time divided by {split.ranks}", split.ideal, ""),
            *((p.name, p.how, p.seconds, p.note or _negative(split, p)) for p in split.parts),
            (_RANK_ZERO, "none in this step: every rank does the same", Seconds(value=0.0), ""),
            ("sum of the parts", "", split.total, ""),
            ("interaction", "the loss less the sum", split.interaction, "" if split.reliable else "split unreliable"),
            ("loss", "measured less ideal", split.loss, split.doubt),
            ("measured", f"{split.unit} as they train", split.measured, ""),
            ("exchange, loading off", f"{split.unit}, all of these off together", split.all_off, ""),
            ("overlapped communication", "the exchange in a profile, less what is exposed", split.overlapped, ""),
        ]
        lossy = {p.name for p in split.parts} | {"sum of the parts", "interaction"}
        found += [
            {
                **several,
                "Part": name,
                "How it is measured": how,
                "Time in a step": milliseconds(split, seconds) if name != _RANK_ZERO else "0",
                "Share of the loss": _share(seconds, split) if name in lossy else _NONE,
                "Sets": str(seconds.sets) if seconds.sets else _NONE,
                "Note": note,
            }
            for name, how, seconds, note in rows
        ]
    frame = pd.DataFrame(found)
    if frame.empty:
        return frame
    frame = frame.drop(columns="Family") if frame["Family"].nunique() == 1 else frame
    return frame if frame["Note"].any() else frame.drop(columns="Note")


def _negative(split: Split, part: Part) -> str:
    """What a time below zero says: a gain where it is resolved, and else no known difference from none."""
    if not part.seconds.value < 0:
        return ""
    return "a gain" if part.gained and not split.doubt else "below zero: inconclusive"


def _share(seconds: Seconds, split: Split) -> str:
    if split.doubt or not (seconds.known and split.loss.low > 0):
        return _NONE
    return f"{100 * seconds.value / split.loss.value:.0f} %"

"""Sentences about the rows of a comparison."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence

from ddpm_lab.explain import decisions, phrases
from ddpm_lab.explain import quality as equivalence
from ddpm_lab.explain.comparisons import COMPARED, MECHANISM_ONLY, QUALITY, Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import NOT_TRAINED, WEAK

_SUBJECTS = {
    "multi_gpu": ("{label} at batch {batch}", "{base}"),
    "workers": ("training with {label}", "with {base}"),
    "torch_compile": ("{label} {precision} training", "{base} training"),
    "exchange": ("the exchange with {label}", "the {base}"),
    "batch_size": ("{label}", "{base}, image for image"),
}
_USUAL_BATCH = dict.fromkeys(("profile", "amp", "workers", "torch_compile", "exchange"), (8, 128))
_USUAL_BATCH["multi_gpu"] = (16, 128)
"""Global batch size where none is given, on a CPU and on a GPU."""


def lead(rows: Sequence[Comparison]) -> Comparison:
    """The comparison that the answer is about: the primary one, with all cores where there are several."""
    primary = [r for r in rows if r.primary]
    return min(primary or rows[:1], key=lambda r: (not r.answered, r.config.threads != 0))


def compared(row: Comparison) -> str:
    """A comparison in words, whatever its verdict: "bf16 is 26 % slower than fp32"."""
    subject, other = _subjects(row)
    return f"{subject} {_is(row)} {_than(phrases.difference(row.ratio.value))} {other}{with_cores(row)}"


def headline(row: Comparison) -> str:
    """The answer that a comparison gives, in at most some 15 words."""
    subject, other = _subjects(row)
    if row.resolved:
        return compared(row)
    if row.verdict == decisions.SAME:
        return f"{subject} {_is(row)} as fast as {other}, within {phrases.share(row.resolution)}{with_cores(row)}"
    if row.verdict == decisions.TOO_FEW:
        return f"Too few sets ({row.sets}) to say whether {subject} {_is(row)} faster{with_cores(row)}"
    low, high = (phrases.difference(end) for end in row.ratio.ends)
    return f"No clear answer: {subject} may be anything from {low} to {_than(high)} {other}{with_cores(row)}"


def with_cores(row: Comparison) -> str:
    """The cores of a comparison that was measured with some of them alone, after a space."""
    cores = row.config.threads * row.config.node_size
    return f" on {phrases.plural(cores, 'core')}" if cores and row.config.device == "cpu" else ""


def _subjects(row: Comparison) -> tuple[str, str]:
    weak = WEAK in row.family
    forms = (
        ("{label}, each with its batch,", "{base}") if weak else _SUBJECTS.get(row.experiment, ("{label}", "{base}"))
    )
    if row.loader_alone:
        forms = ("the loader alone with {label}", "with {base}")
    names = {"label": row.label, "base": row.baseline_label, "batch": row.batch, "precision": row.config.precision}
    if row.config.is_own:
        names["precision"] = ""
    return tuple(" ".join(form.format(**names).split()) for form in forms)  # type: ignore[return-value]


def _is(row: Comparison) -> str:
    several = row.experiment == "multi_gpu" and not row.label.startswith("1 ")
    return "are" if several else "is"


def _than(difference: str) -> str:
    return f"{difference} as" if difference.endswith("as fast") else f"{difference} than"


def evidence(row: Comparison) -> str:
    """What an answer rests on, in one line."""
    if not row.ratio.exists:
        return f"Ratio {phrases.ratio(row)}, {phrases.plural(row.sets, 'set')}, no interval."
    sets = f"{phrases.plural(row.sets, 'set')} of {phrases.plural(row.turns, 'turn')}"
    text = f"Ratio {phrases.ratio_with_interval(row)}, 95 % interval over {sets}"
    text += f"; the baseline repeated: {floor}" if (floor := phrases.noise_floor(row)) else ""
    text += f"; resolves {phrases.share(row.resolves)}" if not row.resolved and math.isfinite(row.resolves) else ""
    return f"{text}{f'; {row.why}' if row.why else ''}."


def way_out(row: Comparison, *, own_images: bool = False) -> str:
    """The command that would give an answer where there is none, and its minutes; empty where there is one.

    A resolution that the sets have reached already asks for none; without one there are more sets.
    """
    if row.answered or row.role != "candidate":
        return ""
    typed = command(row, own_images=own_images)
    if row.verdict == decisions.TOO_FEW or not row.sets_needed > row.sets:
        return typed
    if row.minutes_needed > 120:
        return f"{typed} measures more; {phrases.share(row.resolution)} would take over two hours here"
    resolution = phrases.share(row.resolution).replace(" ", "")
    return f"{typed} --resolution {resolution} (about {max(1.0, row.minutes_needed):.0f} min)"


def command(row: Comparison, *, own_images: bool = False) -> str:
    """The command that measures a comparison, with the settings that are not usual; DATA stands for a user's images."""
    config = row.baseline
    if row.experiment == "compare":
        return f"ddpm-lab compare {shlex.quote(row.baseline_label)} {shlex.quote(row.label)}"
    words = ["ddpm-lab", "run", row.experiment]
    if config.is_own:
        words += ["--workload", config.work_name]
    elif config.network != "tiny":
        words += ["--network", config.network]
    words += ["--data", "DATA"] * (own_images and not config.is_own)
    words += ["--image-size", str(config.image_size)] * (config.image_size != 32)
    usual = _USUAL_BATCH.get(row.experiment)
    if usual and config.global_batch_size != usual[config.device == "cuda"]:
        words += [f"--batch-size{'s' * (row.experiment == 'multi_gpu')}", str(config.global_batch_size)]
    return " ".join(words)


def trains(row: Comparison) -> bool:
    """Whether a row's ranks learn one network: without exchange each has its own, and its speed is no offer."""
    return bool(row.config.exchange.enabled)


def exposed_communication(rows: Sequence[Comparison]) -> str:
    """What a step takes less where ranks exchange nothing, each in a sentence after a space; empty without any."""
    told = ""
    for row in rows:
        if row.role != "candidate" or trains(row) or not row.sets:
            continue
        named = f"Without exchange a step of {row.family} is"
        if not row.resolved:
            told += f" {named} not called shorter (ratio {phrases.ratio(row)}, {phrases.evidence(row)})."
            continue
        shorter, low, high = (100 * (1 - 1 / v) for v in (row.ratio.value, *row.ratio.ends))
        span = "" if math.isnan(low) else f" ({low:.1f} to {high:.1f} %)"
        told += f" {named} {shorter:.1f} % shorter{span}: exposed communication."
    return told


def noise(row: Comparison) -> str:
    """The repeated baseline after a semicolon; empty where there is none."""
    floor = phrases.noise_floor(row)
    return f"; the baseline repeated {floor}" if floor else ""


def tally(rows: Sequence[Comparison], lead: Comparison) -> str:
    """How the other comparisons ended, in a sentence after a space; empty where there are none."""
    others = [r for r in rows if r is not lead]
    told = [f"{r.label}{_family(r, lead)} {phrases.outcome(r)}" for r in others if len(others) <= 3]
    if told:
        return f" Beside it: {'; '.join(told)}."
    counts = Counter(r.verdict for r in others)
    return f" Of {len(others)} others {phrases.joined([f'{n} {v}' for v, n in counts.items()])}." if others else ""


def _family(row: Comparison, lead: Comparison) -> str:
    return "" if row.family == lead.family else f" ({row.family})"


def quality(rows: Sequence[Comparison], *, evidence: bool = False) -> str:
    """What is known of the quality of the configurations, such as "quality: bf16 not worse (8 seeds)".

    With ``evidence`` each verdict comes with its difference, interval and margin. A configuration of which families
    say different things is named with its family.
    """
    known = [r for r in rows if r.role == "candidate" and r.sets]
    said = [equivalence.full(r.equivalence) if evidence else r.quality for r in known]
    if set(said) <= {QUALITY}:
        return f"quality {QUALITY}"
    different: dict[str, set[str]] = {}
    for r, text in zip(known, said, strict=True):
        different.setdefault(r.label, set()).add(text)
    told: dict[str, str] = {}
    for r, text in zip(known, said, strict=True):
        told[f"{r.label} of {r.family}" if len(different[r.label]) > 1 else r.label] = text
    text = f"quality: {phrases.joined([f'{name} {found}' for name, found in told.items() if found != QUALITY])}"
    others = [name for name, found in told.items() if found == QUALITY]
    return f"{text}; of {phrases.joined(others)} {QUALITY}" if others else text


def untrained(study: Study) -> str:
    """Which configurations were not trained for quality as often as was planned, after a space; empty without any."""
    lacking: dict[tuple[str, str], str] = {}
    for r in study.records:
        if r.role == "note" and r.config.purpose == "quality":
            done = any(t.run_id == r.run_id and equivalence.speaks_for(t, r.code_version) for t in study.trials)
            lacking |= {(r.family, r.label): "" if done else str(r.reason)}
    by_reason: dict[str, list[str]] = {}
    for (family, label), reason in lacking.items():
        several = len({f for (f, name), why in lacking.items() if name == label and why}) > 1
        by_reason.setdefault(reason, []).append(f"{label} of {family}" if several else label)
    each = {reason: " each" if len(names) > 1 else "" for reason, names in by_reason.items()}
    return "".join(
        f" {phrases.joined(names)} {'were' if each[why] else 'was'} {why}."
        if why.startswith(NOT_TRAINED)
        else f" Of {phrases.joined(names)}{each[why]} {why}."
        for why, names in by_reason.items()
        if why
    )


def left_over(rows: Sequence[Comparison]) -> str:
    """Configurations without a speed, by why; those that only some families lack are named with their family."""
    families = {r.family for r in rows}
    lacking: dict[tuple[str, str], set[str]] = {}
    for r in unmeasured(rows):
        lacking.setdefault((r.label, phrases.failure(r)), set()).add(r.family)

    def name(r: Comparison) -> str:
        everywhere = lacking[r.label, phrases.failure(r)] == families
        return r.label if everywhere else f"{r.label} of {r.family}"

    failed = [(name(r), phrases.failure(r)) for r in unmeasured(rows) if r.status not in ("ok", "left out")]
    left_out = [(name(r), r.reason) for r in unmeasured(rows) if r.status == "left out"]
    mechanism = [(r.label, "") for r in rows if r.mechanism_only and r.role != "twin"]
    text = ""
    for head, items in (("Failed", failed), ("Left out", left_out), (MECHANISM_ONLY.capitalize(), mechanism)):
        by_reason: dict[str, list[str]] = {}
        for label, why in dict.fromkeys(items):
            by_reason.setdefault(why, []).append(label)
        if items:
            each = {why: f" ({'each ' * (len(names) > 1)}{why})" if why else "" for why, names in by_reason.items()}
            text += f" {head}: {'; '.join('; '.join(names) + each[why] for why, names in by_reason.items())}."
    return text


def lost(study: Study, rows: Sequence[Comparison]) -> str:
    """A sentence, after a space, on sets that a configuration failed in and was measured beside; else empty."""
    have = {r.run_id for r in rows if r.sets}
    failed = [r for r in study.records if r.role in COMPARED and r.status not in ("ok", "left out")]
    failed = [r for r in failed if r.run_id in have]
    if not failed:
        return ""
    sets = phrases.plural(len({r.set_id for r in failed}), "set")
    why = [f"{r.label} ({phrases.failed(r.status, r.reason)})" for r in failed]
    return f" Lost on the way, in {sets}: {phrases.joined(list(dict.fromkeys(why)))}."


def unmeasured(rows: Sequence[Comparison]) -> list[Comparison]:
    """Rows without a speed: they failed or were left out."""
    return [r for r in rows if not r.sets and not r.mechanism_only and r.role != "twin"]

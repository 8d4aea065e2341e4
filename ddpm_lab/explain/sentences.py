"""Headlines, evidence and commands about one comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ddpm_lab.explain import decisions, phrases
from ddpm_lab.explain.comparisons import QUALITY, Comparison
from ddpm_lab.plan import WEAK

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
    """Choose the comparison that the answer is about: the primary one, with all cores if there are several."""
    primary = [r for r in rows if r.primary]
    return min(primary or rows[:1], key=lambda r: (not r.answered, r.config.threads != 0))


def compared(row: Comparison) -> str:
    """Say how much faster or slower, whatever the verdict: "bf16 is 26 % slower than fp32"."""
    subject, other = _subjects(row)
    return f"{subject} {_is(row)} {_than(phrases.difference(row.ratio.value))} {other}{with_cores(row)}"


def headline(row: Comparison) -> str:
    """Say what a comparison answers, in about 15 words."""
    subject, other = _subjects(row)
    if row.resolved:
        return compared(row)
    if row.verdict == decisions.SAME:
        return f"{subject} {_is(row)} as fast as {other}, within {phrases.share(row.resolution)}{with_cores(row)}"
    if row.verdict == decisions.TOO_FEW:
        return f"Too few sets ({row.sets}) to say whether {subject} {_is(row)} faster{with_cores(row)}"
    low, high = (phrases.difference(end) for end in row.ratio.ends)
    return f"No clear answer: {subject} may be {low} to {_than(high)} {other}{with_cores(row)}"


def with_cores(row: Comparison) -> str:
    """Return `` on 2 cores`` if fewer cores were used than there are; else an empty text."""
    cores = row.config.threads * row.config.node_size
    return f" on {phrases.plural(cores, 'core')}" if cores and row.config.device == "cpu" else ""


def _subjects(row: Comparison) -> tuple[str, str]:
    subject, other = _SUBJECTS.get(row.experiment, ("{label}", "{base}"))
    if row.loader_alone:
        subject, other = "the loader alone with {label}", "with {base}"
    elif WEAK in row.family:
        subject, other = "{label}, each with its batch,", "{base}"
    precision = "" if row.config.is_own else row.config.precision
    names = {"label": row.label, "base": row.baseline_label, "batch": row.batch, "precision": precision}
    return " ".join(subject.format(**names).split()), " ".join(other.format(**names).split())


def _is(row: Comparison) -> str:
    several = row.experiment == "multi_gpu" and not row.label.startswith("1 ")
    return "are" if several else "is"


def _than(difference: str) -> str:
    return f"{difference} as" if difference.endswith("as fast") else f"{difference} than"


def evidence(row: Comparison) -> str:
    """Return ratio, interval, sets and noise floor in one line."""
    if not row.ratio.exists:
        return f"Ratio {phrases.ratio(row)}, {phrases.plural(row.sets, 'set')}, no interval."
    sets = f"{phrases.plural(row.sets, 'set')} of {phrases.plural(row.turns, 'turn')}"
    text = f"Ratio {phrases.ratio_with_interval(row)}, 95 % interval over {sets}{noise(row)}"
    text += "" if row.resolved else f"; resolves {phrases.share(row.resolves)}"
    return f"{text}{f'; {row.why}' if row.why else ''}."


def way_out(row: Comparison, *, own_images: bool = False) -> str:
    """Return the command that would give an answer, with its minutes; empty if there is one already.

    Without ``--resolution`` it adds sets, as for a resolution that has been reached.
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
    """Return the command that measures a comparison; DATA stands for the user's images."""
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
    """True if the ranks synchronise gradients; without that they train separate models."""
    return bool(row.config.exchange.enabled)


def noise(row: Comparison) -> str:
    """Return the noise floor after a semicolon; empty without one."""
    floor = phrases.between(row.noise)
    return f"; the baseline repeated {floor}" if floor else ""


def quality(rows: Sequence[Comparison]) -> str:
    """Return the verdicts on quality, such as "quality: bf16 not worse (8 seeds)".

    A configuration with different verdicts is named with its families.
    """
    by_label: dict[str, dict[str, list[str]]] = {}
    for r in rows:
        if r.role == "candidate" and r.sets:
            by_label.setdefault(r.label, {}).setdefault(r.quality, []).append(r.family)
    told = {
        f"{label} of {phrases.joined(families)}" if len(said) > 1 else label: verdict
        for label, said in by_label.items()
        for verdict, families in said.items()
    }
    others = [name for name, verdict in told.items() if verdict == QUALITY]
    if len(others) == len(told):
        return f"quality {QUALITY}"
    text = f"quality: {phrases.joined([f'{name} {verdict}' for name, verdict in told.items() if verdict != QUALITY])}"
    return f"{text}; of {phrases.joined(others)} {QUALITY}" if others else text

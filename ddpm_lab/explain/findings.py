"""The answer to a question in words: a headline, a line of evidence, and notes on their limits."""

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import machine_state, phrases, quality, stats
from ddpm_lab.explain.comparisons import COMPARED, MECHANISM_ONLY, QUALITY, Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.stats import Interval
from ddpm_lab.files import output_folder
from ddpm_lab.plan import LEVERS, WEAK, WHOLE_QUESTION, usual_network
from ddpm_lab.record import gradient_fault

_SUBJECTS = {
    "multi_gpu": ("{label} at batch {batch}", "{base}"),
    "workers": ("training with {label}", "with {base}"),
    "torch_compile": ("{label} {precision} training", "{base} training"),
    "exchange": ("a step with {label}", "with the {base}"),
    "batch_size": ("{label}", "{base}, image for image"),
}
_OF_STEP = ("precision", "world_size", "loader", "loader_workers", "compile", "image_size", "seed")
"""Settings that are options of ``run bottleneck``."""
_LEFT_OPEN = ("precision", "loader", "compile")
"""Those of them for which it uses the trainer's defaults unless they are given."""
FAILED = "failed"
ANSWERED = "answered"
NOT_EXPLAINED = "not explained"
ALL_DISTURBED = "No answer yet: other processes disturbed every set"
_SOUND = ("ok", "left out")
"""Statuses that are not failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to a question, as every page, notebook, table and command shows it.

    ``headline`` is short enough for a title, ``evidence`` one line on the data behind it, and ``notes`` are sentences
    on its limits. ``verdict``, ``sets``, ``ratio``, its interval, and that of the repeated baseline (``noise_low``,
    ``noise_high``) belong to the comparison that the headline is about, and are NaN if there is none. ``status`` is
    answered, inconclusive, too few sets, failed, not measured, or not explained. Without an answer, ``way_out`` is the
    command that would give one, with its minutes. ``published`` records came with the checkout.
    """

    experiment: str
    question: str
    headline: str
    evidence: str = ""
    notes: tuple[str, ...] = ()
    verdict: str
    status: str
    hardware: str
    date: str
    published: bool = False
    sets: int = 0
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    noise_low: float = math.nan
    noise_high: float = math.nan
    quality: str = f"quality {QUALITY}"
    way_out: str = ""

    @property
    def claim(self) -> str:
        how = "Published records, not measured here but" if self.published else "Measured"
        known = self.hardware and (self.notes or self.status != quality.NOT_MEASURED)
        where = f"{how} on {self.hardware}, {self.date}; {self.quality}." if known else ""
        return " ".join(filter(None, (f"{self.headline}.", self.evidence, *self.notes, where)))

    @property
    def speed(self) -> str:
        """Ratio, interval and sets, such as "1.62 (1.55 to 1.69), 6 sets"; a dash where nothing was compared."""
        ratio = Interval(value=self.ratio, low=self.low, high=self.high)
        return f"{phrases.times(ratio)}, {phrases.plural(self.sets, 'set')}" if self.sets else phrases.DASH


def plain(study: Study, headline: str, status: str, *notes: str, **known: Any) -> Finding:
    """Return a finding with more fields from ``known``; ``verdict`` defaults to ``status``, empty notes are dropped."""
    return Finding(
        experiment=study.experiment,
        question=study.experiment,
        headline=headline,
        status=status,
        notes=tuple(filter(None, map(str.strip, notes))),
        hardware=study.hardware,
        date=study.date,
        published=study.published,
        **{"verdict": status, **known},
    )


def about(study: Study, row: Comparison, headline: str, *notes: str, evidence: str = "") -> Finding:
    """Return a finding about one comparison, with that comparison's values."""
    as_written = (row.label,) if study.experiment == "compare" else ("bf16", "fp", "tf32")
    headline = headline if headline.startswith(as_written) else phrases.begun(headline)
    known = {"verdict": row.verdict, "quality": f"quality {row.quality}", "evidence": evidence or _evidence_of(row)}
    ends = dict(zip(("low", "high", "noise_low", "noise_high"), (*row.ratio.ends, *row.noise.ends), strict=True))
    status = ANSWERED if row.answered else row.verdict
    return plain(study, headline, status, *notes, sets=row.sets, ratio=row.ratio.value, **known, **ends)


def compared(
    study: Study,
    *,
    rows: Sequence[Comparison] | None = None,
    keep: Callable[[Comparison], bool] = lambda _: True,
    own: Callable[[Comparison], Iterable[str]] = lambda _: (),
    notes: Sequence[str] = (),
) -> Finding:
    """Return the finding of a question that compares speeds: about its primary comparison, or why there is none.

    ``rows`` defaults to all comparisons of the study; the finding is about one for which ``keep`` returns true.
    ``own`` returns notes on that comparison, which are followed by ``notes``.
    """
    rows = comparisons(study) if rows is None else rows
    others = [r for r in rows if r.role not in ("baseline", "twin")]
    measured = [r for r in others if r.sets and keep(r)]
    candidates = [r for r in measured if not r.loader_alone] or measured
    every = (*notes, *common_notes(study, rows))
    if not study.records:
        return plain(
            study, "Nothing is measured yet", quality.NOT_MEASURED, "Give it more minutes, or leave --minutes out."
        )
    if not candidates:
        return _nothing_to_compare(study, rows, others, every)
    first = lead(candidates)
    harmed = [(_named(r, rows), "") for r in candidates if r is not first and r.equivalence.verdict == quality.WORSE]
    notes = (*own(first), listed("Worse in quality", harmed), *every)
    named = "batch" in _SUBJECTS.get(study.experiment, ("", ""))[0]
    bases = [r.baseline for r in candidates if r.primary] or [r.baseline for r in candidates]
    asked = {(b.work_name, b.device, b.image_size, b.precision, b.world_size) for b in bases}
    batches = {b.global_batch_size for b in bases if not named}
    scope = " on the CPU" * (first.config.device == "cpu" and bool(study.records[-1].machine.gpus))
    scope += f" ({first.family})" * (max(len(asked), len(batches)) > 1)
    finding = about(study, first, headline_of(first) + scope, *notes)
    return replace(finding, way_out=way_out_of(study, first))


def _named(row: Comparison, rows: Sequence[Comparison]) -> str:
    """Return the label of a row, with its family if there are several."""
    return f"{row.label} of {row.family}" if len({r.family for r in rows}) > 1 else row.label


def listed(kind: str, items: Iterable[tuple[str, str]]) -> str:
    """Return (name, reason) pairs as "Failed: fp16 and tf32 (no GPU); compiled (no compiler)."; empty without any."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in items:
        by_reason[why].append(name)
    groups = [phrases.joined(names) + (f" ({why})" if why else "") for why, names in by_reason.items()]
    return f"{kind}: {'; '.join(groups)}." if groups else ""


def common_notes(study: Study, rows: Sequence[Comparison]) -> tuple[str, ...]:
    """Return the notes for every comparison: failures, what was left out, training faults, and the machine's state."""
    lacking = [r for r in rows if r.role != "twin" and not r.sets and not r.mechanism_only]
    measured = {r.run_id for r in rows if r.sets}
    lost = [r for r in study.records if r.role in COMPARED and r.status not in _SOUND and r.run_id in measured]
    sets = phrases.plural(len({r.set_id for r in lost}), "set")
    return (
        listed("Failed", ((_named(r, rows), phrases.failure(r)) for r in lacking if r.status not in _SOUND)),
        listed("Left out", ((_named(r, rows), r.reason) for r in lacking if r.status == "left out")),
        listed(MECHANISM_ONLY.capitalize(), ((r.label, "") for r in rows if r.mechanism_only and r.role != "twin")),
        unsound(study),
        untrained(study),
        listed(f"Lost in {sets}", ((r.label, phrases.failure(r)) for r in lost)),
        machine_state.unknown(study),
        *machine_state.warnings(study),
    )


def unsound(study: Study) -> str:
    """Return a note on the settings whose gradient check failed or found a fault; empty if there are none."""
    checks = [(r, (r.quality or {}).get("gradients")) for r in study.records if r.role == "check"]
    faults = ((r.label, gradient_fault(check) if check else phrases.failure(r)) for r, check in checks)
    return listed("Wrong gradient", (item for item in faults if item[1]))


def untrained(study: Study) -> str:
    """Return a note on the planned training runs for quality that are missing, with reasons; empty without any."""
    codes = {r.code_version for r in study.records or study.trials}
    trials = [t for t in study.trials if any(quality.speaks_for(t, code) for code in codes)]
    planned = [r for r in study.records if (r.role, r.config.purpose) == ("note", "quality")]
    done = {t.run_id for t in trials if t.status == "ok"}  # perhaps after a failure
    failed = (t for t in trials if t.status not in (*_SOUND, "diverged") and t.run_id not in done)
    tried = [[t for t in trials if t.run_id == r.run_id and quality.speaks_for(t, r.code_version)] for r in planned]
    skipped = [(r.label, str(r.reason)) for r, runs in zip(planned, tried, strict=True) if not runs]
    return listed("Not trained as planned", skipped + [(t.label, phrases.failure(t)) for t in failed])


def _nothing_to_compare(
    study: Study, rows: Sequence[Comparison], others: Sequence[Comparison], notes: Sequence[str]
) -> Finding:
    """Return the finding of a study whose candidates all lack a speed: the reason, and what would give one."""
    whole = next((r for r in rows if r.label == WHOLE_QUESTION), None)
    timed = {r.run_id for r in study.records if r.windows}  # perhaps after a failure
    lost = [r for r in study.records if r.status not in _SOUND and r.run_id not in timed]
    hidden = [r for r in others if r.mechanism_only]
    if whole is not None:
        headline = f"Left out: this cannot be asked of {whole.config.work_name}"
        return plain(study, headline, quality.NOT_MEASURED, f"{whole.reason}.")
    if any(r.disturbed_sets for r in others or rows):
        return plain(study, ALL_DISTURBED, stats.TOO_FEW, *notes, way_out=command_of(study, (others or rows)[0]))
    names = phrases.joined(r.label for r in lost or hidden)
    if lost:
        if lost[-1].role not in ("baseline", "candidate"):  # records of other roles are not among the rows
            notes = (f"{phrases.failure(lost[-1])}.", *notes)
        return plain(study, f"Nothing can be compared, since {names} failed", FAILED, *notes)
    if hidden:
        return plain(study, f"{MECHANISM_ONLY.capitalize()}: {names}", MECHANISM_ONLY, *notes)
    return plain(study, "Nothing to compare with the baseline was measured", quality.NOT_MEASURED, *notes)


def how_to_judge(study: Study, found: Finding, *, trains: bool) -> str:
    """Return the command that measures the effect on quality; empty if that is known or cannot be measured."""
    rows = [r for r in comparisons(study) if r.role == "candidate" and r.experiment == study.experiment]
    if not trains or study.experiment == "peers" or not found.sets or not rows:
        return ""
    first = lead(rows)
    judged = first.equivalence
    if judged.verdict != quality.NOT_MEASURED and not (judged.verdict == quality.NOT_ENOUGH and judged.seeds_needed):
        return ""
    return judging(study, command_of(study, first), first.baseline, seeds=judged.seeds_needed or 0)


def judging(study: Study, command: str, config: RunConfig, *, seeds: int = 0) -> str:
    """Return ``command`` with an option for trials, after anything that the user's own training lacks for them.

    Empty if trials could only show that a configuration is worse.
    """
    if not config.is_own and not quality.shows_harm(config):
        return ""
    mine = [r for r in study.records if r.config.work_name == config.work_name]
    offers = [o for r in mine for rank in r.witness.get("ranks", ()) for o in rank.get("offers", ())]
    lacks = "a held_out_loss and then " * (config.is_own and "held_out_loss" not in offers)
    return f"{lacks}{command} --seeds {max(8, seeds)}"


def lead(rows: Sequence[Comparison]) -> Comparison:
    """Return the comparison that the answer is about: the primary one, preferably on a GPU or with all cores.

    If none is primary, it is the fastest one, preferably with an answer.
    """
    if primary := [r for r in rows if r.primary]:
        return max(primary, key=lambda r: (r.answered, r.config.device == "cuda", r.config.threads == 0))
    return max(rows, key=lambda r: (r.answered, r.sets > 0, r.ratio.value))


def difference(row: Comparison) -> str:
    """Return how much faster or slower a row is, whatever its verdict, such as "bf16 is 26 % slower than fp32"."""
    subject, other = _subjects(row)
    return f"{subject} {_is(row)} {_than(phrases.difference(row.ratio.value))} {other}{with_cores(row)}"


def headline_of(row: Comparison) -> str:
    """Return the answer of a comparison in about 15 words."""
    subject, other = _subjects(row)
    if row.resolved:
        return difference(row)
    if row.verdict == stats.SAME:
        return f"{subject} {_is(row)} as fast as {other}, within {phrases.share(row.resolution)}{with_cores(row)}"
    if row.verdict == stats.TOO_FEW:
        return f"Too few sets ({row.sets}) to say whether {subject} {_is(row)} faster{with_cores(row)}"
    low, high = (phrases.difference(end) for end in row.ratio.ends)
    low = low.removesuffix(high[-len(" slower") :]).strip()  # do not repeat "slower" or "faster"
    return f"No clear answer: {subject} may be {low} to {_than(high)} {other}{with_cores(row)}"


def with_cores(row: Comparison) -> str:
    """Return `` on 2 cores`` if not all cores were used, else an empty string."""
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
    return "are" if row.experiment == "multi_gpu" and row.ranks > 1 else "is"


def _than(difference: str) -> str:
    return f"{difference} as" if difference.endswith("as fast") else f"{difference} than"


def _evidence_of(row: Comparison) -> str:
    if not row.ratio.exists:
        return f"Ratio {phrases.ratio(row)}, {phrases.plural(row.sets, 'set')}, no interval."
    sets = f"{phrases.plural(row.sets, 'set')} of {phrases.plural(row.turns, 'turn')}"
    text = f"Ratio {phrases.times(row.ratio)}, 95 % interval over {sets}{noise(row)}"
    text += "" if row.resolved or row.verdict == stats.TOO_FEW else f"; resolves {phrases.share(row.ratio.resolves)}"
    return f"{text}{f'; {row.why}' if row.why else ''}."


def way_out_of(study: Study, row: Comparison) -> str:
    """Return the command that would give an answer, with its minutes; empty if there is an answer already.

    Without ``--resolution`` the command adds sets, even if the resolution has been reached.
    """
    if row.answered or row.role != "candidate":
        return ""
    command = command_of(study, row)
    if row.experiment == "compare" and not row.sets_needed > row.sets and row.verdict != stats.TOO_FEW:
        return f"{command} --resolution {phrases.share(row.resolution / 2).replace(' ', '')}"  # it ended at this one
    more = row.experiment == "bottleneck" or "--preset full" in command  # it measures more than this row
    if more or row.verdict == stats.TOO_FEW or not row.sets_needed > row.sets:
        return command
    resolution = phrases.share(row.resolution).replace(" ", "")
    return f"{command} --resolution {resolution} (about {max(1.0, row.minutes_needed):.0f} min)"


def command_of(study: Study, row: Comparison) -> str:
    """Return the command that measures a comparison."""
    config = row.baseline
    if row.experiment == "compare":
        return f"ddpm-lab compare {shlex.quote(row.baseline_label)} {shlex.quote(row.label)}"
    if row.experiment == "bottleneck":
        return command_of_step(study, config, row.label, known=row)
    words = ["ddpm-lab", "run", shlex.quote(row.experiment)]
    words += work_of(config, usual_network(config.device, row.experiment))
    words += ["--image-size", str(config.image_size)] * (config.image_size != 32)
    words += ["--seed", str(config.seed)] * (config.seed != 0)
    return " ".join([*words, *where_of(study, config), *_options(row)])


def work_of(config: RunConfig, usual: str = "") -> list[str]:
    """Return the command-line options that select what is trained; empty for the ``usual`` network."""
    if config.is_own:
        return ["--workload", shlex.quote(config.work_name)]
    return ["--network", config.network] * (config.network != usual)


def command_of_step(study: Study, config: RunConfig, *only: str, known: Comparison | None = None) -> str:
    """Return the command that compares ``config`` with its possible changes, or ``only`` with those of these names.

    One that is ``known`` gets sets up to a resolution of 2 %, or beyond it.
    """
    plain = RunConfig(network=config.network, device=config.device, global_batch_size=config.global_batch_size)
    words = ["ddpm-lab run bottleneck", *work_of(config), f"--batch-size {config.global_batch_size}"]
    words += where_of(study, config)
    changed = config.differences(plain).keys() - {"data_sha256", "nodes"}
    for name in _OF_STEP:
        named = name in changed or name in _LEFT_OPEN
        words += [f"--{name.replace('_', '-')}", str(getattr(config, name))] if named else []
    words += ["--only", shlex.quote(",".join(only))] if only else []
    words += ["--resolution", "2%"] if only and not (known and known.all_sets.resolves <= 0.02) else []
    return " ".join(words)


_SYNTHETIC = re.compile(r"([\d,]+ )?synthetic images")
"""The name of synthetic images in records; no folder has such a name."""


def where_of(study: Study, config: RunConfig) -> list[str]:
    """Return the command-line options for images, device and output folder that differ from the command's defaults.

    Images are given by the folder of prepared images, held-out part included, or as DATA if it no longer exists.
    """
    names = {r.data_name for r in study.records if r.data_name and r.config.data_sha256 == config.data_sha256}
    images = config.data if config.data and Path(config.data).is_dir() else "DATA"
    others = any(not _SYNTHETIC.fullmatch(name) for name in names)
    words = ["--data", shlex.quote(images)] * (others and not config.is_own)
    words += ["--device", "cpu"] * (config.device == "cpu" and any(r.machine.gpus for r in study.records))
    return words + output_of(study)


def output_of(study: Study) -> list[str]:
    """Return the command-line option for the output folder, unless it is the usual one."""
    usual = study.published or study.output_dir in (Path(), output_folder(None))
    return ["--output-dir", shlex.quote(str(study.output_dir))] * (not usual)


def _options(row: Comparison) -> list[str]:
    """Return the options with which a question measures this comparison; those not named here are left out."""
    base, its, name = row.baseline, row.config, row.experiment
    batches = {base.global_batch_size, its.global_batch_size} if name == "batch_size" else {base.global_batch_size}
    ranks = its.world_size * (its.world_size > 1)
    precision = "" if base.option("number_format", "") else base.precision
    by_block = its.compile == "regional"  # in full alone
    of_files = str(base.loader_workers) * (base.loader == "files" or (by_block and name == "torch_compile"))
    given = (
        ("batch-sizes", ("multi_gpu", "batch_size"), ",".join(map(str, sorted(batches)))),
        ("batch-size", ("amp", "workers", "torch_compile", "exchange", "quality", "peers"), base.global_batch_size),
        ("world-size", ("batch_size",), ranks),
        ("world-sizes", ("amp", "torch_compile", "multi_gpu", "exchange"), ranks),
        ("precision", ("torch_compile", "multi_gpu", "exchange", "batch_size"), precision),
        ("precisions", ("workers",), precision),
        ("parts", ("peers",), "levers" * row.family.endswith(LEVERS)),
        ("scaling", ("multi_gpu",), "weak" * (row.scaling == "weak")),
        ("worker-counts", ("workers",), f"{base.loader_workers},{its.loader_workers}"),
        ("preset", ("torch_compile",), "full" * by_block),
        ("loader-workers", ("torch_compile", "multi_gpu"), of_files),
    )
    return [f"--{option} {value}" for option, questions, value in given if name in questions and value]


def noise(row: Comparison) -> str:
    """Return the interval of the repeated baseline after a semicolon; empty if there is none."""
    floor = phrases.between(row.noise)
    return f"; the baseline repeated {floor}" if floor else ""


def qualities(rows: Sequence[Comparison]) -> str:
    """Return the known verdicts on quality, such as "quality: bf16 not worse (8 seeds)", with families if several."""
    tried = [r for r in rows if r.role == "candidate" and r.sets and r.quality != QUALITY]
    several = len({r.family for r in tried}) > 1
    verdicts = phrases.joined(f"{r.label}{f' of {r.family}' * several} {r.quality}" for r in tried)
    return f"quality: {verdicts}" if verdicts else f"quality {QUALITY}"

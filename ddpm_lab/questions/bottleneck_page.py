"""The bottleneck report as Markdown and as a page: what limits a step, and the changes that make it faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import change_phrases, limits, machine_state, pages, phrases, quality
from ddpm_lab.explain.bands import S002 as TARGETS
from ddpm_lab.explain.bands import documents
from ddpm_lab.explain.charts.style import save
from ddpm_lab.explain.frames import Study, rank_zero
from ddpm_lab.explain.questions import bottleneck
from ddpm_lab.explain.questions.bottleneck import Advice
from ddpm_lab.explain.subject import Subject, roofline, subject
from ddpm_lab.files import replace as replace_file
from ddpm_lab.questions import lost_scaling
from ddpm_lab.questions.answers import answer

TITLE, STEM = "Bottleneck report", "bottleneck_report"


def write(study: Study, folder: Path, remarks: Sequence[str] = ()) -> Path:
    """Write the report with its pictures into ``folder``, as Markdown and as a page; returns the former."""
    about = subject(study)
    folder.mkdir(parents=True, exist_ok=True)
    shown = []
    changed = tuple(r for r in study.records if r.experiment == "bottleneck" and r.role != "profile")
    for name, records in {"profile": (about.profile,) if about else (), "bottleneck": changed}.items():
        if records:
            part = replace(study, experiment=name, records=records)
            path = folder / f"{STEM}_{name}.png"
            shown_part = answer(part)
            save(shown_part.figure(), path)
            shown.append((shown_part.finding.headline, path.name))
    text = markdown(study, shown, remarks)
    target = folder / f"{STEM}.md"
    replace_file(target, text)
    pages.write_markdown(text, target.with_suffix(".html"))
    return target


def markdown(study: Study, figures: Sequence[tuple[str, str]] = (), remarks: Sequence[str] = ()) -> str:
    """The whole report; ``figures`` are (text alternative, file name) of pictures that lie beside it.

    ``remarks`` are sentences on how it was measured that end the executive summary.
    """
    about = subject(study)
    if about is None:
        return f"# {TITLE}\n\n{bottleneck.summary(study)[0]}\n"
    found = bottleneck.advice(study)
    goals = [(t.name, t.target, t.now, t.status) for t in bottleneck.targets(study, about, found)]
    sections = {
        "Executive summary": [_items([*bottleneck.summary(study), *remarks])],
        "Bottleneck identification": _identification(study, about, figures),
        "Current configuration": [_configuration(about)],
        "Recommendations": _recommendations(study, about, found),
        "Targets": [_table(("Target", "Wanted", "Now", "Status"), goals)],
        "No action needed": [_items(_fine(about, bottleneck.declined(study)) or ["Nothing that was looked at."])],
        "Method": [_items(_method(study, about))],
    }
    record = about.profile
    context = [record.machine.name, record.family, record.data_name, record.date[:10]]
    context += ["published records, not measured here"] * study.published
    parts = [f"# {TITLE}", " \N{MIDDLE DOT} ".join(context)]
    for name, body in sections.items():
        parts += [f"## {name}", *(text for text in body if text)]
    return "\n\n".join(parts) + "\n"


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _identification(study: Study, about: Subject, figures: Sequence[tuple[str, str]]) -> list[str]:
    """The phases of a step, the verdict, how far it is from the peaks, and where ranks lose."""
    line, config = about.taken.running, about.config
    names = {bd.TRANSFER: "memory transfer", bd.COMPUTE: "GPU compute" if about.taken.on_device else "compute"}
    rows = [
        (bd.LONG.get(name, name), phrases.seconds(s), bd.percent(line.share(name)), names.get(kind, kind))
        for name, s in line.phases.items()
        for kind in [bd.class_of(name)]
    ]
    rows.append(("in no phase", phrases.seconds(line.residual_seconds), bd.percent(line.residual_share), "residual"))
    whole = f"whole step{f' of rank {about.taken.rank}, the slowest' if about.taken.others else ''}"
    rows.append((whole, phrases.seconds(line.step_seconds), "100 %", "wall time"))
    how = f"ddpm-lab run peers --network {config.network} --parts limits"
    peak = roofline(study, about)
    splits = [
        s for s in lost_scaling.splits(study) if (s.ranks, s.batch) == (config.world_size, config.global_batch_size)
    ]
    return [
        _table(("Component", "Time per batch", "Share", "Class"), rows),
        f"**Verdict.** {bottleneck.verdict(about)}",
        f"{bd.evidence(about.taken)}.",
        limits.sentence_of(peak) if peak else f"The machine's peaks are not measured; `{how}` measures them.",
        *map(lost_scaling.sentence, splits),
        *(f"![{alt}]({name})" for alt, name in figures),
    ]


def _configuration(about: Subject) -> str:
    config, environment, seen = about.config, about.profile.environment, rank_zero(about.profile)
    machine, optimizer, diffusion = environment.machine, about.config.optimizer, about.config.diffusion
    weights = f", {seen['parameters']:,} parameters" if "parameters" in seen else ""
    memory = phrases.memory(environment.ram_bytes) if environment.ram_bytes else "unknown"
    size = f"{config.image_size}\N{MULTIPLICATION SIGN}{config.image_size}"
    batch = f"{phrases.plural(config.global_batch_size, 'image')} a step, accumulation {config.accumulation}"
    adam = f"Adam ({optimizer.adam}), learning rate {optimizer.learning_rate:g}, EMA ({optimizer.ema})"
    versions = [f"{name} {v}" for name, v in sorted(environment.packages.items())]
    rows = [
        ("machine", f"{machine.name}, {memory} of memory"),
        ("network", f"{config.network}{weights}"),
        ("images", f"{about.profile.data_name}, {size}; {batch}"),
        ("settings", phrases.settings(config)),
        ("kernels", f"{config.kernels}, {'channels_last' if config.channels_last else 'NCHW'}"),
        ("optimizer", adam),
        ("objective", f"{diffusion.objective}, {diffusion.loss}, {diffusion.schedule}"),
        ("software", ", ".join([f"Python {environment.python}", *versions])),
        ("CUDA, driver", f"{environment.cuda or 'none'}, {machine.driver or 'none'}"),
        ("git commit", environment.git_commit or "unknown"),
    ]
    return _table(("", "Value"), rows)


def _recommendations(study: Study, about: Subject, found: Sequence[Advice]) -> list[str]:
    """All changes in a table, and the measured gains in full."""
    if not found:
        return ["None: nothing that was measured would make a step faster."]
    rows = [(str(i), a.title, a.impact, a.expected(), a.status, a.quality_word) for i, a in enumerate(found, 1)]
    parts = [_table(("", "Change", "Impact", "Expected speed", "Rests on", "Quality"), rows)]
    for i, a in enumerate((a for a in found if a.ratio > 1), 1):
        told = [
            f"**Now:** `{a.current}`. **{'Recommended' if a.sure else 'To be measured'}:** `{a.recommended}`",
            f"**Rationale:** {a.rationale}.",
            f"**Expected improvement:** {a.expected()}. Impact: {a.impact}.",
            f"**Evidence:** {a.evidence}.",
            f"**Quality:** {a.quality}.",
            f"**Command:** `{a.command}`",
        ]
        if a.status == bottleneck.FASTER and a.quality.startswith(quality.NOT_MEASURED):
            told[-2] += f" `{change_phrases.quality_command(study)}` measures it."
        parts += [f"### {i}. {a.title}", _items(told)]
    if sum(a.sure for a in found) > 1:
        parts.append("Change one at a time and measure again after each: gains of separate changes do not multiply.")
    missing = [a for a in found if a.status == bottleneck.NOT_MEASURED]
    if missing:
        parts.append(f"`{change_phrases.command(study, about.config)}` measures what is not measured yet.")
        parts.append(_items([f"{a.title}: {a.evidence}." for a in missing if ";" in a.evidence]))
    return parts


def _fine(about: Subject, left: Sequence[Advice]) -> list[str]:
    line = about.taken.running
    told = [
        f"{bd.LONG.get(name, name)}: {bd.percent(line.share(name))} of a step"
        for name in line.phases
        if bd.class_of(name) != bd.COMPUTE and line.share(name) < TARGETS.io and about.taken.explained
    ]
    for a in left:
        why = f"worse quality, {a.quality}" if a.status == bottleneck.WORSE else a.expected()
        told.append(f"{a.title}: {a.evidence if math.isnan(a.ratio) else why} ({a.status})")
    return told


def _method(study: Study, about: Subject) -> list[str]:
    record, taken = about.profile, about.taken
    compute = ", ".join(f"{name} from {bd.percent(b)}" for name, b in TARGETS.compute_names if b)
    io = ", ".join(f"{name} up to {bd.percent(b)}" for name, b in TARGETS.io_names[:-1])
    impacts = ", ".join(f"{name} from {b:.2f} times as fast" for name, b in TARGETS.impacts if b)
    told = [
        f"Time budget: {phrases.plural(taken.steps, 'step')} of a fresh process group, each phase timed where it "
        "begins and ends, the wall time by a clock of its own. One with more than "
        f"{bd.percent(bd.UNEXPLAINED)} in no phase names no bottleneck.",
        "Speeds: fresh process groups take turns in sets, the present settings twice. Ratios are paired by turn, "
        "intervals are 95 % over sets, and verdicts are corrected for all comparisons of an experiment (Holm).",
        f"{TARGETS.whose} names shares: compute {compute}, else poor; I/O {io}, else poor. Its targets are goals of "
        f"their own: compute above {bd.percent(TARGETS.compute)}, I/O below {bd.percent(TARGETS.io)}, which is less "
        "than what it names good. "
        f"Impact by the lower end of the interval: {impacts}, else low. {documents(TARGETS.whose)}",
        "Compute share is the part of the wall time in forward, backward, optimizer and weight averaging. It is not "
        "the utilisation of the device, which is read from the machine.",
        f"Code version {record.code_version}, run {record.run_id}, measured {study.date}.",
    ]
    busy = machine_state.busy(study).strip()
    return [*told, f"{busy} The time budget was measured apart from them."] if busy else told

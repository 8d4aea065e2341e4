"""The bottleneck report as Markdown, in the order of S002's: every sentence is computed from a study's records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpm_lab.explain import advice as adv
from ddpm_lab.explain import (
    bottleneck,
    change_phrases,
    decisions,
    limits,
    lost_scaling,
    lost_scaling_table,
    machine_state,
    phrases,
    quality,
)
from ddpm_lab.explain import budget as bd
from ddpm_lab.explain.advice import Advice
from ddpm_lab.explain.bands import S002 as TARGETS
from ddpm_lab.explain.bands import documents
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.frames import Study, rank_zero
from ddpm_lab.explain.subject import Subject, roofline, subject

TITLE = "Bottleneck report"


def markdown(study: Study, figures: Sequence[tuple[str, str]] = (), remarks: Sequence[str] = ()) -> str:
    """The whole report; ``figures`` are (text alternative, file name) of pictures that lie beside it.

    ``remarks`` are sentences on how it was measured that end the executive summary.
    """
    about = subject(study)
    if about is None:
        return f"# {TITLE}\n\n{bottleneck.summary(study)[0]}\n"
    found, left = adv.advice(study), adv.declined(study)
    targets = [(t.name, t.target, t.now, t.status) for t in bottleneck.targets(study, about, found)]
    pictures = [f"![{alt}]({name})" for alt, name in figures]
    sections = {
        "Executive summary": [_items([*bottleneck.summary(study), *remarks])],
        "Bottleneck identification": [
            _phases(about),
            f"**Verdict.** {bottleneck.verdict(about)}",
            *([f"Beside the phases: {phrases.joined(bd.beside(about.taken))}."] if bd.beside(about.taken) else []),
            *pictures,
        ],
        "Current configuration": [_configuration(about)],
        "Recommendations": _recommendations(study, about, found),
        "Why the present speed is good or not": _why(study, about),
        "Action plan": [_numbered(_actions(study, found))],
        "Targets": [_table(("Target", "Wanted", "Now", "Status"), targets)],
        "Conclusion": _conclusion(study, about, found, left),
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


def _numbered(lines: Sequence[str]) -> str:
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _phases(about: Subject) -> str:
    line = about.taken.running
    names = {bd.TRANSFER: "memory transfer", bd.COMPUTE: "GPU compute" if about.taken.on_device else "compute"}
    rows = [
        (bd.LONG.get(name, name), phrases.seconds(s), bd.percent(line.share(name)), names.get(kind, kind))
        for name, s in line.phases.items()
        for kind in [bd.class_of(name)]
    ]
    rows.append(("in no phase", phrases.seconds(line.residual_seconds), bd.percent(line.residual_share), "residual"))
    whole = f"whole step{f' of rank {about.taken.rank}, the slowest' if about.taken.others else ''}"
    rows.append((whole, phrases.seconds(line.step_seconds), "100 %", "wall time"))
    return _table(("Component", "Time per batch", "Share", "Class"), rows)


def _configuration(about: Subject) -> str:
    config, environment, seen = about.config, about.profile.environment, rank_zero(about.profile)
    machine, optimizer = environment.machine, about.config.optimizer
    weights = f", {seen['parameters']:,} parameters" if "parameters" in seen else ""
    memory = phrases.memory(environment.ram_bytes) if environment.ram_bytes else "unknown"
    size = f"{config.image_size}\N{MULTIPLICATION SIGN}{config.image_size}"
    batch = f"{phrases.plural(config.global_batch_size, 'image')} a step, accumulation {config.accumulation}"
    adam = f"Adam ({optimizer.adam}), learning rate {optimizer.learning_rate:g}, EMA ({optimizer.ema})"
    diffusion = config.diffusion
    rows = [
        ("hardware", "machine", machine.name),
        ("hardware", "memory of the machine", memory),
        ("training", "network", f"{config.network}{weights}"),
        ("training", "images", f"{about.profile.data_name}, {size}"),
        ("training", "batch", batch),
        ("training", "settings", phrases.settings(config)),
        ("training", "kernels", f"{config.kernels}, {'channels_last' if config.channels_last else 'NCHW'}"),
        ("training", "optimizer", adam),
        ("training", "objective", f"{diffusion.objective}, {diffusion.loss}, {diffusion.schedule}"),
        ("software", "Python", environment.python),
        ("software", "packages", ", ".join(f"{name} {v}" for name, v in sorted(environment.packages.items()))),
        ("software", "CUDA, driver", f"{environment.cuda or 'none'}, {machine.driver or 'none'}"),
        ("software", "git commit", environment.git_commit or "unknown"),
    ]
    return _table(("", "", "Value"), rows)


def _recommendations(study: Study, about: Subject, found: Sequence[Advice]) -> list[str]:
    if not found:
        return ["None: nothing that was measured would make a step faster."]
    rows = [(str(i), a.title, a.impact, a.expected(), a.status, a.quality_word) for i, a in enumerate(found, 1)]
    parts = [_table(("", "Change", "Impact", "Expected speed", "Rests on", "Quality"), rows)]
    told_in_full = [a for a in found if a.ratio > 1]
    for i, a in enumerate(told_in_full, 1):
        told = [
            f"**Impact:** {a.impact}",
            f"**Now:** `{a.current}`. **{'Recommended' if a.sure else 'To be measured'}:** `{a.recommended}`",
            f"**Rationale:** {a.rationale}.",
            f"**Evidence:** {a.evidence}.",
            f"**Expected improvement:** {a.expected()}.",
            f"**Quality:** {a.quality}.",
            f"**Command:** `{a.command}`",
            f"**Test plan:** {_test(study, a)}",
            f"**Expected result:** {_result(about, a)}",
        ]
        parts += [f"### {i}. {a.title}", _items(told)]
    if any(a.status == adv.NOT_MEASURED for a in found):
        how = change_phrases.command(study, about.config)
        parts.append(f"`{how}` measures what is not measured yet.")
        parts.append(
            _items([f"{a.title}: {a.evidence}." for a in found if a.status == adv.NOT_MEASURED and ";" in a.evidence])
        )
    return parts


def _test(study: Study, a: Advice) -> str:
    sets = f"at least {phrases.plural(decisions.LEAST_SETS, 'set')} of both sides in turns"
    if a.status == adv.DERIVED:
        return "compare the rank's clocks, temperature, neighbours and data with the others'; then the command again."
    if a.status != adv.FASTER:
        return f"the command measures it, {sets}; adopt it where the whole interval lies above 1."
    if a.quality.startswith(quality.NOT_MEASURED):
        return f"before it is adopted, its quality: `{change_phrases.quality_command(study)}`."
    return f"set it, and give the command again with it as the present setting: {sets}."


def _result(about: Subject, a: Advice) -> str:
    now = about.step_seconds / about.config.global_batch_size
    per = f"{phrases.seconds(now)} for an image now"
    span = "" if math.isnan(a.low) else f" ({phrases.seconds(now / a.high)} to {phrases.seconds(now / a.low)})"
    told = f"{phrases.seconds(now / a.ratio)} for an image{span}; {per}."
    return (
        f"not known: the gain is inconclusive. If it is what it reads, {told}" if a.status == adv.NOT_RESOLVED else told
    )


def _why(study: Study, about: Subject) -> list[str]:
    config = about.config
    parts = [f"{bottleneck.speed(about)}. {bd.evidence(about.taken)}."]
    if peak := roofline(study, about):
        parts.append(limits.sentence_of(peak))
    else:
        how = f"ddpm-lab run peers --network {config.network} --parts limits"
        parts.append(f"How far it is from the machine's peaks is not measured; `{how}` measures the peaks.")
    sizes = [r for r in _sweep(study, about) if r.sets]
    if len(sizes) > 1:
        rows = [
            (
                str(r.batch),
                phrases.throughput(r),
                phrases.seconds(r.step_seconds),
                phrases.ratio_with_interval(r),
                phrases.outcome(r),
            )
            for r in sizes
        ]
        parts += [
            "Other batch sizes, for equal images:",
            _table(("Batch", "Images/s", "Step", "Speed", "Verdict"), rows),
        ]
    else:
        parts.append(f"Other batch sizes are not measured; `{change_phrases.command(study, config)}` measures them.")
    splits = [
        s for s in lost_scaling.splits(study) if (s.ranks, s.batch) == (config.world_size, config.global_batch_size)
    ]
    return [*parts, *map(lost_scaling_table.sentence, splits)]


def _sweep(study: Study, about: Subject) -> list[Comparison]:
    """Rows of the present configuration and of those that differ from it in the batch alone, the smallest first."""
    found = [
        r
        for r in adv.measured(study, about).values()
        if r.config.differences(about.config).keys() == {"global_batch_size"}
    ]
    return sorted([*([about.speed] if about.speed else []), *found], key=lambda r: r.batch)


def _actions(study: Study, found: Sequence[Advice]) -> list[str]:
    sure = [a for a in found if a.sure]
    told = [f"{a.title}: `{a.recommended}` ({a.expected()})." for a in sure]
    if len(sure) > 1:
        told.append("Change one at a time and measure again after each: gains of separate changes do not multiply.")
    if any(a.quality.startswith(quality.NOT_MEASURED) for a in sure):
        told.append(f"Measure what they cost in quality: `{change_phrases.quality_command(study)}`.")
    open_ = [a for a in found if a not in sure]
    told += [f"Measure: {phrases.within(a.title)} ({a.expected()}): `{a.command}`." for a in open_[:3]]
    return told or ["Nothing to do here."]


def _conclusion(study: Study, about: Subject, found: Sequence[Advice], left: Sequence[Advice]) -> list[str]:
    parts = [bottleneck.verdict(about)]
    sure = [a for a in found if a.sure]
    parts.append(f"The largest sure gain: {sure[0].title}, {sure[0].expected()}." if sure else "No gain is sure yet.")
    open_ = [a for a in found if a not in sure]
    if open_:
        parts.append(f"Not yet sure: {phrases.joined([phrases.within(a.title) for a in open_])}.")
    every = change_phrases.command(study, about.config)
    after = [change_phrases.command(study, sure[0].config)] if sure and sure[0].config else []
    steps = [every, *after] if open_ or not after else after
    parts += ["### Next steps", _numbered([f"`{command}`" for command in steps])]
    return [*parts, "### No action needed for", _items(_fine(about, left) or ["Nothing that was looked at."])]


def _fine(about: Subject, left: Sequence[Advice]) -> list[str]:
    line = about.taken.running
    told = [
        f"{bd.LONG.get(name, name)}: {bd.percent(line.share(name))} of a step"
        for name in line.phases
        if bd.class_of(name) != bd.COMPUTE and line.share(name) < TARGETS.io and about.taken.explained
    ]
    for a in left:
        why = f"worse quality, {a.quality}" if a.status == adv.WORSE else a.expected()
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
    apart = "The time budget was taken apart from these sets, and what others took then is said with it."
    return [*told, f"{busy} {apart}"] if busy else told

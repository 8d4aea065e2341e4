"""Sentences about the rows of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain import quality as equivalence
from ddpm_lab.explain.comparisons import COMPARED, MECHANISM_ONLY, QUALITY, resolved
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import NOT_TRAINED, WEAK

_SENTENCES = {
    "amp": "{label} trains {ratio} times as fast as {base}",
    "multi_gpu": "{label} {verb} {ratio} times as fast as {base}",
    "workers": "training with {label} runs {ratio} times as fast as with {base}",
    "torch_compile": "{label}{narrow} training runs {ratio} times as fast as {base}{narrow} training",
    "exchange": "{label} trains {ratio} times as fast as the {base}",
    "batch_size": "training with {label} takes {ratio} times as many images a second as with {base}",
}


def lead(rows: Sequence[Any]) -> Any:
    """The comparison that a claim is about: the fastest resolved one, else the slowest, else the best known one."""
    faster = [r for r in rows if r["verdict"] == stats.FASTER]
    slower = [r for r in rows if r["verdict"] == stats.SLOWER]
    if slower and not faster:
        return min(slower, key=lambda r: r["ratio"])
    return max(faster or rows, key=lambda r: r["ratio"])


def faster(row: Mapping[str, Any]) -> str:
    """The ratio of a comparison in words: "bf16 trains 1.62 times as fast as fp32"."""
    form = _SENTENCES.get(row["experiment"], "{label} runs {ratio} times as fast as {base}")
    if row["loader_alone"]:
        form = "the loader alone with {label} delivers {ratio} times the images of {base}"
    if WEAK in row["family"]:
        form = "{label} take {ratio} times as many images a second as {base}"
    verb = "trains" if row["label"].startswith("1 ") else "train"
    narrow = "" if row["config"].is_own else f" {row['config'].precision}"
    names = {"label": row["label"], "base": row["baseline_label"], "verb": verb, "narrow": narrow}
    return form.format(ratio=phrases.ratio(row), **names)


def trains(row: Mapping[str, Any]) -> bool:
    """Whether a row's ranks learn one network: without exchange each has its own, and its speed is no offer."""
    return bool(row["config"].exchange.enabled)


def exposed_communication(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a step takes less where ranks exchange nothing, each in a sentence after a space; empty without any."""
    told = ""
    for row in rows:
        if row["role"] != "candidate" or trains(row) or not row["sets"]:
            continue
        named = f"Without exchange a step of {row['family']} is"
        if not resolved(row):
            told += f" {named} not called shorter (ratio {phrases.ratio(row)}, {phrases.evidence(row)})."
            continue
        shorter, low, high = (100 * (1 - 1 / row[end]) for end in ("ratio", "low", "high"))
        span = "" if math.isnan(low) else f" ({low:.1f} to {high:.1f} %)"
        told += f" {named} {shorter:.1f} % shorter{span}: exposed communication."
    return told


def claim(lead: Mapping[str, Any], count: int, family: str) -> tuple[str, str]:
    """Headline and claim about the ``lead`` of ``count`` comparisons; ``family`` is its own where there are several."""
    if not resolved(lead):
        return unresolved(lead, count, family)
    prefix, where = (f"With {family}: ", f" ({family})") if family else ("", "")
    return f"{faster(lead)}{where}", f"{prefix}{faster(lead)} ({phrases.evidence(lead)}{noise(lead)})."


def unresolved(lead: Mapping[str, Any], count: int, family: str) -> tuple[str, str]:
    """The same where no comparison is resolved, so that the lead has the highest ratio."""
    evidence = _evidence(lead)
    pair = f"{lead['label']} against {lead['baseline_label']}"
    sets = f" ({phrases.plural(int(lead['sets']), 'set')})" if lead["sets"] < stats.LEAST_SETS else ""
    if count > 1:
        short = f"Not resolved{sets}: no configuration of {count} is called faster or slower"
        of = f", of {family}" if family else ""
        return short, f"{short}. The highest ratio{of}: {evidence}"
    where = f" ({family})" if family else ""
    return f"Not resolved{sets}: {pair}{where}", f"Not resolved{where}: {evidence}"


def _evidence(lead: Mapping[str, Any]) -> str:
    text = f"{lead['label']} against {lead['baseline_label']} reads {phrases.ratio(lead)} ({phrases.evidence(lead)})"
    if lead["sets"] < stats.LEAST_SETS:
        return f"{text}; a verdict needs at least {stats.LEAST_SETS} sets."
    effect = f"{100 * lead['resolution']:.3g} %"
    if lead["low"] > 1 / (1 + lead["resolution"]) and lead["high"] < 1 + lead["resolution"]:
        return f"{text}{noise(lead)}; the interval leaves no room for a difference of {effect}."
    if math.isnan(lead["sets_needed"]):
        return f"{text}{noise(lead)}; the spread between sets is too wide for {effect}."
    return f"{text}{noise(lead)}; about {lead['sets_needed']:.0f} sets would resolve {effect}."


def noise(row: Mapping[str, Any]) -> str:
    """The noise floor after a semicolon; empty where there is none."""
    floor = phrases.noise_floor(row)
    return f"; noise floor {floor}" if floor else ""


def tally(rows: Sequence[Mapping[str, Any]], lead: Mapping[str, Any]) -> str:
    """How many comparisons are faster, slower, not resolved; empty where the ``lead`` itself is not resolved."""
    if len(rows) < 2 or not resolved(lead):
        return ""
    counts = [(sum(r["verdict"] == v for r in rows), v) for v in (stats.FASTER, stats.SLOWER)]
    counts.append((len(rows) - sum(n for n, _ in counts), stats.NOT_RESOLVED))
    words = [f"{n} {'is' if n == 1 else 'are'} {v}" for n, v in counts if n]
    if len(words) == 1:
        return f" {'Both' if len(rows) == 2 else f'All {len(rows)}'} comparisons are {lead['verdict']}."
    return f" Of {len(rows)} comparisons {phrases.joined(words)}."


def quality(rows: Sequence[Mapping[str, Any]], *, evidence: bool = False) -> str:
    """What is known of the quality of the configurations, such as "quality: bf16 not worse (8 seeds)".

    With ``evidence`` each verdict comes with its difference, interval and margin. A configuration of which families
    say different things is named with its family.
    """
    known = [r for r in rows if r["role"] == "candidate" and r["sets"]]
    said = [
        QUALITY if r["quality"] == QUALITY else equivalence.full(r["equivalence"]) if evidence else str(r["quality"])
        for r in known
    ]
    if set(said) <= {QUALITY}:
        return f"quality {QUALITY}"
    different: dict[str, set[str]] = {}
    for r, text in zip(known, said, strict=True):
        different.setdefault(str(r["label"]), set()).add(text)
    told: dict[str, str] = {}
    for r, text in zip(known, said, strict=True):
        told[f"{r['label']} of {r['family']}" if len(different[str(r["label"])]) > 1 else str(r["label"])] = text
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


def left_over(rows: Sequence[Mapping[str, Any]]) -> str:
    """Configurations without a speed, by why; those that only some families lack are named with their family."""
    families = {str(r["family"]) for r in rows}
    lacking: dict[tuple[str, str], set[str]] = {}
    for r in unmeasured(rows):
        lacking.setdefault((str(r["label"]), phrases.failure(r)), set()).add(str(r["family"]))

    def name(r: Mapping[str, Any]) -> str:
        everywhere = lacking[str(r["label"]), phrases.failure(r)] == families
        return str(r["label"]) if everywhere else f"{r['label']} of {r['family']}"

    failed = [(name(r), phrases.failure(r)) for r in unmeasured(rows) if r["status"] not in ("ok", "left out")]
    left_out = [(name(r), str(r["reason"])) for r in unmeasured(rows) if r["status"] == "left out"]
    mechanism = [(str(r["label"]), "") for r in rows if r["mechanism_only"] and r["role"] != "twin"]
    text = ""
    for head, items in (("Failed", failed), ("Left out", left_out), (MECHANISM_ONLY.capitalize(), mechanism)):
        by_reason: dict[str, list[str]] = {}
        for label, why in dict.fromkeys(items):
            by_reason.setdefault(why, []).append(label)
        if items:
            each = {why: f" ({'each ' * (len(names) > 1)}{why})" if why else "" for why, names in by_reason.items()}
            text += f" {head}: {'; '.join('; '.join(names) + each[why] for why, names in by_reason.items())}."
    return text


def lost(study: Study, rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence, after a space, on sets that a configuration failed in and was measured beside; else empty."""
    have = {r["run_id"] for r in rows if r["sets"]}
    failed = [r for r in study.records if r.role in COMPARED and r.status not in ("ok", "left out")]
    failed = [r for r in failed if r.run_id in have]
    if not failed:
        return ""
    sets = phrases.plural(len({r.set_id for r in failed}), "set")
    why = [f"{r.label} ({phrases.failed(r.status, r.reason)})" for r in failed]
    return f" Lost on the way, in {sets}: {phrases.joined(list(dict.fromkeys(why)))}."


def unmeasured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows without a speed: they failed or were left out."""
    return [r for r in rows if not r["sets"] and not r["mechanism_only"] and r["role"] != "twin"]

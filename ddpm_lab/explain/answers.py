"""The answer of ``compare`` in words, as values, and as a notebook shows it."""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from html import escape
from pathlib import Path
from typing import Any

from ddpm_lab.explain import figures, phrases
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.losses import first_losses
from ddpm_lab.record import RunRecord


def answer_text(study: Study, finding: Finding) -> str:
    """Verdict, ratio, interval, noise floor, memory, disturbance, losses and what really ran, one line each."""
    repeats = finding.claim.lower().startswith(finding.verdict.lower())
    lines = [finding.claim if repeats else f"{finding.verdict}: {finding.claim}"]
    for row in comparisons(study):
        if row["sets"] and row["role"] != "twin":
            lines.append(
                f"  {row['label']}: {phrases.seconds(row['step_seconds'])} a step, "
                f"peak memory {phrases.peak_memory(row)}, "
                f"{phrases.plural(int(row['sets']), 'set')} of {phrases.plural(int(row['turns']), 'turn')}, "
                f"{row['turns_dropped']} dropped"
            )
    lines.append(f"  losses: {first_losses(study).sentence}")
    lines += [f"  {line}" for line in _witnesses(study)]
    return "\n".join(lines)


def answer_values(study: Study, finding: Finding) -> dict[str, Any]:
    """The same as plain values; what is unknown is null."""
    values = {
        name: _known(getattr(finding, name))
        for name in ("verdict", "claim", "ratio", "low", "high", "noise_low", "noise_high", "sets", "hardware", "date")
    }
    sides = [
        {
            "label": row["label"],
            "role": row["role"],
            "run_id": row["run_id"],
            "status": row["status"],
            "reason": row["reason"],
            "step_seconds": _known(row["step_seconds"]),
            "peak_memory_bytes": _known(row["peak_memory_bytes"]),
            "peak_rss_bytes": _known(row["peak_rss_bytes"]),
            "sets": int(row["sets"]),
            "sets_needed": _known(row["sets_needed"]),
            "turns_dropped": int(row["turns_dropped"]),
        }
        for row in comparisons(study)
    ]
    losses = dataclasses.asdict(first_losses(study))
    return {**values, "resolution": study.resolution, "sides": sides, "quality": finding.quality, "losses": losses}


def mime_bundle(study: Study, finding: Finding) -> dict[str, str]:
    """For a notebook: the sentence, and the figure with its text alternative."""
    image = base64.b64encode(figures.png(figures.figure(study))).decode("ascii")
    alt = escape(figures.alt_text(study))
    text = escape(answer_text(study, finding))
    html = (
        f'<p style="white-space: pre-line">{text}</p>'
        f'<img style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{image}">'
    )
    return {"text/plain": answer_text(study, finding), "text/html": html}


def _witnesses(study: Study) -> list[str]:
    """What ran, as the ranks themselves said in the last set."""
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
    """Where a failed side was in its own code: the last line of its traceback that is no library."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in', str(record.witness.get("traceback", "")))
    own = [
        (file, number) for file, number in lines if "site-packages" not in file and "ddpm_lab" not in Path(file).parts
    ]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

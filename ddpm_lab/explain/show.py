"""Show a study in a notebook: its figure, its table and its finding, in a form that the report reads back.

The figure is also written to ``image_output/`` of the study's output folder. Outside a notebook the functions print
the text form of what they would show.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from matplotlib.figure import Figure

from ddpm_lab.explain import figures, findings, machine_state, operators, phrases, samples, stats, tables, trained
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.grids import literal
from ddpm_lab.explain.pages import METADATA, spoken_date

__all__ = ["figure", "finding", "more", "table"]

NAMES = {
    "profile": "01_profile",
    "multi_gpu": "02_multi_gpu",
    "amp": "03_amp",
    "workers": "04_workers",
    "torch_compile": "05_torch_compile",
    "batch_size": "batch_size",
    "exchange": "exchange",
    "all_reduce": "all_reduce",
    "peers": "07_peers",
    "quality": "08_quality",
    "claims": "09_claims",
    "bottleneck": "bottleneck",
    "recommendation": "06_recommendation",
}
NAMING = ("Configuration", "Family", "Operator", "Settings", "Work")
"""Columns that name a row: words, although a name such as "2 ranks" begins with a digit."""


def figure(study: Study) -> None:
    """Show the answer's figure with its text alternative, and write it to ``image_output/NN_name.png``."""
    _show_figure(figures.figure(study), findings.finding(study).headline, _path(study, ""))


def table(study: Study) -> None:
    """Show the answer's table: numbers to the right, words to the left; it scrolls where the screen is narrow."""
    _show_table(tables.table(study))


def _show_table(frame: pd.DataFrame) -> None:
    _display({"text/html": _html(frame), "text/plain": frame.to_string(index=False)})


def finding(study: Study) -> None:
    """Show the computed answer, and attach its values to the output for the index of the report."""
    found, how = findings.finding(study), findings.how_to_judge(study)
    last = study.records[-1] if study.records else None
    told = ("experiment", "headline", "claim", "verdict", "status", "hardware", "date", "sets", "quality", "way_out")
    values = {
        **{name: getattr(found, name) for name in told},
        "evidence": " \N{MIDDLE DOT} ".join(
            part for part in (_evidence(found), machine_state.busy(study).strip()) if part
        ),
        "published": study.published,
        "data": last.data_name if last else "",
        "training": phrases.training(study),
        "code_version": last.code_version if last else "",
    }
    facts = {
        "To answer it": found.way_out,
        "Verdict": found.verdict + f" ({found.status})" * (found.status not in (found.verdict, findings.ANSWERED)),
        "Evidence": _evidence(found),
        "Sets": str(found.sets) if found.sets else "",
        "Hardware": found.hardware + " (published records, not measured here)" * study.published,
        "Measured": " to ".join(spoken_date(day) for day in found.date.split(" to ")),
        "Quality": found.quality.removeprefix("quality ") + (f"; {how} measures it" if how else ""),
        "FID": samples.fid_sentence(trained.fids(study)) if study.experiment == trained.EXPERIMENT else "",
    }
    lines = [found.claim, "", *(f"- {name}: {value}" for name, value in facts.items() if value)]
    marked = [f"**{literal(found.headline)}**", "", *map(literal, lines[:2])]
    marked += [f"- **{name}:** {literal(value)}" for name, value in facts.items() if value]
    _display({"text/markdown": "\n".join(marked), "text/plain": "\n".join(lines)}, {METADATA: values})


def more(study: Study) -> None:
    """Show the further figures and tables of a study, each under a line that says what it shows; name its traces."""
    further, numbers, traces = figures.more(study), tables.more(study), _traces(study)
    if not further and not numbers and not traces:
        _display({"text/markdown": "There are none for this question.", "text/plain": "no further figures"})
    for caption, extra, name in further:
        _display({"text/markdown": literal(caption), "text/plain": caption})
        _show_figure(extra, caption, _path(study, f"_{name}"))
    for caption, frame in numbers:
        _display({"text/markdown": literal(caption), "text/plain": caption})
        _show_table(frame)
    if traces:
        names = ", ".join(f"`{trace}`" for trace in traces)
        text = f"Chrome traces, one for each rank, to open at ui.perfetto.dev or chrome://tracing: {names}"
        _display({"text/markdown": text, "text/plain": text.replace("`", "")})


def _traces(study: Study) -> list[Path]:
    """The traces of the latest profile that are there, seen from the output folder."""
    record = operators.latest_profile(study.records)
    names = (record.profile or {}).get("traces", []) if record else []
    paths = [Path("trace_output", name) for name in names]
    return [path for path in paths if (study.output_dir / path).is_file()]


def _path(study: Study, suffix: str) -> Path:
    return study.output_dir / "image_output" / f"{NAMES[study.experiment]}{suffix}.png"


def _show_figure(drawn: Figure, alt: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figures.save(drawn, path)
    image = base64.b64encode(path.read_bytes()).decode("ascii")
    _display({"image/png": image, "text/plain": alt}, {"image/png": {"alt": alt}})


def _display(data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
    if InteractiveShell.initialized():
        display(dict(data), metadata=dict(metadata or {}), raw=True)  # type: ignore[no-untyped-call]
    else:
        print(data["text/plain"])


def _evidence(found: Finding) -> str:
    """Ratio, interval and the repeated baseline in words; empty where nothing was compared."""
    if math.isnan(found.ratio):
        return ""
    ratio = stats.Interval(value=found.ratio, low=found.low, high=found.high)
    repeated = stats.Interval(value=1.0, low=found.noise_low, high=found.noise_high)
    pieces = [f"ratio {phrases.ratio_of(ratio)}"]
    for name, ends in (("95 % interval", ratio), ("baseline repeated", repeated)):
        if interval := phrases.between(ends):
            pieces.append(f"{name} {interval}")
    return ", ".join(pieces)


def _html(frame: pd.DataFrame) -> str:
    """The table as HTML, laid out by itself, since a notebook and a page have different style sheets."""
    sides = {str(name): "right" if name not in NAMING and _numbers(frame[name]) else "left" for name in frame.columns}

    def cell(tag: str, name: str, value: object) -> str:
        scope = {"th": ' scope="col"'}.get(tag, "")
        text = escape(str(value))
        if tag == "td" and sides[name] == "right":
            # The interval goes below its value, so that a table of ten columns fits a page.
            text = re.sub(r" (\(.*\))$", r'<br><span class="interval">\1</span>', text)
        wrap = "; white-space: nowrap" if tag == "td" and sides[name] == "right" else ""
        return f'<{tag}{scope} style="text-align: {sides[name]}{wrap}">{text}</{tag}>'

    head = "".join(cell("th", str(name), name) for name in frame.columns)
    body = "".join(
        "<tr>" + "".join(cell("td", str(name), value) for name, value in row.items()) + "</tr>\n"
        for row in frame.to_dict("records")
    )
    return (
        '<div class="scroll" style="overflow-x: auto" tabindex="0" role="region" aria-label="Table of results">'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>"
    )


def _numbers(column: pd.Series[Any]) -> bool:
    """Whether a column holds numbers, with units and intervals or not: each value begins with a digit or is a dash."""
    return all(re.match(r"(below )?[-+\N{MINUS SIGN}]?\d|\N{EN DASH}?$", str(value)) for value in column) and any(
        re.match(r"[-+\N{MINUS SIGN}]?\d", str(value)) for value in column
    )

"""Show an answer in a notebook: its figure, its table and its finding, in a form that the report reads back.

The figure is also written to ``image_output/`` of the study's output folder. Outside a notebook the functions print
the text form of what they would show.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM
from ddpm_lab.explain import findings, machine_state, phrases
from ddpm_lab.explain.answer import Answer
from ddpm_lab.explain.charts import Figure, save
from ddpm_lab.explain.pages import METADATA, spoken_date
from ddpm_lab.explain.table import Table, code, html, literal, plain
from ddpm_lab.output import say


def figure(answer: Answer) -> None:
    """Show the answer's figure with its text alternative, and write it to ``image_output/NN_name.png``."""
    _show_figure(answer, answer.figure(), answer.finding.headline)


def table(answer: Answer) -> None:
    """Show the answer's table: numbers to the right, words to the left; it scrolls where the screen is narrow."""
    _show_table(answer.table())


def finding(answer: Answer) -> None:
    """Show the computed answer, and attach its values to the output for the index of the report."""
    study, found = answer.study, answer.finding
    how = findings.how_to_judge(study, found, trains=answer.trains)
    last = study.records[-1] if study.records else None
    bases = [r.config for r in study.records if r.role == "baseline"]
    networks = phrases.joined(config.network for config in bases if config.workload == DDPM)
    own = phrases.joined(config.work_name for config in bases if config.is_own)
    fields = ("experiment", "headline", "claim", "verdict", "status", "hardware", "date", "sets", "quality")
    rests_on = ([found.speed] if found.sets else []) + list(machine_state.warnings(study))
    values = {
        **{name: getattr(found, name) for name in (*fields, "notes", "published")},
        "evidence": " \N{MIDDLE DOT} ".join(rests_on),
        "data": last.data_name if last else "",
        "training": f"{networks} network" if networks else own,
        "code_version": last.code_version if last else "",
        "way_out": found.way_out or how,
    }
    facts = {
        "To answer it": found.way_out,
        "Verdict": found.verdict + f" ({found.status})" * (found.status not in (found.verdict, findings.ANSWERED)),
        "Hardware": found.hardware + " (published records, not measured here)" * found.published,
        "Measured": spoken_date(found.date),
        "Quality": found.quality.removeprefix("quality ") + (f"; {how} measures it" if how else ""),
    }
    facts = {name: value for name, value in facts.items() if value}
    shown = {}
    for kind, text, bold, gap in (("text/markdown", literal, "**", "\n\n"), ("text/plain", str, "", "\n")):
        head = [f"{bold}{text(found.headline)}{bold}", *([text(found.evidence)] if found.evidence else [])]
        items = [*map(text, found.notes), *(f"{bold}{name}:{bold} {text(value)}" for name, value in facts.items())]
        shown[kind] = gap.join(head) + "\n\n" + "\n".join(f"- {item}" for item in items)
    _display(shown, {METADATA: values})


def more(answer: Answer) -> None:
    """Show the further figures and tables of an answer, each under a line that says what it shows; name its traces."""
    further, numbers = answer.figures(), answer.tables()
    profile = next((r.profile for r in reversed(answer.study.records) if r.profile), {})
    paths = [Path("trace_output", name) for name in profile.get("traces", ())]
    traces = [path for path in paths if (answer.study.output_dir / path).is_file()]
    if not further and not numbers and not traces:
        _show_text("There are none for this question.", "no further figures")
    for caption, extra, name in further:
        _show_text(literal(caption), caption)
        _show_figure(answer, extra, caption, f"_{name}")
    for caption, rows in numbers:
        _show_text(literal(caption), caption)
        _show_table(rows)
    if traces:
        text = "Chrome traces, one for each rank, to open at ui.perfetto.dev or chrome://tracing: "
        _show_text(text + ", ".join(map(code, traces)), text + ", ".join(map(str, traces)))


def _show_text(markdown: str, plainly: str) -> None:
    _display({"text/markdown": markdown, "text/plain": plainly})


def _show_table(rows: Table) -> None:
    _display({"text/html": html(rows), "text/plain": plain(rows)})


def _show_figure(answer: Answer, drawn: Figure, alt: str, suffix: str = "") -> None:
    path = answer.study.output_dir / "image_output" / f"{answer.file}{suffix}.png"
    save(drawn, path)
    image = base64.b64encode(path.read_bytes()).decode("ascii")
    _display({"image/png": image, "text/plain": alt}, {"image/png": {"alt": alt}})


def _display(data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
    if InteractiveShell.initialized():
        display(dict(data), metadata=dict(metadata or {}), raw=True)  # type: ignore[no-untyped-call]
    else:
        say(*data["text/plain"].split("\n"))


def _missing(
    shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: int | None = None
) -> None:
    """Say what a cell lacks that stands below one which did not come to its end; show any other error as usual."""
    if getattr(error, "name", "") == "answer":
        kind, error, trace = ConfigError, ConfigError("no answer yet: run the cell that measures, to its end"), None
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


if InteractiveShell.initialized():
    InteractiveShell.instance().set_custom_exc((NameError,), _missing)  # type: ignore[no-untyped-call]

"""The folder that a benchmark is shared as: results, tables, report and pictures, all from the records of a study."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ddpm_lab.explain import comparison_report, figure_dashboard, figure_style, pages, results_file, summary
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.grids import csv_text
from ddpm_lab.explain.pairs import pairs
from ddpm_lab.explain.study_summary import of_study

DASHBOARD, TABLE = "gpu_benchmark_comparison.png", "performance_summary_table.png"
RESULTS = "benchmark_results"


def write(study: Study, folder: Path, ledger: str) -> list[Path]:
    """Write every file; return them in the order in which people look at them.

    ``ledger`` is where the records lie, relative to the folder. Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = study.records[-1].config.network
    figure_style.save(figure_dashboard.dashboard(study), folder / DASHBOARD)
    figure_style.save(figure_dashboard.summary_table(study), folder / TABLE)
    written = [folder / DASHBOARD, folder / TABLE]
    for name, text in _texts(study, network, ledger):
        pages.replace_text(folder / name, text)
        written.append(folder / name)
    report = folder / f"comparison_report_{network}.md"
    if report in written:
        page = report.with_suffix(".html")
        pages.write_markdown(report.read_text(encoding="utf-8"), page)
        written.insert(0, page)
    return written


def _texts(study: Study, network: str, ledger: str) -> Iterator[tuple[str, str]]:
    found = pairs(study)
    if any(p.single and p.multi for p in found):
        yield f"comparison_report_{network}.md", comparison_report.report(study, DASHBOARD)
    runs, gains = of_study(study, ledger)
    yield "summary_table.md", summary.markdown(runs, [gains])
    yield "summary_table.csv", csv_text(summary.plain(runs))
    results = results_file.rows(study)
    yield f"{RESULTS}.csv", csv_text(results_file.grid(results))
    yield f"{RESULTS}.json", json.dumps(results, allow_nan=False, indent=1) + "\n"

"""Tell a tracker what sets have shown, from their records alone and after the last of them: one experiment a question.

Ratios, intervals, verdicts and speeds of its comparisons, what the machine did meanwhile, the settings, and the figure.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpm_lab.explain import figures, findings
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.files import LEDGER
from ddpm_lab.tracking import STATE, Tracker, environment, settings

NUMBERS = ("images_per_second", "step_seconds", "peak_memory_bytes", "peak_rss_bytes", "sets", "disturbed_sets")
WORDS = ("role", "status", "verdict", "quality")
"""Fields of a comparison: numbers, and words. A reason is not told, since it may name files of the user."""


def tell(kind: str, study: Study) -> None:
    """Tell of a study, if it has records; the same records are the same experiment, however often they are told."""
    if not study.records:
        return
    rows = comparisons(study)
    if len({row.family for row in rows}) > 1:  # the twin has a label of its own
        rows = tuple(replace(row, label=f"{row.family}/{row.label}") for row in rows)
    finding = findings.finding(study)
    sets = "\n".join(sorted({f"{r.experiment} {r.set_id}" for r in study.records}))
    with tempfile.TemporaryDirectory(prefix="ddpm_lab-") as place:
        picture = Path(place) / f"{study.experiment}.png"
        picture.write_bytes(figures.png(figures.figure(study)))
        with Tracker(
            kind,
            (study.output_dir / LEDGER).parent / "comet",
            sha256(sets.encode()).hexdigest()[:32],
            name=study.experiment,
            say=lambda sentence: print(sentence, file=sys.stderr),
        ) as tracker:
            # A note has no configuration of its own: it was left out.
            ran = [row for row in rows if row.role != "note"]
            tracker.log_parameters(_settings(ran) or settings(study.records[-1].config))
            where = environment(study.records[-1].environment)
            tracker.log_others({**where, "question": finding.question, "answer": finding.headline})
            for row in ran:
                values = {"ratio": row.ratio.value, "low": row.ratio.low, "high": row.ratio.high}
                values |= {name: float(getattr(row, name)) for name in NUMBERS} | _state(study, row)
                tracker.log_metrics({f"{row.label}/{key}": value for key, value in values.items()})
            for row in rows:
                tracker.log_others({f"{row.label}/{name}": getattr(row, name) for name in WORDS})
            tracker.log_figure(picture, study.experiment)


def _settings(rows: Sequence[Comparison]) -> dict[str, Any]:
    """Settings that all configurations share by their name, the others by configuration and name."""
    each = {row.label: settings(row.config) for row in rows if row.role != "twin"}
    shared = set.intersection(*({(k, repr(v)) for k, v in found.items()} for found in each.values())) if each else set()
    return {
        (key if (key, repr(value)) in shared else f"{name}/{key}"): value
        for name, found in each.items()
        for key, value in found.items()
    }


def _state(study: Study, row: Comparison) -> dict[str, float]:
    """Mean over a configuration's windows of what the machine did in them."""
    same = [r for r in study.records if (r.role, r.run_id) == (row.role, row.run_id)]
    known = {key: [v for r in same for w in r.windows if (v := w.state.get(key)) is not None] for key in STATE}
    return {key: fmean(values) for key, values in known.items() if values}

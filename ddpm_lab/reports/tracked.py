"""Log what a question's records say to a tracker: ratios, speeds, settings, the answer and its figure."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from ddpm_lab.explain.charts.style import png
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.files import LEDGER
from ddpm_lab.questions.ask import answer
from ddpm_lab.training.tracking import Tracker, environment, settings

NUMBERS = ("images_per_second", "step_seconds", "peak_memory_bytes", "peak_rss_bytes", "sets", "disturbed_sets")
WORDS = ("role", "status", "verdict", "quality")


def tell(kind: str, study: Study) -> None:
    """Log a study, if it has records; the same records are the same experiment, however often they are logged."""
    if not study.records:
        return
    rows = comparisons(study)
    if len({row.family for row in rows}) > 1:
        rows = tuple(replace(row, label=f"{row.family}/{row.label}") for row in rows)
    shown, last = answer(study), study.records[-1]
    sets = "\n".join(sorted({f"{r.experiment} {r.set_id}" for r in study.records}))
    key, archives = sha256(sets.encode()).hexdigest()[:32], (study.output_dir / LEDGER).parent / "comet"
    with tempfile.TemporaryDirectory(prefix="ddpm_lab-") as place:
        picture = Path(place) / f"{study.experiment}.png"
        picture.write_bytes(png(shown.figure()))
        tracker = Tracker(kind, archives, key, name=study.experiment, say=partial(print, file=sys.stderr))
        ran = [row for row in rows if row.role != "note"]  # a note has no configuration of its own
        base = settings(next((row.config for row in ran if row.role == "baseline"), last.config))
        differing = {f"{r.label}/{k}": v for r in ran for k, v in settings(r.config).items() if base[k] != v}
        tracker.call("log_parameters", base | differing)
        said = {"question": shown.finding.question, "answer": shown.finding.headline}
        tracker.call("log_others", environment(last.environment) | said)
        for row in ran:
            values = {"ratio": row.ratio.value, "low": row.ratio.low, "high": row.ratio.high}
            values |= {name: float(getattr(row, name)) for name in NUMBERS}
            tracker.metrics({f"{row.label}/{name}": value for name, value in values.items()})
        for row in rows:
            tracker.call("log_others", {f"{row.label}/{name}": getattr(row, name) for name in WORDS})
        tracker.call("log_image", str(picture), name=study.experiment)
        tracker.close()

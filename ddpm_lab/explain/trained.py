"""The experiment quality: what each setting costs in held-out loss, what it gains in speed, and both together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import gradients, phrases, quality, stats
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

EXPERIMENT = "quality"
TARGET_SHARE = 0.9
"""The target is the loss that the baseline has reached on average after this share of its images."""
_NONE = "\N{EN DASH}"
GOOD = (quality.IDENTICAL, quality.NOT_WORSE)

Row = dict[str, Any]


def rows(study: Study) -> list[Row]:
    """The configurations that were compared with the baseline, each with ``equivalence``."""
    frame = comparisons(study)
    return [{str(k): v for k, v in r.items()} for r in frame.to_dict("records") if r["role"] == "candidate"]


def base(study: Study) -> Row | None:
    """The baseline's row; None where nothing is measured."""
    frame = comparisons(study)
    found = [{str(k): v for k, v in r.items()} for r in frame.to_dict("records") if r["role"] == "baseline"]
    return found[0] if found else None


def trials_of(study: Study, config: RunConfig) -> list[RunRecord]:
    """The longest trials of a configuration that ended, in the order of their seeds."""
    key = quality.work_of(config)
    mine = [r for r in study.trials if r.status == "ok" and quality.work_of(r.config) == key and _curve(r)]
    most = max((int(r.config.option("images", 0)) for r in mine), default=0)
    latest = {r.config.seed: r for r in mine if r.config.option("images", 0) == most}
    return [latest[seed] for seed in sorted(latest)]


def curve(records: Sequence[RunRecord]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Images of each look (n,), and the held-out loss of each trial at each look (trials, n)."""
    looks = [[(h["images"], h["loss"]) for h in _curve(r)] for r in records]
    return np.array([images for images, _ in looks[0]], float), np.array([[loss for _, loss in r] for r in looks])


def by_time(records: Sequence[RunRecord]) -> npt.NDArray[np.float64]:
    """Final held-out loss of each trial by ten ranges of timesteps (trials, 10)."""
    return np.array([_curve(r)[-1]["by_time"] for r in records], float)


def _curve(record: RunRecord) -> list[dict[str, Any]]:
    return list((record.quality or {}).get("held_out") or [])


def faster(row: Row) -> bool:
    """Whether a configuration is called faster."""
    return bool(row["verdict"] == stats.FASTER)


def answered(found: Sequence[Row]) -> bool:
    """Whether any configuration has a verdict on its quality."""
    return any(r["equivalence"].verdict in (*GOOD, quality.WORSE) for r in found)


def headline(found: Sequence[Row]) -> tuple[str, Row]:
    """The answer in one line, and the configuration that it is about."""
    good = [r for r in found if r["equivalence"].verdict in GOOD]
    worse = [r for r in found if r["equivalence"].verdict == quality.WORSE]
    lead = max(good or found, key=lambda r: r["ratio"] if r["sets"] else 0.0)
    if not good and not worse:
        return f"Not enough data for a verdict on {phrases.plural(len(found), 'setting')}", lead
    says = [f"{r['label']} is worse" for r in worse[:2]] + [f"so are {len(worse) - 2} more"] * (len(worse) > 2)
    if good and faster(lead):
        first = f"{lead['label']} trains {phrases.ratio(lead)} times as fast as {lead['baseline_label']} and is "
        return ", ".join([first + lead["equivalence"].verdict, *says]), lead
    if good:
        says.insert(0, f"no setting that is not worse is faster than {lead['baseline_label']}")
    text = "; ".join(says)
    return text[0].upper() + text[1:], lead


def evidence(found: Sequence[Row]) -> str:
    """The verdicts with their differences, intervals and margins."""
    told = []
    for verdict in (quality.IDENTICAL, quality.NOT_WORSE, quality.WORSE, quality.NOT_ENOUGH):
        chosen = [r for r in found if r["equivalence"].verdict == verdict]
        words = [_detail(r) for r in chosen]
        if words:
            told.append(f"{verdict.capitalize()}: {phrases.joined(words)}.")
    return " ".join(told)


def _detail(row: Row) -> str:
    equal: quality.Equivalence = row["equivalence"]
    speed = f"{phrases.ratio(row)} times as fast" if row["sets"] else "speed not measured"
    loss = equal.reason or (f"loss {quality.evidence(equal)}" if quality.evidence(equal) else "")
    return f"{row['label']} ({'; '.join(part for part in (loss, speed) if part)})"


def method(study: Study) -> str:
    """How the verdicts were found: images, seeds, how far the loss fell."""
    lead = base(study)
    records = trials_of(study, lead["config"]) if lead else []
    if not records:
        return ""
    images, losses = curve(records)
    return (
        f"Held-out loss of the averaged weights after {images[-1]:,.0f} images, paired over "
        f"{phrases.plural(len(records), 'seed')}, 90 % intervals; the baseline fell from {losses[:, 0].mean():.3f} to "
        f"{losses[:, -1].mean():.4f}."
    )


def target(study: Study) -> float:
    """The held-out loss to be reached; NaN where the baseline has no trials."""
    lead = base(study)
    records = trials_of(study, lead["config"]) if lead else []
    if not records:
        return math.nan
    images, losses = curve(records)
    return float(np.interp(TARGET_SHARE * images[-1], images, losses.mean(0)))


def time_to(study: Study, row: Row, loss: float) -> tuple[float, float, float]:
    """Seconds of training to a held-out loss, and their 95 % interval: images over seeds, seconds an image over sets.

    NaN where a trial did not get there or no speed is known; without an interval for one trial.
    """
    needed = np.array([quality.images_to_reach(r, loss) for r in trials_of(study, row["config"])])
    if not len(needed) or not np.isfinite(needed).all() or not row["sets"]:
        return math.nan, math.nan, math.nan
    mean, n = float(needed.mean()), len(needed)
    rate = (row["images_per_second"], row["images_per_second_low"], row["images_per_second_high"])
    if n < 2:
        return mean / rate[0], math.nan, math.nan
    half = float(special.stdtrit(n - 1, (1 + stats.LEVEL) / 2) * needed.std(ddof=1) / math.sqrt(n))
    low, high = stats.quotient_interval((mean, mean - half, mean + half), rate)
    return mean / rate[0], low, high


def table(study: Study) -> pd.DataFrame:
    """One row a configuration: speed, verdict on quality with its evidence, and time to the target."""
    lead, found = base(study), rows(study)
    aim = target(study)
    shown = []
    for row in ([lead] if lead else []) + found:
        equal = row["equivalence"]
        records = trials_of(study, row["config"])
        seconds, low, high = time_to(study, row, aim)
        span = "" if math.isnan(low) else f" ({phrases.seconds(low)} to {phrases.seconds(high)})"
        interval = phrases.interval(row)
        judged = equal is not None and not math.isnan(equal.low)
        shown.append(
            {
                "Configuration": f"{row['label']} (baseline)" if row is lead else row["label"],
                "Speed": (phrases.ratio(row) if row["sets"] else _NONE) + (f" ({interval})" if interval else ""),
                "Verdict on speed": phrases.outcome(row),
                "Quality": "baseline" if row is lead else quality.sentence(equal),
                "Held-out loss": f"{curve(records)[1][:, -1].mean():.4f}" if records else _NONE,
                "Difference (90 % interval)": quality.interval(equal) if judged else _NONE,
                "Margin": f"{equal.margin:.2g}" if judged and not math.isnan(equal.margin) else _NONE,
                f"Time to loss {aim:.4f}": _NONE if math.isnan(seconds) else f"{phrases.seconds(seconds)}{span}",
                "Seeds": str(len(records)),
            }
        )
    return pd.DataFrame(shown) if shown else pd.DataFrame(columns=["Configuration", "Speed", "Quality"])


def check_table(study: Study) -> pd.DataFrame:
    """One row for each configuration whose loss and gradient were compared with fp32, eager, on the same batch."""
    shown = []
    for r in study.records:
        answer = (r.quality or {}).get("gradients") if r.role == "check" else None
        if not answer:
            continue
        worst, layer = answer["worst"], answer["worst"].get("worst_layer") or {}
        judged = gradients.verdict(answer)
        shown.append(
            {
                "Configuration": r.label,
                "Verdict": "as expected" if judged.as_expected else judged.sentence,
                "Loss off by": _share(worst.get("loss_error")),
                "Gradient off by": _share(worst.get("gradient_error")),
                "Cosine": f"{worst['cosine']:.6f}" if worst.get("cosine") is not None else _NONE,
                "Worst layer": f"{layer['name']}: {_share(layer['error'])}" if layer else _NONE,
                "Not finite": str(worst.get("nonfinite", _NONE)),
                "Skipped steps": str(worst.get("skipped", _NONE)),
            }
        )
    return pd.DataFrame(shown)


def _share(error: float | None) -> str:
    return _NONE if error is None else f"{error:.1e}"


def front(found: Sequence[Row]) -> list[Row]:
    """Configurations that no other beats in both speed and loss, slowest first: the Pareto front, baseline included."""
    known = [r for r in found if r["sets"] and not math.isnan(_difference(r))]
    best = [
        r
        for r in known
        if not any(
            o["ratio"] >= r["ratio"]
            and _difference(o) <= _difference(r)
            and o is not r
            and (o["ratio"], -_difference(o)) != (r["ratio"], -_difference(r))
            for o in known
        )
    ]
    return sorted(best, key=lambda r: float(r["ratio"]))


def _difference(row: Row) -> float:
    return 0.0 if row["role"] == "baseline" else float(row["equivalence"].difference)

"""The experiment quality: what each setting costs in held-out loss, what it gains in speed, and both together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddpm_lab import gradient_bounds
from ddpm_lab.explain import decisions, learned, phrases, quality, samples
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.learned import baseline_trials, extent_of, images_of, pairs_of
from ddpm_lab.explain.table import Table, one_family, without_constant
from ddpm_lab.record import RunRecord

EXPERIMENT = "quality"
_NONE = phrases.DASH


def rows(study: Study) -> list[Comparison]:
    """The configurations that were compared with the baseline, each with ``equivalence``."""
    return [r for r in _family(study) if r.role == "candidate"]


def base(study: Study) -> Comparison | None:
    """The baseline's row; None where nothing is measured."""
    return next((r for r in _family(study) if r.role == "baseline"), None)


def _family(study: Study) -> list[Comparison]:
    """Rows of the baseline that was measured last: another batch or network is another question."""
    latest = next((r.baseline_id for r in reversed(study.records) if r.role == "baseline"), None)
    return [r for r in comparisons(study) if r.baseline_id == latest]


def elsewhere(study: Study) -> str:
    """A sentence that names what was measured from another baseline and is not shown; empty where there is none."""
    shown = {r.family for r in _family(study)}
    others = list(dict.fromkeys(r.family for r in comparisons(study) if r.family not in shown))
    return f" Measured besides, from another baseline, and not shown here: {phrases.joined(others)}." if others else ""


def trials_of(study: Study, row: Comparison) -> list[RunRecord]:
    """The trials of a row that verdicts rest on, in the order of their seeds."""
    found = rows(study)
    if row.role == "baseline":
        return baseline_trials(found)
    return [b for _, b in pairs_of(row, extent_of(found))]


def fids(study: Study) -> list[tuple[str, Mapping[str, Any]]]:
    """The FIDs that were asked for, by label, the baseline's first."""
    lead = base(study)
    asked = [(r.label, samples.fid(trials_of(study, r))) for r in ([lead] if lead else []) + rows(study)]
    return [(label, found) for label, found in asked if found]


def faster(row: Comparison) -> bool:
    """Whether a configuration is called faster."""
    return bool(row.verdict == decisions.FASTER)


def answered(found: Sequence[Comparison]) -> bool:
    """Whether every setting that was tried has a verdict on its quality."""
    tried = [r.equivalence.verdict for r in found if r.equivalence.seeds]
    return bool(tried) and quality.NOT_ENOUGH not in tried


def headline(found: Sequence[Comparison]) -> tuple[str, Comparison]:
    """The answer in one line, and the configuration that it is about."""
    good = [r for r in found if r.equivalence.verdict in quality.GOOD]
    quick = [r for r in good if faster(r)]
    worse = [r for r in found if r.equivalence.verdict == quality.WORSE]
    says = [f"{r.label} is worse" for r in worse[:2]] + [f"so are {len(worse) - 2} more"] * (len(worse) > 2)
    if quick:
        lead = max(quick, key=lambda r: r.ratio.value)
        judged = lead.equivalence
        how = quality.NOT_WORSE if judged.verdict == quality.IDENTICAL else judged.verdict
        how += quality.after(judged)
        first = f"{lead.label} trains {phrases.ratio(lead)} times as fast as {lead.baseline_label}, {how}"
        return "; ".join([first, *says]), lead
    lead = max(good or worse or list(found), key=lambda r: r.ratio.value if r.sets else 0.0)
    if good:
        even = [r for r in good if r.equivalence.verdict != quality.SLIGHTLY]
        decided, base_label = all(r.resolved for r in even or good), lead.baseline_label
        what = f"not worse than {base_label}" if even else f"worse than {base_label} by less than the margin"
        first = f"{phrases.plural(len(even or good), 'setting')} of {len(found)} {what}, "
        says.insert(0, first + ("none of them faster" if decided else "which is faster is not known yet"))
    return "; ".join(says) or f"Not enough data for a verdict on {phrases.plural(len(found), 'setting')}", lead


def evidence(found: Sequence[Comparison]) -> str:
    """The verdicts with their differences, intervals and margins."""
    told = []
    for verdict in (*quality.DECIDED, quality.NOT_ENOUGH):
        chosen = [r for r in found if r.equivalence.verdict == verdict]
        words = [_detail(r) for r in chosen]
        if words:
            told.append(f"{verdict.capitalize()}: {phrases.joined(words)}.")
    return " ".join(told)


def _detail(row: Comparison) -> str:
    equal: quality.Equivalence = row.equivalence
    speed = f"{phrases.ratio(row)} times as fast" if row.sets else "speed not measured"
    loss = equal.reason or (f"loss {quality.evidence(equal)}" if quality.evidence(equal) else "")
    return f"{row.label} ({'; '.join(part for part in (loss, speed) if part)})"


def method(study: Study) -> str:
    """How the verdicts were found: images, seeds, how far the loss fell."""
    records = baseline_trials(rows(study))
    if not records:
        return ""
    ends = np.array([quality.curve(r)[1][[0, -1]] for r in records]).mean(0)
    return (
        f"Held-out loss of the averaged weights after {images_of(rows(study)):,} images, paired over "
        f"{phrases.plural(len(records), 'seed')}, 90 % intervals; the baseline fell from {ends[0]:.3f} to "
        f"{ends[1]:.4f}."
    )


def unsound(study: Study) -> str:
    """A sentence, after a space, on settings whose gradient check failed or found a fault; empty without any."""
    told = []
    for r, answer in _checks(study):
        if not answer:
            told.append(f"the check of {r.label} failed ({phrases.failed(r.status, r.reason)})")
        elif fault := gradient_bounds.fault(answer):
            told.append(f"the gradient of {r.label} is not as expected: {fault}")
    return f" {phrases.begun(phrases.joined(list(dict.fromkeys(told))))}." if told else ""


def _checks(study: Study) -> list[tuple[RunRecord, Mapping[str, Any]]]:
    """The gradient checks of a study, each with its answer, empty where it has none."""
    return [(r, (r.quality or {}).get("gradients") or {}) for r in study.records if r.role == "check"]


def table(study: Study) -> Table:
    """One row a configuration: speed, verdict on quality with its evidence, and images to the target."""
    lead, found = base(study), rows(study)
    shown = _table(study, [lead, *found] if lead else found)
    return shown if fids(study) else _no_fid(shown)


def tables(study: Study) -> list[tuple[str, Table]]:
    """What the configurations of each family have learned, as (caption, table)."""
    told = "Quality beside speed, and the images to the loss that the baseline has after 90 % of its own"
    return [(f"{told}: {found[0].family}.", _no_fid(_table(study, found))) for found in learned.families(study)]


def _no_fid(rows: Table) -> Table:
    return without_constant(rows, {"FID": {row["FID"] for row in rows}})


def _table(study: Study, family: Sequence[Comparison]) -> Table:
    found = [r for r in family if r.role == "candidate"]
    images, loss = images_of(found), learned.target(found)
    tried = learned.tried(study, family) if images else []
    shown = []
    for row in family:
        own = [r for r in tried if r.run_id == row.run_id]
        if not own or own[0] is not row:  # without trials of its own
            shown.append(_cells(row, [], images, loss))
        for each in own:
            lead = each.role == "baseline"
            records = baseline_trials(found) if lead else [b for _, b in pairs_of(each, extent_of(found))]
            shown.append(_cells(each, records, images, loss))
    return shown


def _cells(row: Comparison, records: Sequence[RunRecord], images: int, loss: float) -> dict[str, str]:
    equal, lead = row.equivalence, row.role == "baseline"
    final = learned.held_out(records, np.array([images])).mean() if records else math.nan
    return {
        "Configuration": f"{row.label} (baseline)" if lead else row.label,
        "Speed": phrases.ratio_with_interval(row) if row.sets else _NONE,
        "Verdict on speed": phrases.outcome(row),
        "Quality": "baseline" if lead else quality.sentence(equal),
        "Held-out loss": f"{final:.4f}" if records else _NONE,
        "FID": samples.fid_words(distance) if (distance := samples.fid(records)) else _NONE,
        **phrases.loss(row),
        "Images to the same loss": learned.images_to_reach(records, loss),
        "Seeds": str(len(records)),
    }


def check_table(study: Study) -> Table:
    """One row for each configuration whose loss and gradient were compared with fp32, eager, on the same batch."""
    shown = []
    for r, answer in _checks(study):
        if not answer:
            shown.append({"Family": r.family, "Configuration": r.label, "Verdict": phrases.failed(r.status, r.reason)})
            continue
        worst, layer = answer["worst"], answer["worst"].get("worst_layer") or {}
        shown.append(
            {
                "Family": r.family,
                "Configuration": r.label,
                "Verdict": gradient_bounds.fault(answer) or "as expected",
                "Loss off by": _share(worst.get("loss_error")),
                "Gradient off by": _share(worst.get("gradient_error")),
                "Cosine": f"{worst['cosine']:.6f}" if worst.get("cosine") is not None else _NONE,
                "Worst layer": f"{layer['name']}: {_share(layer['error'])}" if layer else _NONE,
                "Not finite": str(worst.get("nonfinite", _NONE)),
                "Skipped steps": str(worst.get("skipped", _NONE)),
            }
        )
    columns = dict.fromkeys(name for row in shown for name in row)
    return one_family([{name: row.get(name, _NONE) for name in columns} for row in shown])


def _share(error: float | None) -> str:
    return _NONE if error is None else f"{error:.1e}"

"""Strong and weak scaling, each by itself: its comparisons, its efficiencies with their bands, its sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import machine_state, phrases, sentences
from ddpm_lab.explain.bands import Bands, share
from ddpm_lab.explain.comparisons import Row, comparisons, resolved
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import WEAK, scaling

EXPERIMENT = "multi_gpu"
KINDS = {"strong": "the ranks share the batch", "weak": "each rank keeps its batch"}
"""What stays in each kind of scaling. They are never compared with each other."""


def rows(study: Study) -> list[Row]:
    """Rows of ``comparisons`` of the families that scale, each with its kind as ``scaling``."""
    found = [
        {**row, "scaling": scaling(row["family"])} for row in comparisons(study) if row["experiment"] == EXPERIMENT
    ]
    return [row for row in found if row["scaling"]]


def named(row: Mapping[str, Any]) -> Row:
    """The row under a family's name that tells its kind of scaling."""
    return {**row, "family": row["family"] if WEAK in row["family"] else f"{row['family']}, strong scaling"}


def layout(config: RunConfig) -> str:
    """On what a configuration runs: "1 CPU rank", "4 GPUs", "8 GPUs on 2 hosts"."""
    words = phrases.plural(config.world_size, "GPU" if config.device == "cuda" else "CPU rank")
    return words if config.nodes == 1 else f"{words} on {phrases.plural(config.nodes, 'host')}"


def shared_cores(study: Study, measured: Sequence[Row]) -> str:
    """What CPU ranks share, without a full stop."""
    cores = phrases.plural(study.records[-1].environment.machine.usable_cores, "core")
    if any(r["config"].nodes > 1 for r in measured):
        return f"All ranks of a host share its {cores}"
    return f"All ranks share the same {cores}"


def efficiency(row: Mapping[str, Any]) -> str:
    """Such as "80 %"."""
    return f"{100 * row['efficiency']:.0f} %"


def interval(row: Mapping[str, Any]) -> str:
    """The interval of an efficiency, such as "78 to 82 %"; empty without one."""
    low, high = 100 * row["efficiency_low"], 100 * row["efficiency_high"]
    return "" if math.isnan(low) else f"{low:.0f} to {high:.0f} %"


def rated(row: Mapping[str, Any], bands: Bands) -> str:
    """An efficiency with its band and its interval: "80 %, good (78 to 82 %)"."""
    span = f" ({found})" if (found := interval(row)) else ""
    return f"{efficiency(row)}, {band(row, bands)}{span}"


BEYOND = "above 100 %"
DISTURBED = "the baseline was disturbed, or caches hold what each of them works on"


def band(row: Mapping[str, Any], bands: Bands) -> str:
    """The name of an efficiency; without an interval, or where all of it lies above 100 %, why it has none."""
    if math.isnan(row["efficiency_low"]):
        return "no interval"
    return BEYOND if row["efficiency_low"] > 1 else bands.name(row["efficiency"])


def answer(study: Study, measured: Sequence[Row]) -> tuple[str, str, Row]:
    """Headline, claim, and the comparison that they are about: strong scaling first, weak scaling apart from it."""
    by_kind = {kind: [r for r in measured if r["scaling"] == kind] for kind in KINDS}
    leads = {kind: sentences.lead(found) for kind, found in by_kind.items() if found}
    told = []
    for kind, stays in KINDS.items():
        said = "not measured." if kind not in leads else _claim(study, by_kind[kind], leads[kind])
        told.append(f"{kind.capitalize()} scaling ({stays}): {said}")
    if any(r["config"].device == "cpu" for r in measured):
        told.append(f"{shared_cores(study, measured)}: expect no efficiency near 100 %.")
    if len(leads) == 1:
        ((kind, only),) = leads.items()
        found = by_kind[kind]
        short, _ = sentences.claim(only, len(found), only["family"] if _several(found) else "")
        return short, " ".join(told), only
    short = "; ".join(f"{kind} scaling{_batch(by_kind[kind], lead)}: {_short(lead)}" for kind, lead in leads.items())
    return phrases.begun(short), " ".join(told), leads["strong"]


def _batch(found: Sequence[Row], lead: Row) -> str:
    """Of which batch a comparison is, where there are several: a ratio without it means nothing."""
    if not _several(found):
        return ""
    own = lead["config"]
    return f" at batch {own.global_batch_size}" if lead["scaling"] == "strong" else f" at {own.rank_batch_size} a rank"


def _several(found: Sequence[Row]) -> bool:
    return len({r["family"] for r in found}) > 1


def _short(lead: Row) -> str:
    """The comparison in a few words: "8 GPUs 6.45 times as fast as 1 GPU"."""
    pair = f"{lead['label']} {phrases.ratio(lead)} times as fast as {lead['baseline_label']}"
    return pair if resolved(lead) else f"{lead['label']} {phrases.outcome(lead)}"


def _claim(study: Study, found: Sequence[Row], lead: Row) -> str:
    """The best comparison of one kind, the efficiency of every number of ranks beside it, and how the others ended."""
    bands = study.bands
    where = lead["family"].replace(WEAK, "") if _several(found) else ""
    if resolved(lead):
        evidence = f"({phrases.evidence(lead)}{sentences.noise(lead)})."
        text = (f"with {where}, " if where else "") + f"{sentences.faster(lead)} {evidence}"
    else:
        text = phrases.within(sentences.unresolved(lead, len(found), where)[1])
    family = [r for r in found if (r["family"], r["baseline_id"]) == (lead["family"], lead["baseline_id"])]
    busy = "; the machine was busy" if machine_state.busy(study) else ""
    each = [
        f"{efficiency(r)} with {r['label']} ({_band(r, bands, busy)})"
        for r in sorted(family, key=lambda r: (r["ranks"], r["config"].nodes))
    ]
    text += f" Parallel efficiency: {phrases.joined(each)}, by {whose(bands)} bands"
    if asked := _asked(lead, bands):
        text += f"; {lead['label']}: {asked}"
    text += "."
    return text + sentences.tally(found, lead)


def _band(row: Row, bands: Bands, busy: str) -> str:
    """The band of an efficiency, and those of its interval where they are others; why it has none, and ``busy``."""
    name = band(row, bands)
    if math.isnan(row["efficiency_low"]):
        return f"{name}, so no band{busy}"
    if name == BEYOND:
        return f"interval {interval(row)}: all of it {BEYOND}, which more ranks alone cannot give: {DISTURBED}{busy}"
    ends = [bands.name(row[f"efficiency_{end}"]) for end in ("low", "high")]
    return name if ends == [name, name] else f"{name}; its interval: {' to '.join(dict.fromkeys(ends))}"


def _asked(row: Row, bands: Bands) -> str:
    """What the bands ask of good scaling, where the whole interval gives one answer."""
    ends = ("efficiency_low", "efficiency_high")
    if any(math.isnan(row[end]) for end in ends) or band(row, bands) == BEYOND:
        return ""
    nodes = row["config"].nodes
    low, high = (bands.verdict(row[end], nodes) for end in ends)
    if low == high or not bands.good(row["efficiency_high"], nodes):  # short of good at its best
        return high
    return "the interval does not decide whether this is good scaling"


def whose(bands: Bands) -> str:
    """Whose bands: "S001's", or "your own"."""
    return bands.whose if bands.whose.startswith("your") else f"{bands.whose}'s"


def legend(bands: Bands) -> str:
    """The bands in a sentence, for the foot of a figure."""
    return f"{phrases.begun(whose(bands))} bands: {bands.sentence()}. Dashed: {share(bands.threshold)}. "

"""Strong and weak scaling, each by itself: its comparisons, its efficiencies with their bands, its sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import machine_state, phrases
from ddpm_lab.explain.bands import Bands, share
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import WEAK

EXPERIMENT = "multi_gpu"
KINDS = {"strong": "the ranks share the batch", "weak": "each rank keeps its batch"}
"""What stays in each kind of scaling. They are never compared with each other."""


def rows(study: Study) -> list[Comparison]:
    """The comparisons of the families that scale."""
    return [row for row in comparisons(study) if row.experiment == EXPERIMENT and row.scaling]


def named(row: Comparison) -> Comparison:
    """The row under a family's name that tells its kind of scaling."""
    return row if WEAK in row.family else replace(row, family=f"{row.family}, strong scaling")


def layout(config: RunConfig) -> str:
    """On what a configuration runs: "1 CPU rank", "4 GPUs", "8 GPUs on 2 hosts"."""
    words = phrases.plural(config.world_size, "GPU" if config.device == "cuda" else "CPU rank")
    return words if config.nodes == 1 else f"{words} on {phrases.plural(config.nodes, 'host')}"


def shared_cores(study: Study, measured: Sequence[Comparison]) -> str:
    """What CPU ranks share, without a full stop."""
    cores = phrases.plural(study.records[-1].environment.machine.usable_cores, "core")
    if any(r.config.nodes > 1 for r in measured):
        return f"All ranks of a host share its {cores}"
    return f"All ranks share the same {cores}"


def efficiency(row: Comparison) -> str:
    """Such as "80 %"."""
    return f"{100 * row.efficiency.value:.0f} %"


def interval(row: Comparison) -> str:
    """The interval of an efficiency, such as "78 to 82 %"; empty without one."""
    low, high = 100 * row.efficiency.low, 100 * row.efficiency.high
    return "" if math.isnan(low) else f"{low:.0f} to {high:.0f} %"


def rated(row: Comparison, bands: Bands) -> str:
    """An efficiency with its band and its interval: "80 %, good (78 to 82 %)"."""
    span = f" ({found})" if (found := interval(row)) else ""
    return f"{efficiency(row)}, {band(row, bands)}{span}"


BEYOND = "above 100 %"
DISTURBED = "the baseline was disturbed, or caches hold what each of them works on"


def band(row: Comparison, bands: Bands) -> str:
    """The name of an efficiency; without an interval, or where all of it lies above 100 %, why it has none."""
    if math.isnan(row.efficiency.low):
        return "no interval"
    return BEYOND if row.efficiency.low > 1 else bands.name(row.efficiency.value)


def efficiencies(study: Study, measured: Sequence[Comparison], lead: Comparison) -> str:
    """The efficiency of every number of ranks in the family of ``lead``, with its band, in a sentence or two."""
    bands, busy = study.bands, "; the machine was busy" if machine_state.disturbed_sets(study) else ""
    family = [r for r in measured if (r.family, r.baseline_id) == (lead.family, lead.baseline_id)]
    each = [
        f"{efficiency(r)} with {r.label} ({_band(r, bands, busy)})"
        for r in sorted(family, key=lambda r: (r.ranks, r.config.nodes))
    ]
    text = f"Parallel efficiency: {phrases.joined(each)}, by {whose(bands)} bands"
    if asked := _asked(lead, bands):
        text += f"; {asked}" if len(family) == 1 else f"; {lead.label}: {asked}"
    text += "."
    if any(r.config.device == "cpu" for r in measured):
        text += f" {shared_cores(study, measured)}: expect no efficiency near 100 %."
    return text


def _band(row: Comparison, bands: Bands, busy: str) -> str:
    """The band of an efficiency, and those of its interval where they are others; why it has none, and ``busy``."""
    name = band(row, bands)
    if math.isnan(row.efficiency.low):
        return f"{name}, so no band{busy}"
    if name == BEYOND:
        return f"interval {interval(row)}: all of it {BEYOND}, which more ranks alone cannot give: {DISTURBED}{busy}"
    ends = [bands.name(end) for end in row.efficiency.ends]
    return name if ends == [name, name] else f"{name}; its interval: {' to '.join(dict.fromkeys(ends))}"


def _asked(row: Comparison, bands: Bands) -> str:
    """What the bands ask of good scaling, where the whole interval gives one answer."""
    if not row.efficiency.exists or band(row, bands) == BEYOND:
        return ""
    nodes = row.config.nodes
    low, high = (bands.verdict(end, nodes) for end in row.efficiency.ends)
    if low == high or not bands.good(row.efficiency.high, nodes):  # short of good at its best
        return high
    return "the interval does not decide whether this is good scaling"


def whose(bands: Bands) -> str:
    """Whose bands: "S001's", or "your own"."""
    return bands.whose if bands.whose.startswith("your") else f"{bands.whose}'s"


def legend(bands: Bands) -> str:
    """The bands in a sentence, for the foot of a figure."""
    return f"{phrases.begun(whose(bands))} bands: {bands.sentence()}. Dashed: {share(bands.threshold)}. "

"""What the machine did while it was measured: neighbours, clocks, temperature, power and memory."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import peak, repeats_itself
from ddpm_lab.explain.selection import Study, once
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import LEAST_SETS, LOST
from ddpm_lab.record import RunRecord, crowded_sets

NOT_AVAILABLE = "not available"
_REASONS = {
    0x4: "its power cap",
    0x8: "its hardware",
    0x10: "the other GPUs' clocks",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the power supply",
}
"""Bits of nvmlClocksThrottleReason that slow a busy GPU down; the others are settings, or say that it was idle."""

Quantity = tuple[str, str | list[float], Callable[[Sequence[float]], str]]
"""Its name, its values or their key in the state of a window, and how they are said."""


class Moment(NamedTuple):
    """A window, or the windows of a time budget, and what other processes used meanwhile; None is unknown.

    ``turn`` counts from 1 over all sets of the study in their order.
    """

    record: RunRecord
    turn: int
    seconds: float | None
    others_cores: float | None
    stolen_seconds: float | None
    state: dict[str, float | None]


@once
def moments(study: Study) -> list[Moment]:
    """Return every window of the study's sets in order, or the time budget of a profile."""
    found: list[Moment] = []
    first: dict[str, int] = {}
    turns = 0
    for r in study.records:
        if r.family.endswith(LOST):  # beside the answer, and nothing that anybody would train with
            continue
        if r.windows and r.set_id not in first:
            first[r.set_id] = turns
            turns += 1 + max(w.turn for w in r.windows)
        for w in r.windows:
            turn = first[r.set_id] + w.turn + 1
            found.append(Moment(r, turn, w.seconds, w.others_cores, w.stolen_seconds, w.state))
        if taken := (r.profile or {}).get("budget"):
            others, stolen = taken.get("others_cores"), taken.get("stolen_seconds")
            found.append(Moment(r, 0, None, others, stolen, taken.get("state", {})))
    return sorted(found, key=lambda m: m.turn)


def unknown(study: Study) -> str:
    """Return a sentence if the records lack the load of other processes; else an empty text."""
    found = moments(study)
    if any(m.others_cores is None for m in found):
        return "CPU use by other processes is unknown."
    if any(m.state.get("gpu_others", 0) is None for m in found):
        return "GPU use by other processes is unknown."
    return ""


def warnings(study: Study) -> tuple[str, ...]:
    """Return sentences on disturbed sets, a machine that does not repeat itself, and cores that no answer used."""
    told, lost = [], crowded_sets(study.records)
    if disturbed := len(lost):
        of = f"{disturbed} of {phrases.plural(len({r.set_id for r in study.records if r.windows}), 'set')}"
        verbs = ("was", "does") if disturbed == 1 else ("were", "do")
        told.append(f"{of} {verbs[0]} disturbed by other processes and {verbs[1]} not count.")
    if not repeats_itself(study.looks):
        told.append("This machine does not repeat itself: over all questions, baselines differ from their repeats.")
    taken: dict[tuple[int, int], list[float]] = defaultdict(list)
    bases = [r for r in study.records if r.role == "baseline" and r.config.device == "cpu"]
    sets = Counter(r.run_id for r in bases if r.windows and r.set_id not in lost)
    for r in bases:
        used, most = r.config.threads * r.config.node_size, r.machine.usable_cores
        if 0 < used < most and sets[replace(r.config, threads=0).run_id] < LEAST_SETS:
            taken[used, most] += [w.others_cores or 0.0 for w in r.windows]
    if taken:
        cores = " and ".join(f"{n} of {phrases.plural(most, 'core')}" for n, most in sorted(taken))
        # A core counts as taken from a half on, as where the number of cores was chosen.
        others = all(values and fmean(values) + 0.5 >= most - n for (n, most), values in taken.items())
        told.append(f"Measured with {cores}{': other processes used the rest' * others}.")
    return tuple(told)


def table(study: Study) -> Table:
    """Return one row a quantity; "not available" if nothing could be read."""
    found = moments(study)
    rows = _host(study, found) if found else []
    if any(m.record.config.device == "cuda" for m in found):
        rows += _said(found, _gpu(found))
    elif found:
        rows.append(("GPU utilisation, clocks, temperature, power and energy", NOT_AVAILABLE))
    shown = [m for m in found if m.record.role != "twin"]
    several = len({m.record.family for m in shown}) > 1
    named = defaultdict(list)
    for m in shown:
        named[f"{m.record.label}, {m.record.family}" if several else m.record.label].append(m)
    for name, own in named.items():
        rows.append((f"Peak memory of a rank, {name}", _peak(own[-1].record)))
    return [{"Meanwhile": name, "Value": value} for name, value in rows]


def _host(study: Study, found: Sequence[Moment]) -> list[tuple[str, str]]:
    cores, total = study.records[-1].machine.usable_cores, study.records[-1].environment.ram_bytes
    spans = [(m.stolen_seconds, m.state.get("watched_seconds") or m.seconds) for m in found]
    stolen = [100 * took / seconds / cores for took, seconds in spans if took is not None and seconds]
    others = [m.others_cores for m in found if m.others_cores is not None]
    of = f" of {phrases.memory(total)}" if total else ""
    taken = f"{{:.2f}} of {cores} on average, at most {{:.2f}}"
    rows: list[Quantity] = [
        ("Cores kept busy by other processes", others, lambda v: taken.format(fmean(v), max(v))),
        ("Core time taken by the hypervisor", stolen, lambda v: f"{fmean(v):.1f} % on average, at most {max(v):.1f} %"),
        ("Held back by a CPU quota", "cgroup_throttled_seconds", lambda v: f"{phrases.seconds(sum(v))} in all"),
        ("CPU utilisation", "cpu_utilisation_percent", lambda v: f"{fmean(v):.0f} % on average"),
        ("Memory of the machine in use", "ram_used_bytes", lambda v: f"at most {phrases.memory(max(v))}{of}"),
    ]
    sets = {m.record.set_id for m in found if m.record.windows}
    lost = ("Disturbed sets, which do not count", f"{len(crowded_sets(study.records) & sets)} of {len(sets)}")
    return [*_said(found, rows), *([lost] if sets else [])]


def _gpu(found: Sequence[Moment]) -> list[Quantity]:
    least, held = _known(found, "gpu_clock_min_mhz"), _known(found, "gpu_others_bytes")
    at_least = f"{min(least):,.0f} MHz" if least else NOT_AVAILABLE
    memory = phrases.memory(max(held)) if held else NOT_AVAILABLE
    return [
        ("GPU utilisation", "gpu_utilisation_percent", lambda v: f"{fmean(v):.0f} % on average"),
        ("GPU clock", "gpu_clock_mhz", lambda v: f"{fmean(v):,.0f} MHz on average, at least {at_least}"),
        ("GPU memory clock", "gpu_memory_clock_mhz", lambda v: f"{fmean(v):,.0f} MHz on average"),
        ("GPU slowed down by", "gpu_throttle_reasons", _throttled),
        ("GPU temperature", "gpu_temperature_celsius", lambda v: f"at most {max(v):.0f} \N{DEGREE SIGN}C"),
        ("Power of a group's GPUs", "gpu_power_watts", lambda v: f"{fmean(v):,.0f} W on average"),
        ("Other processes on the GPU", "gpu_others", lambda v: f"at most {max(v):.0f}, memory {memory}"),
    ]


def _known(found: Sequence[Moment], name: str) -> list[float]:
    return [value for m in found if (value := m.state.get(name)) is not None]


def _said(found: Sequence[Moment], rows: Sequence[Quantity]) -> list[tuple[str, str]]:
    known = ((name, _known(found, v) if isinstance(v, str) else v, say) for name, v, say in rows)
    return [(name, say(values) if values else NOT_AVAILABLE) for name, values, say in known]


def _throttled(masks: Sequence[float]) -> str:
    shares = {name: fmean(bool(int(mask) & bit) for mask in masks) for bit, name in _REASONS.items()}
    return phrases.joined([f"{name} in {100 * s:.0f} % of windows" for name, s in shares.items() if s]) or "nothing"


def _peak(record: RunRecord) -> str:
    """Return the peak memory of the largest rank; on a GPU also the share reserved, and headroom."""
    text = phrases.peak_of(record.config, peak(record, "peak_memory_bytes"), peak(record, "peak_rss_bytes"))
    reserved = max((rank.peak_reserved_bytes or 0 for rank in record.ranks), default=0)
    cards = [rank.get("device_total_bytes") for rank in record.witness.get("ranks", ())]
    if record.config.device == "cpu" or not reserved or not cards or None in cards:
        return text
    total = min(cards)
    return (
        f"{text} allocated, {phrases.memory(reserved)} reserved: {100 * reserved / total:.0f} % of the card, "
        f"{phrases.memory(total - reserved)} headroom"
    )

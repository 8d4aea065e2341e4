"""What the machine did while it was measured: neighbours, clocks, temperature, power and memory."""

from collections import Counter, defaultdict
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import peak, repeats_itself
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import LEAST_SETS, LOST
from ddpm_lab.record import RunRecord, Window, crowded_sets

NOT_AVAILABLE = "not available"
_CPU = {
    "Cores kept busy by other processes": ("others_cores", "{mean:.2f} on average, at most {most:.2f}"),
    "CPU utilisation": ("cpu_utilisation_percent", "{mean:,.0f} % on average"),
}
_GPU = {
    "GPU utilisation": ("gpu_utilisation_percent", "{mean:,.0f} % on average"),
    "GPU clock": ("gpu_clock_mhz", "{mean:,.0f} MHz on average"),
    "Lowest GPU clock": ("gpu_clock_min_mhz", "{least:,.0f} MHz"),
    "GPU temperature": ("gpu_temperature_celsius", "at most {most:.0f} \N{DEGREE SIGN}C"),
    "Power of a group's GPUs": ("gpu_power_watts", "{mean:,.0f} W on average"),
}
"""By the names of quantities: theirs in the state of a window, and how they are said."""


class Moment(NamedTuple):
    """A window; ``turn`` counts from 1 over all sets of the study in their order."""

    record: RunRecord
    turn: int
    window: Window


def moments(study: Study) -> list[Moment]:
    """Return every window of the study's sets in order."""
    # The lost scaling stands beside the answer, and is nothing that anybody would train with.
    timed = [r for r in study.records if r.windows and not r.family.endswith(LOST)]
    first, turns = dict[str, int](), 0
    for r in timed:
        if r.set_id not in first:
            first[r.set_id] = turns
            turns += 1 + max(w.turn for w in r.windows)
    found = (Moment(r, first[r.set_id] + w.turn + 1, w) for r in timed for w in r.windows)
    return sorted(found, key=lambda m: m.turn)


def unknown(study: Study) -> str:
    """Return a sentence if the records lack the load of other processes; else an empty text."""
    windows = [m.window for m in moments(study)]
    gpu = "GPU" * any(w.state.get("gpu_others", 0) is None for w in windows)
    what = "CPU" if any(w.others_cores is None for w in windows) else gpu
    return f"{what} use by other processes is unknown." if what else ""


def warnings(study: Study) -> tuple[str, ...]:
    """Return sentences on disturbed sets, a machine that does not repeat itself, and cores that no answer used."""
    notes, lost = [], crowded_sets(study.records)
    if lost:
        all_sets = phrases.plural(len({r.set_id for r in study.records if r.windows}), "set")
        was, does = ("was", "does") if len(lost) == 1 else ("were", "do")
        notes.append(f"{len(lost)} of {all_sets} {was} disturbed by other processes and {does} not count.")
    if not repeats_itself(study.looks):
        notes.append("This machine does not repeat itself: over all questions, baselines differ from their repeats.")
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
        notes.append(f"Measured with {cores}{': other processes used the rest' * others}.")
    return tuple(notes)


def table(study: Study) -> Table:
    """Return one row a quantity; "not available" if nothing could be read."""
    if not (found := moments(study)):
        return []
    on_gpu = any(m.record.config.device == "cuda" for m in found)
    rows: dict[str, str] = {}
    states = [{**m.window.state, "others_cores": m.window.others_cores} for m in found]
    for name, (of, said) in {**_CPU, **(_GPU if on_gpu else {})}.items():
        known = [value for state in states if (value := state.get(of)) is not None]
        ends = {"most": max(known), "least": min(known)} if known else {}
        rows[name] = said.format(mean=fmean(known), **ends) if known else NOT_AVAILABLE
    used = [value for state in states if (value := state.get("ram_used_bytes")) is not None]
    total = study.records[-1].environment.ram_bytes
    of_all = f" of {phrases.memory(total)}" if total else ""
    rows["Memory of the machine in use"] = f"at most {phrases.memory(max(used))}{of_all}" if used else NOT_AVAILABLE
    sets = {m.record.set_id for m in found}
    rows["Disturbed sets, which do not count"] = f"{len(crowded_sets(study.records) & sets)} of {len(sets)}"
    if not on_gpu:
        rows["GPU utilisation, clocks, temperature and power"] = NOT_AVAILABLE
    last = {(m.record.label, m.record.family): m.record for m in found if m.record.role != "twin"}
    several = len({family for _, family in last}) > 1
    for (label, family), record in last.items():
        rows[f"Peak memory of a rank, {label}{f', {family}' * several}"] = _peak(record)
    return [{"Meanwhile": name, "Value": value} for name, value in rows.items()]


def _peak(record: RunRecord) -> str:
    """Return the peak memory of the largest rank; on a GPU also the share reserved, and headroom."""
    text = phrases.peak_of(record.config, peak(record, "peak_memory_bytes"), peak(record, "peak_rss_bytes"))
    reserved = max((rank.peak_reserved_bytes or 0 for rank in record.ranks), default=0)
    cards = [rank.get("device_total_bytes") for rank in record.witness.get("ranks", ())]
    if record.config.device == "cpu" or not reserved or not cards or None in cards:
        return text
    share, free = f"{100 * reserved / min(cards):.0f} % of the card", phrases.memory(min(cards) - reserved)
    return f"{text} allocated, {phrases.memory(reserved)} reserved: {share}, {free} headroom"

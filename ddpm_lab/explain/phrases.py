"""Numbers and settings in words, the same in sentences, tables and figures."""

import math
from collections.abc import Iterable

from ddpm_lab.config import DDPM, LOADER_ALONE, RunConfig
from ddpm_lab.explain import quality, stats
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.stats import Interval
from ddpm_lab.plan import LOST
from ddpm_lab.record import RunRecord

DISTURBED = "other processes disturbed every set"
DASH = "\N{EN DASH}"
WIDE = 100  # times its lower end, where an interval says little


def status(word: str) -> str:
    return "out of memory" if word == "oom" else word


def plural(count: int | str, noun: str) -> str:
    """Such as "1 set", "6 sets"; a number that is rounded already comes as text: "1 call", "0.2 calls"."""
    text = count if isinstance(count, str) else f"{count:,}"
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def begun(text: str) -> str:
    """Capitalise the first letter."""
    return text[:1].upper() + text[1:]


def within(text: str) -> str:
    """Lower the first letter."""
    return text[:1].lower() + text[1:]


def joined(words: Iterable[object]) -> str:
    """Words, each once: "a", "a and b", "a, b and c"."""
    *others, last = dict.fromkeys(map(str, words)) or ("",)
    return f"{', '.join(others)} and {last}" if others else last


def decimals(ratio: Interval) -> int:
    """Return the decimals of a ratio: three if a narrow interval is close to 1, or one without 1 would end at 1.00."""
    hidden = ratio.exists and not ratio.contains(1) and any(round(end, 2) == 1 for end in ratio.ends)
    if hidden or (ratio.high - ratio.low < 0.03 and abs(ratio.value - 1) < 0.06):
        return 3
    return 2 if ratio.value < 10 else 1


def between(ratio: Interval) -> str:
    """Return the interval, such as "1.55 to 1.69"; empty without one."""
    if not ratio.exists:
        return ""
    digits, wide = decimals(ratio), ratio.high > WIDE * ratio.low  # of two sets, by chance
    low = "<0.01" if wide and ratio.low < 0.01 else _number(ratio.low, digits)
    return f"{low} to " + (">100" if wide and ratio.high > 100 else _number(ratio.high, digits))


def times(ratio: Interval) -> str:
    """A ratio, and its interval if it has one: "1.62 (1.55 to 1.69)"."""
    return _number(ratio.value, decimals(ratio)) + (f" ({between(ratio)})" if ratio.exists else "")


def ratio(row: Comparison) -> str:
    """Such as "1.62"."""
    return _number(row.ratio.value, decimals(row.ratio))


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if 0.1 <= value < 100 or value == 0 else significant(value)


def evidence(estimate: stats.Estimate) -> str:
    """Such as "95 % interval 1.55 to 1.69, 6 sets", or "1 set, no interval"."""
    sets = plural(estimate.sets, "set")
    return f"95 % interval {between(estimate)}, {sets}" if estimate.exists else f"{sets}, no interval"


def significant(value: float, digits: int = 3) -> str:
    """A plain number with thousands separators: 4,310; 12.3; 0.045; "unknown" for NaN."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "infinite"
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, places):,.{max(0, places)}f}"


def seconds(value: float) -> str:
    """A duration: "9.6 ms", "34 s", "12.5 min", "3.2 h"."""
    if not math.isfinite(value):
        return significant(value)
    units = (("ms", 1e-3, 1), ("s", 1, 120), ("min", 60, 7200), ("h", 3600, math.inf))
    return next(f"{significant(value / size)} {unit}" for unit, size, most in units if value < most)


def memory(value: float) -> str:
    """Bytes as MiB or GiB."""
    if math.isnan(value):
        return "unknown"
    return f"{value / 2**20:,.0f} MiB" if value < 2**30 else f"{value / 2**30:,.1f} GiB"


def peak_memory(row: Comparison) -> str:
    return peak_of(row.config, row.peak_memory_bytes, row.peak_rss_bytes)


def peak_of(config: RunConfig, allocated: float, resident: float) -> str:
    """Peak memory of a rank: "1.2 GiB" of its GPU, on a CPU the host's resident set, such as "412 MiB RSS"."""
    host = config.device == "cpu" and math.isnan(allocated) and not math.isnan(resident)
    return f"{memory(resident)} RSS" if host else memory(allocated)


def settings(config: RunConfig) -> str:
    """The settings that the experiments vary: "2 ranks, bf16, compiled, files with 2 workers"."""
    lab, workers = not config.is_own, plural(config.loader_workers, "worker")
    files = config.loader == "files" if lab else config.option("samples", None) is not None
    words = {
        plural(config.world_size, "GPU" if config.device == "cuda" else "CPU rank"): True,
        config.precision: lab or not config.option("number_format", ""),
        "compiled": config.compile != "off",
        "NCHW": lab and not config.channels_last,
        "fused kernels": lab and config.kernels == "fused",
        "freed memory kept": config.freed_memory == "kept",
        "files": lab and files,
        workers: files,
        f"{config.loader} data": lab and not files,
    }
    return ", ".join(word for word, holds in words.items() if holds)


def work(config: RunConfig) -> str:
    """Return what is trained: "tiny", or of one's own training "mine:make (21,000 parameters)"."""
    parameters = config.option("parameters", None) if config.is_own else None
    return config.work_name if parameters is None else f"{config.work_name} ({parameters:,} parameters)"


def context(study: Study, *, batch: bool = True) -> str:
    """Return the subtitle of a figure: hardware, network, batch, data, date, sets and turns."""
    aside = ("note", "search", "largest", "check", "wrong")
    shown = [r for r in study.records if r.role not in aside] or study.records
    if not shown:
        return "the ledger holds no record for this question"
    # Parts of the lost scaling stand beside an answer, and have a figure of their own.
    shown = [r for r in shown if not r.family.endswith(LOST)] or shown
    configs = [r.config for r in shown]
    own, parts = [c for c in configs if c.is_own], [study.hardware]
    if ours := any(c.workload in (DDPM, LOADER_ALONE) for c in configs):
        sizes = joined(f"{s}\N{MULTIPLICATION SIGN}{s}" for s in sorted({c.image_size for c in configs}))
        parts.append(f"{joined(c.network for c in configs)} network, {sizes} images")
    parts.append(joined(map(work, own)))
    if batch and (ours or own):
        parts.append(f"batch {joined(sorted({c.global_batch_size for c in configs}))}")
    parts += [joined(r.data_name for r in shown if r.data_name), study.date]
    measured = [c for c in comparisons(study) if c.sets and c.role in ("baseline", "candidate")]
    if measured := [c for c in measured if c.role == "candidate"] or measured:
        sets, turns = [c.sets for c in measured], [c.turns for c in measured]
        ranges = ((min(n), max(n), noun) for n, noun in ((sets, "set"), (turns, "turn")))
        parts.append(" of ".join(f"{low} to " * (low < high) + plural(high, noun) for low, high, noun in ranges))
    return " \N{MIDDLE DOT} ".join(filter(None, parts))


def outcome(row: Comparison) -> str:
    """Verdict of a comparison: "faster", "same within 3 %", "inconclusive (resolves 8 %)", "too few sets (1)"."""
    if row.verdict == stats.SAME:
        return f"same within {share(row.resolution)}"
    if row.verdict == stats.TOO_FEW:
        return f"{stats.TOO_FEW} ({row.sets})"
    if row.verdict == stats.INCONCLUSIVE:
        return f"{stats.INCONCLUSIVE} (resolves {share(row.ratio.resolves)}{f'; {row.why}' if row.why else ''})"
    return status(row.verdict)


def share(value: float) -> str:
    """A share in per cent: "26 %", "1.4 %"."""
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:,.0f} %"


def difference(ratio: float) -> str:
    """Say how much faster or slower a ratio is: "26 % slower", "2.3 times as fast", "0.0040 times as fast"."""
    if ratio >= 2 or ratio < 0.01:
        return f"{significant(ratio, 2)} times as fast"
    return f"{share(ratio - 1)} faster" if ratio >= 1 else f"{share(1 - ratio)} slower"


LOSS = ("Loss difference (90 % interval)", "Margin")
"""Columns of a table that say what a verdict on quality rests on."""


def loss(row: Comparison) -> dict[str, str]:
    """Return the columns LOSS of a row: its loss minus the baseline's, and the margin."""
    found = row.equivalence
    if math.isnan(found.low):
        return dict.fromkeys(LOSS, DASH)
    margin = DASH if math.isnan(found.margin) else quality.margin_words(found)
    return dict(zip(LOSS, (quality.difference(found), margin), strict=True))


def failure(of: Comparison | RunRecord) -> str:
    """Such as "out of memory: needs 90 GiB, 78 GiB are free"."""
    words = status(of.status) if of.status != "ok" else "no result"
    return f"{words}: {of.reason}" if of.reason else words


def without_speed(row: Comparison) -> str:
    if row.mechanism_only:
        return MECHANISM_ONLY
    return DISTURBED if row.disturbed_sets and row.status == "ok" and not row.failed_sets else failure(row)

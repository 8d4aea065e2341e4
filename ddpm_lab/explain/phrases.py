"""Numbers and settings in words, the same in sentences, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddpm_lab.config import DDPM, LOADER_ALONE, SAMPLING, RunConfig
from ddpm_lab.explain import quality, stats
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import LOST

QUESTIONS = {
    "profile": "Where does the time of a training step go?",
    "multi_gpu": "Do more ranks or GPUs train faster?",
    "amp": "Does mixed precision speed up training?",
    "workers": "How many loader workers are worth having?",
    "torch_compile": "Is torch.compile worth its compile time?",
    "all_reduce": "How fast do ranks exchange gradients?",
    "batch_size": "How large a batch fits, and does a larger one train faster?",
    "exchange": "How should ranks exchange gradients?",
    "peers": "How fast is this trainer beside others, and how far from the limit?",
    "bottleneck": "What should be changed next?",
    "quality": "Does any setting cost quality?",
    "claims": "Which published claims hold here?",
    "compare": "Which of the two is faster?",
    "recommendation": "Which settings should I use on this machine?",
}
STATUS_WORDS = {"oom": "out of memory"}
DASH = "\N{EN DASH}"


def status(word: str) -> str:
    """A status for people."""
    return STATUS_WORDS.get(word, word)


def plural(count: int | str, noun: str) -> str:
    """Such as "1 set", "6 sets"; a number that is rounded already comes as text: "1 call", "0.2 calls"."""
    text = count if isinstance(count, str) else f"{count:,}"
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def begun(text: str) -> str:
    """A text with the first letter of a sentence."""
    return text[:1].upper() + text[1:]


def within(text: str) -> str:
    """A text with the first letter that it has within a sentence."""
    return text[:1].lower() + text[1:]


def joined(words: Sequence[str]) -> str:
    """Such as "a", "a and b", "a, b and c"."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


def decimals(value: float, low: float, high: float) -> int:
    """Decimals of a ratio: three where a narrow interval lies close to 1, so that it does not round to 1.00."""
    width = high - low
    if width < 0.03 and abs(value - 1) < 0.06:
        return 3
    return 2 if value < 10 else 1


def between(value: float, low: float, high: float, *, to: str = " to ") -> str:
    """The interval of a ratio, such as "1.55 to 1.69"; empty without one."""
    digits = decimals(value, low, high)
    return "" if math.isnan(low) else f"{low:.{digits}f}{to}{high:.{digits}f}"


def ratio_of(value: float, low: float, high: float) -> str:
    """Such as "1.62"."""
    return f"{value:.{decimals(value, low, high)}f}"


def times(value: float, low: float, high: float, *, what: str = "") -> str:
    """A ratio, what it is of, and its interval if it has one: "1.62 times as fast (1.55 to 1.69)"."""
    span = between(value, low, high)
    return f"{ratio_of(value, low, high)}{what}" + (f" ({span})" if span else "")


def ratio(row: Mapping[str, Any]) -> str:
    """Such as "1.62"."""
    return ratio_of(row["ratio"], row["low"], row["high"])


def interval(row: Mapping[str, Any]) -> str:
    """Such as "1.55 to 1.69"; empty without an interval."""
    return between(row["ratio"], row["low"], row["high"])


def ratio_with_interval(row: Mapping[str, Any], what: str = "") -> str:
    """Such as "1.62 (1.55 to 1.69)"; without an interval "1.62"."""
    return times(row["ratio"], row["low"], row["high"], what=what)


def noise_floor(row: Mapping[str, Any]) -> str:
    """The interval of the baseline against itself, such as "0.99 to 1.01"; empty where there is none."""
    return between(1.0, row["noise_low"], row["noise_high"])


def evidence(row: Mapping[str, Any]) -> str:
    """Such as "95 % interval 1.55 to 1.69, 6 sets", or "1 set, no interval"."""
    sets = plural(int(row["sets"]), "set")
    return f"95 % interval {interval(row)}, {sets}" if interval(row) else f"{sets}, no interval"


def significant(value: float, digits: int = 3) -> str:
    """A plain number with thousands separators: 4,310; 12.3; 0.045; "unknown" for NaN."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "infinite"
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def seconds(value: float) -> str:
    """A duration: "9.6 ms", "34 s", "12.5 min", "3.2 h"."""
    if not math.isfinite(value):
        return significant(value)
    for unit, size, most in (("ms", 1e-3, 1), ("s", 1, 120), ("min", 60, 7200)):
        if value < most:
            return f"{significant(value / size)} {unit}"
    return f"{significant(value / 3600)} h"


def with_interval(say: Callable[[float], str], value: float, low: float, high: float) -> str:
    """A value with its interval, as ``say`` says numbers: "12 s (11 s to 13 s)"; without one "12 s"."""
    return say(value) if math.isnan(low) else f"{say(value)} ({say(low)} to {say(high)})"


def memory(value: float) -> str:
    """Bytes as MiB or GiB."""
    if math.isnan(value):
        return "unknown"
    return f"{value / 2**20:,.0f} MiB" if value < 2**30 else f"{value / 2**30:,.1f} GiB"


def peak_memory(row: Mapping[str, Any]) -> str:
    """Peak memory of a rank: "1.2 GiB" of its GPU, on a CPU the host's resident set, such as "412 MiB RSS"."""
    if row["config"].device == "cpu" and math.isnan(row["peak_memory_bytes"]) and not math.isnan(row["peak_rss_bytes"]):
        return f"{memory(row['peak_rss_bytes'])} RSS"
    return memory(row["peak_memory_bytes"])


def throughput(row: Mapping[str, Any]) -> str:
    """Such as "4,310 images/s"."""
    return f"{significant(row['images_per_second'])} images/s"


def settings(config: RunConfig) -> str:
    """The settings that the experiments vary: "2 ranks, bf16, compiled, files with 2 workers"."""
    unit = "GPU" if config.device == "cuda" else "CPU rank"
    formats, workers = [config.precision], plural(config.loader_workers, "worker")
    loads = ["files", workers] if config.loader == "files" else [f"{config.loader} data"]
    if config.is_own:
        formats = [] if config.option("number_format", "") else formats
        loads = [] if config.option("samples", None) is None else [workers]
    compiled = ["compiled"] * (config.compile != "off")
    lab = not config.is_own
    forms = ["NCHW"] * (lab and not config.channels_last) + ["joined kernels"] * (lab and config.kernels == "fused")
    forms += ["freed memory kept"] * (config.freed_memory == "kept")
    return ", ".join([plural(config.world_size, unit), *formats, *compiled, *forms, *loads])


def work(config: RunConfig) -> str:
    """What is trained: "tiny", or of a training of the user's its name and size, "mine:make (21,000 parameters)"."""
    parameters = config.option("parameters", None) if config.is_own else None
    return config.work_name if parameters is None else f"{config.work_name} ({parameters:,} parameters)"


def _values(values: Iterable[Any]) -> str:
    return joined([str(v) for v in dict.fromkeys(values)])


def context(study: Study, *, batch: bool = True) -> str:
    """Subtitle of a figure: hardware, network, batch, data, date, sets and turns."""
    shown = [
        r for r in study.records if r.role not in ("note", "choice", "search", "largest", "check", "wrong")
    ] or list(study.records)
    if not shown:
        return "the ledger holds no record for this question"
    # Parts of the lost scaling stand beside an answer, and have a figure of their own.
    shown = [r for r in shown if not r.family.endswith(LOST)] or shown
    configs = [r.config for r in shown]
    sizes = _values(f"{s}\N{MULTIPLICATION SIGN}{s}" for s in sorted({c.image_size for c in configs}))
    ours = any(c.workload in (DDPM, LOADER_ALONE, SAMPLING) for c in configs)
    parts = [study.hardware]
    parts += [f"{_values(c.network for c in configs)} network, {sizes} images"] if ours else []
    own = [c for c in configs if c.is_own]
    parts += [_values(map(work, own))] if own else []
    if batch and (ours or own):
        parts.append(f"batch {_values(sorted({c.global_batch_size for c in configs}))}")
    parts += [_values(r.data_name for r in shown if r.data_name), study.date]
    measured = [r for r in shown if r.role == "baseline" and r.windows]
    if measured:
        per_family: dict[tuple[str, str, str], int] = {}
        for r in measured:
            key = (r.experiment, r.family, r.baseline_id)
            per_family[key] = per_family.get(key, 0) + 1
        parts.append(f"{_range(per_family.values(), 'set')} of {_range([len(r.windows) for r in measured], 'turn')}")
    return " \N{MIDDLE DOT} ".join(p for p in parts if p)


def _range(counts: Iterable[int], noun: str) -> str:
    low, high = min(counts := list(counts)), max(counts)
    return plural(high, noun) if low == high else f"{low} to {plural(high, noun)}"


def outcome(row: Mapping[str, Any]) -> str:
    """Verdict of a row with the sets it rests on: "faster, 6 sets", "not resolved (1 set)"."""
    if row["verdict"] == stats.NOT_RESOLVED and row["sets"] < stats.LEAST_SETS:
        return f"not resolved ({plural(int(row['sets']), 'set')})"
    return status(str(row["verdict"]))


LOSS = ("Loss difference (90 % interval)", "Margin")
"""Columns of a table that say what a verdict on quality rests on."""


def loss(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns LOSS of a row: how much more a configuration loses than its baseline, and how much counts as none."""
    found = row["equivalence"]
    if found is None or math.isnan(found.low):
        return dict.fromkeys(LOSS, DASH)
    margin = DASH if math.isnan(found.margin) else f"{found.margin:.2g}"
    return dict(zip(LOSS, (quality.interval(found), margin), strict=True))


def failure(row: Mapping[str, Any]) -> str:
    """Such as "out of memory: needs 90 GiB, 78 GiB are free"."""
    return failed(row["status"], row["reason"])


def failed(how: str, reason: str | None) -> str:
    """How a run ended, and why."""
    words = status(how) if how != "ok" else "no result"
    return f"{words}: {reason}" if reason else words


def without_speed(row: Mapping[str, Any]) -> str:
    """Why a row has no speed."""
    return MECHANISM_ONLY if row["mechanism_only"] else failure(row)

"""How should ranks exchange gradients, and how fast do they? Settings of the exchange, and all-reduces alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import machine_state, phrases
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.charts import Figure, Line, Plot, lines
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, compared, plain
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import Experiment, Family, Plan, Question
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.training.setting import Batch, Precision, Setup, WorldSizes

QUESTION = Question(title="How should ranks exchange gradients?", file="exchange", trains=True)

BASELINE, NO_EXCHANGE = "default", "no exchange (no training)"
_SETTINGS: dict[str, dict[str, Any]] = {
    NO_EXCHANGE: {"enabled": False},
    "bf16 hook": {"hook": "bf16"},
    "fp16 hook": {"hook": "fp16"},
    "buckets of 5 MiB": {"bucket_mb": 5},
    "static graph": {"static_graph": True},
    "no bucket view": {"bucket_view": False},
    "buckets of 100 MiB": {"bucket_mb": 100},
    "buckets of 1 MiB": {"bucket_mb": 1},
    "NCCL for PCIe": {"nccl": "pcie"},
}


def exchange(
    setup: Setup, *, world_sizes: WorldSizes = None, global_batch_size: Batch = None, precision: Precision = "fp32"
) -> Experiment:
    """What is each setting of the exchange worth, and what does the exchange cost at all?

    Two ranks, on a GPU as many as there are; ``smoke`` measures the first two settings. NCCL's settings need GPUs.
    One exchange in 2 micro-batches halves the updates of weights too, so no ratio to the default says what it is worth:
    what the exchange costs there is measured against the same steps without it, last.
    """
    usual = [setup.most_ranks] if setup.device == "cuda" else [2]
    asked = setup.world_sizes(world_sizes, [n for n in usual if n > 1])
    if world_sizes is not None and 1 in asked:
        raise ConfigError("world_sizes has 1, and one rank exchanges nothing: give 2 or more")
    format_ = f", {precision}" * (precision != "fp32")
    able = [label for label, changes in _SETTINGS.items() if setup.device == "cuda" or "nccl" not in changes]
    families, left_out = [], []
    for ranks in asked:
        batch = setup.batch_size(global_batch_size, ranks)
        base = setup.config(global_batch_size=batch, world_size=ranks, precision=precision)
        settings = able[: 2 if setup.preset == "smoke" else None]
        families.append(_family(f"{setup.family_name(batch, ranks)}{format_}", base, settings, primary="bf16 hook"))
        if setup.preset != "smoke":
            # The same micro-batches, two to a step: half as many exchanges for equal images.
            twice = replace(base, global_batch_size=2 * batch, accumulation=2)
            name = f"{setup.family_name(2 * batch, ranks)}{format_}, one exchange in 2 micro-batches"
            families.append(_family(name, twice, [NO_EXCHANGE]))
    if not families:
        batch = setup.batch_size(global_batch_size)
        base, name = setup.config(global_batch_size=batch, precision=precision), setup.family_name(batch, 1) + format_
        families.append(_family(name, base, (), setup.ranks_label(1), mechanism=True))
        left_out.append((name, setup.ranks_label(2), setup.why_alone))
    return Experiment(name="exchange", families=tuple(families), left_out=tuple(left_out))


def _family(name: str, base: RunConfig, settings: Sequence[str], label: str = BASELINE, **values: Any) -> Family:
    """Ranks as by default, and each of the ``settings`` alone."""
    changed = tuple((s, replace(base, exchange=ExchangeConfig(**_SETTINGS[s]))) for s in settings)
    return Family(name=name, baseline=base, baseline_label=label, candidates=changed, **values)


def answer(study: Study) -> Answer:
    """Compare the settings of the exchange; ranks that exchange nothing train apart and are none."""
    silent = [r for r in comparisons(study) if r.role == "candidate" and r.sets and not r.config.exchange.enabled]
    notes = []
    for row in silent:
        shorter, low, high = (100 * (1 - 1 / ratio) for ratio in (row.ratio.value, *row.ratio.ends))
        text = f"{shorter:.1f} % shorter ({low:.1f} to {high:.1f} %): exposed communication"
        if not row.resolved:
            text = f"not called shorter (ratio {phrases.ratio(row)}, {phrases.evidence(row.ratio)})"
        notes.append(f"Without exchange a step of {row.family} is {text}.")
    found = compared(study, keep=lambda row: row.config.exchange.enabled, own=lambda _: notes)
    return speeds(study, found, views=trained_views(study))


# --- all_reduce -------------------------------------------------------------------------------------------------------

Messages = Annotated[Sequence[int] | None, Opt("bytes of the messages", least=4)]
WORKLOAD = "ddpm_lab.training.limits:all_reduce"
ALL_REDUCE = Question(
    title="How fast do ranks exchange gradients?",
    file="all_reduce",
    # Nothing is compared with anything: a time within some per cent is enough, and large messages take long.
    plan=Plan(turns=6, window_seconds=0.1, window_steps=5, settle_steps=2, warmup_steps=5),
)
MESSAGES = (2**10, 2**14, 2**18, 2**20, 2**23, 2**26)
FULL_MESSAGES = tuple(2**power for power in range(10, 27, 2))
"""Bytes, from where latency alone counts to where bandwidth alone does."""


def all_reduce(setup: Setup, *, world_sizes: WorldSizes = None, message_bytes: Messages = None) -> Experiment:
    """How fast do ranks exchange? All-reduces from 1 KiB to 64 MiB; a family for each number of ranks."""
    ranks = [n for n in setup.world_sizes(world_sizes, sorted({*setup.doubled_ranks, setup.most_ranks})) if n > 1]
    if world_sizes is not None and not ranks:
        raise ConfigError("world_sizes has 1 alone, and one rank exchanges nothing: give 2 or more")
    for size in message_bytes or ():
        if size % 4:
            raise ConfigError(f"message_bytes has {size}: give multiples of 4, the bytes of a number")
    first, *others = sorted(set(message_bytes or (FULL_MESSAGES if setup.preset == "full" else MESSAGES)))
    sizes = [first, *others[-1:], *others[:-1]]  # smallest and largest tell most
    families = []
    for n in ranks or [1]:
        common: dict[str, Any] = {"workload": WORKLOAD, "world_size": n, "global_batch_size": n}
        every = [(label(size), setup.config(options=(("message_bytes", size),), **common)) for size in sizes]
        (least, base), rows = every[0], tuple(every[1:]) if ranks else ()
        name = f"all-reduce, {setup.ranks_label(n)}"
        # What slows a whole set is told from what all its messages share.
        families.append(Family(name=name, baseline_label=least, baseline=base, candidates=rows, together=True))
    left_out = () if ranks else ((families[0].name, setup.ranks_label(2), setup.why_alone),)
    return Experiment(name="all_reduce", families=tuple(families), left_out=left_out)


def label(size: int) -> str:
    """Such as "64 KiB"."""
    unit, name = next(((u, n) for u, n in ((2**20, "MiB"), (2**10, "KiB")) if size >= u), (1, "bytes"))
    return f"{size / unit:.4g} {name}"


def exchanges(study: Study) -> list[Comparison]:
    """Return the measured all-reduces of a study by hosts, ranks and size."""
    found = [row for row in comparisons(study) if row.sets and row.role != "twin" and row.ranks > 1]
    return sorted(found, key=lambda e: (e.config.nodes, e.ranks, message_bytes(e)))


def message_bytes(exchange: Comparison) -> int:
    """Return the bytes that each rank holds."""
    return int(exchange.config.option("message_bytes", 0))


def bus_bandwidth(exchange: Comparison) -> float:
    """Return bytes a second over each rank's link: 2 (N - 1) / N n / t, as nccl-tests defines it."""
    return 2 * (exchange.ranks - 1) / exchange.ranks * message_bytes(exchange) / exchange.step_seconds


def answer_all_reduce(study: Study) -> Answer:
    """Show time and bus bandwidth of each message."""
    found = exchanges(study)
    if not found:
        return replace(speeds(study, compared(study)), table=lambda: [])
    most = max(found, key=lambda e: (e.ranks, bus_bandwidth(e)))
    least = min((e for e in found if e.ranks == most.ranks), key=lambda e: e.step_seconds)
    up, down = f"at up to {_speed(most)} of bus bandwidth", f"in no less than {_duration(least)}"
    headline = f"{most.ranks} ranks exchange {up}, and {down}"
    sets = phrases.plural(most.sets, "set")
    evidence = f"The most is reached with {most.label}, the least time takes a message of {least.label} ({sets})."
    known = {"evidence": evidence, "verdict": "measured", "quality": "no training, so no quality"}
    finding = plain(study, headline, ANSWERED, *machine_state.warnings(study), **known)
    series: dict[str, list[Comparison]] = {}
    for e in found:
        hosts = f" on {e.config.nodes} hosts" if e.config.nodes > 1 else ""
        series.setdefault(f"{e.ranks} ranks{hosts}", []).append(e)
    names = ("Configuration", "Message", "Time", "Bus bandwidth", "Sets")
    cells = [(name, e.label, _duration(e), _speed(e), str(e.sets)) for name, shown in series.items() for e in shown]
    rows = [dict(zip(names, row, strict=True)) for row in cells]
    return Answer(study=study, finding=finding, figure=lambda: _bandwidths(study, headline, series), table=lambda: rows)


def _duration(exchange: Comparison) -> str:
    """Such as "405 us": microseconds below a millisecond."""
    seconds = exchange.step_seconds
    return f"{phrases.significant(1e6 * seconds)} \N{MICRO SIGN}s" if seconds < 1e-3 else phrases.seconds(seconds)


def _speed(exchange: Comparison) -> str:
    """Such as "1.9 GB/s"."""
    speed = bus_bandwidth(exchange)
    unit, name = (1e9, "GB/s") if speed >= 1e9 else (1e6, "MB/s")
    return f"{phrases.significant(speed / unit)} {name}"


def _bandwidths(study: Study, title: str, series: Mapping[str, Sequence[Comparison]]) -> Figure:
    """Bus bandwidth against the size of the message, a line for each number of ranks."""
    sizes = dict(sorted({message_bytes(e): e.label for shown in series.values() for e in shown}.items()))
    curves = [
        Line(name=name, x=[message_bytes(e) for e in shown], y=[1e-9 * bus_bandwidth(e) for e in shown])
        for name, shown in series.items()
    ]
    axes: dict[str, Any] = {"x_label": "message", "y_label": "bus bandwidth, GB/s", "log_x": True, "log_y": True}
    plot = Plot(lines=curves, ticks=list(sizes), names=list(sizes.values()), height=3.0, **axes)
    note = "Geometric mean over sets. Bus bandwidth: 2 (N - 1) / N of the message over the time, to be held against "
    note += "the link's own whatever the number of ranks."
    return lines([plot], title=title, context=phrases.context(study), note=note)

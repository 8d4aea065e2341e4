"""How fast do ranks exchange? An all-reduce of messages of several sizes, at each number of ranks that there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.declared import Opt
from ddpm_lab.explain import machine_state, phrases
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import ANSWERED, compared, plain
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import Experiment, Family, Plan
from ddpm_lab.questions.question import Question
from ddpm_lab.training.setting import Setup, WorldSizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Messages = Annotated[Sequence[int] | None, Opt("bytes of the messages", least=4)]
ALL_REDUCE = "ddpm_lab.training.limits:all_reduce"
PLAN = Plan(turns=6, window_seconds=0.1, window_steps=5, settle_steps=2, warmup_steps=5)
"""Nothing is compared with anything: a time within some per cent is enough, and large messages take long."""
QUESTION = Question(title="How fast do ranks exchange gradients?", file="all_reduce", plan=PLAN)
MESSAGES = (2**10, 2**14, 2**18, 2**20, 2**23, 2**26)
FULL_MESSAGES = tuple(2**power for power in range(10, 27, 2))
"""Bytes, from where latency alone counts to where bandwidth alone does."""


def all_reduce(setup: Setup, *, world_sizes: WorldSizes = None, message_bytes: Messages = None) -> Experiment:
    """How fast do ranks exchange? All-reduces from 1 KiB to 64 MiB; a family for each number of ranks."""
    usual = sorted({*setup.doubled_ranks, setup.most_ranks})
    ranks = [n for n in setup.world_sizes(world_sizes, usual) if n > 1]
    if world_sizes is not None and not ranks:
        raise ConfigError("world_sizes has 1 alone, and one rank exchanges nothing: give 2 or more")
    for size in message_bytes or ():
        if size % 4:
            raise ConfigError(f"message_bytes has {size}: give multiples of 4, the bytes of a number")
    first, *others = sorted(set(message_bytes or (FULL_MESSAGES if setup.preset == "full" else MESSAGES)))
    sizes = [first, *others[-1:], *others[:-1]]  # smallest and largest tell most
    families, left_out = [], []
    for n in ranks or [1]:
        common: dict[str, Any] = {"workload": ALL_REDUCE, "world_size": n, "global_batch_size": n}
        rows = [(label(size), setup.config(options=(("message_bytes", size),), **common)) for size in sizes]
        families.append(
            Family(
                name=f"all-reduce, {setup.ranks_label(n)}",
                baseline_label=rows[0][0],
                baseline=rows[0][1],
                candidates=tuple(rows[1:]) if ranks else (),
                together=True,  # what slows a whole set is told from what all its messages share
            )
        )
    if not ranks:
        have = "GPU" if setup.device == "cuda" else "usable core"
        reason = f"this machine has one {have}, and each rank needs its own: a rank alone exchanges nothing"
        left_out = [(families[0].name, setup.ranks_label(2), reason)]
    return Experiment(name="all_reduce", families=tuple(families), left_out=tuple(left_out))


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


def _ranks_name(exchange: Comparison) -> str:
    """Such as "4 ranks", or "4 ranks on 2 hosts"."""
    hosts = exchange.config.nodes
    return f"{exchange.ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")


def answer(study: Study) -> Answer:
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
    finding = plain(study, headline, ANSWERED, *machine_state.warnings(study), evidence=evidence)
    return Answer(
        study=study,
        finding=replace(finding, verdict="measured", quality="no training, so no quality"),
        figure=lambda: _figure(study, headline, found),
        table=lambda: [
            {
                "Configuration": _ranks_name(e),
                "Message": e.label,
                "Time": _duration(e),
                "Bus bandwidth": _speed(e),
                "Sets": str(e.sets),
            }
            for e in found
        ],
    )


def _duration(exchange: Comparison) -> str:
    """Such as "405 us": microseconds below a millisecond."""
    seconds = exchange.step_seconds
    return f"{phrases.significant(1e6 * seconds)} \N{MICRO SIGN}s" if seconds < 1e-3 else phrases.seconds(seconds)


def _speed(exchange: Comparison) -> str:
    """Such as "1.9 GB/s"."""
    speed = bus_bandwidth(exchange)
    unit, name = (1e9, "GB/s") if speed >= 1e9 else (1e6, "MB/s")
    return f"{phrases.significant(speed / unit)} {name}"


def _figure(study: Study, title: str, found: Sequence[Comparison]) -> Figure:
    """Bus bandwidth against the size of the message, a line for each number of ranks."""
    names = dict.fromkeys(map(_ranks_name, found))
    series = {name: [e for e in found if _ranks_name(e) == name] for name in names}
    sizes = dict(sorted({message_bytes(e): e.label for e in found}.items()))
    plot = Plot(
        lines=[
            Line(name=name, x=[message_bytes(e) for e in shown], y=[1e-9 * bus_bandwidth(e) for e in shown])
            for name, shown in series.items()
        ],
        x_label="message",
        y_label="bus bandwidth, GB/s",
        log_x=True,
        log_y=True,
        ticks=list(sizes),
        names=list(sizes.values()),
        height=3.0,
    )
    return lines(
        [plot],
        title=title,
        context=phrases.context(study),
        note="Geometric mean over sets. Bus bandwidth: 2 (N - 1) / N of the message over the time, to be held against "
        "the link's own whatever the number of ranks.",
    )

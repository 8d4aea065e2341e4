"""One figure that answers each experiment's question, and further ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddpm_lab.explain import (
    batch_sizes,
    budget,
    figure_budget,
    figure_costs,
    figure_links,
    figure_machine,
    figure_peers,
    figure_quality,
    figure_ratios,
    figure_samples,
    figure_scaling,
    figure_waterfalls,
    gains,
    operators,
    peers,
    phrases,
    recommended,
    trained,
)
from ddpm_lab.explain import figure_extras as extras
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.figure_style import png, save
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.frames import ALL_REDUCE, CLAIMS, RECOMMENDATION, Study
from ddpm_lab.explain.questions import claims
from ddpm_lab.plan import WITH_TRIALS
from ddpm_lab.record import RunRecord

__all__ = ["figure", "more", "png", "save"]

TOP_OPERATORS = 10
_NAME, _VERSUS = 2.65, 2.45  # inches for an operator's name, and for what stands beside a configuration

_LEARNED: tuple[tuple[Callable[[Study], Figure | None], str, str], ...] = (
    (figure_quality.curves, "curves", "Held-out loss on the way, and its difference from the baseline's."),
    (figure_quality.losses, "losses", "Training loss of every step, smoothed, and its difference from the baseline's."),
)
_MORE: dict[str, tuple[tuple[Callable[[Study], Figure | None], str, str], ...]] = {
    "multi_gpu": (
        (figure_scaling.speed_up, "speedup", "Speed-up against the number of ranks, with the ideal line."),
        (figure_scaling.efficiency, "efficiency", "Parallel efficiency: the speed-up divided by the number of ranks."),
        (figure_scaling.by_ranks, "ranks", "Time for 50,000 images, and throughput, against the number of ranks."),
        (figure_scaling.by_batch, "batch", "Time for 50,000 images, and throughput, against the batch size."),
        (figure_scaling.layouts, "devices", "Throughput of equal work on CPU, one GPU, several, and hosts."),
        (
            figure_waterfalls.lost_scaling,
            "lost_scaling",
            "Where the lost scaling went, from the ideal step to the measured.",
        ),
        (figure_machine.over_the_run, "machine", "What neighbours took, and the memory of each configuration's ranks."),
    ),
    "amp": ((extras.throughput, "throughput", "Throughput of each precision in images per second."),),
    "workers": (
        (extras.throughput, "throughput", "Throughput of training, and of the loader alone where it was measured."),
    ),
    "torch_compile": (
        (extras.break_even, "break_even", "Total time with and without compiling: where the lines cross it pays off."),
        (extras.throughput, "throughput", "Throughput with and without compiling in images per second."),
        (
            figure_costs.cost_split,
            "costs",
            "What a run costs beside its steps: eager, from a warm and from a cold cache.",
        ),
    ),
    "batch_size": (
        (figure_ratios.ratios, "ratios", "Speed for equal images of each batch size relative to the smallest."),
    ),
    peers.EXPERIMENT: (
        (figure_peers.roofline, "limits", "How far from the limit: an image at this machine's peaks, and measured."),
        (figure_peers.levers, "levers", "What each setting of the trainer is worth on this machine."),
    ),
    trained.EXPERIMENT: (
        *_LEARNED,
        (figure_quality.by_time, "timesteps", "The difference of the final loss by timestep."),
        (figure_samples.figure, "samples", "What each setting draws from the same noise."),
    ),
    RECOMMENDATION: (
        (batch_sizes.beside, "batch_size", "The largest batch that fits, and the speed and memory of each size."),
    ),
}


_OWN: dict[str, Callable[[Study, str], Figure | None]] = {
    batch_sizes.EXPERIMENT: batch_sizes.figure,
    peers.EXPERIMENT: figure_peers.figure,
    trained.EXPERIMENT: figure_quality.figure,
    CLAIMS: lambda study, _: claims.figure(study),
    ALL_REDUCE: figure_links.exchange,
}
"""Questions whose answer is drawn, from study and title, in a way of its own, where it has what that needs."""


def figure(study: Study) -> Figure:
    """The figure that answers a study's question; it always says something, if only why there is nothing to draw."""
    with fs.style():
        if study.experiment == RECOMMENDATION and (searched := recommended.recommendation(study)) is not None:
            return figure_waterfalls.recommendation(searched, finding(study).headline)
        if study.experiment == RECOMMENDATION:
            return figure_ratios.changes(study)
        if study.experiment == "profile":
            return _profile(study)
        own = _OWN.get(study.experiment)
        drawn = own(study, finding(study).headline) if own else None
        return drawn or figure_ratios.ratios(study)


def more(study: Study) -> list[tuple[str, Figure, str]]:
    """Further figures as (caption, figure, name for its file); those without data are left out."""
    with fs.style():
        drawn = [(caption, draw(study), name) for draw, name, caption in _further(study.experiment)]
    return [(caption, figure, name) for caption, figure, name in drawn if figure is not None]


def captions(experiment: str) -> dict[str, str]:
    """What the further figures of a question show, by the name for their files."""
    return {name: caption for _, name, caption in _further(experiment)}


def _further(experiment: str) -> tuple[tuple[Callable[[Study], Figure | None], str, str], ...]:
    if experiment == RECOMMENDATION:
        own = ((_changes_beside, "measured", "Everything measured that did equal work, fastest first."),)
        return (*own, *_MORE[experiment])
    if experiment == "profile":
        own = ((_operators_beside, "operators", "Operators of profiled steps, each second counted once."),)
        return (*_MORE.get(experiment, ()), *own)
    return (*_MORE.get(experiment, ()), *(_LEARNED if experiment in WITH_TRIALS else ()))


def _profile(study: Study) -> Figure:
    found = finding(study)
    record = operators.latest_profile(study.records)
    if record is not None and (taken := budget.budget(record)) is not None:
        context = f"{phrases.context(dataclasses.replace(study, records=(record,)))} \N{MIDDLE DOT} {record.label}"
        return figure_budget.figure(taken, context + f" \N{MIDDLE DOT} {MECHANISM_ONLY}" * record.mechanism_only)
    if record is None or operators.operators(record).empty:
        return fs.message(found.headline, phrases.context(study), found.claim)
    return _operators(study, record)


def _operators_beside(study: Study) -> Figure | None:
    """The operators of a profile whose answer is its time budget."""
    record = operators.latest_profile(study.records)
    if record is None or budget.budget(record) is None or operators.operators(record).empty:
        return None
    return _operators(study, record)


def _changes_beside(study: Study) -> Figure | None:
    """What all questions measured, where the answer is a search."""
    return figure_ratios.changes(study) if recommended.recommendation(study) and gains.measured(study) else None


def _operators(study: Study, record: RunRecord) -> Figure:
    frame = operators.operators(record)
    classes = operators.classes(record)
    top = frame.head(TOP_OPERATORS)
    colours = {name: fs.PALETTE[i % len(fs.PALETTE)] for i, name in enumerate(classes["class"])}
    colours[operators.OTHER] = fs.FAINT
    steps = max(1, int((record.profile or {}).get("steps", 1)))
    kind = "device" if operators.on_device(record) else "CPU"
    context = phrases.context(dataclasses.replace(study, records=(record,)))
    figure, axes = fs.sheet(
        operators.shares(record)[0],
        f"{context} \N{MIDDLE DOT} {record.family} \N{MIDDLE DOT} {phrases.plural(steps, 'profiled step')}",
        [0.36 * len(classes) + 0.1, 0.36 * len(top) + 0.1],
        headings=[
            "Classes of operators",
            f"The {len(top)} operators that take most time" if len(top) > 1 else "The only operator",
        ],
        left=_NAME + 0.3,
        right=2.05,
        gap=0.3,
        note=f"Exclusive {kind} time: time in an operator without the operators it calls, so that each second counts "
        "once. The profiler slows a step down: shares are shown, not speeds.",
    )
    limit = 1.02 * 100 * max(float(classes["share"].max()), float(top["share"].max()))
    _shares(axes[0], classes, list(classes["class"]), [colours[c] for c in classes["class"]], steps)
    _shares(axes[1], top, list(top["name"]), [colours[c] for c in top["class"]], steps)
    for ax in axes:
        ax.set_xlim(0, limit)
    axes[0].tick_params(axis="x", labelbottom=False)
    axes[1].set_xlabel("share of all operator time, %")
    return figure


def _shares(ax: Axes, frame: pd.DataFrame, names: list[str], colours: list[str], steps: int) -> None:
    shares = [100 * float(v) for v in frame["share"]]
    ax.barh(range(len(names)), shares, height=0.66, color=colours, lw=0)
    fs.name_rows(ax, [_two_lines(name) for name in names], fontsize=fs.SMALL_POINTS)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    for y, (share, calls) in enumerate(zip(shares, frame["calls"], strict=True)):
        text = f"{share:.1f} %,  {phrases.plural(fs.number(float(calls) / steps), 'call')} a step"
        ax.text(1.02, y, text, transform=ax.get_yaxis_transform(), va="center_baseline", fontsize=fs.SMALL_POINTS)


def _two_lines(name: str) -> str:
    """A long name of an operator in two lines, broken where a word ends; of kernels, which are longer, both ends."""
    if fs.width(name) <= _NAME:
        return name
    words = re.findall(r"[^_:<, ]+[_:<, ]*|[_:<, ]+", name)
    cut = next((n for n in range(len(words) - 1, 0, -1) if fs.width("".join(words[:n])) <= _NAME), 0)
    first, last = "".join(words[:cut]), "".join(words[cut:])
    if cut and fs.width(last) <= _NAME:
        return f"{first}\n{last}"
    first = next(name[:n] for n in range(len(name), 0, -1) if fs.width(name[:n]) <= _NAME)
    dots = "\N{HORIZONTAL ELLIPSIS}"
    return first + "\n" + next(dots + name[n:] for n in range(len(name)) if fs.width(dots + name[n:]) <= _NAME)

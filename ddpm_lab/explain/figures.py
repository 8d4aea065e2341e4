"""One figure that answers each experiment's question, and further ones."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from ddpm_lab.explain import (
    batch_sizes,
    figure_batch_sizes,
    figure_costs,
    figure_links,
    figure_machine,
    figure_peers,
    figure_profile,
    figure_quality,
    figure_ratios,
    figure_samples,
    figure_scaling,
    figure_waterfalls,
    peers,
    trained,
)
from ddpm_lab.explain.charts.style import png, save
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.frames import ALL_REDUCE, CLAIMS, RECOMMENDATION, Study
from ddpm_lab.explain.questions import claims, lost_scaling, recommendation
from ddpm_lab.plan import WITH_TRIALS

__all__ = ["figure", "more", "png", "save"]

Draw = Callable[[Study], Figure | None]
_CURVES = (figure_quality.curves, "curves", "Held-out and training loss on the way, all settings overlaid.")
_LOSSES = (figure_quality.differences, "quality", "Final held-out loss less the baseline's, with the margin.")
_MORE: dict[str, tuple[tuple[Draw, str, str], ...]] = {
    "profile": (
        (figure_profile.operators_beside, "operators", "Operators of profiled steps, each second counted once."),
    ),
    "multi_gpu": (
        (figure_scaling.speed_up, "speedup", "Speed-up against the number of ranks, with the ideal line."),
        (figure_scaling.efficiency, "efficiency", "Parallel efficiency: the speed-up divided by the number of ranks."),
        (figure_scaling.by_batch, "batch", "Time for 50,000 images against the batch size."),
        (figure_scaling.layouts, "devices", "Throughput of equal work on CPU, one GPU, several, and hosts."),
        (
            lost_scaling.figure,
            "lost_scaling",
            "Where the lost scaling went, from the ideal step to the measured.",
        ),
        (figure_machine.over_the_run, "machine", "Memory of each configuration's ranks, and what neighbours took."),
    ),
    "amp": ((figure_ratios.times, "time", "Time for 50,000 images in each precision."),),
    "workers": ((figure_ratios.by_workers, "time", "Time for 50,000 images against the number of loader workers."),),
    "torch_compile": (
        (
            figure_costs.break_even,
            "break_even",
            "Total time with and without compiling: where the lines cross it pays off.",
        ),
        (
            figure_costs.cost_split,
            "costs",
            "What a run costs beside its steps: eager, from a warm and from a cold cache.",
        ),
    ),
    peers.EXPERIMENT: (
        (figure_peers.roofline, "limits", "How far from the limit: an image at this machine's peaks, and measured."),
        (figure_peers.levers, "levers", "What each setting of the trainer is worth on this machine."),
    ),
    trained.EXPERIMENT: (_CURVES, (figure_samples.figure, "samples", "What each setting draws from the same noise.")),
    RECOMMENDATION: (
        (
            figure_batch_sizes.beside,
            "batch_size",
            "The largest batch that fits, and the speed and memory of each size.",
        ),
    ),
}
_OWN: dict[str, Callable[[Study, str], Figure | None]] = {
    batch_sizes.EXPERIMENT: figure_batch_sizes.figure,
    peers.EXPERIMENT: figure_peers.figure,
    trained.EXPERIMENT: figure_quality.figure,
    ALL_REDUCE: figure_links.exchange,
}
"""Questions whose answer is drawn, from study and title, in a way of its own, where it has what that needs."""


def figure(study: Study) -> Figure:
    """The figure that answers a study's question; it always says something, if only why there is nothing to draw."""
    if study.experiment == RECOMMENDATION:
        searched = recommendation.recommendation(study)
        if searched is None:
            return figure_ratios.changes(study)
        return figure_waterfalls.recommendation(searched, finding(study).headline)
    if study.experiment == "profile":
        return figure_profile.figure(study)
    if study.experiment == CLAIMS:
        drawn = claims.figure(study)
    else:
        own = _OWN.get(study.experiment)
        drawn = own(study, finding(study).headline) if own else None
    return drawn or figure_ratios.ratios(study)


def more(study: Study) -> list[tuple[str, Figure, str]]:
    """Further figures as (caption, figure, name for its file); those without data are left out."""
    drawn = [(caption, draw(study), name) for draw, name, caption in _further(study.experiment)]
    return [(caption, figure, name) for caption, figure, name in drawn if figure is not None]


def captions(experiment: str) -> dict[str, str]:
    """What the further figures of a question show, by the name for their files."""
    return {name: caption for _, name, caption in _further(experiment)}


def _further(experiment: str) -> tuple[tuple[Draw, str, str], ...]:
    return (*_MORE.get(experiment, ()), *((_LOSSES, _CURVES) if experiment in WITH_TRIALS else ()))

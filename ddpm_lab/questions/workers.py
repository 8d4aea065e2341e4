"""How many loader workers are worth having? Training, and the loader alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import DDPM, LOADER_ALONE, OWN
from ddpm_lab.declared import Opt
from ddpm_lab.explain import phrases
from ddpm_lab.explain.answer import Answer, View, measured, projection, speeds, timed
from ddpm_lab.explain.charts import Figure, Plot, lines
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import Experiment, Family, Question
from ddpm_lab.questions.quality import identity_trials
from ddpm_lab.training.setting import CPU_PRECISIONS, CUDA_PRECISIONS, Batch, Precisions, Setup

QUESTION = Question(title="How many loader workers are worth having?", file="04_workers")

PRIMARY_WORKERS = 2  # whose comparison with none is the primary one
FULL_WORKERS = (0, 1, 2, 4, 8, 12, 16, 20)


def workers(
    setup: Setup,
    *,
    worker_counts: Annotated[Sequence[int] | None, Opt("numbers of workers", least=0)] = None,
    precisions: Precisions = None,
    global_batch_size: Batch = None,
) -> Experiment:
    """How many loader workers are worth having? Each file decoded when needed; training, and the loader alone."""
    usual = {"smoke": (0, 1), "quick": (0, 1, 2), "full": FULL_WORKERS}[setup.preset]
    able = CUDA_PRECISIONS if setup.device == "cuda" else CPU_PRECISIONS
    for p in precisions or ():
        choice("precisions", p, able)
    asked = tuple(dict.fromkeys(worker_counts or usual))
    plain = setup.plain_precision
    formats = tuple(dict.fromkeys(precisions or (plain, setup.usual_precision if setup.preset == "full" else plain)))
    batch = setup.batch_size(global_batch_size)
    first, *others = sorted(n for n in asked if n <= setup.usable_cores) or [0]
    if not others:
        raise ConfigError(f"worker_counts is {asked}: give two that the {setup.cores_name} can run, to compare them")
    others = others[-1:] + others[:-1]  # the most workers are the most telling
    families, left_out = [], []
    kinds: list[tuple[str, dict[str, Any]]] = [
        (f"training, {setup.family_name(batch)}, {setup.precision_name(p)}", {"precision": p}) for p in formats
    ]
    if setup.preset != "quick":  # it would take the time that the other questions need for a verdict
        kinds.append((f"loader alone, {setup.family_name(batch, trained=False)}", {"workload": LOADER_ALONE}))
    for name, settings in kinds:
        base = setup.config(global_batch_size=batch, loader="files", loader_workers=first, **settings)
        label = partial(phrases.plural, noun="worker")
        rows = tuple((label(n), replace(base, loader_workers=n)) for n in others)
        primary = label(PRIMARY_WORKERS if PRIMARY_WORKERS in others else others[0])
        families.append(Family(name=name, baseline=base, baseline_label=label(first), candidates=rows, primary=primary))
        many = [n for n in asked if n > setup.usable_cores]
        left_out += [(name, label(n), f"more than the {setup.cores_name}") for n in many]
    # What a loader changes is nothing, shown to the last bit; but a dataset of the user's may draw in its workers.
    trials = tuple(t for f in families if f.baseline.workload in (DDPM, OWN) for t in identity_trials(f))
    return Experiment(name="workers", families=tuple(families), left_out=tuple(left_out), trials=trials)


def answer(study: Study) -> Answer:
    """Compare the speed with each number of workers, training and loading alone."""
    times = View("Time for 50,000 images against the number of loader workers.", "time", lambda: _by_workers(study))
    return speeds(study, compared(study), views=(times,))


def _by_workers(study: Study) -> "Figure | None":
    """Time for 50,000 images against the loader workers, training and the loader alone; None below three numbers."""
    shown = [sorted(rows, key=lambda c: c.config.loader_workers) for rows in measured(study)]
    shown = [rows for rows in shown if len({c.config.loader_workers for c in rows}) > 2]
    plots = []
    for alone in (False, True):
        kept = [rows for rows in shown if rows[0].loader_alone == alone]
        if kept:
            unit, time_of = projection([c for rows in kept for c in rows])
            ticks = sorted({c.config.loader_workers for rows in kept for c in rows})
            heading = "The loader alone" if alone else "Training"
            series = [timed(rows, time_of, lambda c: c.config.loader_workers) for rows in kept]
            plots.append(Plot(lines=series, heading=heading, x_label="loader workers", y_label=unit, ticks=ticks))
    if not plots:
        return None
    return lines(
        plots,
        title="Time for 50,000 images against loader workers",
        context=phrases.context(study),
        note="A projection from timed steps; upright lines: 95 % interval of the ratio to the baseline.",
    )

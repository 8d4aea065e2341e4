"""Studies: the records that answer a question."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddpm_lab import plan
from ddpm_lab.explain.bands import DEFAULT, NAMED, Bands
from ddpm_lab.output import say
from ddpm_lab.record import Cohort, LedgerError, Machine, RunRecord, moment

RECOMMENDATION = plan.RECOMMENDATION
BESIDE_OTHERS = ("claims",)
"""Questions that are shown beside the records of all others."""
SMOKE = plan.PRESETS["smoke"].plan.window_seconds
TRIAL, LOOK = "quality", "look"
"""Roles of a record that trained for the weights, and of an answer that was shown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """The records that answer one question: one machine, and one cohort of each experiment.

    ``resolution`` is the smallest relative difference that its comparisons are asked to find. ``published`` records
    came with the checkout: they were not measured here. ``unasked`` are of candidates that the call did not ask for,
    which are tested together with those that it did. ``trials`` are training runs of any experiment on the same
    machine and data, ``other_trials`` those on other images, ``published_trials`` those of any machine that came with
    the checkout. ``bands`` name its efficiencies. ``beside`` are the records of all other questions on the same
    machine, for those of BESIDE_OTHERS.
    ``looks`` are the answers to any question that this machine has shown: they say how much its sets scatter.
    """

    experiment: str
    records: tuple[RunRecord, ...]
    output_dir: Path
    resolution: float = 0.03
    published: bool = False
    unasked: tuple[RunRecord, ...] = ()
    trials: tuple[RunRecord, ...] = ()
    other_trials: tuple[RunRecord, ...] = ()
    published_trials: tuple[RunRecord, ...] = ()
    bands: Bands = NAMED[DEFAULT]
    beside: tuple[RunRecord, ...] = ()
    looks: tuple[RunRecord, ...] = ()

    @property
    def hardware(self) -> str:
        return self.records[-1].machine.name if self.records else ""

    @property
    def date(self) -> str:
        """Day of the measurements (ISO 8601), or first and last day."""
        measured = [r for r in self.records if r.role != "note"] or self.records
        days = sorted({r.date[:10] for r in measured})
        return " to ".join(dict.fromkeys((*days[:1], *days[-1:])))


once = lru_cache(maxsize=16)
"""Compute an answer once for each study: figure, table and finding all ask for it."""


def study(
    records: Iterable[RunRecord],
    experiment: str,
    *,
    machine: str | None = None,
    run_ids: Iterable[str] | None = None,
    cohort: Cohort | None = None,
    output_dir: Path | str = ".",
) -> Study:
    """Select the records of one ``experiment`` that may be compared; "recommendation" takes those of all experiments.

    ``machine`` is a name, key, or a part of the name that only one machine has; None takes the only machine. With
    ``run_ids`` only comparisons whose baseline and configuration are among these are kept. ``cohort`` is by default the
    one measured last. Raises LedgerError where ``machine`` names none or several, or is needed because the records come
    from several.
    """
    selected = chosen(list(records), experiment, machine=machine, cohort=cohort)
    trials, others = [r for r in selected if r.role == TRIAL], [r for r in selected if r.role not in (TRIAL, LOOK)]
    data = {r.cohort[2] for r in others or trials}
    beside = [r for r in others if r.experiment != experiment and experiment in BESIDE_OTHERS]
    found = [r for r in others if r.experiment == experiment or not beside]
    unasked = list[RunRecord]()
    if run_ids is not None:
        wanted = set(run_ids)
        unasked = [r for r in found if r.role == "candidate" and r.baseline_id in wanted and r.run_id not in wanted]
        found = [r for r in found if not (r.baseline_id or r.set_id) or {r.baseline_id, r.run_id} <= wanted]
    return Study(
        experiment=experiment,
        records=tuple(found),
        output_dir=Path(output_dir),
        unasked=tuple(unasked),
        trials=tuple(r for r in trials if r.cohort[2] in data),
        other_trials=tuple(r for r in trials if r.cohort[2] not in data),
        beside=tuple(beside),
        looks=tuple(r for r in selected if r.role == LOOK),
    )


def rank_zero(record: RunRecord) -> dict[str, Any]:
    """Return what rank 0 witnessed; empty without a witness."""
    return dict((record.witness.get("ranks") or [{}])[0])


def chosen(
    records: Sequence[RunRecord], experiment: str, *, machine: str | None = None, cohort: Cohort | None = None
) -> list[RunRecord]:
    """Select the records that ``study`` shows. Trials and looks come last."""
    key, cohort = machine_key(records, machine) if records else "", None if experiment == RECOMMENDATION else cohort
    mine = [r for r in records if r.machine.key == key]
    trials, looks = ([r for r in mine if r.role == role] for role in (TRIAL, LOOK))
    others, shown = [r for r in mine if r.role not in (TRIAL, LOOK)], list[RunRecord]()
    for name in sorted({r.experiment for r in others}):
        group = [r for r in others if r.experiment == name]
        if experiment in (name, RECOMMENDATION):
            shown += _one_cohort(group, cohort)
        elif experiment in BESIDE_OTHERS:
            shown += _one_cohort(group, None)
    return shown + trials + looks


def about(records: Sequence[RunRecord], **of: str | int | None) -> list[RunRecord]:
    """Records ``of`` settings, such as a network, where these are not None; and all trials and looks."""
    wanted = {name: value for name, value in of.items() if value is not None}
    return [r for r in records if r.role in (TRIAL, LOOK) or all(getattr(r.config, n) == v for n, v in wanted.items())]


def with_looks(kept: Iterable[RunRecord], records: Sequence[RunRecord]) -> list[RunRecord]:
    """The records that are ``kept``, and all looks of their machines: whatever they are at tells of scatter."""
    kept = set(kept)
    machines = {r.machine.key for r in kept}
    return [r for r in records if r in kept or (r.role == LOOK and r.machine.key in machines)]


def machine_key(records: Sequence[RunRecord], wanted: str | None) -> str:
    """The key of the machine that is ``wanted``, or of the only one. Raises LedgerError for none, or several."""
    wanted = None if wanted is None else str(wanted)  # papermill makes a number of 17
    machines: dict[str, Machine] = {m.key: m for m in dict.fromkeys(r.machine for r in records)}
    listed = "; ".join(f"{m.name} ({key}, torch {m.torch})" for key, m in machines.items())
    if wanted is None and len(machines) > 1:
        raise LedgerError(f"the records come from {len(machines)} machines: choose one by name or key: {listed}")
    exact = [key for key, m in machines.items() if wanted in (None, key, m.name)]
    fits = exact or [key for key, m in machines.items() if wanted and wanted.lower() in m.name.lower()]
    if len(fits) > 1:
        raise LedgerError(f"machine {wanted!r} fits {len(fits)} machines: give the key of one: {listed}")
    if not fits:
        raise LedgerError(f"machine {wanted!r} is not in the records: choose one by name or key: {listed}")
    return fits[0]


def _one_cohort(records: Sequence[RunRecord], cohort: Cohort | None) -> list[RunRecord]:
    """Records of ``cohort``, or of the one measured last; a smoke run hides no other of the same code and images."""
    if cohort is None:
        # A note, or what a search is about to try, does not say which measurements are the latest.
        measured = [r for r in records if r.role not in ("note", "space")] or records
        last = max(measured, key=lambda r: moment(r.date))
        more = [r for r in measured if r.cohort[:3] == last.cohort[:3] and r.plan.window_seconds != SMOKE]
        cohort = max(more or [last], key=lambda r: moment(r.date)).cohort
    return [r for r in records if r.cohort == cohort]


def note(damaged: Iterable[str]) -> None:
    """Print a note of each line of a ledger that cannot be read."""
    for line in damaged:
        say(f"note: {line}")

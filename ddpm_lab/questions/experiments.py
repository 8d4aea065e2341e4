"""Ask a question: measure what the ledger does not have yet, and return the records that answer it.

``run`` is the one call of every notebook. ``measure`` is the measuring half alone, which needs no scipy, no Jupyter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice, missing_to_explain, whole
from ddpm_lab.explain.answer import Answer
from ddpm_lab.explain.bands import DEFAULT
from ddpm_lab.explain.bands import bands as bands_called
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import BESIDE_OTHERS, LOOK, RECOMMENDATION, TRIAL, Study, cohorts, note, read_study, study
from ddpm_lab.files import CHECKOUT, LEDGER, ledgers, output_folder
from ddpm_lab.ledger import PUBLISHED, Head, Ledger, published_trials
from ddpm_lab.measure import hardware
from ddpm_lab.plan import PRESETS, Experiment
from ddpm_lab.questions.ask import answer, every_question, questions
from ddpm_lab.questions.planning import Measured, Planned, Settings, plan_question
from ddpm_lab.questions.recommend import LEAST_MINUTES, recommend
from ddpm_lab.questions.recommendation import combination as together
from ddpm_lab.questions.recommendation import write_settings
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import OWN_DATA, own_data

SEARCHED = ("sets", "resolution", "seeds", "images", "only", "any_batch", "global_batch_size")
"""Settings of a search, and of what it found, alone."""
LAST = "batch_size"
"""Measured by the recommendation too, in the preset ``full``."""


def run(
    name: str,
    *,
    output_dir: str | Path | None = None,
    ledger: Sequence[str | Path] | str | Path | None = None,
    machine: str | None = None,
    published: bool | None = None,
    bands: object = DEFAULT,
    **settings: Any,
) -> Answer:
    """Answer a question from records, measuring first what is missing.

    With ``ledger`` (files to read) or ``machine`` (whose records to show) nothing is measured. Nor is it with
    ``published``, which shows what this machine has measured before, or else the records that came with the checkout;
    None asks for that where measuring takes long and the preset is not ``full``. ``bands`` name parallel efficiencies:
    s000, s001 or a table of your own (see ``explain.bands``). The other settings are those of ``measure``. Raises
    ConfigError, DataError or LedgerError, in one sentence, before any rank is started.
    """
    choice("experiment", name, questions())
    table = bands_called(bands)
    if published is not None and not isinstance(published, bool):
        raise ConfigError(f"published is {published!r}: give True, False or None")
    if ledger is not None or machine is not None:
        shown = _stored(name, output_dir, ledger, machine, settings.get("workload"))
    elif published or (published is None and every_question()[name].about.long and settings.get("preset") != "full"):
        shown = _published(name, output_folder(output_dir))
        usual = {f.name: f.default for f in dataclasses.fields(Settings)}
        idle = [n for n, value in settings.items() if n != "preset" and value is not None and value != usual.get(n)]
        if idle:
            print(f"note: no effect on records that exist: {', '.join(idle)}; published = False measures with them")
    else:
        shown = study_of(measure(name, output_dir=output_dir, **settings))
    return answer(dataclasses.replace(shown, bands=table))


def cohorts_here(name: str, output_dir: str | Path | None) -> list[Study]:
    """Every cohort of this machine and of the code measured last that answers a question; the latest last."""
    output, here = output_folder(output_dir), hardware.machine().key

    def mine(heads: Sequence[Head]) -> list[Head]:
        found = [h for h in of_training(heads, None) if (h.experiment, h.machine.key) == (name, here)]
        latest = set(cohorts(found))
        return [h for h in found if h.cohort in latest]

    records, damaged = Ledger(output / LEDGER).read(mine)
    note(damaged)
    return [study(records, name, cohort=cohort, output_dir=output) for cohort in cohorts(records)]


def _published(name: str, output: Path) -> Study:
    """The records of this machine that answer a question, or else the latest that came with the checkout."""
    here, heads = hardware.machine().key, of_training(Ledger(output / LEDGER).heads()[0], None)
    if any((h.experiment, h.machine.key) == (name, here) for h in heads):
        return _stored(name, output, None, here)
    files = sorted((CHECKOUT / PUBLISHED).glob("*.jsonl"))
    told = [(h.date, file, h.machine.key) for file in files for h in Ledger(file).heads()[0] if h.experiment == name]
    if not told:
        return study([], name, output_dir=output)
    _, file, key = max(told)
    return dataclasses.replace(_stored(name, output, file, key), published=True)


def study_of(measured: Measured) -> Study:
    """The records that answer what was measured."""
    (machine, code, _, plan), name = measured.cohort, measured.experiment.name

    def mine(h: Head) -> bool:
        return h.machine.key == machine and (h.experiment == name or h.role in (TRIAL, LOOK) or name in BESIDE_OTHERS)

    records, damaged = Ledger(measured.ledger).read(lambda heads: [h for h in heads if mine(h)])
    note(damaged)
    configurations, output = measured.experiment.configurations, measured.output_dir
    ids = {c.run_id for c in configurations}
    parts = [  # images of several sizes are several sets of data: each compares only with itself
        study(records, name, run_ids=ids, cohort=(machine, code, data, plan), output_dir=output)
        for data in dict.fromkeys(c.data_sha256 for c in configurations)
    ]
    return dataclasses.replace(
        parts[0],
        records=tuple(r for part in parts for r in part.records),
        trials=tuple(r for part in parts for r in part.trials),
        published_trials=published_trials(),
        measured_sets=measured.measured_sets,
        resolution=measured.planned.campaign.target.resolution,
    )


def records_of(measured: Measured) -> list[RunRecord]:
    """Every record of the configurations that were asked for, of this machine, code and plan."""
    machine, code, _, plan = measured.cohort
    wanted, name = {c.run_id: c.data_sha256 for c in measured.experiment.configurations}, measured.experiment.name
    cohorts = {(machine, code, data, plan) for data in wanted.values()}
    asked = Ledger(measured.ledger).read(lambda hs: [h for h in hs if h.experiment == name and h.cohort in cohorts])
    return [r for r in asked[0] if r.run_id in wanted]


def recommendation(
    *,
    preset: str = "quick",
    minutes: float | None = None,
    train_images: int | None = None,
    output_dir: str | Path | None = None,
    ledger: Sequence[str | Path] | str | Path | None = None,
    machine: str | None = None,
    workload: str | None = None,
    **settings: Any,
) -> Answer:
    """The fastest configuration that a search finds, with all experiments' records of one machine.

    ``quick`` searches where it is given ``minutes``; else it shows the last search of this machine, or without one what
    all questions came to. ``full`` first measures the largest batch that fits. What is recommended is written into
    ``recommended.toml`` too. With ``ledger`` or ``machine`` nothing is measured. ``train_images`` are those of the full
    training that is projected, and ``workload`` is a training of the user's in place of the lab's own; the other
    settings, and the errors, are those of ``recommend.recommend``.
    """
    choice("preset", preset, PRESETS)
    if train_images is not None:
        whole("train_images", train_images, 1)
    output, reads = output_folder(output_dir), ledger is not None or machine is not None
    if not reads and (preset != "quick" if minutes is None else minutes > 0):
        settings = {"preset": preset, "output_dir": output_dir, "workload": workload, **settings}
        if preset == "full":
            largest = {k: v for k, v in settings.items() if k not in SEARCHED}
            try:
                measure(LAST, minutes=None if minutes is None else minutes / 3, **largest)
                minutes = None if minutes is None else minutes * 2 / 3
            except ConfigError as refused:  # the search is worth more
                print(f"note: {LAST}: {refused}")
        if preset == "full" and minutes is not None and minutes < LEAST_MINUTES:
            print("note: what is left of the time is too short for a search")
        else:
            recommend(minutes=minutes, **settings)
    if not reads:
        machine = hardware.machine().key
        if not any(head.machine.key == machine for head in of_training(Ledger(output / LEDGER).heads()[0], workload)):
            return answer(study([], RECOMMENDATION, output_dir=output))
    shown = _stored(RECOMMENDATION, output_dir, ledger, machine, workload)
    shown = dataclasses.replace(shown, train_images=train_images)
    if not reads:
        write_settings(shown)
    return answer(shown)


def of_training(heads: Sequence[Head], workload: str | None) -> list[Head]:
    """Heads of records of a training of the user's; without a name, of everything but such."""
    begin = OWN_DATA if workload is None else own_data(workload)
    return [head for head in heads if head.cohort[2].startswith(begin) == (workload is not None)]


def _stored(
    name: str,
    output_dir: str | Path | None,
    ledger: Sequence[str | Path] | str | Path | None,
    machine: str | None,
    workload: str | None = None,
) -> Study:
    output = output_folder(output_dir)
    files = ledgers([ledger] if isinstance(ledger, str | Path) else ledger, output)
    return read_study(files, name, output, machine=machine, among=lambda heads: of_training(heads, workload))


def measure(name: str, **settings: Any) -> Measured:
    """Measure what the ledger lacks for a question, and say which records answer it; see ``planning.plan_question``.

    Comparisons that have an answer get no more sets; those that were shown to be inconclusive do.
    """
    return undecided(plan_question(name, **settings)).measure()


def undecided(planned: Planned) -> Planned:
    """A question without further sets for the comparisons whose answer was shown before."""
    campaign = planned.campaign
    looked = any(campaign.held.looked(f.baseline.run_id) for f in campaign.experiment.families)
    if campaign.target.seconds == 0 or not looked or missing_to_explain():
        return planned
    answered = frozenset((c.baseline_id, c.run_id) for c in comparisons(study_of(planned.result())) if c.answered)
    return planned.renewed(decided=answered)


def combination(planned: Planned) -> Planned | None:
    """What may be recommended together, measured as ``planned`` is; None for fewer than two, or without SciPy."""
    if missing_to_explain():
        return None
    campaign, config = planned.campaign, planned.campaign.experiment.configurations[0]
    workload = config.work_name if config.is_own else None
    family = together(_stored(RECOMMENDATION, planned.output, None, campaign.machine_key, workload))
    return planned.renewed(Experiment(name=RECOMMENDATION, families=(family,))) if family else None

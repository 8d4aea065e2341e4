"""Ask a question: measure what the ledger does not have yet, and return the records that answer it.

``run`` is the one call of every notebook, and ``measure_all`` what a report measures before its notebooks show it.
``recommend`` searches: everything that it measures is a record, so that a search that is killed goes on where it
stopped.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError, LabError, choice, missing_to_explain, number
from ddpm_lab.config import NETWORKS
from ddpm_lab.data.packed import is_prepared, place_of, read_manifest
from ddpm_lab.declared import Opt
from ddpm_lab.explain import quality, selection
from ddpm_lab.explain.answer import Answer
from ddpm_lab.explain.bands import DEFAULT
from ddpm_lab.explain.bands import bands as bands_called
from ddpm_lab.explain.comparisons import COMPARED, comparisons
from ddpm_lab.explain.selection import LOOK, TRIAL, Study, note, study
from ddpm_lab.files import CHECKOUT, LEDGER, PREPARED, ledgers, output_folder
from ddpm_lab.ledger import PUBLISHED, Ledger, distinct, published_trials, read_all
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.others import measuring
from ddpm_lab.measure.shortfall import COMPILE_SECONDS, PLACE_SECONDS
from ddpm_lab.output import say
from ddpm_lab.plan import OTHERS, PRIMARY, RECOMMENDATION, SEARCH, Cell, Family, Space, usual_network
from ddpm_lab.questions import search
from ddpm_lab.questions.ask import answer, every_question, questions
from ddpm_lab.questions.planning import Settings, plan_question, seconds_of
from ddpm_lab.questions.recommendation import FILE, OTHER_WORK, SEARCHED, write_settings
from ddpm_lab.questions.search import Belief, Ratios
from ddpm_lab.record import TWIN, RunRecord, crowded
from ddpm_lab.training.setting import OWN_DATA, own_data, usual_device

PRIMARY_SHARE = 0.75  # of the time that is left, which the primary comparisons still to come may take
LEAST_SECONDS = 12.0  # less time is not worth the start of a question
MOST_SETS = 60  # of a search; it ends before where little is left to be found, or the time is over; ``smoke`` has one
SMOKE_CELLS = 3
LEAST_MINUTES = 0.5
SEARCH_SHARE, BESIDE_TRIALS = 0.6, 0.3
"""Share of the time that a search may take; the rest measures again what it found, and trains it if that is asked."""
Files = Sequence[str | Path] | str | Path
IMAGES = ("data", "held_out", "image_size")
"""Settings that say what images are asked about: the answer is about no others, where one is given."""


def run(
    name: str,
    *,
    output_dir: str | Path | None = None,
    ledger: Files | None = None,
    machine: str | None = None,
    published: bool | None = None,
    bands: object = DEFAULT,
    **settings: Any,
) -> Answer:
    """Answer a question from records, measuring first what is missing.

    With ``ledger`` (files to read) or ``machine`` (whose records to show) nothing is measured. Nor is it with
    ``published``, which shows what this machine has measured before, or else the records that came with the checkout;
    None asks for that where measuring takes long and the preset is not ``full``. ``bands`` name parallel efficiencies:
    s000, s001 or a table of your own (see ``explain.bands``). The other settings are those of ``plan_question``. Raises
    ConfigError, DataError or LedgerError, in one sentence, before any rank is started.
    """
    choice("experiment", name, questions())
    table = bands_called(bands)
    if published is not None and not isinstance(published, bool):
        raise ConfigError(f"published is {published!r}: give True, False or None")
    if ledger is not None or machine is not None:
        shown = _stored(name, output_folder(output_dir), ledger, machine, workload=settings.get("workload"))
        _tell_idle(name, settings, "preset", "workload", how="without ledger and machine they are measured")
    elif published or (published is None and every_question()[name].about.long and settings.get("preset") != "full"):
        if (network := settings.get("network")) is not None:
            choice("network", network, NETWORKS)
        usual = usual_network(usual_device(settings.get("device")), name)
        shown = _published(name, output_folder(output_dir), network, usual)
        used = ["preset", "network"] if {r.config.network for r in shown.records} == {network} else ["preset"]
        _tell_idle(name, settings, *used, how="published = False measures with them")
    else:
        shown = study_of(undecided(plan_question(name, output_dir=output_dir, **settings)).measure())
    return answer(dataclasses.replace(shown, bands=table))


def _tell_idle(name: str, settings: Mapping[str, Any], *used: str, how: str) -> None:
    """Print a note of settings that change nothing where records are shown that exist, and ``how`` they would."""
    asks = signature(every_question()[name].ask).parameters.values()
    usual = {p.name: p.default for p in (*signature(Settings).parameters.values(), *asks)}
    idle = [n for n, value in settings.items() if n not in used and value is not None and value != usual.get(n)]
    if idle:
        say(f"note: no effect on records that exist: {', '.join(idle)}; {how}")


def measured_here(name: str, output_dir: str | Path | None, *, workload: str | None = None, **of: Any) -> Study:
    """The records of this machine that answer a question, ``of`` a network and device; none where there are none."""
    output, here = output_folder(output_dir), hardware.machine().key
    mine = [r for r in of_training(Ledger(output / LEDGER).read()[0], workload) if r.machine.key == here]
    if not any(name in (r.experiment, RECOMMENDATION) for r in mine):
        return study([], name, output_dir=output)
    return _stored(name, output, None, here, workload=workload, **of)


def _published(name: str, output: Path, network: str | None, usual: str) -> Study:
    """The records of this machine for a question, or else the latest that came with the checkout, its own first.

    Those of a ``network`` that is asked for, or else among published ones of the ``usual`` one, go before others.
    """
    files, here = sorted((CHECKOUT / PUBLISHED).glob("*.jsonl")), hardware.machine().key
    about = f'"experiment":"{name}"'
    found = ((r, file) for file in files for r in Ledger(file).read(about)[0])
    others = [(r, file) for r, file in found if r.experiment == name and r.role != TRIAL]
    for of, of_published in ((network, network or usual), (None, usual), (None, None)):
        if (mine := measured_here(name, output, network=of)).records:
            return mine
        candidates = [
            (r.machine.key == here, r.date, f, r.machine.key)
            for r, f in others
            if of_published in (None, r.config.network)
        ]
        if candidates:
            *_, file, key = max(candidates)
            return dataclasses.replace(_stored(name, output, file, key, network=of_published), published=True)
    return study([], name, output_dir=output)


def study_of(measured: Campaign) -> Study:
    """The records that answer what was measured."""
    (machine, code, _, plan_key), name = measured.cohort, measured.experiment.name

    def mine(r: RunRecord) -> bool:
        beside = name in selection.BESIDE_OTHERS and not r.cohort[2].startswith(OWN_DATA)
        return r.machine.key == machine and (r.experiment == name or r.role in (TRIAL, LOOK) or beside)

    records, damaged = measured.ledger.read()
    note(damaged)
    records = distinct([r for r in records if mine(r)])
    configurations, output = measured.experiment.configurations, measured.output
    if name == "compare":  # where each of the two may have been the other's baseline before
        records = [r for r in records if r.role in (LOOK, TRIAL) or r.baseline_id == configurations[0].run_id]
        records = [_named_as(measured.experiment.families[0], r) for r in records]
    ids = {c.run_id for c in configurations}
    parts = [  # images of several sizes are several sets of data: each compares only with itself
        study(records, name, run_ids=ids, cohort=(machine, code, data, plan_key), output_dir=output)
        for data in dict.fromkeys(c.data_sha256 for c in configurations)
    ]
    return dataclasses.replace(
        parts[0],
        records=tuple(r for part in parts for r in part.records),
        unasked=tuple(r for part in parts for r in part.unasked),
        trials=tuple(r for part in parts for r in part.trials),
        published_trials=published_trials(),
        resolution=measured.target.resolution,
    )


def _named_as(family: Family, record: RunRecord) -> RunRecord:
    """A record under the names that are asked for now: sets count together, whatever their sides were called."""
    if record.role not in COMPARED:
        return record
    labels = {family.baseline.run_id: family.baseline_label, **{c.run_id: label for label, c in family.candidates}}
    label = labels.get(record.run_id, record.label) + " again" * (record.role == TWIN)
    return dataclasses.replace(record, family=family.name, label=label)


def records_of(measured: Campaign) -> list[RunRecord]:
    """Every record of the configurations that were asked for, their trials too."""
    found, wanted = study_of(measured), {c.run_id for c in measured.experiment.configurations}
    mine = (r for r in (*found.records, *found.trials) if quality.speaks_for(r, measured.cohort[1]))
    return [r for r in mine if r.run_id in wanted and r.experiment == found.experiment]


def recommendation(
    *,
    preset: str = "quick",
    minutes: float | None = None,
    output_dir: str | Path | None = None,
    ledger: Files | None = None,
    machine: str | None = None,
    workload: str | None = None,
    **settings: Any,
) -> Answer:
    """The fastest configuration that a search finds, with all experiments' records of one machine.

    ``quick`` searches where it is given ``minutes``; else it shows the last search of this machine, or without one what
    all questions came to. What a search recommends is written into ``recommended.toml``, by ``smoke`` where there is
    none. With ``ledger`` or ``machine`` nothing is measured. ``workload`` is a training of the user's in place of the
    lab's own; the other settings, and the errors, are those of ``recommend``.
    """
    choice("preset", preset, plan.PRESETS)
    output, searches = output_folder(output_dir), preset != "quick" if minutes is None else seconds_of(minutes) > 0
    of: dict[str, Any] = {name: settings.get(name) for name in ("network", "device")}
    if ledger is not None or machine is not None:
        _tell_idle(RECOMMENDATION, settings | {"minutes": minutes}, *of, how="without ledger and machine they count")
        return answer(_stored(RECOMMENDATION, output, ledger, machine, workload=workload, **of))
    named = searches
    if searches:
        settings = {"preset": preset, "output_dir": output_dir, "workload": workload, **settings}
        base = recommend(minutes=minutes, **settings).experiment.configurations[0]
        of = {"network": None if base.is_own else base.network, "device": base.device}
        images = {"data_sha256": base.data_sha256, "searched": base.run_id}
    else:
        used = ("preset", "data", "held_out", "skip_bad", "network", "device", "image_size")
        _tell_idle(RECOMMENDATION, settings, *used, how="give minutes to search with them")
        images = {} if workload else {"data_sha256": _images_of(settings, output)}
        named = any(settings.get(name) not in (None, getattr(Settings(), name)) for name in IMAGES)
    shown = measured_here(RECOMMENDATION, output, workload=workload, **of, **images)
    if not shown.records and not named:
        shown = measured_here(RECOMMENDATION, output, workload=workload, **of)
    if searches and settings.get("only"):  # of nothing else
        shown = dataclasses.replace(shown, records=tuple(r for r in shown.records if r.experiment in SEARCHED))
    writes = searches and (preset != "smoke" or not (output / FILE).exists())
    return dataclasses.replace(answer(shown), settings=write_settings(shown) if writes else None)


def _images_of(settings: Mapping[str, Any], output: Path) -> str:
    """Hash of the images that settings name; one of no images where they were never prepared."""
    how = {name: settings[name] for name in ("image_size", "held_out", "skip_bad") if name in settings}
    folder, _ = place_of(settings.get("data", "synthetic"), output / PREPARED, **how)
    return read_manifest(folder).content_hash if is_prepared(folder) else "never prepared"


def of_training(records: Sequence[RunRecord], workload: str | None) -> list[RunRecord]:
    """Records of a training of the user's; without a name, of everything but such."""
    begin = OWN_DATA if workload is None else own_data(workload)
    return [r for r in records if r.cohort[2].startswith(begin) == (workload is not None)]


def _stored(
    name: str,
    output: Path,
    ledger: Files | None,
    machine: str | None,
    *,
    workload: str | None = None,
    searched: str | None = None,
    **of: Any,
) -> Study:
    """The records that answer a question, of the lab's trainer where it has any, else of the last of the user's.

    Those ``of`` a network, device and data, where these are named, and of searches that set out from ``searched`` (a
    run id).
    """
    records, damaged = read_all(ledgers([ledger] if isinstance(ledger, str | Path) else ledger, output))
    note(damaged)
    if machine is not None and records:
        key = selection.machine_key(records, machine)
        records = [r for r in records if r.machine.key == key]
    other = () if name != RECOMMENDATION else ("profile", *OTHER_WORK)
    asked = [r for r in records if r.experiment == name or (other and r.experiment not in other)]
    found = of_training(records, workload)
    if searched is not None:
        found = [r for r in found if r.role == TRIAL or r.experiment not in SEARCHED or r.baseline_id == searched]
    if workload is None and of.get("network") is None and asked and set(asked).isdisjoint(found):
        found = [r for r in records if r.cohort[2] == asked[-1].cohort[2]]
    shown = study(selection.about(selection.with_looks(found, records), **of), name, machine=machine, output_dir=output)
    return dataclasses.replace(shown, published_trials=published_trials())


# --- measuring --------------------------------------------------------------------------------------------------------


def undecided(planned: Campaign) -> Campaign:
    """A question without further sets for the comparisons whose answer was shown; inconclusive ones get more."""
    looked = any(planned.held.looked(f.baseline.run_id) for f in planned.experiment.families)
    if planned.target.seconds == 0 or not looked or missing_to_explain():
        return planned
    answered = frozenset((c.baseline_id, c.run_id) for c in comparisons(study_of(planned)) if c.answered)
    return planned.renewed(decided=answered)


def measure_all(asked: Mapping[str, Mapping[str, Any]], *, seconds: float, say: Callable[[str, str], None]) -> int:
    """Measure what questions (name -> settings) lack within ``seconds``; returns the sets that were added.

    The primary comparisons of all come first, one that would take the time of the rest after these, then with what
    time is left all others: a slow machine loses rows of tables, and few answers. What compiles takes longest, and
    begins when the others have answers, if there is time. What has been shown before gets no further sets. ``say`` is
    called with a question and a line of progress, or with why it cannot be measured: the others go on. Costs and
    scatter decide how the time is divided, and that a large difference needs fewer sets.
    """
    ends, added, measured = time.monotonic() + seconds, list[int](), dict[str, Campaign]()

    def spend(name: str, planned: Campaign, seconds: float, *stages: str, yields: bool = False) -> None:
        with _going_on(name, say):
            measured[name] = planned.measure(seconds=seconds, stages=stages, look=False, yields=yields)
            added.append(measured[name].measured_sets)

    def finish(*, all_time: bool) -> None:
        for name in sorted(measured, key=lambda name: measured[name].least_seconds()):
            left, least = ends - time.monotonic(), measured[name].least_seconds()
            if 0 < least <= left:
                spend(name, measured[name], left if all_time else least, PRIMARY)

    for count, name in enumerate(asked):
        with _going_on(name, say):
            planned = plan_question(name, further=False, say=partial(say, name), **asked[name])
            if planned.missing():
                if compiling := planned.compiling_seconds():
                    finish(all_time=False)
                    if measured and ends - time.monotonic() < compiling:
                        raise ConfigError("compiling would take longer than the time that is left")
                weight = 1 + compiling / COMPILE_SECONDS  # in units of a comparison
                left = (ends - time.monotonic()) * PRIMARY_SHARE * weight / (weight + len(asked) - count - 1)
                spend(name, planned, max(LEAST_SECONDS, left), PRIMARY, yields=count < len(asked) - 1)
    finish(all_time=True)
    for count, (name, planned) in enumerate(measured.items()):
        left = (ends - time.monotonic()) / (len(measured) - count)
        spend(name, planned, max(left, 1.0), OTHERS)
    date = hardware.environment().date
    for name, done in measured.items():  # all answers are shown at once
        with _going_on(name, say):
            done.look(date)
    return sum(added)


@contextlib.contextmanager
def _going_on(name: str, say: Callable[[str, str], None]) -> Iterator[None]:
    """Turn what is refused of one question into a line: the others go on."""
    try:
        yield
    except LabError as error:
        say(name, f"not measured: {error}")


# --- a search, and the sets that measure again what it found ----------------------------------------------------------


def recommend(
    *,
    preset: str = "quick",
    minutes: float | None = None,
    sets: int | None = None,
    resolution: float | None = None,
    seeds: Annotated[int | None, Opt("trials of what is found, from so many seeds (default: none; full: 8)")] = None,
    images: Annotated[int | None, Opt("images that each trial trains on (default: the preset's)")] = None,
    only: Mapping[str, Sequence[object]] | None = None,
    global_batch_size: int | None = None,
    **settings: Any,
) -> Campaign:
    """Search the fastest settings, then measure the baseline, the winner and the steps between them in new sets.

    ``smoke`` tries a few combinations in one set; ``quick`` and ``full`` search until little more can be gained.
    ``minutes`` is the total time. ``only`` and ``global_batch_size`` restrict the search (see ``search``); ``sets``,
    ``resolution``, ``seeds`` and ``images`` apply to the new sets. ``seeds`` defaults to 8 in ``full``, else to no
    trials. Other settings and errors are those of ``planning.plan_question``. Returns the campaign of the new sets.
    """
    if minutes is not None and not (number(minutes) and minutes >= LEAST_MINUTES):
        raise ConfigError(
            f"minutes is {minutes!r}: a search and the sets that measure again what it found take longer; give a "
            f"number of at least {LEAST_MINUTES}, or leave it out for no limit"
        )
    begun, seconds = time.monotonic(), seconds_of(minutes)
    trained = preset == "full" if seeds is None else bool(seeds)
    search_ends, ends = begun + seconds * (BESIDE_TRIALS if trained else SEARCH_SHARE), begun + seconds
    settings["preset"] = preset
    planned = plan_question(SEARCH, only=only, global_batch_size=global_batch_size, **settings)
    space = planned.experiment.space
    if space is None:  # the user's training runs its own steps, so nothing can be set
        raise ConfigError("; ".join(reason for _, _, reason in planned.experiment.left_out))
    base = space.baseline  # the winner is measured on the same device, cores and network
    settings |= {"device": base.device, "cores": base.threads * base.node_size or hardware.usable_cores()}
    settings |= {"space": space, "sets": sets, "resolution": resolution, "seeds": seeds, "images": images}
    settings |= {} if base.is_own else {"network": base.network}
    plan_question(RECOMMENDATION, steps=[space.start], **settings)  # raise its errors before the search
    with measuring(planned.progress.always) as waited:
        planned = planned.renewed() if waited else planned
        while True:
            may_win = _admissible(planned, space)
            belief = find(planned, may_win, search_ends, preset)
            winner = belief.winner(may_win)
            left = None if minutes is None else max(1.0, ends - time.monotonic()) / 60
            again = plan_question(RECOMMENDATION, steps=search.path(belief, winner), minutes=left, **settings)
            _note_space(again, space)
            measured = again.measure()
            if time.monotonic() > ends or winner in _admissible(planned, space):
                return measured
            # Trials call the winner worse: search without it.


def _admissible(campaign: Campaign, space: Space) -> list[Cell]:
    """Return the cells that may win, by the trials in the ledger and published ones; without SciPy nothing is known."""
    if missing_to_explain():
        return search.admissible(space, lambda _: "")
    trial = (TRIAL, campaign.machine_key)
    records = [r for r in campaign.ledger.read()[0] if (r.role, r.machine.key) == trial]
    trials, code = quality.Trials(records, published_trials()), campaign.instrument.code.key
    return search.admissible(space, lambda config: trials.verdict(space.baseline, config, code).verdict)


def find(campaign: Campaign, among: Sequence[Cell], ends: float = math.inf, preset: str = "quick") -> Belief:
    """Go on until ``ends`` with the race between cells that may win (``among``), from what the ledger holds."""
    progress, space, cohort = campaign.progress, campaign.experiment.space, campaign.cohort
    assert space is not None
    (family,), cells, base = campaign.experiment.families, space.cells, space.baseline
    records = [r for r in campaign.ledger.read()[0] if r.experiment == SEARCH and r.cohort == cohort]
    found, most = search.observations(records, base.run_id), min(MOST_SETS, search.most_sets(len(among)))
    if preset == "smoke":
        eager = [c for c in among if cells[c].compile == "off"]
        first = search.believe(space, []).next_cells(eager, lambda _: 1.0, math.inf)[:SMOKE_CELLS]
        among, most = [space.start, *first], 1 - len(found)

    def measure(chosen: list[Cell]) -> Ratios | None:
        progress.prefix = f"set {len(found) + 1} of the search,"
        progress.always(f"trying {'; '.join(map(space.changed, chosen))}")
        new = campaign.add_set(family, [(space.changed(c), cells[c]) for c in chosen])
        records.extend(new)
        # Of a set that others disturbed nothing is known, and it is measured again unless the first ones all were.
        again = crowded(new) and (any(found) or len(found) + 1 < plan.LEAST_SETS)
        return next(iter(search.observations(new, base.run_id)), {} if again else None)

    def seconds_of(cell: Cell) -> float:
        known = any(r.status == "ok" and r.run_id == cells[cell].run_id for r in records)
        cold = cells[cell].compile != "off" and not known
        took = [r.stages["compile"] for r in records if r.compile_cache == "cold" and "compile" in r.stages]
        seen = campaign.held.place_seconds(family.baseline.run_id)
        # A set that compiled took longer, and will not again.
        place = min(campaign.lacks.costs.get(family.name) or [PLACE_SECONDS if seen is None else seen])
        return place + cold * max(took, default=COMPILE_SECONDS)

    how: dict[str, Any] = {"seconds_of": seconds_of, "seconds_left": lambda: ends - time.monotonic(), "most_sets": most}
    return search.race(space, found, among, measure, **how)


def _note_space(campaign: Campaign, space: Space) -> None:
    """Record what the search could choose from, and which family measures again what it found, once for each answer."""
    (family,) = campaign.experiment.families
    label = family.candidates[0][0] if family.candidates else family.baseline_label
    record = campaign.unmeasured("space", family.name, label, space.baseline, space.baseline)
    record = dataclasses.replace(record, space=space.as_dict())
    here = ("space", record.machine.key, record.code_version)
    earlier = [r for r in campaign.ledger.read()[0] if (r.role, *r.cohort[:2]) == here]
    said = attrgetter("family", "space", "run_id", "plan")
    if not earlier or said(earlier[-1]) != said(record):
        campaign.ledger.append([record])

"""Search the fastest configuration of this machine, and measure again what the search found.

Everything that is measured is a record: a search that is killed goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError, missing_to_explain, number
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import quality
from ddpm_lab.ledger import published_trials
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.others import measuring
from ddpm_lab.measure.process import sweep
from ddpm_lab.measure.shortfall import COMPILE_SECONDS, PLACE_SECONDS
from ddpm_lab.plan import RECOMMENDATION, SEARCH, Cell, Space
from ddpm_lab.questions import search
from ddpm_lab.questions.planning import Planned, plan_question
from ddpm_lab.questions.search import Belief, Ratios
from ddpm_lab.record import RunRecord

MOST_SETS = 60
"""Of a search; it ends before where little is left to be found, or the time is over. ``smoke`` has one."""
SMOKE_CELLS = 3
LEAST_MINUTES = 0.5
SEARCH_SHARE, BESIDE_TRIALS = 0.6, 0.3
"""Share of the time that a search may take; the rest measures again what it found, and trains it if that is asked."""


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
) -> Planned:
    """Search, then measure baseline, winner and the steps between them in sets of their own.

    ``smoke`` tries a handful in one set, ``quick`` and ``full`` search until little more can be gained; ``minutes`` is
    the time of all of it. ``only`` and ``global_batch_size`` say what is searched (see ``search``); ``sets``,
    ``resolution``, ``seeds`` and ``images`` are of what is measured again, without ``seeds`` 8 in ``full``, else no
    trials. The other settings, and the errors, are those of ``planning.plan_question``.
    """
    if minutes is not None and not (number(minutes) and minutes >= LEAST_MINUTES):
        raise ConfigError(
            f"minutes is {minutes!r}: a search and the sets that measure again what it found take longer; give a "
            f"number of at least {LEAST_MINUTES}, or leave it out for no limit"
        )
    settings["preset"] = preset
    seconds = math.inf if minutes is None else 60 * minutes
    ends = time.monotonic() + seconds
    trained = preset == "full" if seeds is None else bool(seeds)
    search_ends = ends - (0.0 if minutes is None else seconds * (1 - (BESIDE_TRIALS if trained else SEARCH_SHARE)))
    limits: dict[str, Any] = {"only": only, "global_batch_size": global_batch_size}
    planned = plan_question(SEARCH, **limits, **settings)
    space = planned.campaign.experiment.space
    if space is None:  # the user's training does its own steps
        raise ConfigError("; ".join(reason for _, _, reason in planned.campaign.experiment.left_out))
    settings |= _settings_of(space.baseline)
    settings |= {"space": space, "sets": sets, "resolution": resolution, "seeds": seeds, "images": images}
    plan_question(RECOMMENDATION, steps=[space.start], **settings)  # what it refuses is refused now
    sweep()
    with measuring(planned.progress.always) as waited:
        planned = planned.renewed() if waited else planned
        while True:
            may_win = _admissible(planned.campaign, space)
            belief = find(planned, may_win, lambda: search_ends - time.monotonic(), preset)
            winner = belief.winner(may_win)
            left = None if minutes is None else max(1.0, ends - time.monotonic()) / 60
            again = plan_question(RECOMMENDATION, steps=search.path(belief, winner), minutes=left, **settings)
            _note_space(again.campaign, space)
            measured = again.measure()
            if time.monotonic() > ends or winner in _admissible(planned.campaign, space):
                return dataclasses.replace(measured, before=(measured.before[0] + planned.campaign.measured_sets, 0))
            # Trials call the winner worse: search without it.


def _settings_of(config: RunConfig) -> dict[str, Any]:
    """Settings with which a question measures on the device, cores and network of a configuration."""
    cores = config.threads * config.node_size or hardware.usable_cores()
    network = {} if config.is_own else {"network": config.network}
    return {"device": config.device, "cores": cores, **network}


def _admissible(campaign: Campaign, space: Space) -> list[Cell]:
    """Return the cells that may win, by the trials in the ledger and published ones; without SciPy nothing is known."""
    if missing_to_explain():
        return search.admissible(space, lambda _: "")
    mine = (campaign.machine_key, space.baseline.data_sha256)
    records, _ = campaign.ledger.read(
        lambda heads: [h for h in heads if h.role == "quality" and (h.machine.key, h.cohort[2]) == mine]
    )
    trials, code = quality.Trials(records, published_trials()), campaign.instrument.code.key
    return search.admissible(space, lambda config: trials.verdict(space.baseline, config, code).verdict)


def find(
    planned: Planned, among: Sequence[Cell], seconds_left: Callable[[], float] = lambda: math.inf, preset: str = "quick"
) -> Belief:
    """Go on with the race between the cells that may win (``among``) from what the ledger holds."""
    campaign, progress, space = planned.campaign, planned.progress, planned.campaign.experiment.space
    assert space is not None
    (family,), cells, base = campaign.experiment.families, space.cells, space.baseline
    cohort = (campaign.machine_key, campaign.instrument.code.key, base.data_sha256, campaign.target.plan.key)
    records, _ = campaign.ledger.read(lambda heads: [h for h in heads if h.experiment == SEARCH and h.cohort == cohort])
    found, most = search.observations(records, base.run_id), min(MOST_SETS, search.most_sets(len(among)))
    if preset == "smoke":
        eager = [c for c in among if cells[c].compile == "off"]
        first = search.believe(space, []).next_cells(eager, lambda _: 1.0, math.inf)[:SMOKE_CELLS]
        among, most = [space.start, *first], 1 - len(found)

    def measure(chosen: list[Cell]) -> Ratios | None:
        progress.prefix = f"set {len(found) + 1} of the search,"
        progress.always(f"trying {'; '.join(map(space.changed, chosen))}")
        new = campaign.measure(family, [(space.changed(c), cells[c]) for c in chosen])
        records.extend(new)
        return next(iter(search.observations(new, space.baseline.run_id)), None)

    def seconds_of(cell: Cell) -> float:
        known = any(r.status == "ok" and r.run_id == cells[cell].run_id for r in records)
        cold = cells[cell].compile != "off" and not known
        took = [r.stages["compile"] for r in records if r.compile_cache == "cold" and "compile" in r.stages]
        seen = campaign.held.place_seconds(family.baseline.run_id)
        # A set that compiled took longer, and will not again.
        place = min(campaign.lacks.costs.get(family.name) or [PLACE_SECONDS if seen is None else seen])
        return place + cold * max(took, default=COMPILE_SECONDS)

    return search.race(space, found, among, measure, seconds_of=seconds_of, seconds_left=seconds_left, most_sets=most)


def _note_space(campaign: Campaign, space: Space) -> None:
    """Record what the search could choose from, and which family measures again what it found, once for each answer."""
    (family,) = campaign.experiment.families
    record = RunRecord(
        set_id="",
        experiment=RECOMMENDATION,
        family=family.name,
        role="space",
        label=family.candidates[0][0] if family.candidates else family.baseline_label,
        config=space.baseline,
        baseline_id=space.baseline.run_id,
        plan=campaign.target.plan,
        environment=hardware.environment(),
        code_version=campaign.instrument.code.key,
        data_name=campaign.instrument.data_name,
        space=space.as_dict(),
    )
    here = ("space", record.machine.key, record.code_version)
    told, _ = campaign.ledger.read(lambda heads: [h for h in heads if (h.role, h.machine.key, h.cohort[1]) == here])
    said = attrgetter("family", "space", "run_id", "plan")
    if not told or said(told[-1]) != said(record):
        campaign.ledger.append([record])

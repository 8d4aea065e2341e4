"""Search the fastest configuration of this machine, and measure again what the search found.

Everything that is measured is a record: a search that is killed goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ddpm_lab.checks import ConfigError, missing_to_explain, number
from ddpm_lab.explain import bayesian, quality
from ddpm_lab.explain.bayesian import Belief, Ratios
from ddpm_lab.ledger import published_trials
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.others import measuring
from ddpm_lab.measure.process import sweep
from ddpm_lab.measure.shortfall import COMPILE_SECONDS, PLACE_SECONDS
from ddpm_lab.plan import RECOMMENDATION, SEARCH
from ddpm_lab.plan import preset as preset_called
from ddpm_lab.questions.planned import Measured, Planned
from ddpm_lab.questions.planning import plan_question
from ddpm_lab.record import RunRecord
from ddpm_lab.space import BATCH, Cell, Space

MOST_SETS = 60
"""Of a search; it ends before where little is left to be found, or the time is over. ``smoke`` has one."""
SMOKE_CELLS = 3
LEAST_MINUTES = 0.5
AFTERWARDS, FOR_TRIALS = 0.4, 0.7
"""Shares of the time that a search leaves: at most, for measuring again what it found; with trials, for these too."""


def recommend(
    *,
    preset: str = "quick",
    minutes: float | None = None,
    sets: int | None = None,
    resolution: float | None = None,
    seeds: int | None = None,
    images: int | None = None,
    only: Mapping[str, Sequence[object]] | None = None,
    any_batch: bool = False,
    global_batch_size: int | None = None,
    **settings: Any,
) -> Measured:
    """Search, then measure baseline, winner and the steps between them in sets of their own.

    Args:
        preset: smoke tries a handful in one set, quick and full search until little more can be gained.
        minutes: time budget of all of it; None is no limit.
        sets, resolution: of the sets that measure again, as in ``experiments.measure``.
        seeds, images: trials of what was found, as in ``experiments.measure``; None is none, 8 seeds in ``full``.
        only: settings that are held to some of their values.
        any_batch: choose any batch, although another batch is another training; else a batch is chosen only where
            trials have shown that it learns as much from as many images.
        global_batch_size: the baseline's; None is the preset's.
        settings: those of ``planning.plan_question``.

    Raises:
        ConfigError: a setting cannot be run here, or a budget makes no sense.
        DataError: there are no images where ``data`` says.
        LedgerError: the output folder cannot be written.
    """
    _check(minutes)
    begun = time.monotonic()
    total = math.inf if minutes is None else 60 * minutes
    asked: dict[str, Any] = {"only": only, "any_batch": any_batch, "global_batch_size": global_batch_size}
    planned = plan_question(SEARCH, preset=preset, **asked, **settings)
    campaign, space = planned.campaign, planned.campaign.experiment.space
    if space is None:  # of the user's training, which does its own steps
        raise ConfigError("; ".join(reason for _, _, reason in campaign.experiment.left_out))
    settings = {**settings, "device": space.baseline.device}
    settings["cores"] = space.baseline.threads * space.baseline.node_size or hardware.usable_cores()
    if not space.baseline.is_own:
        settings["network"] = space.baseline.network
    settings |= {"preset": preset, "sets": sets, "resolution": resolution, "space": space}
    settings |= {"seeds": seeds, "images": images}
    plan_question(RECOMMENDATION, steps=[space.start], **settings)  # what it refuses is refused now
    wanted, trained = sets or preset_called(preset).sets, preset == "full" if seeds is None else bool(seeds)

    def seconds_left(steps: int) -> float:
        """For the search, when what it found is so many steps from the baseline."""
        if minutes is None:
            return math.inf
        again = 1.8 * _place_seconds(campaign) * wanted * (steps + 2)  # sets of twice the turns, baseline and twin too
        later = FOR_TRIALS * total if trained else min(AFTERWARDS * total, again)
        return total - (time.monotonic() - begun) - later

    sweep()
    with measuring(planned.progress.always) as waited:
        if waited:
            planned = planned.renewed()
            campaign = planned.campaign
        while True:
            among = _admissible(campaign, space)
            belief = find(planned, among, seconds_left, preset)
            winner = belief.winner(among)
            steps = bayesian.path(belief, winner, last=list(space.settings).index(BATCH))
            left = None if minutes is None else max(1.0, total - (time.monotonic() - begun)) / 60
            fresh = plan_question(RECOMMENDATION, steps=steps, minutes=left, **settings)
            _note_space(fresh.campaign, space)
            done = fresh.measure()
            over = total - (time.monotonic() - begun) <= 0
            if over or winner in _admissible(campaign, space):  # what trials call worse is searched without
                return dataclasses.replace(done, measured_sets=done.measured_sets + campaign.measured_sets)


def _check(minutes: float | None) -> None:
    if minutes is None:
        return
    if not (number(minutes) and 0 < minutes < math.inf):
        raise ConfigError(f"minutes is {minutes!r}: give a number above 0, or leave it out for no limit")
    if minutes < LEAST_MINUTES:
        raise ConfigError(
            f"minutes is {minutes!r}: a search and the sets that measure again what it found take longer; give "
            f"{LEAST_MINUTES} or more, or the preset smoke"
        )


def _admissible(campaign: Campaign, space: Space) -> list[Cell]:
    """The cells that may win, by the trials in the ledger and published ones; without scipy no quality is known."""
    if missing_to_explain():
        return bayesian.admissible(space, lambda _: "")
    key, data = campaign.machine_key, space.baseline.data_sha256
    records, _ = campaign.ledger.read(
        lambda heads: [h for h in heads if h.role == "quality" and (h.machine.key, h.cohort[2]) == (key, data)]
    )
    trials, code = quality.Trials(records, published_trials()), campaign.instrument.code.key
    return bayesian.admissible(space, lambda config: trials.verdict(space.baseline, config, code).verdict)


def find(
    planned: Planned,
    among: Sequence[Cell],
    seconds_left: Callable[[int], float] = lambda _: math.inf,
    preset: str = "quick",
) -> Belief:
    """Race on from what the ledger holds, and then look what other batches would gain, if they may not be chosen.

    ``among`` are the cells that may win. ``seconds_left`` is what may still be spent, where the best so far is so many
    changes from the baseline.
    """
    campaign, progress, space = planned.campaign, planned.progress, planned.campaign.experiment.space
    assert space is not None
    (family,), cells = campaign.experiment.families, space.cells
    cohort = (campaign.machine_key, campaign.instrument.code.key, space.baseline.data_sha256, campaign.target.plan.key)
    records, _ = campaign.ledger.read(lambda heads: [h for h in heads if h.experiment == SEARCH and h.cohort == cohort])
    compiled, took = set[str](), list[float]()

    def learn(records: Sequence[RunRecord]) -> list[Ratios]:
        compiled.update(r.run_id for r in records if r.status == "ok")
        took.extend(r.stages["compile"] for r in records if r.compile_cache == "cold" and "compile" in r.stages)
        return bayesian.observations(records, space.baseline.run_id)

    found = learn(records)
    if preset == "smoke":
        alone = [c for c in among if sum(map(bool, c)) == 1 and cells[c].compile == "off"]
        alone.sort(key=bayesian.alone_order)
        first = [space.start, *([space.guess] if space.guess in among else []), *alone]
        among = list(dict.fromkeys(first))[: SMOKE_CELLS + 1]

    def measure(chosen: list[Cell]) -> Ratios | None:
        progress.prefix = f"set {len(found) + 1} of the search,"
        progress.always(f"trying {'; '.join(space.changed(c, space.start) for c in chosen)}")
        new = campaign.measure(family, [(space.changed(c, space.start), cells[c]) for c in chosen])
        return next(iter(learn(new)), None)

    def seconds_of(cell: Cell) -> float:
        cold = cells[cell].compile != "off" and cells[cell].run_id not in compiled
        return _place_seconds(campaign) + cold * max(took, default=COMPILE_SECONDS)

    def left(belief: Belief) -> float:
        return seconds_left(sum(map(bool, belief.winner(among))))

    most = 1 - len(found) if preset == "smoke" else min(MOST_SETS, bayesian.most_sets(len(among)))
    belief = bayesian.race(space, found, among, measure, seconds_of=seconds_of, seconds_left=left, most_sets=most)
    winner, place = belief.winner(among), list(space.settings).index(BATCH)
    other_batches = ((*winner[:place], i, *winner[place + 1 :]) for i in range(len(space.settings[BATCH])))
    beside = [c for c in other_batches if c in cells and c not in {*among, *belief.lost}]
    new = [c for c in beside if not belief.sets.get(c)][: bayesian.AT_ONCE - 1]
    if not new or space.any_batch or preset == "smoke" or left(belief) < sum(map(seconds_of, [winner, *new])):
        return belief
    looked = measure([winner] * (winner != space.start) + new)
    return bayesian.believe(space, [*found, *([looked] if looked else [])])


def _place_seconds(campaign: Campaign) -> float:
    """What a configuration takes in a set of the search."""
    (family,) = campaign.experiment.families
    if costs := campaign.lacks.costs.get(family.name):
        return min(costs)  # a set that compiled took longer, and will not again
    seen = campaign.held.place_seconds(family.baseline.run_id)
    return PLACE_SECONDS if seen is None else seen


def _note_space(campaign: Campaign, space: Space) -> None:
    """Say what the search could choose from, and which family measures again what it found, once for each answer."""
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
        environment=environment(),
        code_version=campaign.instrument.code.key,
        data_name=campaign.instrument.data_name,
        space=space.as_dict(),
    )
    here = (record.machine.key, record.code_version)
    told, _ = campaign.ledger.read(
        lambda heads: [h for h in heads if h.role == "space" and (h.machine.key, h.cohort[1]) == here]
    )
    said = attrgetter("family", "space", "run_id", "plan")
    if not told or said(told[-1]) != said(record):
        campaign.ledger.append([record])

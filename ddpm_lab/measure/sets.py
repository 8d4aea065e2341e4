"""Measure one set: isolated groups, built and warmed one after the other, then short timed windows in turns."""

from __future__ import annotations

import dataclasses
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.seat import Instrument, Member, Seat, memory_held
from ddpm_lab.plan import USUAL_TURNS, Plan
from ddpm_lab.record import RunRecord


def balanced_orders(count: int, turns: int, seed: int) -> list[list[int]]:
    """Orders of ``count`` configurations over ``turns`` turns.

    Rows of a Williams square (Williams 1949): over a whole square every configuration stands at every position equally
    often and follows every other equally often. Rows and names are shuffled by ``seed`` (the set's own), so that what
    one set leaves unbalanced the sets together do not.
    """
    rng = random.Random(seed)
    zigzag = [(i + 1) // 2 if i % 2 else count - i // 2 for i in range(count)]
    rows = [[(step + shift) % count for step in zigzag] for shift in range(count)]
    if count % 2:  # an odd square is balanced for who goes before only together with its mirror image
        rows += [row[::-1] for row in rows]
    rng.shuffle(rows)
    names = list(range(count))
    rng.shuffle(names)
    return [[names[i] for i in rows[turn % len(rows)]] for turn in range(turns)]


def steps_of_windows(
    plan: Plan, batch_sizes: Sequence[int], step_seconds: Sequence[float], prefetch_batches: Sequence[int]
) -> list[int]:
    """Steps of a timed window for each configuration of a set, so that all process the same number of images.

    The fastest configuration fills ``plan.window_seconds`` and every one does ``plan.window_steps`` steps; where loader
    workers prefetch, at least 20 steps and ten times the prefetch queue. The slowest window is held to about ten times
    ``plan.window_seconds`` unless the fewest steps already take longer: a ratio that large needs no long window.
    """
    least = plan.window_steps
    if any(count > 1 for count in prefetch_batches):  # one batch ahead is made for each one that is taken
        least = max(least, 20, 10 * max(prefetch_batches))
    unit = math.lcm(*batch_sizes)
    pairs = list(zip(batch_sizes, step_seconds, strict=True))
    needed = max(b * max(least, math.ceil(plan.window_seconds / s)) for b, s in pairs)
    floor = max(b * least for b in batch_sizes)
    slowest = max(s / b for b, s in pairs)  # seconds per image
    affordable = max(floor, 10 * plan.window_seconds / slowest)
    images = math.ceil(min(needed, affordable) / unit) * unit
    return [images // b for b in batch_sizes]


BUDGET_SECONDS = 6.0
"""Rounds beyond the first are taken while both kinds of window together stay below this."""


def take_budget(seat: Seat) -> dict[str, Any]:
    """Take the time budget of a warm group: windows as training runs, in turns with synchronised ones.

    A window holds a whole number of the steps between two updates of the averaged weights, at least as many as a timed
    window, so that a phase that comes rarely has its right share. Raises GroupFailed.

    Returns:
        ``steps`` behind each number, ``rounds``, ``others_cores`` (cores that other processes kept busy meanwhile;
        None: unknown), ``stolen_seconds`` and ``state`` (as in a window's record), and ``ranks``: for each rank its
        ``unsynchronised`` and ``synchronised`` windows, in seconds per step.
    """
    plan, step_seconds = seat.plan, seat.warm_step_seconds
    least = max(plan.window_steps, 10 * seat.prefetch_batches, math.ceil(plan.window_seconds / max(step_seconds, 1e-6)))
    cycle = seat.config.optimizer.ema_every
    steps = -(-least // cycle) * cycle
    rounds = max(1, min(plan.turns or USUAL_TURNS, int(BUDGET_SECONDS / (2 * steps * max(step_seconds, 1e-6)))))
    with seat.watched() as watch:
        ranks = seat.alive.budget(
            settle=max(plan.settle_steps, seat.prefetch_batches),
            steps=steps,
            rounds=rounds,
            limit=max(seat.instrument.limits.window_seconds, 20 * step_seconds),
        )
    return {
        "steps": steps * rounds,
        "rounds": rounds,
        "others_cores": None if watch.others_cores is None else round(watch.others_cores, 3),
        "stolen_seconds": watch.stolen_seconds,
        "state": watch.state | memory_held(ranks),
        "ranks": ranks,
    }


def with_traces(budget: dict[str, Any], profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """The budget with what each rank's profiled steps say of the same phases, in seconds per step, to check it by."""
    ranks = [
        {
            **rank,
            "profiled": {
                "step_seconds": profile["wall_seconds"] / profile["steps"],
                "phases": {name: seconds / profile["steps"] for name, seconds in profile["phases"].items()},
            },
        }
        for rank, profile in zip(budget["ranks"], profiles, strict=True)
    ]
    return {**budget, "ranks": ranks}


CARD_SHARE = 0.7
"""Groups share a GPU only while they use less than this share of its memory."""


WINDOW_OVERHEAD_SECONDS = 0.03
"""What waking a group and reading the machine's state take beside a window."""
PROFILED_STEPS = 5
TURNS_ALONE = 6
"""Turns of a set whose groups are started for every turn, where nothing else is planned."""

Turns = Callable[[float, float], int]
"""From the seconds that a set's groups took to start, and those of one turn, to the turns of the set."""
_TimedWindow = Callable[[Seat, int, int, int], None]
"""Times a window of a seat: its turn, its position in the turn, and its steps."""
Work = Callable[[Seat], dict[str, Any]]
"""What a group does on its own: from its seat to what the record says of it, by name."""


class _DoesNotFitTogether(Exception):  # noqa: N818 - a turn of events, not a defect
    """The groups of a set cannot share the card."""


class _SetRun:
    """One set of one family while it is measured; the first member is the baseline."""

    def __init__(
        self,
        instrument: Instrument,
        *,
        experiment: str,
        family: str,
        plan: Plan,
        members: list[Member],
        turns: Turns | None = None,
    ) -> None:
        self.instrument, self.experiment, self.family, self.plan = instrument, experiment, family, plan
        self.turns = turns
        self.seats = [Seat(member, plan, instrument) for member in members]
        token = secrets.token_hex(3)
        self.set_id = f"{datetime.now():%Y%m%d-%H%M%S}-{token}"
        self.seed = int(token, 16)
        self.environment = environment()

    def together(self) -> None:
        """Every group lives for the whole set, one awake at a time."""
        begun = time.monotonic()
        for i in balanced_orders(len(self.seats), 1, self.seed)[0]:
            self.guard(self.seats[i], self._open_beside_others)
            if self.baseline_lost():
                return
        steps = self._steps(self.seats)
        if not self.plan.turns:
            assert self.turns is not None, "a plan without turns needs a rule for them"
            turn = sum(s.window_seconds(steps[s.member]) for s in self.seats if not s.failure)
            turns = self.turns(time.monotonic() - begun, turn + WINDOW_OVERHEAD_SECONDS * len(steps))
            self.plan = dataclasses.replace(self.plan, turns=turns)
        turns = self.plan.turns
        candidates = [s for s in self.seats if s.member.role == "candidate"]
        if candidates and all(s.failure for s in candidates):
            turns = 1  # nothing is left to compare: the baseline's speed is all there is to learn
        self._take_turns(Seat.window, steps, turns)
        if not self.baseline_lost():
            for seat in self.seats:
                self.guard(seat, Seat.finish)

    def one_at_a_time(self) -> None:
        """The fallback where groups do not fit on the card together: each turn starts each group again."""
        for seat in self.seats:
            seat.close()
        self.seats = [Seat(seat.member, self.plan, self.instrument) for seat in self.seats]
        for seat in self.seats:  # once without a window: equal work needs everybody's speed
            self.guard(seat, self._open_and_finish)
        if self.baseline_lost():
            return
        steps = self._steps(self.seats)
        turns = self.plan.turns or TURNS_ALONE  # each turn costs a start of every group
        self.plan = dataclasses.replace(self.plan, turns=turns)
        self._take_turns(self._visit, steps, turns, ", each group on its own")

    def _take_turns(self, window: _TimedWindow, steps: dict[Member, int], turns: int, how: str = "") -> None:
        """Every living member's window in every turn, until the baseline or its twin is lost."""
        for turn, order in enumerate(balanced_orders(len(self.seats), turns, self.seed)):
            self.instrument.progress(f"turn {turn + 1} of {turns}{how}")
            for position, i in enumerate(order):
                self.guard(self.seats[i], lambda s, t=turn, p=position: window(s, t, p, steps[s.member]))  # type: ignore[misc]
                if self.baseline_lost():
                    return

    def _open_beside_others(self, seat: Seat) -> None:
        seat.open()
        if seat.card_share > CARD_SHARE and len(self.seats) > 1:
            raise _DoesNotFitTogether

    @staticmethod
    def _open_and_finish(seat: Seat) -> None:
        seat.open()
        seat.finish()

    @staticmethod
    def _visit(seat: Seat, turn: int, position: int, steps: int) -> None:
        seat.open()
        seat.window(turn, position, steps)
        seat.finish()

    def baseline_lost(self) -> bool:
        """Whether nothing of this set can be compared."""
        return any(s.failure and s.member.role in ("baseline", "twin") for s in self.seats)

    def guard(self, seat: Seat, action: Callable[[Seat], None]) -> None:
        """Run ``action`` unless the seat has failed; a failure is kept and its group is removed."""
        if seat.failure is not None:
            return
        try:
            action(seat)
        except GroupFailed as failure:
            crowded = any(s is not seat and s.group is not None for s in self.seats)
            if failure.status == "oom" and seat.config.device == "cuda" and crowded:
                raise _DoesNotFitTogether from failure
            seat.failure = failure
            seat.close()

    def _steps(self, seats: list[Seat]) -> dict[Member, int]:
        alive = [s for s in seats if s.failure is None]
        counts = steps_of_windows(
            self.plan,
            [s.config.global_batch_size for s in alive],
            [s.warm_step_seconds for s in alive],
            [s.prefetch_batches for s in alive],
        )
        return {seat.member: count for seat, count in zip(alive, counts, strict=True)}

    def records(self) -> list[RunRecord]:
        """The records of all members; without a baseline only of what failed, since the others compare with nothing."""
        lost = [s for s in self.seats if s.failure and s.member.role in ("baseline", "twin")]
        return [self.record(seat) for seat in (lost or self.seats)]

    def record(self, seat: Seat, found: Mapping[str, Any] = MappingProxyType({})) -> RunRecord:
        """The record of one member, with what else was ``found``; a failed one keeps its reason and no windows."""
        config, failure = seat.config, seat.failure
        stages = {name: round(seconds, 4) for name, seconds in seat.stages.items()}
        windows = [] if failure else seat.windows
        if windows:
            stages["steady"] = round(sum(w.seconds for w in windows), 4)
        witness: dict[str, Any] = {"ranks": seat.witness}
        if failure and failure.detail:
            witness["traceback"] = failure.detail[-4000:]
        return RunRecord(
            set_id=self.set_id,
            experiment=self.experiment,
            family=self.family,
            role=seat.member.role,
            label=seat.member.label,
            config=config,
            baseline_id=self.seats[0].config.run_id,
            plan=self.plan,
            environment=dataclasses.replace(self.environment, cuda=next((w.get("cuda") for w in seat.witness), None)),
            code_version=self.instrument.code.key,
            data_name=self.instrument.data_name,
            status=failure.status if failure else "ok",
            reason=failure.reason if failure else None,
            primary=seat.member.primary,
            mechanism_only=mechanism_only(config, bool(self.environment.machine.gpus)),
            stages=stages,
            compile_cache=seat.compile_cache,
            warmup_steps=seat.warmup_steps,
            ranks=tuple(seat.ranks),
            windows=tuple(windows),
            witness=witness,
            **found,
        )


def mechanism_only(config: RunConfig, machine_has_gpu: bool) -> bool:
    """Whether a run shows that something works, and nothing about speed.

    More ranks than cores fight for them, and CPU ranks on a machine with a GPU are not what anybody would train with.
    """
    return config.oversubscribe or (machine_has_gpu and config.device == "cpu")


def measure_set(
    instrument: Instrument,
    *,
    experiment: str,
    family: str,
    plan: Plan,
    members: list[Member],
    turns: Turns | None = None,
) -> list[RunRecord]:
    """Measure one set and return the records of all its members, to be appended to the ledger together.

    ``members`` begins with the baseline. A member that fails becomes a row with its reason, and the rest goes on.
    ``turns`` computes the number of turns of a plan that has none.
    """
    run = _SetRun(instrument, experiment=experiment, family=family, plan=plan, members=members, turns=turns)
    try:
        try:
            run.together()
        except _DoesNotFitTogether:
            run.one_at_a_time()
        return run.records()
    finally:
        for seat in run.seats:
            seat.close()


def warm_up_alone(seat: Seat) -> dict[str, Any]:
    """Start and warm up, and find nothing."""
    seat.open()
    return {}


def profile_alone(traces: list[Path]) -> Work:
    """A time budget and a profile, with one trace file a rank."""

    def work(seat: Seat) -> dict[str, Any]:
        seat.open()
        say = seat.instrument.progress
        say(f"{seat.member.label}: taking the time budget")
        budget = take_budget(seat)  # before the profiler, which changes what it watches
        say(f"{seat.member.label}: profiling")
        ranks = seat.alive.profile(traces, wait=1, warmup=2, active=PROFILED_STEPS, repeat=1)
        names = [path.name for path in traces]
        return {"profile": {**ranks[0], "traces": names, "budget": with_traces(budget, ranks)}}

    return work


def measure_alone(
    instrument: Instrument,
    *,
    experiment: str,
    family: str,
    plan: Plan,
    member: Member,
    work: Work = warm_up_alone,
) -> RunRecord:
    """One group on its own, which does some ``work``: by default it only starts, as for a cold compile."""
    run = _SetRun(instrument, experiment=experiment, family=family, plan=plan, members=[member])
    found: dict[str, Any] = {}

    def guarded(seat: Seat) -> None:
        found.update(work(seat))
        seat.finish()

    try:
        run.guard(run.seats[0], guarded)
        return run.record(run.seats[0], found)
    finally:
        run.seats[0].close()

"""Measure one set: isolated groups, built and warmed one after the other, then short timed windows in turns."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.seat import Instrument, Member, Seat
from ddpm_lab.measure.time_budget import take_budget, with_traces
from ddpm_lab.measure.turns import balanced_orders, steps_of_windows
from ddpm_lab.plan import Plan
from ddpm_lab.record import RunRecord

CARD_SHARE = 0.7
"""Groups share a GPU only while they use less than this share of its memory."""


WINDOW_OVERHEAD_SECONDS = 0.03
"""What waking a group and reading the machine's state take beside a window."""
PROFILED_STEPS = 5
TURNS_ALONE = 6
"""Turns of a set whose groups are started for every turn, where nothing else is planned."""

Turns = Callable[[float, float], int]
"""From the seconds that a set's groups took to start, and those of one turn, to the turns of the set."""
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
        for turn, order in enumerate(balanced_orders(len(self.seats), turns, self.seed)):
            self.instrument.progress(f"turn {turn + 1} of {turns}")
            for position, i in enumerate(order):
                seat = self.seats[i]
                self.guard(seat, lambda s, t=turn, p=position: s.window(t, p, steps[s.member]))  # type: ignore[misc]
                if self.baseline_lost():
                    return
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
        for turn, order in enumerate(balanced_orders(len(self.seats), turns, self.seed)):
            self.instrument.progress(f"turn {turn + 1} of {turns}, each group on its own")
            for position, i in enumerate(order):
                if self.baseline_lost():
                    return
                self.guard(self.seats[i], lambda s, t=turn, p=position: self._visit(s, t, p, steps[s.member]))  # type: ignore[misc]

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

"""Measure one set: isolated groups are built and warmed up one by one, and then take turns in short timed windows."""

import contextlib
import itertools
import math
import os
import random
import re
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpm_lab.config import DDPM, TRAINING, RunConfig, digest
from ddpm_lab.measure.code_version import CodeVersion, in_lab
from ddpm_lab.measure.command import CommandGroup
from ddpm_lab.measure.group import Group, GroupFailed, Limits
from ddpm_lab.measure.hardware import environment, machine
from ddpm_lab.measure.others import Watch, folded, side_by_side
from ddpm_lab.measure.witness import consumption, drift, mismatches
from ddpm_lab.output import Progress
from ddpm_lab.plan import Plan
from ddpm_lab.record import RankRecord, RunRecord, Window, crowded

CHUNK, CHUNK_SECONDS = 5, 0.5  # steps of a window while warming up, and the time of more than one
FIRST_LOSSES = 20  # kept to the last bit, so that two sides can be compared by them
STEADY, WARMUP_SECONDS = 0.1, 3.0  # a warm-up ends when two windows agree within this share, or after this time
SETTLE_SECONDS = 0.1  # maximum time of untimed steps after a sleep, of which the first one refills the caches
FIRST_EXTRA, NEXT_EXTRA, EXTRA_SECONDS = 10, 1, 1.0
"""Most further untimed steps, drawn at random, before a set's first window and before each later one; as many as fit.

Without them something at every second, or every tenth, step could fall between the windows of all turns and sets.
"""
CACHE_DAYS = 30.0  # compile caches of other code versions are deleted this long after their last use
CARD_SHARE = 0.7  # groups share a GPU only while they use less than this share of its memory
WINDOW_OVERHEAD_SECONDS = 0.03  # time for waking a group and reading the machine's state, in addition to a window
TURNS_ALONE = 6  # default number of turns in a set whose groups are restarted for every turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """What measuring needs to know about this machine and this run; the same for every set."""

    code: CodeVersion
    cache: Path
    usable_cores: int
    data_name: str
    limits: Limits = field(default_factory=Limits)
    progress: Progress = field(default_factory=lambda: Progress("", quiet=True))


@dataclass(frozen=True, slots=True)
class Member:
    """A configuration and its role in a set."""

    role: str
    label: str
    config: RunConfig
    primary: bool = False


class Slot:
    """A member while it is being measured: its group and the results so far."""

    def __init__(self, member: Member, plan: Plan, instrument: Instrument) -> None:
        self.member, self.config, self.plan, self.instrument = member, member.config, plan, instrument
        self.group: Group | None = None
        self.failure: GroupFailed | None = None
        self.stages: dict[str, float] = {}
        self.compile_cache: str | None = None
        self._filled: Path | None = None  # the file that marks the compile caches as filled
        self.warm_step_seconds = 0.0
        self.warmup_steps = 0
        self.started_now = True
        self.witness: list[dict[str, Any]] = []
        self.windows: list[Window] = []
        self.ranks: list[RankRecord] = []
        self._losses: list[list[float]] = [[] for _ in range(member.config.world_size)]
        self._first_losses: list[list[float]] = []

    @property
    def alive(self) -> Group:
        assert self.group is not None, "the slot has no running group"
        return self.group

    @property
    def prefetch_batches(self) -> int:
        """Number of batches that may be prefetched before a window."""
        return max((int(w.get("prefetch_batches", 0)) for w in self.witness), default=0)

    @property
    def card_share(self) -> float:
        """Share of the GPU's memory that all groups on it use at this point; 0 on a CPU."""
        on_gpus = [w for w in self.witness if "device_used_bytes" in w]
        return max((w["device_used_bytes"] / w["device_total_bytes"] for w in on_gpus), default=0.0)

    def say(self, text: str) -> None:
        self.instrument.progress(f"{self.member.label}: {text}")

    def _add(self, stage: str, seconds: float) -> None:
        """Add to the seconds of a stage. A group that is restarted for every turn goes through stages repeatedly."""
        self.stages[stage] = self.stages.get(stage, 0.0) + max(0.0, seconds)

    def open(self) -> None:
        """Start a group, warm it up until its steps are steady, and read its witness. Raises GroupFailed."""
        self.start()
        self._warm_up()
        self.hear_witness()

    def start(self) -> None:
        """Start a group without running any steps. Raises GroupFailed."""
        config, instrument, self.started_now = self.config, self.instrument, True
        code = instrument.code.of(config.revision)
        self.say("starting")
        how: dict[str, Any] = {"limits": instrument.limits, "progress": self.say, "tree": code.tree}
        how |= {"threads": config.rank_threads(instrument.usable_cores), "written": code.written}
        if config.command:
            self.group = CommandGroup(config, log=log_of(instrument.cache, config), **how)
        else:
            self.group = Group(config, environment=self._compile_cache(), modules=code.modules, **how)
        self._add("start", self.alive.start_seconds - self.alive.build_seconds)
        self._add("build", self.alive.build_seconds)

    def hear_witness(self) -> None:
        """Ask every rank for its actual settings. Raises GroupFailed if they differ from the configuration."""
        if self._filled is not None:  # after its first steps a group has compiled everything
            self._filled.touch()
        self.witness = self.alive.witness()
        for rank, losses in zip(self.witness, self._first_losses, strict=False):  # empty without a warm-up
            rank["first_losses"] = losses if all(map(math.isfinite, losses)) else []
        if wrong := mismatches(self.config, self.witness):
            raise GroupFailed("refused", "; ".join(wrong))

    def _compile_cache(self) -> dict[str, str]:
        """Return environment variables that direct the compiler to the lab's caches, emptied for a cold compile."""
        if self.config.compile == "off":
            return {}
        cache = self.instrument.cache
        if re.search(r"[\s'\"\\]", str(cache)):  # where torch would cut the command of its C++ compiler
            home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - never raises
            cache = Path(home, "ddpm_lab", digest(str(cache)))
        version = cache / "compile" / self.instrument.code.key
        version.mkdir(parents=True, exist_ok=True)
        os.utime(version)
        for other in version.parent.glob("[0-9a-f]" * 12):
            with contextlib.suppress(OSError):  # another process may be clearing them too
                if time.time() - other.lstat().st_mtime > CACHE_DAYS * 86400:
                    shutil.rmtree(other, ignore_errors=True)  # which follows no link
        work = self.config
        if work.purpose == "quality":  # all seeds of a trial share the cache of the timed runs
            trained = DDPM if work.workload == TRAINING else work.workload
            work = replace(work, purpose="timing", workload=trained, seed=0, options=work.own_options)
        folder = version / f"{machine().key}-{work.run_id}"  # several machines may share a checkout
        self._filled = folder / "filled"
        self.compile_cache = "warm" if self._filled.exists() and self.member.role != "cold" else "cold"
        if self.compile_cache == "cold":
            shutil.rmtree(folder, ignore_errors=True)  # a killed compile leaves an incomplete cache
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            # Helper processes compile while nothing is timed, and end when the witness is read.
            "TORCHINDUCTOR_COMPILE_THREADS": str(self.instrument.usable_cores if self.compile_cache == "cold" else 1),
        }

    def _warm_up(self) -> None:
        """Run steps until two consecutive windows agree within ``STEADY``, or for ``WARMUP_SECONDS``.

        Run at least ``plan.warmup_steps`` if time allows. The first step, which compiles, is timed separately.
        """
        compiled = self.config.compile != "off"
        self._first_losses = [[] for _ in self._losses]

        def take(steps: int, stage: str) -> float:
            limit = self.instrument.limits.build_seconds
            reports = self.alive.window(settle=0, steps=steps, limit=limit, stage=stage)
            for losses, rank in zip(self._first_losses, reports, strict=True):
                losses.extend(rank["losses"][: FIRST_LOSSES - len(losses)])
            return statistics.median(slowest(reports))

        begun = time.monotonic()
        step = first = take(1, "compiling" if compiled else "warming up")
        done, steps, stepping = 1, 1, time.monotonic()
        while True:
            step, last = take(steps, "warming up"), step
            done += steps
            steady = abs(step - last) <= STEADY * last
            left = WARMUP_SECONDS - (time.monotonic() - stepping)
            few = done < self.plan.warmup_steps and self.plan.warmup_steps * step < WARMUP_SECONDS
            if left <= 0 or (steady and not few):
                break
            steps = max(1, min(CHUNK, int(min(left, CHUNK_SECONDS) / step)))
        seconds = time.monotonic() - begun
        self.warm_step_seconds = step
        self.warmup_steps += done
        if compiled:
            self._add("compile", first - step)
            seconds -= first - step
        self._add("warmup", seconds)

    @property
    def settle_steps(self) -> int:
        """Number of untimed steps before a window, which refill the caches and consume prefetched batches."""
        awake = math.ceil(SETTLE_SECONDS / max(self.warm_step_seconds, 1e-6)) if self.warm_step_seconds < 1 else 0
        return max(min(self.plan.settle_steps, awake), self.prefetch_batches)

    @property
    def silence_limit(self) -> float:
        """Seconds that a rank may be silent in a window; longer for the user's code, which may evaluate between steps.

        For ranks this is less than the timeout of a collective, so that the rank that hangs is blamed, not its peers.
        """
        limits = self.instrument.limits
        if self.config.command:
            usual = limits.build_seconds
        elif all(map(in_lab, self.config.sources)):
            usual = limits.window_seconds
        else:
            usual = max(limits.window_seconds, limits.build_seconds / 5)
        return max(usual, 20 * self.warm_step_seconds)

    def window(self, turn: int, position: int, steps: int, extra: int = 0) -> None:
        """Measure a timed window, after enough untimed steps to consume prefetched batches. Raises GroupFailed.

        So many ``extra`` ones are untimed, or of slow ones the remainder of those that fit into ``EXTRA_SECONDS``.
        """
        # Enough steps to empty a full queue even if workers load four batches in five steps.
        full = 5 * self.prefetch_batches if self.started_now or self.config.nodes > 1 else 0
        extra %= 1 + int(EXTRA_SECONDS / max(1e-6, self.warm_step_seconds))
        how, self.started_now = {"settle": max(self.settle_steps, full) + extra, "steps": steps}, False
        for _ in range(2):
            with self.watched() as watch:
                reports = self.alive.window(**how, limit=self.silence_limit, stage=f"measuring, turn {turn + 1}")
            if not self.alive.suspended:  # else clocks went on while ranks stood still: once more
                break
        for losses, rank in zip(self._losses, reports, strict=True):
            losses += [round(loss, 6) for loss in rank["losses"]]
        if any(not math.isfinite(loss) for losses in self._losses for loss in losses):
            raise GroupFailed("diverged", "the training loss is no longer finite")
        start = min(r["start"] for r in reports)
        self.windows.append(
            Window(
                turn=turn,
                position=position,
                start_seconds=round(start, 6),
                seconds=round(max(r["end"] for r in reports) - start, 6),
                images=steps * self.config.global_batch_size,
                steps=steps,
                rank_seconds=tuple(round(r["end"] - r["start"], 6) for r in reports),
                step_seconds=tuple(round(s, 6) for s in slowest(reports)),
                data_seconds=tuple(round(r["data_seconds"], 6) for r in reports),
                **seen_of_machine(watch, reports),
            )
        )

    def watched(self) -> Watch:
        """Return a watch over this host and over the GPUs that the ranks reported."""
        pids, uuids = self.alive.pids, [rank.get("device_uuid") for rank in self.witness]
        # Ranks on other hosts cannot be watched from here, so a group with such ranks has no GPUs watched at all.
        gpus = {uuid: pid for uuid, pid in zip(uuids, pids, strict=True) if uuid} if len(pids) == len(uuids) else {}
        return Watch(gpus)

    def finish(self) -> None:
        """Shut the group down cleanly and keep the summaries of its ranks. Raises GroupFailed."""
        begun = time.monotonic()
        summaries = self.alive.finish()
        wrong = [line for summary in summaries for line in consumption(self.config, summary)]
        if wrong := wrong + [line for pair in zip(self.witness, summaries, strict=False) for line in drift(*pair)]:
            raise GroupFailed("refused", "; ".join(wrong))
        self.group = None
        self._add("teardown", time.monotonic() - begun)
        self.ranks = [
            RankRecord(**{k: v for k, v in summary.items() if k != "steps"}, losses=tuple(losses))
            for summary, losses in zip(summaries, self._losses, strict=True)
        ]

    def close(self) -> None:
        if self.group:
            self.group.kill()
            self.group = None


def log_of(cache: Path, config: RunConfig) -> Path:
    """Return the file that keeps the output of a command: one per configuration, in ``trace_output/``."""
    return cache.parent / "scripts" / f"{config.run_id}.log"


def seen_of_machine(watch: Watch, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a window on the machine's state, with the largest memory of any rank, by kind, in bytes."""
    others, stolen = (None, None) if side_by_side() else (watch.others_cores, watch.stolen_seconds)
    memory = {kind: folded(max, [rank["memory"].get(kind) for rank in reports]) for kind in reports[0]["memory"]}
    return {
        "others_cores": None if others is None else round(others, 3),
        "stolen_seconds": None if stolen is None else round(stolen, 3),
        "state": watch.state | memory | reports[0].get("state", {}),
    }


def slowest(ranks: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each step, measured between the times at which the slowest rank finished each step.

    Raises GroupFailed if the median is not above 0.
    """
    ends = [max(step) for step in zip(*([r["start"] + end for end in r["step_ends"]] for r in ranks), strict=True)]
    seconds = [after - before for before, after in itertools.pairwise([min(r["start"] for r in ranks), *ends])]
    if statistics.median(seconds) <= 0:
        raise GroupFailed("crashed", "its steps took no time by time.perf_counter: let it leave Python's clock alone")
    return seconds


def balanced_orders(count: int, turns: int, seed: int) -> list[list[int]]:
    """Return an order of ``count`` configurations for each turn: rows of a Williams square (Williams 1949).

    Over a whole square, each configuration takes every position and follows every other one equally often. ``seed``,
    which differs between sets, shuffles rows and names, so that incomplete squares are balanced over many sets.
    """
    rng = random.Random(seed)
    zigzag = [(i + 1) // 2 if i % 2 else count - i // 2 for i in range(count)]
    rows = [[(step + shift) % count for step in zigzag] for shift in range(count)]
    if count % 2:  # with an odd count, predecessors are balanced only together with the mirrored square
        rows += [row[::-1] for row in rows]
    rng.shuffle(rows)
    names = list(range(count))
    rng.shuffle(names)
    return [[names[i] for i in rows[turn % len(rows)]] for turn in range(turns)]


def steps_of_windows(
    plan: Plan, batch_sizes: Sequence[int], step_seconds: Sequence[float], least_steps: Sequence[int]
) -> list[int]:
    """Return the number of steps in a timed window of each configuration, so that all process equally many images.

    The fastest configuration fills ``plan.window_seconds``, and all run at least ``plan.window_steps`` and the maximum
    of ``least_steps``. The slowest window is limited to about ten times ``plan.window_seconds`` unless the minimum of
    steps takes longer, since a ratio that large does not need long windows. If the least common multiple of the batch
    sizes is too large, the numbers of images differ by up to half a batch.
    """
    least = max(plan.window_steps, *least_steps)
    unit = math.lcm(*batch_sizes)
    pairs = list(zip(batch_sizes, step_seconds, strict=True))
    needed = max(b * max(least, math.ceil(plan.window_seconds / s)) for b, s in pairs)
    slowest = max(s / b for b, s in pairs)  # seconds per image
    affordable = max(max(batch_sizes) * least, 10 * plan.window_seconds / slowest)
    images = min(needed, affordable)
    if unit <= 4 * affordable:  # otherwise, as for 250 and 256, image counts are only about equal: ratios are per image
        images = math.ceil(images / unit) * unit
    return [max(least, round(images / b)) for b in batch_sizes]


Turns = Callable[[float, float], int]  # (seconds to start the groups, seconds of a turn) -> number of turns
Work = Callable[[Slot], dict[str, Any] | None]  # does the work and returns fields of the record, by name


class _DoesNotFitTogether(Exception):  # noqa: N818 - handled by starting the groups separately
    """The groups of a set do not fit on the GPU together."""


class _Set:
    """A set of a family while it is being measured; its first member is the baseline."""

    def __init__(
        self,
        instrument: Instrument,
        members: Sequence[Member],
        plan: Plan,
        where: dict[str, Any],
        *,
        turns: Turns | None = None,
        gives_up: bool = False,
    ) -> None:
        self.instrument, self.plan, self.where = instrument, plan, where
        self.turns, self.gives_up, self.asked = turns, gives_up, plan
        self.slots = [Slot(member, plan, instrument) for member in members]
        token = secrets.token_hex(3)
        self.set_id, self.seed = f"{datetime.now():%Y%m%d-%H%M%S}-{token}", int(token, 16)
        self.environment = environment()

    def together(self) -> None:
        """Measure the set with all groups alive throughout; only one of them runs at any time."""
        begun = time.monotonic()
        for i in balanced_orders(len(self.slots), 1, self.seed)[0]:
            slot = self.slots[i]
            self.guard(slot, Slot.open)
            if self.baseline_lost():
                return
            if slot.card_share > CARD_SHARE and len(self.slots) > 1 and not slot.failure:
                raise _DoesNotFitTogether
        steps = self._steps()
        if not self.plan.turns:
            assert self.turns is not None, "a plan without turns needs a rule for them"
            alive = [s for s in self.slots if not s.failure]
            untimed = NEXT_EXTRA / 2
            windows = sum((steps[s.member] + s.settle_steps + untimed) * s.warm_step_seconds for s in alive)
            turns = self.turns(time.monotonic() - begun, windows + WINDOW_OVERHEAD_SECONDS * len(alive))
            self.plan = replace(self.plan, turns=turns)
        candidates = [s for s in self.slots if s.member.role == "candidate"]
        # If all candidates failed, one turn is enough for the baseline's speed.
        turns = 1 if candidates and all(s.failure for s in candidates) else self.plan.turns
        self._take_turns(Slot.window, steps, turns)
        for slot in self.slots:
            if not self.baseline_lost():
                self.guard(slot, Slot.finish)

    def one_at_a_time(self) -> None:
        """Measure the set with groups that do not fit on the GPU together: each turn starts each group again."""

        def visit(slot: Slot, *window: int) -> None:
            slot.open()
            if window:
                slot.window(*window)
            slot.finish()

        self.close()
        self.slots = [Slot(slot.member, self.plan, self.instrument) for slot in self.slots]
        for slot in self.slots:  # once without a window: equal work depends on the speeds of all
            self.guard(slot, visit)
        if self.baseline_lost():
            return
        self.plan = replace(self.asked, turns=self.asked.turns or TURNS_ALONE)  # each turn starts every group
        self._take_turns(visit, self._steps(), self.plan.turns, ", each group on its own")

    def _take_turns(self, window: Callable[..., None], steps: dict[Member, int], turns: int, how: str = "") -> None:
        """Run all turns of windows, but stop if the baseline or its twin fails, or if the set is too disturbed."""
        rng = random.Random(self.seed)
        for turn, order in enumerate(balanced_orders(len(self.slots), turns, self.seed)):
            extra = rng.randint(0, NEXT_EXTRA if turn and not how else FIRST_EXTRA)
            self.instrument.progress(f"turn {turn + 1} of {turns}{how}")
            for position, i in enumerate(order):
                self.guard(self.slots[i], window, turn, position, steps.get(self.slots[i].member, 0), extra)
                if self.baseline_lost():
                    return
            kept = [self.record(s) for s in self.slots if not s.failure] if self.gives_up else []
            if crowded(kept, to_come=turns - turn - 1):
                return  # the set does not count and will be measured again

    def close(self) -> None:
        for slot in self.slots:
            slot.close()

    def baseline_lost(self) -> list[Slot]:
        """Return the failed slots without which this set has no comparisons: baseline or twin, if any."""
        return [s for s in self.slots if s.failure and s.member.role in ("baseline", "twin")]

    def guard(self, slot: Slot, action: Callable[..., None], *arguments: int) -> None:
        """Run ``action`` unless the slot has failed; on failure, store the error and kill the group."""
        if slot.failure:
            return
        try:
            action(slot, *arguments)
        except GroupFailed as failure:
            beside = any(s is not slot and s.group for s in self.slots)
            if failure.status == "oom" and slot.config.device == "cuda" and beside:
                raise _DoesNotFitTogether from failure
            slot.failure = failure
            slot.close()

    def _steps(self) -> dict[Member, int]:
        alive = [s for s in self.slots if not s.failure]
        seconds = [s.warm_step_seconds for s in alive]
        # Two full queues average out the work of loader workers. A queue of one batch is refilled at every step.
        least = [2 * s.prefetch_batches for s in alive if s.prefetch_batches > 1]
        counts = steps_of_windows(self.plan, [s.config.global_batch_size for s in alive], seconds, [0, *least])
        return {slot.member: count for slot, count in zip(alive, counts, strict=True)}

    def record(self, slot: Slot, **found: Any) -> RunRecord:
        """Return the record of a member, with ``found`` as further fields. A failure has a reason and no windows."""
        config, failure = slot.config, slot.failure
        stages = {name: round(seconds, 4) for name, seconds in slot.stages.items()}
        windows = [] if failure else slot.windows
        if windows:
            stages["steady"] = round(sum(w.seconds for w in windows), 4)
        detail = {"traceback": failure.detail[-4000:]} if failure and failure.detail else {}
        gpus, own = self.environment.machine.gpus, self.where["experiment"] == "compare"
        return RunRecord(
            set_id=self.set_id,
            role=slot.member.role,
            label=slot.member.label,
            config=config,
            baseline_id=self.slots[0].config.run_id,
            plan=self.plan,
            environment=replace(self.environment, cuda=next((w.get("cuda") for w in slot.witness), None)),
            code_version=self.instrument.code.key,
            data_name=self.instrument.data_name,
            status=failure.status if failure else "ok",
            reason=failure.reason if failure else None,
            primary=slot.member.primary,
            # Oversubscribed ranks compete for cores. On a machine with GPUs, only a user's code trains on the CPU.
            mechanism_only=config.oversubscribe or (bool(gpus) and config.device == "cpu" and not own),
            stages=stages,
            compile_cache=slot.compile_cache,
            warmup_steps=slot.warmup_steps,
            ranks=tuple(slot.ranks),
            windows=tuple(windows),
            witness={"ranks": slot.witness, **detail},
            **self.where,
            **found,
        )


def measure_set(
    instrument: Instrument,
    *,
    plan: Plan,
    members: Sequence[Member],
    turns: Turns | None = None,
    gives_up: bool = False,
    **where: str,
) -> list[RunRecord]:
    """Measure one set and return the records of its members, the baseline first, to be appended together.

    The record of a member that fails has the reason; if the baseline or its twin fails, only failures are recorded.
    ``turns`` computes the number of turns if the plan does not give it; ``where`` has the experiment and the family.
    With ``gives_up``, the set ends early if other processes have disturbed it too much for it to count.
    """
    with contextlib.closing(_Set(instrument, members, plan, where, turns=turns, gives_up=gives_up)) as run:
        try:
            run.together()
        except _DoesNotFitTogether:
            run.one_at_a_time()
        return [run.record(slot) for slot in (run.baseline_lost() or run.slots)]


def measure_alone(instrument: Instrument, *, plan: Plan, member: Member, work: Work, **where: str) -> RunRecord:
    """Run ``work`` on a group of its own and return its record; ``where`` has the experiment and the family."""
    found: dict[str, Any] = {}

    def guarded(slot: Slot) -> None:
        found.update(work(slot) or {})
        slot.finish()

    with contextlib.closing(_Set(instrument, [member], plan, where)) as run:
        run.guard(run.slots[0], guarded)
        return run.record(run.slots[0], **found)

"""One configuration's place in a set: its group from the first start to the record it leaves."""

from __future__ import annotations

import contextlib
import itertools
import math
import shutil
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.measure.cluster import current, relatives
from ddpm_lab.measure.code_version import CodeVersion
from ddpm_lab.measure.group import Group, GroupFailed, Limits, Progress
from ddpm_lab.measure.machine_watch import State, Watch
from ddpm_lab.measure.others import side_by_side
from ddpm_lab.measure.witness import consumption, mismatches
from ddpm_lab.plan import Plan
from ddpm_lab.record import RankRecord, Window

CHUNK = 5
FIRST_LOSSES = 20
"""Losses of the first steps that a record keeps to the last bit, so that two sides can be compared by them."""
STEADY = 0.1
WARMUP_SECONDS = 3.0
"""After this long steps are as warm as they get: on a disturbed machine they never look steady."""

SETTLE_SECONDS = 0.1
"""Untimed steps after a sleep go on for no longer than this: the first one refills the caches."""
CACHE_DAYS = 30.0
"""How long compile caches of another code version are kept after their last use, in case somebody goes back to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """What measuring needs to know of this machine and this run, the same for every set."""

    code: CodeVersion
    cache: Path
    usable_cores: int
    data_name: str
    start_method: str = "forkserver"
    limits: Limits = field(default_factory=Limits)
    progress: Progress = lambda _: None


@dataclass(frozen=True, slots=True)
class Member:
    """A configuration, and the role it plays in a set."""

    role: str
    label: str
    config: RunConfig
    primary: bool = False


class Seat:
    """A member while it is measured: its group, and what is known of it so far."""

    def __init__(self, member: Member, plan: Plan, instrument: Instrument) -> None:
        self.member, self.plan, self.instrument = member, plan, instrument
        self.group: Group | None = None
        self.failure: GroupFailed | None = None
        self.stages: dict[str, float] = {}
        self.compile_cache: str | None = None
        self._throwaway: Path | None = None
        self._filled: Path | None = None
        self.warm_step_seconds = 0.0
        self.warmup_steps = 0
        self.witness: list[dict[str, Any]] = []
        self.windows: list[Window] = []
        self.ranks: list[RankRecord] = []
        self._losses: list[list[float]] = [[] for _ in range(member.config.world_size)]
        self._first_losses: list[list[float]] = []

    @property
    def config(self) -> RunConfig:
        """The member's configuration."""
        return self.member.config

    @property
    def alive(self) -> Group:
        """The running group."""
        assert self.group is not None, "the seat has no running group"
        return self.group

    @property
    def prefetch_batches(self) -> int:
        """Batches that may lie ready before a window."""
        return max((int(w.get("prefetch_batches", 0)) for w in self.witness), default=0)

    @property
    def card_share(self) -> float:
        """Share of the GPU's memory that all groups on it use by now; 0 on a CPU."""
        return max(
            (w["device_used_bytes"] / w["device_total_bytes"] for w in self.witness if "device_used_bytes" in w),
            default=0.0,
        )

    def _add(self, stage: str, seconds: float) -> None:
        """Add to a stage; a group that is started for every turn goes through each stage several times."""
        self.stages[stage] = self.stages.get(stage, 0.0) + max(0.0, seconds)

    def open(self) -> None:
        """Start a group, warm it up until its steps are steady, and let its witness speak. Raises GroupFailed."""
        self.start()
        self._warm_up(self.alive)
        self.hear_witness()

    def start(self) -> None:
        """Start a group that has not made a step yet. Raises GroupFailed."""
        config, instrument = self.config, self.instrument
        code, say = instrument.code.of(config.revision), instrument.progress
        say(f"{self.member.label}: starting")
        environment, self._filled = self._compile_cache()
        self.group = group = Group(
            config,
            threads=config.rank_threads(instrument.usable_cores),
            modules=code.modules,
            environment=environment,
            tree=code.tree,
            start_method=instrument.start_method,
            limits=instrument.limits,
            progress=lambda text: say(f"{self.member.label}: {text}"),
        )
        built = group.build_seconds()
        self._add("start", group.start_seconds - built)
        self._add("build", built)

    def hear_witness(self) -> None:
        """Let every rank say what it is. Raises GroupFailed where the label says otherwise."""
        if self._filled is not None:  # whoever has made steps by now has compiled
            self._filled.touch()
        self.witness = self.alive.witness()
        for rank, losses in zip(self.witness, self._first_losses, strict=False):  # none of a group that did not warm up
            rank["first_losses"] = losses if all(map(math.isfinite, losses)) else []
        wrong = mismatches(self.config, self.witness)
        if wrong:
            raise GroupFailed("refused", "; ".join(wrong))

    def _compile_cache(self) -> tuple[dict[str, str], Path | None]:
        """Environment that points the compiler at caches the lab owns, and the file that marks them as filled.

        A cold member starts with empty caches: with the lab's own while they are empty, so that it fills them for the
        sets that follow, else with fresh ones.
        """
        if self.config.compile == "off":
            return {}, None
        version = self.instrument.cache / "compile" / self.instrument.code.key
        if not version.exists():
            _remove_unused(version.parent)
        trial = self.config.purpose == "quality"  # its seeds share one cache, with the runs that are timed
        trained = self.config.workload if self.config.is_own else DDPM
        same = {"workload": trained, "seed": 0, "options": self.config.own_options}
        work = replace(self.config, purpose="timing", **same) if trial else self.config  # type: ignore[arg-type]
        folder = version / work.run_id
        if self.member.role == "cold" and (folder / "filled").exists():
            self._throwaway = folder = folder.with_name(f"{folder.name}-{time.time_ns()}")
        filled = folder / "filled"
        self.compile_cache = "warm" if filled.exists() else "cold"
        if self.compile_cache == "cold":
            shutil.rmtree(folder, ignore_errors=True)  # a compile that was killed leaves half a cache
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            # A cold compile is measured alone and may use every core; in a set helper processes would be awake in the
            # windows of others.
            "TORCHINDUCTOR_COMPILE_THREADS": str(self.instrument.usable_cores if self.member.role == "cold" else 1),
        }, filled

    def _warm_up(self, group: Group) -> None:
        """Step until two windows in a row agree within 10 %, or for ``WARMUP_SECONDS``.

        At least ``plan.warmup_steps``, where these fit into that time. The first step is apart and never the only one:
        it compiles, allocates and lets cuDNN choose.
        """
        limit = self.instrument.limits.build_seconds
        compiled = self.config.compile != "off"
        begun = time.monotonic()
        reports = group.window(settle=0, steps=1, limit=limit, stage="compiling" if compiled else "warming up")
        self._first_losses = [rank["losses"] for rank in reports]
        step = first = slowest(reports)[0]
        done = steps = 1
        stepping = time.monotonic()
        while True:
            reports = group.window(settle=0, steps=steps, limit=limit, stage="warming up")
            for losses, rank in zip(self._first_losses, reports, strict=True):
                losses.extend(rank["losses"][: FIRST_LOSSES - len(losses)])
            done += steps
            step, last = statistics.median(slowest(reports)), step
            steady = abs(step - last) <= STEADY * last
            left = WARMUP_SECONDS - (time.monotonic() - stepping)
            few = done < self.plan.warmup_steps and self.plan.warmup_steps * step < WARMUP_SECONDS
            if left <= 0 or (steady and not few):
                break
            steps = max(1, min(CHUNK, int(left / step)))
        seconds = time.monotonic() - begun
        self.warm_step_seconds = step
        self.warmup_steps += done
        if compiled:
            self._add("compile", first - step)
            seconds -= first - step
        self._add("warmup", seconds)

    @property
    def settle_steps(self) -> int:
        """Untimed steps before a window: what was prefetched, and the first after a sleep unless they are long."""
        awake = math.ceil(SETTLE_SECONDS / max(self.warm_step_seconds, 1e-6)) if self.warm_step_seconds < 1 else 0
        return max(min(self.plan.settle_steps, awake), self.prefetch_batches)

    def window_seconds(self, steps: int) -> float:
        """About how long a window of so many steps takes, with the untimed steps before it."""
        return (steps + self.settle_steps) * self.warm_step_seconds

    def window(self, turn: int, position: int, steps: int) -> None:
        """One timed window, after enough untimed steps to use up what was prefetched. Raises GroupFailed."""
        settle = self.settle_steps
        limit = max(self.instrument.limits.window_seconds, 20 * self.warm_step_seconds)
        with self.watched() as watch:
            reports = self.alive.window(settle=settle, steps=steps, limit=limit, stage=f"measuring, turn {turn + 1}")
        for losses, rank in zip(self._losses, reports, strict=True):
            losses += [round(loss, 6) for loss in rank["losses"]]
        if any(not math.isfinite(loss) for losses in self._losses for loss in losses):
            raise GroupFailed("diverged", "the training loss is no longer finite")
        hosts = [] if side_by_side() else [vars(watch), *self.alive.watched_elsewhere()]
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
                others_cores=_most(*(host["others_cores"] for host in hosts)),
                stolen_seconds=_most(*(host["stolen_seconds"] for host in hosts)),
                state=watch.state | memory_held(reports),
            )
        )

    def watched(self) -> Watch:
        """A watch over this host, and over its GPUs that the ranks said they are on."""
        pids, seen = self.alive.pids, [rank.get("device_uuid") for rank in self.witness]
        # Of ranks on other hosts nothing is known here, and so it is not of all GPUs of the group together.
        gpus = {uuid: pid for uuid, pid in zip(seen, pids, strict=True) if uuid} if len(pids) == len(seen) else {}
        return Watch(gpus, relatives() if current() else ())

    def finish(self) -> None:
        """End the group in order and keep its ranks' summaries. Raises GroupFailed."""
        begun = time.monotonic()
        summaries = self.alive.finish()
        wrong = [line for summary in summaries for line in consumption(self.config, summary)]
        if wrong:
            raise GroupFailed("refused", "; ".join(wrong))
        self.group = None
        self._add("teardown", time.monotonic() - begun)
        self.ranks = [
            RankRecord(**{k: v for k, v in summary.items() if k != "steps"}, losses=tuple(losses))
            for summary, losses in zip(summaries, self._losses, strict=True)
        ]

    def close(self) -> None:
        """Kill what is left of the group, and remove the caches of a cold compile that nobody will start from."""
        if self.group is not None:
            self.group.kill()
            self.group = None
        if self._throwaway is not None:
            shutil.rmtree(self._throwaway, ignore_errors=True)
            self._throwaway = None


def _remove_unused(caches: Path) -> None:
    """Remove the compile caches of other code versions that no group has started from for ``CACHE_DAYS``.

    Only folders named like a code version, and nothing that a link leads to.
    """
    if caches.is_symlink():
        return
    for version in caches.glob("[0-9a-f]" * 12):
        with contextlib.suppress(OSError):
            last_use = max(path.lstat().st_mtime for path in (version, *version.glob("*"), *version.glob("*/filled")))
            if time.time() - last_use > CACHE_DAYS * 86400 and not version.is_symlink():
                shutil.rmtree(version, ignore_errors=True)


def memory_held(reports: list[dict[str, Any]]) -> State:
    """The memory that the ranks reported, each kind of the rank that holds most of it, in bytes."""
    kinds = {kind: [rank["memory"].get(kind) for rank in reports] for kind in reports[0]["memory"]}
    return {kind: None if None in held else max(held) for kind, held in kinds.items()}


def _most(*taken: float | None) -> float | None:
    """What was taken of the host that lost most; unknown where one host's is."""
    known = [value for value in taken if value is not None]
    return round(max(known), 3) if known and len(known) == len(taken) else None


def slowest(ranks: list[dict[str, Any]]) -> list[float]:
    """Seconds of each step: from the moment the slowest rank ended one to the moment the slowest ended the next."""
    ends = [max(step) for step in zip(*([r["start"] + end for end in r["step_ends"]] for r in ranks), strict=True)]
    return [after - before for before, after in itertools.pairwise([min(r["start"] for r in ranks), *ends])]

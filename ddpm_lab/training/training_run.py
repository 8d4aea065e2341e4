"""A training run: from settings to a checked configuration, then chunks of steps, and what is due between them.

The parent's half, which imports torch only where a checkpoint is read: the ranks train, save and sample.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import DEVICES, LEARNED, TRAINING, RunConfig
from ddpm_lab.data.packed import read_manifest, resolve
from ddpm_lab.declared import Opt, known, validate
from ddpm_lab.files import NOT_IN_FILES, configuration, expanded, read_settings
from ddpm_lab.measure import hardware
from ddpm_lab.measure.cluster import current, spread, usual_ranks
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.measure.others import CoreWatch, fair_cores
from ddpm_lab.output import Progress
from ddpm_lab.training.run_folder import SETTINGS, RunFailed, RunFolder, checkpoints_in
from ddpm_lab.training.setting import FUSED_NEEDS, check_cores, check_ranks, usual_device, usual_settings
from ddpm_lab.training.stopping import Stop, without_sigterm
from ddpm_lab.training.tracking import TrackedTraining

CHUNK_SECONDS = 1.0
SAVE_SECONDS = 600.0  # after which there is a checkpoint, however few steps that was
SILENCE_SECONDS = 600.0
"""The longest silence of a rank while it compiles, saves, samples or evaluates."""
STOPPING_SECONDS = 15.0
"""The longest silence of a rank once a signal has asked the run to stop, or 20 steps, but while it saves."""
COMPILING_CHUNKS = 3
"""A compiled step may be compiled again in its second or third call."""
DIVERGED = "is no longer finite at step {:,}: go on with a lower --learning-rate, or in fp32"
HELD_OUT_DRAWS = 1_000
GRID_IMAGES, GRID_STEPS = 36, 50
NOT_LEARNED = ("optimizer.adam", "optimizer.ema", "optimizer.learning_rate")
"""Settings of the optimizer of which a resumed run may have others."""
NETWORK, BATCH = "seed", {"cpu": 16, "cuda": 128}
OBJECTS, OBJECTS_BATCH = {"seed": 100_000}, 16
"""Images of CIFAR-10 after which samples of one run showed objects, in batches of 16 (docs/training.md); fewer, larger
steps may take more."""
TABLE = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long a run trains, and what is done every so many steps and after the last; 0 is never."""

    steps: Annotated[int, Opt("optimizer steps in all, those of an earlier start included", least=1)] = 20_000
    save_every: Annotated[int, Opt("steps between checkpoints, at most ten minutes", least=1)] = 1_000
    sample_every: Annotated[int, Opt("steps between sample grids; 0: none", least=0)] = 1_000
    evaluate_every: Annotated[int, Opt("steps between held-out losses; 0: none", least=0)] = 1_000
    keep: Annotated[int, Opt("checkpoints that stay", least=1)] = 3

    def __post_init__(self) -> None:
        validate(self)

    def due(self, every: int, step: int) -> bool:
        """Whether what is done every ``every`` steps is done after ``step``."""
        return every > 0 and (step % every == 0 or step == self.steps)

    def next_stop(self, step: int) -> int:
        """The first step after ``step`` after which something is due."""
        each = (self.save_every, self.sample_every, self.evaluate_every)
        return min(self.steps, *((step // every + 1) * every for every in each if every))


class Outcome(NamedTuple):
    """Last step of a run, its checkpoint, and the losses measured last; None was never measured."""

    step: int
    checkpoint: Path
    loss: float | None = None
    held_out_loss: float | None = None


def plan_training(
    flags: Mapping[str, Any],
    schedule: Mapping[str, Any],
    *,
    file: Path | None,
    cache: Path,
    folder: Path | None = None,
    held_out: str | None = None,
    skip_bad: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[RunConfig, Schedule, frozenset[str]]:
    """Return the configuration and schedule of a run, and the names of the settings that the user gave.

    ``flags`` and ``schedule`` come from the command line and override those of ``file``; a dot in a name separates a
    table from its entry. Defaults are ``usual_settings``, ``NETWORK`` and ``BATCH`` for the device. Images are prepared
    in ``cache``; the run's ``folder`` must not be among them. Raises ConfigError if the configuration cannot run here,
    and DataError if the images cannot be used.
    """
    place = "the settings" if file is None else str(file)
    values, planned = _given(flags, schedule, file, place)
    if "data" in values:
        expanded(values["data"])  # raises if it is empty, which does not mean synthetic images
    if "device" not in values:
        values["device"] = usual_device(None)
    device, chosen = values["device"], frozenset(values)
    choice(f"{place}: device", device, DEVICES)
    defaults = {"network": NETWORK, "global_batch_size": BATCH[device], **usual_settings(device)}
    if any(values.get(name, value) != value for name, value in FUSED_NEEDS.items()):
        del defaults["kernels"]  # fused kernels may not work with the given settings
    values = {**defaults, **values}
    values.setdefault("world_size", usual_ranks(values.get("nodes")))
    values.setdefault("nodes", spread(values["world_size"]))
    config = configuration({**values, "workload": TRAINING, "purpose": "quality"}, place)
    alone = config.device == "cuda" and config.world_size == config.accumulation == 1
    if alone and config.compile == "whole" and "compile_mode" not in values:
        # Without CUDA graphs, an H100 waited for its host (README). Graphs hold one micro-batch's gradients.
        config = dataclasses.replace(config, compile_mode="reduce-overhead")
    _check_machine(config, place)
    images: dict[str, Any] = {"image_size": config.image_size, "held_out": held_out, "skip_bad": skip_bad}
    prepared = resolve(config.data or "synthetic", cache, results=folder, progress=progress, **images)
    manifest = read_manifest(prepared)
    getattr(progress, "stay", progress)(manifest.describe())
    sha256, memory = manifest.content_hash, min((g.memory_bytes or 0 for g in hardware.gpus()), default=0)
    if config.loader == "resident" and "loader" not in chosen and 4 * math.prod(manifest.shape) > memory > 0:
        config = dataclasses.replace(config, loader="packed")  # leave most of the memory to the step
    if config.data_sha256 not in ("", sha256):
        problem = f"the images in {config.data} are not those that data_sha256 names"
        raise ConfigError(f"{place}: {problem}: give those with --data, or leave it out in a run of its own")
    return dataclasses.replace(config, data=str(prepared), data_sha256=sha256), planned, chosen


def _given(
    flags: Mapping[str, Any], schedule: Mapping[str, Any], file: Path | None, place: str
) -> tuple[dict[str, Any], Schedule]:
    """The settings of a file under those of the command line, and the schedule. Raises ConfigError."""
    values = read_settings(file, "--config") if file else {}
    for name in NOT_IN_FILES:
        if name in values:
            raise ConfigError(f"{place}: {name} is not for a file of training settings: leave it out")
    if "data" in flags:
        values.pop("data_sha256", None)  # it belongs to the file's images
    for table in {TABLE, *(name.rpartition(".")[0] for name in flags)} - {""}:
        if not isinstance(values.setdefault(table, {}), dict):
            raise ConfigError(f"{place}: {table} is {values[table]!r}: give a table, [{table}]")
    for name, value in flags.items():
        table, _, inner = name.rpartition(".")
        (values[table] if table else values)[inner] = value
    times = {**values.pop(TABLE), **schedule}
    known(f"[{TABLE}]", times, Schedule)
    return values, Schedule(**times)


def _check_machine(config: RunConfig, place: str) -> None:
    """Raise ConfigError for hosts, ranks, threads or workers that are not here."""
    if config.nodes > (len(cluster.hosts) if (cluster := current()) else 1):
        raise ConfigError(
            f"{place}: nodes is {config.nodes}: start it on so many hosts (torchrun ... -m ddpm_lab rank train), or "
            "leave it out"
        )
    if not config.exchange.enabled:
        raise ConfigError("exchange.enabled is false: ranks that exchange nothing train a network each; leave it out")
    cores = hardware.usable_cores()
    check_ranks(config.device, config.node_size, len(hardware.gpus()), cores, config.oversubscribe)
    for name in ("loader_workers", "threads"):
        check_cores(name, getattr(config, name), cores, config.node_size)


def _differences(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """Settings that decide what is learned and differ, as ``name is A, and was B``."""
    mine, before = ours.flat, theirs.flat
    learned = [n for n in mine if n in LEARNED or n.startswith(("diffusion.", "optimizer."))]
    names = [n for n in learned if n not in NOT_LEARNED and mine[n] != before[n]]
    return [f"{n} is {mine[n]!r}, and was {before[n]!r}" for n in names]


def train(
    config: RunConfig,
    schedule: Schedule,
    folder: Path,
    *,
    threads: int,
    stop: Stop,
    progress: Progress,
    tracker: str | None = None,
    why: str = "",
) -> Outcome:
    """Train up to the last step, from the newest readable checkpoint in ``folder`` if there is one.

    Ends early, with everything saved, when ``stop`` notes a signal, which it does from the first step on. ``threads``
    are those of each rank; ``tracker`` is comet, comet-offline or None; ``why`` says where the settings come from.
    Raises ConfigError for a folder that cannot be used, or holds checkpoints of a run that learns something else, and
    RunFailed where a loss or weight was not finite, a file could not be written, or a rank failed.
    """
    with RunFolder(folder) as run, contextlib.ExitStack() as stack:
        step = 0
        if found := _start(run, config, progress):
            path, step = found
            if step >= schedule.steps:
                asked = f"{schedule.steps:,} {'was' if schedule.steps == 1 else 'were'} asked for"
                progress.done(f"{step:,} steps are trained already, and {asked}: give more to go on")
                return Outcome(step=step, checkpoint=path)
            progress.done(f"goes on after step {step:,} of {schedule.steps:,}, from {path}")
            config = dataclasses.replace(config, options=(*config.options, ("checkpoint", str(path))))
        run.cut_log(step)
        times, tracked = dataclasses.asdict(schedule), None
        run.write_settings(config, times, why)
        if tracker:
            logging = TrackedTraining(tracker, folder, config, schedule=times, step=step, say=progress.done)
            tracked = stack.enter_context(logging)
        return _Run(config, schedule, run, stop, progress, tracked, threads, step=step, saved=step).train()


def _start(run: RunFolder, config: RunConfig, progress: Progress) -> tuple[Path, int] | None:
    """The newest readable checkpoint and its step; newer ones are set aside. Raises ConfigError if none can be used."""
    paths, refused = checkpoints_in(run.checkpoints), list[str]()
    if not paths:
        return None
    from ddpm_lab.training.checkpoint import CheckpointError, read  # noqa: PLC0415 - torch only where one is read

    for path in paths:
        try:
            start = read(path)
            break
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # which may pass: the file is as good as it was
                raise
            progress.done(str(error))
            refused.append(str(error))
    else:
        raise ConfigError(
            f"no checkpoint in {run.checkpoints} can be read: move them away to begin anew (the newest: {refused[0]})"
        )
    if unlike := _differences(config, start.config):
        raise ConfigError(
            f"{run.path} holds a run that learns something else ({'; '.join(unlike)}): give its settings, as with "
            f"--config {run.path / SETTINGS}, and the images as they were; or another --output-dir"
        )
    rate, before = config.optimizer.learning_rate, start.config.optimizer.learning_rate
    if rate != before:
        progress.done(f"the learning rate is {rate:g} from here on, and was {before:g}")
    for unreadable in paths[: len(refused)]:  # it must take the place of no good one
        unreadable.replace(unreadable.with_name(f"{unreadable.name}.unreadable"))
    return path, start.step


@dataclass(slots=True)
class _Run:
    """A run while it trains."""

    config: RunConfig
    schedule: Schedule
    run: RunFolder
    stop: Stop
    progress: Progress
    tracked: TrackedTraining | None
    threads: int
    step: int
    saved: int
    chunks: int = 0
    watch: CoreWatch | None = None
    step_seconds: float = CHUNK_SECONDS
    loss: float | None = None
    held_out: float | None = None
    saved_at: float = 0.0  # on the clock of this process
    saving: Path | None = None  # the checkpoint that is being written
    unasked: Path | None = None  # a checkpoint that stays until the next one, beside those that are kept

    def train(self) -> Outcome:
        # Threads that were asked for stay; of a job's ranks, which others have started, nothing is known. What was
        # compiled would be compiled anew.
        chosen = not self.config.threads and self.config.compile == "off"
        if self.config.device == "cpu" and chosen and current() is None:
            self.watch = CoreWatch()
        self.progress("starting")
        self.saved_at = time.monotonic()
        try:
            how: dict[str, Any] = {"threads": self.threads, "starting": without_sigterm, "patience": self._patience}
            with Group(self.config, progress=self.progress, **how) as group:
                while self.step < self.schedule.steps and self.stop.number is None:
                    rows = self._advance(group)
                    if self.chunks == 1:
                        self._check_images(group)
                    self._between(group, rows)
                if self.saved < self.step:
                    self._save(group)
                with contextlib.suppress(GroupFailed):  # all is saved: how the ranks end is of no account
                    group.finish()
        except GroupFailed as failed:
            advice = "; a smaller global_batch_size or more accumulation needs less" if failed.status == "oom" else ""
            lost = self._failed(f"{failed.reason}{advice}")
            lost.add_note(failed.detail.strip())  # for --debug
            raise lost from failed
        return Outcome(self.step, self.run.checkpoint(self.step), self.loss, self.held_out)

    def _patience(self) -> float:
        """The longest silence of a rank from now on: one that hangs must not keep a run that is to stop."""
        stopping = self.stop.number is not None and (self.saving is None or self.saving.exists())
        return max(STOPPING_SECONDS, 20 * self.step_seconds) if stopping else math.inf

    def _check_images(self, group: Group) -> None:
        """Each host may have its own copy of the images, and one may have been prepared again by now."""
        for rank, seen in enumerate(group.witness()):
            if seen["data_sha256"] != self.config.data_sha256:
                problem = f"rank {rank} sees other images than its configuration names: prepare them alike everywhere"
                raise GroupFailed("refused", f"{problem}, and start again")

    def _advance(self, group: Group) -> list[dict[str, Any]]:
        """Train one chunk; returns a row of the log for each step."""
        first, self.chunks = self.chunks == 0, self.chunks + 1
        steps = 1 if first else max(1, round(CHUNK_SECONDS / self.step_seconds))
        steps = min(steps, self.schedule.next_stop(self.step) - self.step)
        limit = SILENCE_SECONDS if self.chunks <= COMPILING_CHUNKS else max(60.0, 20 * self.step_seconds)
        reports = group.advance(steps, limit, "compiling" if first and self.config.compile != "off" else "training")
        # Before this there is next to nothing to save.
        self.stop.gentle = self.config.compile == "off" or self.chunks >= COMPILING_CHUNKS
        seconds = max(float(report["seconds"]) for report in reports)
        # The first step may have compiled: it says only how long the others take at most.
        compiled = first and self.config.compile != "off"
        self.step_seconds = min(seconds, CHUNK_SECONDS) if compiled else seconds / steps
        rate = steps * self.config.global_batch_size / seconds
        rows: list[dict[str, Any]] = []
        for losses in zip(*(report["losses"] for report in reports), strict=True):
            row: dict[str, Any] = {"step": self.step + len(rows) + 1, "loss": statistics.fmean(losses)}
            if not math.isfinite(row["loss"]):
                self._log(rows)
                raise self._failed(f"the loss {DIVERGED.format(row['step'])}")
            rows.append(row | {"images_per_second": float(f"{rate:.6g}")})
        if first:  # a start may have other ranks than the one before, and other speeds
            rows[0] |= {"settings": dataclasses.replace(self.config, options=(), seed=0).run_id}
        self.step += steps
        self.loss = statistics.fmean(row["loss"] for row in rows)
        self._show(rate)
        return rows

    def _between(self, group: Group, rows: list[dict[str, Any]]) -> None:
        """What is due after a chunk. The log comes before the checkpoint: it holds every step that is not redone."""
        due = self.schedule.due
        if self.stop.number is not None and self.step < self.schedule.steps:
            self._log(rows)  # and save, before whoever sent the signal loses patience
            return
        if self.step == self.schedule.next_stop(self.step - 1):
            self.progress.expect(None)  # how long this takes the steps do not say
        if due(self.schedule.evaluate_every, self.step):
            self.progress.always(f"step {self.step:,}: held-out loss")
            found = group.call("held_out_loss", SILENCE_SECONDS, draws=HELD_OUT_DRAWS)[0]
            if not math.isfinite(found["loss"]):
                raise self._failed(f"the held-out loss {DIVERGED.format(self.step)}")
            self.held_out = found["loss"]
            rows[-1]["held_out_loss"] = found["loss"]
        self._log(rows)
        if due(self.schedule.save_every, self.step):
            self._save(group)
        elif time.monotonic() - self.saved_at > SAVE_SECONDS:
            self._save(group)
            self.unasked = self.run.checkpoint(self.step)
        if due(self.schedule.sample_every, self.step):
            self.progress.always(f"step {self.step:,}: samples")
            path = str(self.run.samples / f"step-{self.step:08d}.png")
            self._call(group, "samples", path=path, count=GRID_IMAGES, steps=GRID_STEPS)
        free = self.watch.free() if self.watch else None
        # Beside others too many threads wait for each other, and a step can take many times as long.
        if free and (threads := self.config.rank_threads(fair_cores(free))) != self.threads:
            self.threads = threads
            group.ask("set_threads", SILENCE_SECONDS, "taking other threads", count=threads)
            each = f"{threads} thread{'s' * (threads > 1)}{' a rank' * (self.config.world_size > 1)}"
            self.progress.done(f"step {self.step:,}: {free} core{'s are' if free > 1 else ' is'} free now: {each}")

    def _log(self, rows: list[dict[str, Any]]) -> None:
        self.run.log(rows)
        if self.tracked is not None:
            self.tracked.steps(rows)

    def _save(self, group: Group) -> None:
        self.run.sync_log()
        self.saving = self.run.checkpoint(self.step)
        self._call(group, "save", path=str(self.saving))
        self.saving, self.saved, self.saved_at = None, self.step, time.monotonic()
        if self.unasked:
            self.unasked.unlink(missing_ok=True)
            self.unasked = None
        self.run.keep(self.schedule.keep)

    def _call(self, group: Group, method: str, **arguments: Any) -> None:
        """Have rank 0 write something. Raises RunFailed with its sentence."""
        if problem := group.call(method, SILENCE_SECONDS, **arguments)[0]:
            raise self._failed(problem)

    def _show(self, rate: float) -> None:
        # The first chunks may have compiled, and are no measure of the others.
        compiling = 1 if self.config.compile == "off" else COMPILING_CHUNKS
        left = (self.schedule.steps - self.step) * self.config.global_batch_size / rate
        self.progress.expect(left if self.chunks > compiling and self.step < self.schedule.steps else None)
        loss = f"{self.loss:.4f}" + (f", held-out {self.held_out:.4f}" if self.held_out is not None else "")
        self.progress(f"step {self.step:,} of {self.schedule.steps:,}, loss {loss}, {rate:,.0f} images/s")
        shown = math.ceil(OBJECTS.get(self.config.network, 0) / self.config.global_batch_size)
        seen = self.config.image_size == 32 and self.config.global_batch_size <= OBJECTS_BATCH
        if self.chunks == compiling + 1 and self.step < shown and seen:
            minutes = (shown - self.step) * self.config.global_batch_size / rate / 60
            more = f": give --steps {shown} or more" if shown > self.schedule.steps else ""
            of = f"samples of CIFAR-10 showed objects after some {OBJECTS[self.config.network]:,} images"
            self.progress.stay(f"{of}: here after step {shown:,}, in {minutes:,.0f} min{more}")

    def _failed(self, sentence: str) -> RunFailed:
        found = checkpoints_in(self.run.checkpoints)
        last = f"the last good checkpoint is {found[0]}" if found else "there is no checkpoint yet"
        return RunFailed(f"{sentence}; {last}")

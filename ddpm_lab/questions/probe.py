"""The fastest of the trainer's settings on this machine: recommended by its ledger, else tried on the very shapes.

Candidates differ in number format, memory format, kernels and memory handling, and never in what is learned but by
rounding. Two groups of processes at a time take turns, the fastest so far and the next, so that a busy neighbour slows
both alike. What was found is kept and used again until the machine, the code, the shapes or the threads are others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, redirect_stdout, suppress
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import psutil

from ddpm_lab.config import TRAINING, RunConfig, digest
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.processor import multiplies_bf16
from ddpm_lab.settings_file import read_settings
from ddpm_lab.training.run_folder import CHECKPOINTS, checkpoints_in
from ddpm_lab.training.run_folder import SETTINGS as RUN_SETTINGS
from ddpm_lab.training.stopping import without_sigterm

SETTINGS = ("precision", "channels_last", "kernels", "freed_memory")
ALIKE = ("network", "global_batch_size", "image_size", "device", "world_size", "compile", "accumulation")
"""Settings in which a training has to be like the one that a search was made for."""
PLAIN: dict[str, Any] = {"precision": "fp32", "channels_last": False, "kernels": "aten", "freed_memory": "default"}
"""A step as torch does it where nothing is said."""
SECONDS, PLAIN_STEPS = 20.0, 3
"""How long a probe takes at most: seconds, or so many plain steps where they take longer."""
WORTH, LEAST_IMAGES = 3, 2_000
"""A training shorter than so many probes, or of fewer images, goes without one."""
TURN_SECONDS = 0.2
LEAST_TURNS = 4
SURELY, HOPELESS = 3.0, 2.0
"""Standard errors from equal that decide between two; how many times as long one step is that needs no second."""
STARTING_SECONDS = 1.0
"""What a first step may take longer than the others."""
SILENCE_SECONDS = 600.0
"""The longest that the first candidate may take for a part of a step; the others are given up when hopeless."""
FILE = Path("trace_output", "probe.json")
Say = Callable[[str], None]


def fastest(
    config: RunConfig,
    said: Set[str],
    *,
    steps: int,
    threads: int,
    output: Path,
    folder: Path,
    probing: bool,
    progress: Say,
) -> tuple[RunConfig, str]:
    """``config`` with the fastest of SETTINGS that the user has not ``said``, and a sentence that says why.

    A run that goes on in ``folder`` keeps its settings. Without ``probing``, on a GPU, where something is compiled, and
    over several hosts they stay as the table of ``usual_settings`` has them. Nothing fails here: a candidate that does
    is not chosen.
    """
    open_, warning = [name for name in SETTINGS if name not in said], _emulated(config)
    if config.device != "cpu" or config.compile != "off" or config.nodes > 1 or not open_:
        return config, warning
    if found := _before(config, open_, folder):
        return found, ""
    if not probing or warning or steps * config.global_batch_size < LEAST_IMAGES:
        return config, warning
    if found := _recommended(config, open_, output):
        return found, f"settings: {_name(found)}, as this machine's search recommends for {config.network}"
    return _tried(config, said, steps=steps, threads=threads, path=output / FILE, progress=progress)


def _tried(
    config: RunConfig, said: Set[str], *, steps: int, threads: int, path: Path, progress: Say
) -> tuple[RunConfig, str]:
    """``config`` with what a probe of earlier, kept in ``path``, or one of now has found; as it is where none did."""
    key = _key(config, said, threads)
    with suppress(KeyError, TypeError, ValueError):  # not kept, or by other hands
        kept = _kept(path)[key]
        return dataclasses.replace(config, **kept["settings"]), f"{kept['why']} ({kept['date']})"
    progress("probing settings")
    candidates, plain = _candidates(config, said), dataclasses.replace(config, **PLAIN)
    measured_only = {} if plain in candidates.values() else {_name(plain): plain}
    found_now = _Probe(threads, progress).run(candidates, measured_only, steps)
    if found_now is None:
        return config, ""
    chosen, why, lasting = found_now
    entry = {
        "settings": {name: getattr(chosen, name) for name in SETTINGS},
        "why": why,
        "date": date.today().isoformat(),
    }
    with suppress(OSError):  # then the next start probes again
        path.parent.mkdir(parents=True, exist_ok=True)
        if lasting:
            mine = path.with_name(f"probe-{os.getpid()}.json")
            mine.write_text(json.dumps({**_kept(path), key: entry}, indent=1) + "\n")
            mine.replace(path)
    return chosen, why


def _emulated(config: RunConfig) -> str:
    """The warning of a number format that this processor has no instructions for."""
    if config.device != "cpu" or config.precision != "bf16" or multiplies_bf16():
        return ""
    return "precision bf16 is emulated on this processor, many times slower than fp32: leave it out"


def _candidates(config: RunConfig, said: Set[str]) -> dict[str, RunConfig]:
    """What is tried, by name: plain settings first, then the table's, then those between.

    bf16 is tried only where it has instructions: emulated it takes ten times as long.
    """
    rows = [PLAIN, {}, {"precision": "fp32"}, {"precision": "fp32", "kernels": "aten"}, {"kernels": "aten"}]
    found: dict[str, RunConfig] = {}
    for row in rows:
        changed = {name: value for name, value in row.items() if name not in said}
        with suppress(ValueError):  # joined kernels where what the user has said rules them out
            candidate = dataclasses.replace(config, **changed)
            if candidate not in found.values():
                found[_name(candidate)] = candidate
    return found


def _name(config: RunConfig) -> str:
    """The settings in a few words: ``bf16, fused kernels``."""
    if all(getattr(config, name) == value for name, value in PLAIN.items()):
        return "plain fp32"
    kernels = "fused kernels" if config.kernels == "fused" else "channels-last" if config.channels_last else "NCHW"
    return ", ".join([config.precision, kernels, *(["compiled"] if config.compile != "off" else [])])


class _BestFailed(Exception):  # noqa: N818 - what the contest ends with
    """The fastest so far, on which all others are measured, is gone."""


class _Probe:
    """A contest of the candidates, each against the fastest so far."""

    def __init__(self, threads: int, progress: Say) -> None:
        self.threads, self.progress = threads, progress
        self.used, self.seconds = 0.0, SECONDS
        """Seconds of steps: what processes take to start, and kernels to be compiled, leaves no candidate untried."""

    def run(
        self, choices: Mapping[str, RunConfig], measured_only: Mapping[str, RunConfig], steps: int
    ) -> tuple[RunConfig, str, bool] | None:
        """The fastest choice, a sentence, and whether that may be kept; None where nothing was compared.

        What is ``measured_only`` is what the choices are told to be slower than.
        """
        candidates = {**measured_only, **choices}
        began = time.monotonic()
        times: dict[str, float] = {}  # of a step, relative to the first that ran
        far: set[str] = set()  # of which one step may have been enough
        failed: list[str] = []
        lasting = True
        with ExitStack() as stack:
            best: tuple[str, Group, float] | None = None
            for number, (name, candidate) in enumerate(candidates.items()):
                if best and self.used >= self.seconds:
                    failed.append(f"{name} not tried for want of time")
                    continue
                self.progress(f"probing settings: {name}")
                group = None
                try:
                    group = stack.enter_context(self._group(candidate))
                    if best is None:
                        step = min(self._step(group), self._step(group))
                        if step * steps < WORTH * SECONDS or not _room_for_two(group):
                            return None
                        self.seconds = max(SECONDS, PLAIN_STEPS * step)
                        best, times[name] = (name, group, step), 1.0
                        continue
                    first = self._step(group, silence=2 * HOPELESS * best[2] + STARTING_SECONDS)
                    ratio = self._against(best, group, first, len(candidates) - number)
                except _BestFailed:
                    return None
                except GroupFailed as problem:
                    slow = best and problem.status == "timed out"
                    lasting &= bool(slow) or problem.status == "unsupported"
                    why = f"takes over {HOPELESS:.2g} times as long" if slow else f"failed: {problem.reason}"
                    failed.append(f"{name} {why}")
                    if group:
                        group.kill()
                    continue
                times[name] = times[best[0]] * ratio
                if not HOPELESS > ratio > 1 / HOPELESS:
                    far.add(name if ratio > 1 else best[0])
                if ratio < 1:
                    best[1].kill()
                    best = name, group, best[2] * ratio
                else:
                    group.kill()
        if best is None or len(candidates) == 1:
            return None
        chosen = min((name for name in times if name in choices), key=times.__getitem__, default="")
        if not chosen:
            return None
        told = [*_told(chosen, times, far, measured_only), *failed]
        why = f"settings: {chosen}, the fastest in {time.monotonic() - began:.0f} s of trying; {'; '.join(told)}"
        return candidates[chosen], why, lasting

    def _group(self, config: RunConfig) -> Group:
        quiet: dict[str, Any] = {"modules": {}, "environment": {}, "progress": lambda _: None}
        return Group(config, threads=self.threads, starting=without_sigterm, **quiet)

    def _step(self, group: Group, steps: int = 1, silence: float = SILENCE_SECONDS) -> float:
        """Seconds of a step of the slowest rank."""
        seconds = max(float(report["seconds"]) for report in group.advance(steps, silence, "probing"))
        self.used += seconds
        return seconds / steps

    def _against(self, best: tuple[str, Group, float], other: Group, first: float, waiting: int) -> float:
        """How many times as long the other takes, by turns with the best until that is sure.

        Or until its share of the time is up, of which the rest is for those that are ``waiting``, itself included.
        """
        step = best[2]
        if first > HOPELESS * step + STARTING_SECONDS or first < step / HOPELESS:
            return first / step
        count = max(1, round(TURN_SECONDS / step))
        ends = self.used + max(0.0, self.seconds - self.used) / waiting
        mine, theirs = list[float](), list[float]()
        while not mine or (self.used < ends and not _sure(mine, theirs)):
            try:
                mine.append(self._step(best[1], count))
            except GroupFailed as problem:
                raise _BestFailed from problem
            theirs.append(self._step(other, count))
        return min(theirs) / min(mine)  # of few turns the least disturbed ones


def _told(chosen: str, times: Mapping[str, float], far: Set[str], measured_only: Iterable[str]) -> list[str]:
    """How long the others take beside the chosen one; what is faster, and no choice, first."""
    slower = [(name, times[chosen] / times[name]) for name in measured_only]
    found = [f"slower than {name}: a step takes {ratio:.2f} times as long" for name, ratio in slower if ratio > 1]
    for name, t in times.items():
        if name != chosen and t >= times[chosen]:
            ratio = f"over {HOPELESS:.2g}" if name in far else f"{t / times[chosen]:.2f}"
            found.append(f"{name} takes {ratio} times as long")
    return found


def _room_for_two(group: Group) -> bool:
    """Whether another training of the same size fits into memory beside a group."""
    held = 0
    for pid in group.pids:
        with suppress(psutil.Error):
            held += psutil.Process(pid).memory_info().rss
    return bool(held < 0.8 * psutil.virtual_memory().available)


def _sure(mine: list[float], theirs: list[float]) -> bool:
    """Whether the mean logarithm of their ratio is far from zero for how much it scatters."""
    if len(mine) < LEAST_TURNS:
        return False
    logs = [math.log(b / a) for a, b in zip(mine, theirs, strict=True)]
    return abs(fmean(logs)) > SURELY * stdev(logs) / math.sqrt(len(logs))


def _before(config: RunConfig, open_: Sequence[str], folder: Path) -> RunConfig | None:
    """The settings that a run in ``folder`` has had, where it goes on on a machine that has what they need."""
    if not checkpoints_in(folder / CHECKPOINTS):
        return None
    with suppress(ValueError, OSError):
        told = read_settings(folder / RUN_SETTINGS, "--output-dir")
        found = dataclasses.replace(config, **{name: told[name] for name in open_ if name in told})
        return None if _emulated(found) else found
    return None


def _recommended(config: RunConfig, open_: Sequence[str], output: Path) -> RunConfig | None:
    """The settings that the last search here recommends for this training, where it recommends any."""
    with suppress(ModuleNotFoundError, ValueError, OSError):
        key = hardware.machine().key
        if not any(h.role == "space" and h.machine.key == key for h in Ledger(output / LEDGER).heads()[0]):
            return None
        # The explaining half is not on a bare GPU node, and what it notes of the ledger is no output of a training.
        with redirect_stdout(sys.stderr):
            from ddpm_lab.questions import experiments  # noqa: PLC0415
            from ddpm_lab.questions.recommendation import recommendation  # noqa: PLC0415

            study = experiments.measured_here("recommendation", output)
            found = study and recommendation(study)
        if (
            found
            and found.count
            and all(getattr(found.best.row.config, name) == getattr(config, name) for name in ALIKE)
        ):
            return dataclasses.replace(config, **{name: getattr(found.best.row.config, name) for name in open_})
    return None


def _key(config: RunConfig, said: Set[str], threads: int) -> str:
    """What has to be equal for what was found to be used again: machine, code, shapes, threads, what was said."""
    neutral = dataclasses.replace(config, data="", data_sha256="", seed=0, workload=TRAINING, options=())
    given = sorted(name for name in SETTINGS if name in said)
    here = hardware.machine().key
    return digest({"machine": here, "code": _code(), "run": neutral.run_id, "said": given, "threads": threads})


def _code() -> str:
    """A hash of what a training step is made of."""
    found = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "diffusion").glob("*.[pc]*")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _kept(path: Path) -> dict[str, Any]:
    """What was found before; nothing where the file is not there, or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}

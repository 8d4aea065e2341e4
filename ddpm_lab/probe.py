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
import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ddpm_lab.config import TRAINING, RunConfig, digest
from ddpm_lab.files import LEDGER, replace
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.processor import multiplies_bf16

SETTINGS = ("precision", "channels_last", "kernels", "freed_memory")
PLAIN: dict[str, Any] = {"precision": "fp32", "channels_last": False, "kernels": "aten", "freed_memory": "default"}
"""A step as torch does it where nothing is said."""
SECONDS, PLAIN_STEPS = 20.0, 3
"""How long a probe takes at most: seconds, or so many plain steps where they take longer."""
WORTH, LEAST_IMAGES = 3, 2_000
"""A training shorter than so many probes, or of fewer images, goes without one."""
TURN_SECONDS = 0.2
LEAST_TURNS = 4
SURELY, HOPELESS = 3.0, 1.5
"""Standard errors from equal that decide between two; how many times as long one turn is that needs no second."""
STARTING_SECONDS = 1.0
"""What a first step may take longer than the others."""
SILENCE_SECONDS = 600.0
"""The longest that the first candidate may take for a part of a step; the others are given up when hopeless."""
FILE = Path("trace_output", "probe.json")
Say = Callable[[str], None]


def fastest(
    config: RunConfig, said: Set[str], *, steps: int, threads: int, output: Path, probing: bool, progress: Say
) -> tuple[RunConfig, str]:
    """``config`` with the fastest of SETTINGS that the user has not ``said``, and a sentence that says why.

    Without ``probing``, on a GPU, where something is compiled, and over several hosts it stays as it is: as the table
    of ``usual_settings`` has it. Nothing fails here: a candidate that does is not chosen.
    """
    open_ = [name for name in SETTINGS if name not in said]
    warning = _emulated(config)
    if config.device != "cpu" or config.compile != "off" or config.nodes > 1 or not open_:
        return config, warning
    if found := _recommended(config, said, output):
        return found, f"settings as this machine's search recommends for {config.network}: {_name(found)}"
    if not probing or warning or steps * config.global_batch_size < LEAST_IMAGES:
        return config, warning
    key = _key(config, said, threads)
    kept = _kept(output / FILE)
    if key in kept:
        settings, why = kept[key]["settings"], kept[key]["why"]
        return dataclasses.replace(config, **settings), f"{why} ({kept[key]['date']})"
    found_now = _Probe(config, threads, progress).run(_candidates(config, said), steps)
    if found_now is None:
        return config, warning
    chosen, why = found_now
    settings = {name: getattr(chosen, name) for name in SETTINGS}
    with suppress(OSError):  # then the next start probes again
        (output / FILE).parent.mkdir(parents=True, exist_ok=True)
        entry = {"settings": settings, "why": why, "date": date.today().isoformat()}
        replace(output / FILE, json.dumps({**_kept(output / FILE), key: entry}, indent=1) + "\n")
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


class _Probe:
    """A contest of the candidates, each against the fastest so far."""

    def __init__(self, config: RunConfig, threads: int, progress: Say) -> None:
        self.config, self.threads, self.progress = config, threads, progress
        self.began, self.seconds = time.monotonic(), SECONDS

    def run(self, candidates: Mapping[str, RunConfig], steps: int) -> tuple[RunConfig, str] | None:
        """The fastest, and a sentence; None where the training is too short for it to be worth while, or all fail."""
        with ExitStack() as stack:
            best: tuple[str, Group, float] | None = None
            times: dict[str, float] = {}  # of a step, relative to the first that ran
            far: set[str] = set()  # of which one step may have been enough
            failed: list[str] = []
            for number, (name, candidate) in enumerate(candidates.items()):
                if best and self._left() <= 0:
                    failed.append(f"{name} not tried for want of time")
                    continue
                self.progress(f"probing settings: {name}")
                group = None
                try:
                    group = stack.enter_context(self._group(candidate))
                    if best is None:
                        step = min(_step_seconds(group, 1), _step_seconds(group, 1))
                        if step * steps < WORTH * SECONDS:
                            return None
                        self.seconds = max(SECONDS, PLAIN_STEPS * step)
                        best, times[name] = (name, group, step), 1.0
                        continue
                    first = _step_seconds(group, 1, HOPELESS * best[2] + STARTING_SECONDS)
                    ratio = self._against(best, group, first, len(candidates) - number)
                except GroupFailed as problem:
                    slow = best and problem.status == "timed out"
                    failed.append(
                        f"{name} {f'takes over {HOPELESS} times as long' if slow else f'failed: {problem.reason}'}"
                    )
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
        if best is None:
            return None
        others = [
            f"{name} takes {f'over {HOPELESS}' if name in far else f'{t / times[best[0]]:.2f}'} times as long"
            for name, t in times.items()
            if name != best[0]
        ]
        seconds = f"{time.monotonic() - self.began:.0f} s of trying"
        return candidates[best[0]], f"settings: {best[0]}, the fastest in {seconds}; {'; '.join([*others, *failed])}"

    def _group(self, config: RunConfig) -> Group:
        silent: Any = lambda _: None  # noqa: E731 - its lines are of no interest
        return Group(config, threads=self.threads, modules={}, environment={}, progress=silent)

    def _left(self) -> float:
        return self.began + self.seconds - time.monotonic()

    def _against(self, best: tuple[str, Group, float], other: Group, first: float, waiting: int) -> float:
        """How many times as long the other takes, by turns with the best until that is sure.

        Or until its share of the time is up, of which the rest is for those that are ``waiting``, itself included.
        """
        step = best[2]
        if first > HOPELESS * step + STARTING_SECONDS or first < step / 2:
            return first / step
        count = max(1, round(TURN_SECONDS / step))
        ends = time.monotonic() + max(0.0, self._left()) / waiting
        mine, theirs = list[float](), list[float]()
        while not mine or (time.monotonic() < ends and not _sure(mine, theirs)):
            mine.append(_step_seconds(best[1], count))
            theirs.append(_step_seconds(other, count))
        return min(theirs) / min(mine)  # of few turns the least disturbed ones


def _step_seconds(group: Group, steps: int, silence: float = SILENCE_SECONDS) -> float:
    return max(float(report["seconds"]) for report in group.advance(steps, silence, "probing")) / steps


def _sure(mine: list[float], theirs: list[float]) -> bool:
    """Whether the mean logarithm of their ratio is far from zero for how much it scatters."""
    if len(mine) < LEAST_TURNS:
        return False
    logs = [math.log(b / a) for a, b in zip(mine, theirs, strict=True)]
    return abs(fmean(logs)) > SURELY * stdev(logs) / math.sqrt(len(logs))


def _recommended(config: RunConfig, said: Set[str], output: Path) -> RunConfig | None:
    """The settings that the last search here recommends for this network, batch and number of ranks."""
    key, ledger = hardware.machine().key, Ledger(output / LEDGER)
    if not any(h.role == "space" and h.machine.key == key for h in ledger.heads()[0]):
        return None
    try:
        from ddpm_lab import experiments  # noqa: PLC0415 - the explaining half is not on a bare GPU node
        from ddpm_lab.explain.recommended import recommendation  # noqa: PLC0415

        study = experiments.measured_here("recommendation", output)
        found = study and recommendation(study)
    except ModuleNotFoundError:
        return None
    shapes = ("network", "global_batch_size", "image_size", "device", "world_size")
    if not found or any(getattr(found.config, name) != getattr(config, name) for name in shapes):
        return None
    return dataclasses.replace(config, **{n: getattr(found.config, n) for n in SETTINGS if n not in said})


def _key(config: RunConfig, said: Set[str], threads: int) -> str:
    """What has to be equal for what was found to be used again: machine, code, shapes, threads, what was said."""
    neutral = dataclasses.replace(config, data="", data_sha256="", seed=0, workload=TRAINING, options=())
    given = sorted(name for name in SETTINGS if name in said)
    here = hardware.machine().key
    return digest({"machine": here, "code": _code(), "run": neutral.run_id, "said": given, "threads": threads})


def _code() -> str:
    """A hash of what a training step is made of."""
    found = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "model").glob("*.[pc]*")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _kept(path: Path) -> dict[str, Any]:
    """What was found before; nothing where the file is not there, or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}

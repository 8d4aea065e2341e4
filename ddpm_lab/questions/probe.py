"""The fastest settings for a training on this machine: as its ledger recommends, else measured on the very shapes.

Candidates differ in number format, memory format, kernels and memory handling, and change what is learned by rounding
alone. Two groups of processes at a time take turns, the fastest so far and the next, so that a busy neighbour slows
both alike. The result is kept and used again until machine, code, shapes or threads change.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from ddpm_lab.config import TRAINING, RunConfig, digest
from ddpm_lab.declared import parsed
from ddpm_lab.explain.selection import RECOMMENDATION, about, study
from ddpm_lab.files import LEDGER, read_settings, replace
from ddpm_lab.ledger import Ledger, published_trials
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.processor import multiplies_bf16
from ddpm_lab.questions.recommendation import recommendation
from ddpm_lab.training.run_folder import CHECKPOINTS, checkpoints_in
from ddpm_lab.training.run_folder import SETTINGS as RUN_SETTINGS
from ddpm_lab.training.setting import OWN_DATA, emulated
from ddpm_lab.training.stopping import without_sigterm

SETTINGS = ("precision", "channels_last", "kernels", "freed_memory")
ALIKE = ("network", "global_batch_size", "image_size", "device", "world_size", "compile", "accumulation")
"""Settings that must be equal to those of a search for its result to apply."""
PLAIN: dict[str, Any] = {"precision": "fp32", "channels_last": False, "kernels": "aten", "freed_memory": "default"}
"""Torch's default settings."""
SECONDS, PLAIN_STEPS = 20.0, 3  # maximum duration of a probe: seconds, or plain steps if these take longer
WORTH, LEAST_IMAGES = 3, 2_000  # no probe for trainings shorter than this many probes, or of fewer images
TURN_SECONDS = 0.2
HOPELESS = 2.0  # a candidate whose first step takes this many times as long as one after it gets no second one
STARTING_SECONDS = 1.0  # additional time allowed for a first step
SILENCE_SECONDS = 600.0  # maximum duration of any part of a step
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

    A run that goes on in ``folder`` keeps its settings. Without ``probing``, and over several hosts, they stay as
    ``usual_settings`` has them; on a GPU, and where something is compiled, unless a search recommends others. Nothing
    fails here: a candidate that fails is out.
    """
    open_, warning = [name for name in SETTINGS if name not in said], emulated(config)
    if config.nodes > 1 or not open_:
        return config, warning
    if found := _before(config, open_, folder):
        return found, ""
    if not probing or warning or steps * config.global_batch_size < LEAST_IMAGES:
        return config, warning
    if found := _recommended(config, open_, output):
        return found, f"settings: {_name(found)}, as this machine's search recommends for {config.network}"
    if config.device != "cpu" or config.compile != "off":
        return config, ""
    contest = _Contest(_candidates(config, said), dataclasses.replace(config, **PLAIN), threads, progress)
    tried = _fastest_of(contest, _key(config, said, threads), output / FILE, steps)
    return (dataclasses.replace(config, **tried[0]), tried[1]) if tried else (config, "")


def formats_of(config: RunConfig, *, threads: int, output: Path, probing: bool, progress: Say) -> dict[str, Any]:
    """Number and memory format in which another trainer is fastest on this CPU, measured once and kept.

    Those of ``config`` where nothing can be compared, or without ``probing`` is kept. bf16 is tried if not emulated.
    """
    plain = dataclasses.replace(config, precision="fp32", channels_last=False)
    neutral = dataclasses.replace(plain, data="", data_sha256="", seed=0)
    key = digest({"machine": hardware.machine().key, "threads": threads, "formats": neutral.run_id})
    precisions = ("fp32", "bf16") if multiplies_bf16() else ("fp32",)
    tried = [dataclasses.replace(plain, precision=p, channels_last=c) for p in precisions for c in (False, True)]
    contest = _Contest({_name(c): c for c in tried}, plain, threads, progress)
    found = _fastest_of(contest, key, output / FILE, sys.maxsize if probing else 0)
    return {name: found[0][name] if found else getattr(config, name) for name in ("precision", "channels_last")}


def settings_of(config: RunConfig, *, threads: int, output: Path, probing: bool, progress: Say) -> dict[str, Any]:
    """The SETTINGS in which the lab's trainer is fastest on this CPU, measured once and kept, as ``train`` takes them.

    Empty where nothing can be compared, or without ``probing`` is kept.
    """
    contest = _Contest(_candidates(config, set()), dataclasses.replace(config, **PLAIN), threads, progress)
    found = _fastest_of(contest, _key(config, set(), threads), output / FILE, sys.maxsize if probing else 0)
    return found[0] if found and contest.lasting else {}  # what is not kept is not found when answers are shown


def _fastest_of(contest: "_Contest", key: str, path: Path, steps: int) -> tuple[dict[str, Any], str] | None:
    """Settings of the fastest choice, and why: those kept in ``path``, or found for ``steps``; None without a result.

    What was found is kept for the next start, if it holds then.
    """
    every: dict[str, Any] = {}
    with suppress(OSError, KeyError, TypeError, ValueError):  # not kept, damaged, or edited by hand
        every = dict(parsed(path.read_bytes()))
        found = {name: every[key]["settings"][name] for name in SETTINGS}
        dataclasses.replace(contest.plain, **found)
        return found, f"{every[key]['why']} ({every[key]['date']})"
    if not steps or (chosen := contest.run(steps)) is None:
        return None
    why = f"settings: {contest.describe(chosen)}"
    found = {name: getattr(contest.choices[chosen], name) for name in SETTINGS}
    if contest.lasting:
        every[key] = {"settings": found, "why": why, "date": date.today().isoformat()}
        with suppress(OSError):  # then the next start probes again
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, json.dumps(every, indent=1) + "\n")
    return found, why


def _candidates(config: RunConfig, said: Set[str]) -> dict[str, RunConfig]:
    """What is tried, by name: plain settings first, then the table's, then those between.

    bf16 is tried only where it has instructions: emulated it takes ten times as long.
    """
    precisions = ("fp32", "bf16") if multiplies_bf16() else ("fp32",)
    rows = [PLAIN, {}, *({"precision": p, **more} for p in precisions for more in ({}, {"kernels": "aten"}))]
    found: dict[str, RunConfig] = {}
    for row in rows:
        changed = {name: value for name, value in row.items() if name not in said}
        with suppress(ValueError):  # fused kernels where what the user has said rules them out
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


class _Contest:
    """The candidates one after the other, each against the fastest so far; ``plain`` runs first, chosen or not.

    ``used`` counts seconds of steps, and not what processes take to start. ``times`` are those of a step relative to
    the first that ran. What was found is ``lasting`` if nothing failed that may work at the next start.
    """

    def __init__(self, choices: Mapping[str, RunConfig], plain: RunConfig, threads: int, progress: Say) -> None:
        self.choices, self.plain, self.threads, self.progress = choices, plain, threads, progress
        self.used, self.seconds, self.began = 0.0, SECONDS, time.monotonic()
        self.times: dict[str, float] = {}
        self.failed: list[str] = []
        self.lasting = True

    def run(self, steps: int) -> str | None:
        """The fastest choice for a training of so many steps; None where nothing was compared."""
        candidates = {_name(self.plain): self.plain, **self.choices}
        best, best_name, step = None, "", 0.0  # the fastest so far, and seconds of its step
        with ExitStack() as stack:
            for number, (name, candidate) in enumerate(candidates.items()):
                if len(candidates) == 1 or (best and self.used >= self.seconds):
                    break
                self.progress(f"probing settings: {name}")
                group = None
                try:
                    group = stack.enter_context(Group(candidate, threads=self.threads, starting=without_sigterm))
                    first = self._step(group)
                    if best is None:
                        best, best_name, step, self.times[name] = group, name, min(first, self._step(group)), 1.0
                        self.seconds = max(SECONDS, PLAIN_STEPS * step)
                        if step * steps < WORTH * SECONDS or not _room_for_two(group):
                            return None
                        continue
                    ratio = self._against(best, group, step, first, len(candidates) - number)
                except GroupFailed as problem:
                    self.lasting &= problem.status == "unsupported"
                    self.failed.append(f"{name} failed: {problem.reason}")
                    if group:
                        group.kill()
                    continue
                if ratio is None:  # the best failed, on which all others are measured
                    return None
                self.times[name] = self.times[best_name] * ratio
                (best if ratio < 1 else group).kill()
                if ratio < 1:
                    best, best_name, step = group, name, step * ratio
        return min((name for name in self.times if name in self.choices), key=self.times.__getitem__, default=None)

    def describe(self, chosen: str) -> str:
        """Return a sentence on the chosen setting, and on how much longer the others take."""
        mine, took = self.times[chosen], time.monotonic() - self.began
        rest = [f"{name} takes {t / mine:.2f} times as long" for name, t in self.times.items() if name != chosen]
        return f"{chosen}, the fastest in {took:.0f} s of trying; {'; '.join([*rest, *self.failed])}"

    def _step(self, group: Group, steps: int = 1) -> float:
        """Seconds of a step of the slowest rank."""
        seconds = max(float(report["seconds"]) for report in group.advance(steps, SILENCE_SECONDS, "probing"))
        self.used += seconds
        return seconds / steps

    def _against(self, best: Group, other: Group, step: float, first: float, waiting: int) -> float | None:
        """How many times as long the other takes, by turns until its time is up; None if the best fails."""
        count, hopeless = max(1, round(TURN_SECONDS / step)), first > HOPELESS * step + STARTING_SECONDS
        ends = self.used + max(0.0, self.seconds - self.used) / waiting
        mine, theirs = list[float](), list[float]()
        while not mine or self.used < ends:
            try:
                mine.append(self._step(best, count))
            except GroupFailed:
                return None
            if hopeless and first > HOPELESS * mine[0] + STARTING_SECONDS:  # which a busy neighbour slowed alike
                return first / mine[0]
            theirs.append(self._step(other, count))
        return min(theirs) / min(mine)  # of few turns the least disturbed ones


def _room_for_two(group: Group) -> bool:
    """Whether another training of the same size fits into memory beside a group."""
    held = 0
    for pid in group.pids:
        with suppress(psutil.Error):
            held += int(psutil.Process(pid).memory_info().rss)
    return held < 0.8 * hardware.available_bytes()


def _before(config: RunConfig, open_: Sequence[str], folder: Path) -> RunConfig | None:
    """``config`` in the settings that a run in ``folder`` has had; None if there is none, or its format is emulated."""
    with suppress(ValueError, OSError):
        if checkpoints_in(folder / CHECKPOINTS):
            saved = read_settings(folder / RUN_SETTINGS, "--output-dir")
            found = dataclasses.replace(config, **{name: saved[name] for name in open_ if name in saved})
            return None if emulated(found) else found
    return None


def _recommended(config: RunConfig, open_: Sequence[str], output: Path) -> RunConfig | None:
    """The settings that the last search here recommends for this training, where it recommends any.

    A search that was held to some values of an open setting does not say which is the fastest.
    """
    machine = hardware.machine().key
    with suppress(ModuleNotFoundError, ValueError, OSError):
        here = [r for r in Ledger(output / LEDGER).read()[0] if r.machine.key == machine]
        mine = [r for r in here if not r.cohort[2].startswith(OWN_DATA)]
        mine = about(mine, network=config.network, device=config.device, image_size=config.image_size)
        if not any(r.role == "space" for r in mine):
            return None
        measured = study(mine, RECOMMENDATION, machine=machine)
        advice = recommendation(dataclasses.replace(measured, published_trials=published_trials()))
        if advice is None or not advice.count:
            return None
        best, values = advice.best.row.config, advice.space.settings
        held = {setting for name, _ in advice.space.only for value in values.get(name, ()) for setting in value.changes}
        alike = {*ALIKE, *SETTINGS}.difference(open_)  # what the user has said too
        if held.isdisjoint(open_) and all(getattr(best, name) == getattr(config, name) for name in alike):
            return dataclasses.replace(config, **{name: getattr(best, name) for name in open_})
    return None


def _key(config: RunConfig, said: Set[str], threads: int) -> str:
    """What has to be equal for what was found to be used again: machine, code, shapes, threads, what was said."""
    alike: dict[str, Any] = {"purpose": "timing", "workload": TRAINING}
    neutral = dataclasses.replace(config, data="", data_sha256="", seed=0, mirror=True, options=(), **alike)
    given = sorted(name for name in SETTINGS if name in said)
    here = {"machine": hardware.machine().key, "code": code_version().key}
    return digest({**here, "run": neutral.run_id, "said": given, "threads": threads})

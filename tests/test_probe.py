"""The fastest settings: found by trying, kept, and never against what the user said."""

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planted_search as planted
import pytest
import records as make

from ddpm_lab.config import DDPM, TRAINING, RunConfig
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.questions import probe
from ddpm_lab.training.run_folder import RunFolder
from ddpm_lab.training.stopping import without_sigterm

pytestmark = pytest.mark.usefixtures("multiplying_bf16")

USUAL = RunConfig(
    workload=TRAINING, purpose="quality", precision="bf16", kernels="fused", freed_memory="kept", global_batch_size=8
)


class Machine:
    """A machine on which a step takes so many seconds by the settings' name, and the groups that ran on it."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.now, self.steps, self.alive, self.most = 0.0, Counter[str](), 0, 0
        self.dies: tuple[str, int] = ("", 0)
        self.crowded_from = math.inf

    @contextlib.contextmanager
    def __call__(self, config: RunConfig, *, starting: object, **_: Any) -> Iterator[SimpleNamespace]:
        assert starting is without_sigterm, "processes that start here live on in the training, which saves at SIGTERM"
        name, running = probe._name(config), set[str]()

        def kill() -> None:
            self.alive -= len(running)
            running.clear()

        def advance(steps: int, _silence: float, _stage: str) -> list[dict[str, float]]:
            self.steps[name] += steps
            if (name, self.steps[name]) == self.dies:
                raise GroupFailed("crashed", "killed by SIGKILL")
            # A neighbour comes and goes: now and then everything takes half as long again.
            seconds = self.seconds[name] * steps * (1.5 if int(self.now) % 7 == 0 else 1.0)
            seconds *= 20 if self.now >= self.crowded_from else 1
            self.now += seconds
            return [{"seconds": seconds}]

        running.add(name)
        self.alive += 1
        self.most = max(self.most, self.alive)
        yield SimpleNamespace(pids=(), kill=kill, advance=advance)
        kill()


Play = Callable[..., Machine]
NAMES = {
    "plain": "plain fp32",
    "bf": "bf16, fused kernels",
    "ff": "fp32, fused kernels",
    "ba": "bf16, channels-last",
    "fa": "fp32, channels-last",
    "bn": "bf16, NCHW",
}

SPEEDS = {"bf": 2.0, "plain": 1.0, "ff": 0.5, "ba": 1.5, "fa": 0.9}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Put a machine of known speeds in the place of real groups."""

    def use(**seconds: float) -> Machine:
        machine = Machine({NAMES[short]: value for short, value in seconds.items()})
        monkeypatch.setattr(probe, "Group", machine)
        monkeypatch.setattr(time, "monotonic", lambda: machine.now)
        return machine

    return use


def fastest(
    tmp_path: Path, config: RunConfig = USUAL, said: set[str] | None = None, **how: Any
) -> tuple[RunConfig, str]:
    options: dict[str, Any] = {"steps": 100_000, "threads": 2, "probing": True, "progress": lambda _: None}
    options["folder"] = tmp_path / "run"
    return probe.fastest(config, said or set(), output=tmp_path, **{**options, **how})


@pytest.mark.parametrize(
    "seconds",
    [
        {"bf": 0.2, "plain": 0.5, "ff": 0.4, "ba": 0.3, "fa": 0.45},
        {"bf": 8.0, "plain": 1.7, "ff": 1.1, "ba": 7.0, "fa": 1.5},
        {"bf": 0.7, "plain": 0.5, "ff": 0.6, "ba": 0.8, "fa": 0.6},
    ],
)
def test_the_fastest_is_found_within_the_time(tmp_path: Path, play: Play, seconds: dict[str, float]) -> None:
    machine, best = play(**seconds), NAMES[min(seconds, key=seconds.__getitem__)]
    config, why = fastest(tmp_path)
    assert probe._name(config) == best
    assert why.startswith(f"settings: {best}, ")
    assert machine.alive == 0
    assert machine.most <= 2  # the memory of two at once, and no more
    assert machine.now <= probe.SECONDS + 1.5 * max(seconds.values()) + 2 * 1.5 * seconds["plain"]


def test_what_the_table_takes_for_slow_is_tried_too(tmp_path: Path, play: Play) -> None:
    """And ``run peers`` trains as ``train`` does."""
    play(**{**SPEEDS, "bf": 0.4})
    config = dataclasses.replace(USUAL, precision="fp32")
    found = fastest(tmp_path, config)[0]
    assert found == USUAL
    how: dict[str, Any] = {"threads": 2, "output": tmp_path, "probing": False, "progress": lambda _: None}
    assert dataclasses.replace(config, **probe.settings_of(config, **how)) == found


def test_who_starts_as_a_neighbour_comes_is_not_out(tmp_path: Path, play: Play) -> None:
    machine = play(bf=0.2, plain=0.5, ff=0.4, ba=0.3, fa=0.45)
    machine.crowded_from = 1.0  # from the second group on
    assert fastest(tmp_path)[0] == USUAL


def test_a_second_start_tries_nothing_until_something_is_different(tmp_path: Path, play: Play) -> None:
    play(**SPEEDS)
    first, why = fastest(tmp_path)
    machine = play(**SPEEDS)
    again, told = fastest(tmp_path, dataclasses.replace(USUAL, seed=7, data="elsewhere", data_sha256="0" * 16))
    assert not machine.steps
    assert probe._name(again) == probe._name(first) == "fp32, fused kernels"
    assert again.seed == 7
    assert told.startswith(why)
    for other in ({"threads": 1}, {"config": dataclasses.replace(USUAL, global_batch_size=16)}):
        machine = play(**SPEEDS)
        fastest(tmp_path, **other)
        assert machine.steps, other


def test_what_the_user_said_stays(tmp_path: Path, play: Play) -> None:
    machine = play(plain=1.0, bf=1.8, ba=1.5, bn=1.9)
    config, why = fastest(tmp_path, said={"precision"})
    assert probe._name(config) == "bf16, channels-last"
    assert "plain fp32 takes 0.67 times as long" in why
    assert machine.steps.keys() == machine.seconds.keys()
    config, why = fastest(tmp_path, said=set(probe.SETTINGS))
    assert (config, why) == (USUAL, "")


def test_a_run_that_goes_on_keeps_its_settings(tmp_path: Path, play: Play) -> None:
    machine = play(**SPEEDS)
    before = dataclasses.replace(USUAL, precision="fp32", kernels="aten", channels_last=False)
    with RunFolder(tmp_path / "run") as run:
        run.write_settings(before, {"steps": 9})
        run.checkpoint(3).touch()
    config, why = fastest(tmp_path)
    assert (config, why, machine.steps) == (before, "", {})
    assert fastest(tmp_path, said={"kernels", "channels_last"})[0] == dataclasses.replace(USUAL, precision="fp32")


HELD = (("precision", ("fp32", "bf16")),)


@pytest.mark.parametrize(
    ("judged", "said", "only", "known"),
    [
        (True, {}, (), True),
        (False, {}, (), False),  # its baseline is no recommendation
        (True, {"precision": "fp32"}, (), False),  # with what it found was never measured
        (True, {}, HELD, False),  # it left others out
        (True, {"precision": "bf16"}, HELD, True),
    ],
)
def test_what_a_search_recommends_needs_no_probe(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, *, judged: bool, said: Any, only: Any, known: bool
) -> None:
    base = dataclasses.replace(USUAL, workload=DDPM, purpose="timing", precision="fp32")
    space = dataclasses.replace(planted.SPACE, baseline=base, only=only)
    found = planted.searched(space, sets=6)
    told = make.trials({"it": (dataclasses.replace(base, precision="bf16", world_size=2), 0.0)}, baseline=base)
    gpu = dataclasses.replace(base, device="cuda", freed_memory="default", kernels="aten")
    beside = make.sets({"bf16": (dataclasses.replace(gpu, precision="bf16"), 0.5)}, baseline=gpu)
    larger = dataclasses.replace(space, baseline=dataclasses.replace(base, image_size=64, data_sha256="64"))
    beside += planted.searched(larger, environment=make.environment(date="2026-01-04T10:00:00+00:00"))
    Ledger(tmp_path / LEDGER).append([*found, *(told if judged else ()), *beside])
    monkeypatch.setattr(hardware, "machine", lambda: found[0].environment.machine)
    machine = play(**SPEEDS)
    mine = dataclasses.replace(USUAL, world_size=2 if judged else 1, **said)  # as what was found, or as the baseline
    config, why = fastest(tmp_path, mine, said=set(said))
    assert bool(machine.steps) is not known
    assert config.precision == ("bf16" if known else "fp32")
    assert ("search recommends" in why) is known


def test_what_fails_by_chance_is_not_kept(tmp_path: Path, play: Play) -> None:
    machine = play(**SPEEDS)
    machine.dies = ("plain fp32", 3)
    assert fastest(tmp_path) == (USUAL, ""), "the fastest dies, on which all others are measured"
    assert (machine.alive, (tmp_path / probe.FILE).exists()) == (0, False)
    play(**SPEEDS).dies = ("fp32, fused kernels", 1)
    assert probe._name(fastest(tmp_path)[0]) == "fp32, channels-last"
    play(**SPEEDS)
    assert probe._name(fastest(tmp_path)[0]) == "fp32, fused kernels"


@pytest.mark.slow
def test_real_groups_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic: RunConfig) -> None:
    monkeypatch.setattr(probe, "SECONDS", 3.0)
    config = dataclasses.replace(USUAL, data=synthetic.data, data_sha256=synthetic.data_sha256)
    chosen, why = fastest(tmp_path, config, threads=1)
    assert probe._name(chosen) in why
    assert fastest(tmp_path, config, threads=1)[0] == chosen


def test_another_trainer_gets_the_formats_in_which_it_is_fastest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = RunConfig(workload="ddpm_lab.training.peers:diffusers", precision="bf16", freed_memory="kept")
    how: dict[str, Any] = {"threads": 2, "output": tmp_path, "probing": True, "progress": lambda _: None}
    seconds = {"fp32, NCHW": 0.3, "fp32, channels-last": 0.2, "bf16, NCHW": 0.9, "bf16, channels-last": 0.8}
    for probing, group, precision in ((False, None, "bf16"), (True, Machine(seconds), "fp32"), (False, None, "fp32")):
        monkeypatch.setattr(probe, "Group", group)  # it is measured once, and kept
        found = probe.formats_of(theirs, **how | {"probing": probing})
        assert found == {"precision": precision, "channels_last": True}
    monkeypatch.setattr(probe, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(probe, "Group", machine := Machine(seconds))
    probe.formats_of(dataclasses.replace(theirs, global_batch_size=16), **how)
    assert machine.steps.keys() == {"fp32, NCHW", "fp32, channels-last"}

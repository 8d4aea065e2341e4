"""A training run: what is due when, going on, and every way to end."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import made

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import TRAINING, DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.others import CoreWatch
from ddpm_lab.measure.progress import Progress
from ddpm_lab.training import training_run
from ddpm_lab.training.checkpoint import read, write
from ddpm_lab.training.run_folder import RunFailed, checkpoints_in
from ddpm_lab.training.stopping import Stop, Stopped
from ddpm_lab.training.training_run import Outcome, Schedule, train

CONFIG = RunConfig(workload=TRAINING, purpose="quality", image_size=8, world_size=2, global_batch_size=8)


class Ranks:
    """What a group of ranks answers, without ranks; ``hook`` is asked before each of its calls."""

    def __init__(self, hook: Callable[[str, int], Any] = lambda *_: None) -> None:
        self.hook = hook
        self.calls: list[tuple[str, int]] = []
        self.step = 0

    def __call__(self, config: RunConfig, **_: Any) -> Ranks:
        self.config = dataclasses.replace(config, options=())
        path = config.option("checkpoint", "")
        self.step = read(Path(path)).step if path else 0
        self.hook("start", self.step)
        return self

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def finish(self) -> None:
        pass

    def advance(self, steps: int, limit: float) -> list[dict[str, Any]]:
        assert limit >= 60
        losses = [self._loss(self.step + i) for i in range(1, steps + 1)]
        self.step += steps
        self.calls.append(("advance", steps))
        return [{"losses": losses, "seconds": 0.1 * steps}, {"losses": losses, "seconds": 0.2 * steps}]

    def _loss(self, step: int) -> float:
        planted = self.hook("loss", step)
        return 1 / step if planted is None else float(planted)

    def call(self, method: str, limit: float, **arguments: Any) -> list[Any]:
        assert limit >= 60
        self.calls.append((method, self.step))
        if (planted := self.hook(method, self.step)) is not None:
            return [planted, None]
        if method == "save":
            write(Path(arguments["path"]), made(self.config, self.step))
        if method == "samples":
            Path(arguments["path"]).touch()
        return [{"loss": 0.5, "by_time": [0.5]} if method == "held_out_loss" else None, None]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Put a stand-in in the place of the group."""

    def use(hook: Callable[[str, int], Any] = lambda *_: None) -> Ranks:
        group = Ranks(hook)
        monkeypatch.setattr(training_run, "Group", group)
        return group

    return use


def run(folder: Path, steps: int, *, config: RunConfig = CONFIG, stop: Stop | None = None, **times: int) -> Outcome:
    return train(
        config,
        Schedule(steps=steps, **times),
        folder,
        threads=1,
        stop=stop or Stop(),
        progress=Progress("train", quiet=True),
    )


def steps_in(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in reversed(checkpoints_in(folder / "checkpoints"))]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


# --- what is done when -----------------------------------------------------------------------------------------------


def test_threads_follow_the_free_cores(
    tmp_path: Path, ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks: eight free cores are four threads for each; what nobody knows changes nothing."""
    group, free = ranks(), iter([None, 2, 8, None, 9, 1])
    counts: list[int] = []
    call = group.call

    def heard(method: str, limit: float, **arguments: Any) -> list[Any]:
        counts.extend([arguments["count"]] if method == "set_threads" else [])
        return call(method, limit, **arguments)

    monkeypatch.setattr(group, "call", heard)
    monkeypatch.setattr(CoreWatch, "free", lambda _: next(free, None))
    lines: list[str] = []
    monkeypatch.setattr(Progress, "done", lambda _, line: lines.append(line))
    run(tmp_path, 60)
    assert counts == [4, 1]
    assert "8 cores are free now: 4 threads a rank" in lines[0]
    free = iter([8, 8])
    run(tmp_path / "fixed", 60, config=dataclasses.replace(CONFIG, threads=1))
    assert counts == [4, 1]


def test_chunks_last_a_second_and_end_where_something_is_due(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    group = ranks()
    outcome = run(tmp_path, 29, save_every=10, sample_every=7, evaluate_every=0, keep=2)
    done = [(name, value) for name, value in group.calls if name != "advance"]
    assert done == [
        *(("samples", 7), ("save", 10), ("samples", 14), ("save", 20), ("samples", 21), ("samples", 28)),
        *(("save", 29), ("samples", 29)),
    ]
    assert max(steps for name, steps in group.calls if name == "advance") <= 5
    assert [r["step"] for r in logged(tmp_path)] == list(range(1, 30))
    assert steps_in(tmp_path) == [20, 29]
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step-00000029.pt"


def test_held_out_losses_stand_in_the_row_of_their_step(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    ranks()
    assert run(tmp_path, 12, evaluate_every=5, sample_every=0).held_out_loss == 0.5
    assert [r["step"] for r in logged(tmp_path) if "held_out_loss" in r] == [5, 10, 12]


def test_the_same_command_goes_on(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    def end(what: str, step: int) -> None:
        if (what, step) == ("loss", 18):
            raise KeyboardInterrupt

    ranks(end)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 30, save_every=7, sample_every=0, evaluate_every=0)
    assert steps_in(tmp_path) == [7, 14]
    group = ranks()
    run(tmp_path, 30, save_every=7, sample_every=0, evaluate_every=0)
    assert sum(steps for name, steps in group.calls if name == "advance") == 16
    assert [r["step"] for r in logged(tmp_path)] == list(range(1, 31))
    assert steps_in(tmp_path) == [21, 28, 30]
    group = ranks()
    assert run(tmp_path, 30).step == 30
    assert group.calls == [], "there is nothing left to do"
    run(tmp_path, 31, sample_every=0, evaluate_every=0)
    assert len(logged(tmp_path)) == 31


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_after_the_chunk(tmp_path: Path, ranks: Callable[..., Ranks], number: int) -> None:
    with Stop() as stop:
        ranks(lambda what, step: os.kill(os.getpid(), number) if (what, step) == ("loss", 3) else None)
        outcome = run(tmp_path, 30, stop=stop)
    assert stop.number == number
    assert 3 <= outcome.step < 10
    assert steps_in(tmp_path) == [outcome.step] == [read(outcome.checkpoint).step]
    assert len(logged(tmp_path)) == outcome.step


@pytest.mark.parametrize("what", ["start", "loss"])
def test_a_signal_before_a_step_is_trained_ends_at_once(tmp_path: Path, ranks: Callable[..., Ranks], what: str) -> None:
    """There is nothing to save while ranks build, or compile in their first step."""
    group = ranks(lambda now, _: os.kill(os.getpid(), signal.SIGTERM) if now == what else None)
    with pytest.raises(Stopped), Stop() as stop:
        run(tmp_path, 30, stop=stop)
    assert (stop.number, stop.gentle, group.calls, logged(tmp_path)) == (None, False, [], [])


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, ranks: Callable[..., Ranks], bad: float) -> None:
    ranks(lambda what, step: bad if what == "loss" and step >= 13 else None)
    words = r"the loss is no longer finite at step 13: .*the last good checkpoint is .*step-00000010\.pt"
    with pytest.raises(RunFailed, match=words):
        run(tmp_path, 30, save_every=5, sample_every=0, evaluate_every=0)
    assert steps_in(tmp_path) == [5, 10]
    assert [r["step"] for r in logged(tmp_path)] == list(range(1, 13))


@pytest.mark.parametrize("what", ["save", "samples"])
def test_what_cannot_be_written_ends_the_run(tmp_path: Path, ranks: Callable[..., Ranks], what: str) -> None:
    ranks(lambda method, step: "cannot write x: No space left on device" if (method, step) == (what, 10) else None)
    last = {"save": 5, "samples": 10}[what]
    words = rf"cannot write x: No space left on device; the last good checkpoint is .*step-{last:08d}\.pt"
    with pytest.raises(RunFailed, match=words):
        run(tmp_path, 30, save_every=5, sample_every=10, evaluate_every=0)
    assert steps_in(tmp_path)[-1] == last


def test_a_rank_that_fails_is_named(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    def fail(what: str, step: int) -> None:
        if (what, step) == ("loss", 7):
            raise GroupFailed("oom", "rank 1: OutOfMemoryError", "  the traceback\n")

    ranks(fail)
    with pytest.raises(RunFailed, match=r"the traceback\nrank 1: OutOfMemoryError; a smaller .*step-00000005"):
        run(tmp_path, 30, save_every=5, sample_every=0, evaluate_every=0)


def test_an_unreadable_checkpoint_is_set_aside(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    ranks()
    run(tmp_path, 20, save_every=5, sample_every=0, evaluate_every=0)
    newest = tmp_path / "checkpoints" / "step-00000020.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    group = ranks()
    run(tmp_path, 22, save_every=5, keep=1, sample_every=0, evaluate_every=0)
    assert sum(steps for name, steps in group.calls if name == "advance") == 7, "from step 15"
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000020.pt.unreadable",
        "step-00000022.pt",
    ]


def test_without_a_readable_checkpoint_nothing_is_begun_anew(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    ranks()
    run(tmp_path, 10, save_every=5, sample_every=0, evaluate_every=0)
    for path in checkpoints_in(tmp_path / "checkpoints"):
        path.write_bytes(b"PK\x03\x04")
    group = ranks()
    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be read: move them away"):
        run(tmp_path, 20)
    assert group.calls == []
    assert len(logged(tmp_path)) == 10
    assert steps_in(tmp_path) == [5, 10]


LEARNS_OTHERWISE: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "seed is 1, and was 0"),
    ({"data_sha256": "ab"}, "data_sha256 is 'ab'"),
    ({"diffusion": DiffusionConfig(objective="v")}, r"diffusion\.objective is 'v', and was 'noise'"),
    ({"optimizer": OptimizerConfig(learning_rate=1e-3)}, r"optimizer\.learning_rate is 0\.001, and was 0\.0002"),
]


@pytest.mark.parametrize(("settings", "words"), LEARNS_OTHERWISE)
def test_a_run_that_learns_something_else_is_refused(
    tmp_path: Path, ranks: Callable[..., Ranks], settings: dict[str, Any], words: str
) -> None:
    ranks()
    run(tmp_path, 5, sample_every=0, evaluate_every=0)
    config = (tmp_path / "config.toml").read_text()
    group = ranks()
    with pytest.raises(ConfigError, match=rf"learns something else \({words}"):
        run(tmp_path, 10, config=dataclasses.replace(CONFIG, **settings))
    assert (group.calls, (tmp_path / "config.toml").read_text()) == ([], config)


def test_every_setting_is_decided() -> None:
    """A new setting needs a decision: does it change what is learned?"""
    computed = {
        *("purpose", "workload", "device", "world_size", "accumulation", "precision", "compile", "compile_mode"),
        *("channels_last", "implementation", "kernels", "read_loss", "loader", "loader_workers", "data", "exchange"),
        *("oversubscribe", "options", "optimizer", "threads", "nodes", "revision", "freed_memory"),
    }
    assert {f.name for f in dataclasses.fields(RunConfig)} == computed | set(training_run.LEARNED)
    assert {f.name for f in dataclasses.fields(OptimizerConfig)} == {"adam", "ema", *training_run.LEARNED_BY}

"""Training runs as processes and commands: killed, stopped, and one walk through train and sample as a user would."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import Call, wait_for
from PIL import Image
from test_training import equal
from test_training_run import logged, steps_in

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion import kernels
from ddpm_lab.measure.group import Group
from ddpm_lab.measure.guard import Paused
from ddpm_lab.output import Progress
from ddpm_lab.training import training_run
from ddpm_lab.training.checkpoint import read
from ddpm_lab.training.run_folder import RunFailed, RunFolder, checkpoints_in
from ddpm_lab.training.stopping import Stop, Stopped
from ddpm_lab.training.training_run import Outcome, train

KILLS = 20 if os.environ.get("CHAOS") == "full" else 3


def command(data: Path, folder: Path, steps: int, *more: str) -> list[str]:
    words = "--network tiny --image-size 8 --batch-size 8 --sample-every 0 --evaluate-every 0 --seed 5 --no-probe"
    given = ["--data", str(data), "--output-dir", str(folder), "--steps", str(steps)]
    return [sys.executable, "-m", "ddpm_lab", "train", *given, *words.split(), *more]


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command on one core, so with one thread: two would wait for each other beside busy neighbours."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, **pipes, start_new_session=True) as process:
        psutil.Process(process.pid).cpu_affinity(sorted(os.sched_getaffinity(0))[:1])
        try:
            yield process
        finally:
            process.kill()


def finished(arguments: list[str]) -> str:
    """What it has said on standard error."""
    with started(arguments) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return err


@pytest.mark.slow
@pytest.mark.chaos
def test_kills_change_nothing(data: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Kill -9 at random moments: while starting, training, and saving, which happens ten times a second."""
    chance, steps, seen = random.Random(0), 300 + 30 * KILLS, set[int]()
    whole, arguments = (command(data, tmp_path / name, steps, "--save-every", "4") for name in ("whole", "killed"))
    saved = tmp_path / "killed" / "checkpoints"
    for i in range(KILLS):
        before = checkpoints_in(saved)[:1]
        with started(arguments) as process:
            if i % 3 < 2:  # once it trains; else while it starts
                wait_for(lambda: checkpoints_in(saved)[:1] != before or process.poll() is not None)  # noqa: B023
                time.sleep(chance.uniform(0, 0.3))
            else:
                time.sleep(chance.uniform(0, 6))
            assert process.poll() is None, "it ended before it could be killed: more steps are needed"
        seen |= {read(path).step for path in checkpoints_in(saved)}
    assert len(seen) > KILLS // 2
    assert f"goes on after step {max(seen):,} of {steps:,}" in finished(arguments)
    finished(whole)
    assert not list(tmp_path.rglob("*.unreadable"))
    one, other = (read(tmp_path / name / "checkpoints" / f"step-{steps:08d}.pt") for name in ("whole", "killed"))
    assert equal(one, other)
    rows = [[(r["step"], r["loss"]) for r in logged(tmp_path / name)] for name in ("whole", "killed")]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == list(range(1, steps + 1))
    record_property("chaos", ("kills: train", KILLS, "the same weights as without"))


@pytest.mark.slow
def test_sigterm_saves_and_stops_and_the_same_command_goes_on(data: Path, tmp_path: Path) -> None:
    """Also where every process gets it, as from ``timeout`` or a service manager."""
    log, before, step = tmp_path / "log.jsonl", 0, 0
    for send in (os.kill, os.killpg):
        with started(command(data, tmp_path, 100_000, "--save-every", "100000")) as process:
            wait_for(lambda: process.poll() or (log.exists() and log.stat().st_size > before))  # noqa: B023
            send(process.pid, signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, err
        assert (f"goes on after step {step:,} of 100,000" in err) == bool(step)
        step, before = steps_in(tmp_path)[-1], log.stat().st_size
        assert err.splitlines()[-1].startswith(f"SIGTERM, saved after step {step:,}")
        assert len(logged(tmp_path)) == step


@pytest.mark.slow
def test_a_signal_while_ranks_build_ends_at_once(data: Path, tmp_path: Path) -> None:
    with started(command(data, tmp_path, 100_000)) as process:
        wait_for((tmp_path / "log.jsonl").exists)
        wait_for(lambda: bool(psutil.Process(process.pid).children()))
        begun = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, logged(tmp_path)) == (128 + signal.SIGTERM, []), err
    assert psutil.wait_procs(begun, timeout=10)[1] == [], "nobody is left"
    assert "SIGTERM, stopped" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_signal_ends_a_run_whose_ranks_cannot_be_started(data: Path, tmp_path: Path) -> None:
    """As where torch is imported from a slow disk, or the process that starts them is stopped."""

    def servers() -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):  # one has ended meanwhile
            found = psutil.Process(process.pid).children()
            return [child for child in found if "forkserver import" in " ".join(child.cmdline())]
        return []

    with started(command(data, tmp_path, 100_000)) as process:
        wait_for(lambda: bool(servers()))
        servers()[0].suspend()
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "kept"),
    [("training", "step-00000001"), ("in held_out_loss", "no checkpoint"), ("in save", "step-00000001")],
)
def test_a_rank_that_hangs_does_not_keep_a_run_that_is_to_stop(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, kept: str
) -> None:
    monkeypatch.setattr(training_run, "STOPPING_SECONDS", 2.0)
    settings = {"image_size": 8, "network": "tiny", "global_batch_size": 8, "world_size": 2, "oversubscribe": True}
    given, times = {**settings, "data": str(data), "device": "cpu"}, {"steps": 9, "evaluate_every": 1, "save_every": 1}
    config, schedule, _ = training_run.plan_training(given, times, file=None, cache=tmp_path)

    class Hanging(Group):
        def ask(self, command: str, limit: float, stage: str, **arguments: Any) -> list[dict[str, Any]]:
            if stage == place and stop.gentle:
                self._paused = Paused()  # which would have it go on
                psutil.Process(self.pids[1]).suspend()
                os.kill(os.getpid(), signal.SIGTERM)
            return super().ask(command, limit, stage, **arguments)

    monkeypatch.setattr(training_run, "Group", Hanging)
    with Stop() as stop, pytest.raises(RunFailed, match=rf"rank 1 showed no sign of life for .*{place}.*{kept}"):
        train(config, schedule, tmp_path, threads=1, stop=stop, progress=Progress("train", quiet=True))


# --- the commands ---


def test_how_a_run_ends_is_its_exit_code(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[Any, int, str]] = [
        (RunFailed("the loss is no longer finite at step 7"), 1, "ddpm-lab: the loss is no longer finite at step 7"),
        (Stopped(15), 143, "ddpm-lab: SIGTERM, stopped"),
        (Stopped(2), 130, "ddpm-lab: SIGINT, stopped"),
        (Outcome(step=5, checkpoint=tmp_path / "a.pt", loss=0.25), 143, "SIGTERM, saved after step 5"),
    ]
    for end, code, last in ends:

        def train(*_: object, stop: Any, end: Any = end, **__: object) -> Outcome:
            if isinstance(end, BaseException):
                raise end
            stop.number = 15
            assert isinstance(end, Outcome)
            return end

        monkeypatch.setattr(training_run, "train", train)
        found, out, err = call("train", "--data", data, "--image-size", 8, "--steps", 9, "--output-dir", tmp_path)
        assert (found, out) == (code, "")
        assert err.splitlines()[-1].startswith(last)


def test_kernels_that_cannot_be_had_are_left_out_unless_they_were_asked_for(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, folder = list[RunConfig](), tmp_path / "run"

    def train(config: RunConfig, *_: object, **__: object) -> Outcome:
        ran.append(config)
        return Outcome(step=5, checkpoint=tmp_path / "a.pt")

    def warnings(*more: object) -> list[str]:
        words = "--image-size 8 --steps 5 --device cpu --world-size 1 --output-dir"
        code, _, err = call("train", "--data", data, *words.split(), folder, *more)
        assert code == 0, err
        return [line for line in err.splitlines() if "plain kernels (aten) are used" in line]

    (tmp_path / "fused.toml").write_text('kernels = "fused"\n')
    monkeypatch.setattr(training_run, "train", train)
    monkeypatch.setattr(kernels, "library", kernels.library.__wrapped__)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (warning,) = warnings("--no-mirror")
    assert "need a C++ compiler (no-such-compiler)" in warning
    assert not ran[-1].mirror
    assert not warnings("--config", tmp_path / "fused.toml")
    assert not warnings("--compile", "whole")
    assert [config.kernels for config in ran] == ["aten", "fused", "aten"]
    with RunFolder(folder) as run:  # begun where there was a compiler
        run.write_settings(dataclasses.replace(ran[1], precision="fp32", freed_memory="default"), {"steps": 9})
        run.checkpoint(3).touch()
    assert len(warnings()) == 1
    assert (ran[-1].kernels, ran[-1].precision, ran[-1].freed_memory) == ("aten", "fp32", "default")


@pytest.mark.slow
def test_train_go_on_and_sample(call: Call, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = tmp_path / "settings.toml"
    settings.write_text("seed = 2\n[train]\nsave_every = 2\nsample_every = 4\nevaluate_every = 4\nkeep = 2\n")
    words = "--network tiny --image-size 8 --batch-size 8"
    common = ("--data", data, *words.split(), "--config", settings, "--output-dir", folder)
    code, out, err = call("train", *common, "--steps", 4)
    assert code == 0, err
    assert out == f"{folder}/checkpoints/step-00000004.pt\n"
    assert any("step 4 of 4, loss 0." in line for line in err.splitlines())
    code, out, err = call("train", "--config", folder / "config.toml", "--output-dir", folder, "--steps", 6)
    assert code == 0, err
    assert "train: goes on after step 4 of 6, from" in err
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [(r["step"], "held_out_loss" in r) for r in rows] == [(n, n in (4, 6)) for n in range(1, 7)]
    assert sorted(p.name for p in (folder / "samples").iterdir()) == ["step-00000004.png", "step-00000006.png"]
    checkpoint = folder / "checkpoints" / "step-00000006.pt"
    code, out, err = call("sample", checkpoint, "--count", 36, "--steps", 50, "--seed", 2, "--grid")
    assert code == 0, err
    assert out == f"{folder}/checkpoints/step-00000006/grid.png\n"
    assert "sample: made 36 images" in err
    # The grid that training drew is of the same images, but for its number format.
    mine, theirs = (np.asarray(Image.open(p), dtype=int) for p in (out.strip(), folder / "samples/step-00000006.png"))
    assert mine.shape == theirs.shape
    assert np.mean(abs(mine - theirs)) < 3
    code, _, err = call("sample", checkpoint, "--count", 36, "--steps", 50, "--seed", 2)
    assert (code, err) == (0, "sample: all 36 images are there\n")

"""The heartbeat that a parent reads while a rank writes it, who is killed, and what becomes of anybody's loop."""

import errno
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from fresh_processes import context

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.measure import process
from ddpm_lab.measure.process import BEAT, Heartbeat, kill_group
from ddpm_lab.measure.rank import Rank, make_workload
from ddpm_lab.workload import RankContext

WRITER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from ddpm_lab.measure.process import Heartbeat
beat, end = Heartbeat(Path(sys.argv[1])), time.monotonic() + 0.5
while time.monotonic() < end:
    beat.steps += 1
    beat.mark("forward" if beat.steps % 2 else "backward")
"""


def test_a_reader_never_sees_half_a_mark(tmp_path: Path) -> None:
    """A torn mark would look like a rank that has been silent since the machine started."""
    (tmp_path / "beat").write_bytes(BEAT.pack(time.monotonic(), 0, 0, b"start"))
    beat = Heartbeat(tmp_path / "beat")
    seen = 0
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "beat")]) as writer:
        while writer.poll() is None:
            said = beat.read()
            assert said.silent_seconds < 30
            assert said.phase in ("start", "forward", "backward")
            assert said.marks == said.steps
            seen = max(seen, said.steps)
    assert writer.returncode == 0
    assert seen > 1000


def test_a_group_whose_number_has_passed_on_to_another_is_not_killed() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        other, earlier = psutil.Process(process.pid), psutil.Process(process.pid)
        earlier._ident = (process.pid, 0.0)  # type: ignore[attr-defined]  # of another start
        kill_group(earlier)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        kill_group(other)
        assert process.wait(10) == -signal.SIGKILL


def test_whoever_allocates_out_of_memory_is_out_of_memory() -> None:
    for error in (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError(f"{'NCCL WARN ' * 50}: CUDA error: out of memory"),
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"),
    ):
        assert process._ending_by(error).status == "oom"
    assert process._ending_by(RuntimeError("CUDA error: an illegal memory access was encountered")).status == "crashed"
    mute = type("Mute", (Exception,), {"__str__": lambda _: 1 / 0})
    assert process._ending_by(mute()).message == "Mute"


def test_an_error_names_the_last_line_of_the_users_own_code(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef broken():\n    json.loads('{')\n")
    with pytest.raises(ValueError, match="Expecting") as failed:
        runpy.run_path(str(file))["broken"]()
    assert process._ending_by(failed.value).message.endswith("(char 1) (mine.py, line 5)")
    inner = f'Original Traceback:\n  File "{file}", line 5, in broken\n  File "{pytest.__file__}", line 9, in x\n'
    worker = ValueError(f"Caught ValueError in DataLoader worker process 0.\n{inner * 9}ValueError: no image 37.png")
    assert process._ending_by(worker).message == "ValueError: no image 37.png (mine.py, line 5)"
    with pytest.raises(ConfigError) as refused:
        RunConfig(device="tpu")
    error = refused.value.with_traceback(refused.value.__traceback__ and refused.value.__traceback__.tb_next)
    assert process._ending_by(error).message == f"ConfigError: {error}", "the lab's own lines are no place to look"


CONTEXT = context()
CONFIG = RunConfig(global_batch_size=4)


def make(function: Callable[..., Any]) -> Any:
    return make_workload(function, "mine:f", CONFIG, CONTEXT)


def test_a_generator_steps_at_every_yield() -> None:
    seen: list[int] = []

    def loop() -> Iterator[torch.Tensor]:
        for i in range(3):
            seen.append(i)
            yield torch.tensor(float(i), requires_grad=True)

    workload = make(loop)
    assert seen == []
    losses = [workload.step(None) for _ in range(3)]
    assert seen == [float(loss) for loss in losses] == [0, 1, 2]
    assert not any(loss.requires_grad for loss in losses), "a kept graph would grow with every window"
    assert workload.witness()["images"] == 3 * 4
    with pytest.raises(RuntimeError, match=r"mine:f ended after 3 steps"):
        workload.step(None)


def test_a_workload_is_taken_as_it_is_a_function_is_a_step_and_anything_else_is_refused() -> None:
    class Own:
        def __init__(self, config: RunConfig, context: RankContext) -> None:
            self.given = config, context

        def batches(self) -> None: ...

        step = witness = close = batches

    assert make(Own).given == (CONFIG, CONTEXT)
    assert make(lambda: lambda: 0.5).step(None) == 0.5
    functions: list[tuple[Callable[..., Any], str]] = [(lambda _a: None, "takes 1 arg"), (lambda: 5, "returned int")]
    for function, words in functions:
        with pytest.raises(TypeError, match=words):
            make(function)


def test_all_gpus_of_a_rank_are_waited_for_and_one_that_is_not_its_own_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: dict[int, int] = {1: 5}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: held.get(gpu, 0))
    rank = object.__new__(Rank)
    rank.cuda, rank.device, rank.job = True, "cuda:0", SimpleNamespace(config=CONFIG)  # type: ignore[assignment]
    rank._find_gpus()
    assert rank.gpus == [0, 1]
    with pytest.raises(RuntimeError, match="computes on cuda:1, and its rank on cuda:0"):
        rank._check_place()
    held[0] = 1
    rank._check_place()

"""Wrong ways to time a training step, as published benchmarks did it, on the trainer's own step. None gives a speed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ddpm_lab.config import RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion.unet import build_network, count_parameters
from ddpm_lab.training.train import Trainer
from ddpm_lab.workload import RankContext

COUNTED = "s000"
RUNS, RUN_STEPS, STEPS, FIRST = 50, 3, 20, 6
"""Short runs in one process, and steps of each; steps of other warm measurements, and of a run that is multiplied."""


class WrongWays(Trainer):
    """A trainer with a method for each wrong way. All but ``fresh`` expect steps before them; times are seconds."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self._batches: Iterator[Batch] = super().batches()

    def fresh(self) -> dict[str, Any]:
        """The first steps of a process, each waited for: nothing is warm."""
        return {"step_seconds": [self._timed(1)["seconds"] for _ in range(FIRST)]}

    def bars(self) -> dict[str, Any]:
        """As many whole steps as the option ``bar_images`` allows: fewer images where the batch does not divide it."""
        self._train(2)
        batch = self.config.global_batch_size
        timed = self._timed(max(1, self.config.option("bar_images", 0) // batch))
        return {**timed, "images": timed["steps"] * batch}

    def runs(self) -> dict[str, Any]:
        """Many short runs one after the other in one process."""
        return {"steps": RUN_STEPS, "seconds": [self._timed(RUN_STEPS)["seconds"] for _ in range(RUNS)]}

    def profiled(self) -> dict[str, Any]:
        """Steps with the profiler inside the timer, and its events summed with and without what runs inside them."""
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self.device.type == "cuda")]
        self._train(2)
        begun = time.perf_counter()
        with profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True) as profiler:
            loop = self._timed(FIRST)
        seconds = time.perf_counter() - begun
        events = [e for e in profiler.key_averages() if e.device_type == DeviceType.CPU]
        return {
            "steps": FIRST,
            "seconds": seconds,
            "loop_seconds": loop["seconds"],
            "inclusive_seconds": sum(e.cpu_time_total for e in events) / 1e6,
            "exclusive_seconds": sum(e.self_cpu_time_total for e in events) / 1e6,
        }

    def phases(self, wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The host's time from each mark of the step to the next; ``wait`` is called before the clock is read."""
        seconds: dict[str, float] = {}
        name, since = "data", 0.0

        def mark(phase: str) -> None:
            nonlocal name, since
            wait()
            now = time.perf_counter()
            seconds[name] = seconds.get(name, 0.0) + now - since
            name, since = phase, now

        context, self.context = self.context, replace(self.context, mark=mark)
        try:
            self._synchronize()
            used, begun = time.process_time(), time.perf_counter()
            since = begun
            for _ in range(STEPS):
                mark("data")
                self._train(1)
            mark("end")
            self._synchronize()
            wall, cpu = time.perf_counter() - begun, time.process_time() - used
        finally:
            self.context = context
        return {"steps": STEPS, "seconds": wall, "cpu_seconds": cpu, "phases": seconds}

    def one_thread(self) -> dict[str, Any]:
        """The phases with one compute thread, which leaves every other core idle: ``cpu_seconds`` show it."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._train(2)
            return self.phases()
        finally:
            torch.set_num_threads(before)

    def phases_waited_for(self) -> dict[str, Any]:
        """The phases with the device waited for at the end of each."""
        return self.phases(self._synchronize)

    def loss_read(self) -> dict[str, Any]:
        """Steps that each wait for their loss, as printing it does."""
        return self._timed(STEPS, lambda loss: loss.item())

    def unsynchronised(self) -> dict[str, Any]:
        """Steps whose clock stops when the last one is launched, and not when it has been computed."""
        found = self._timed(STEPS, wait=False)
        self._synchronize()
        return found

    def counted(self) -> dict[str, Any]:
        """The parameters of a network, without its weights."""
        with torch.device("meta"):
            return {"network": COUNTED, "parameters": count_parameters(build_network(COUNTED))}

    def witness(self) -> dict[str, Any]:
        """What runs. Its images are of steps that no command of the rank has asked for, so that they prove nothing."""
        return {**super().witness(), "images": None}

    def _timed(self, steps: int, each: Callable[[Tensor], object] = id, *, wait: bool = True) -> dict[str, Any]:
        self._synchronize()
        begun = time.perf_counter()
        self._train(steps, each)
        if wait:
            self._synchronize()
        return {"steps": steps, "seconds": time.perf_counter() - begun}

    def _train(self, steps: int, each: Callable[[Tensor], object] = id) -> None:
        for _ in range(steps):
            each(self.step(next(self._batches)))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


wrong_ways = WrongWays
"""The workload, as configurations name it."""

"""Wrong ways to read a training step, each as published benchmarks did it: what they make of a number is shown here.

The step is the trainer's own, whatever is done around it. No number of this module is a speed.
"""

from __future__ import annotations

import os
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
from ddpm_lab.model.train import Trainer
from ddpm_lab.model.unet import build_network, count_parameters
from ddpm_lab.workload import RankContext

COUNTED = "s000"
"""The network whose parameters are counted."""
RUNS, RUN_STEPS, STEPS = 50, 3, 20
"""Short runs of one process and steps of each; steps of everything else that is read from a warm process."""
FIRST = 6
"""Steps of a run that is multiplied."""


def wrong_ways(config: RunConfig, context: RankContext) -> WrongWays:
    """A trainer whose steps are read in wrong ways. Raises Unsupported for what this machine cannot do."""
    return WrongWays(config, context)


class WrongWays(Trainer):
    """A trainer that is watched badly. Every method but ``fresh`` wants steps before it; all times are seconds."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self._batches: Iterator[Batch] = super().batches()

    def fresh(self) -> dict[str, Any]:
        """The first steps of a process, each waited for: nothing is warm."""
        return {"step_seconds": [self._timed(1) for _ in range(FIRST)]}

    def bars(self) -> dict[str, Any]:
        """As many steps as ``bar_images`` hold: with a batch that does not divide them, fewer images than the others.

        The option of the configuration ``bar_images`` counts images.
        """
        steps = max(1, self.config.option("bar_images", 0) // self.config.global_batch_size)
        self._train(2)
        return {"steps": steps, "images": steps * self.config.global_batch_size, "seconds": self._timed(steps)}

    def runs(self) -> dict[str, Any]:
        """Many short runs one after the other, as repeats are often taken: in one process."""
        return {"steps": RUN_STEPS, "seconds": [self._timed(RUN_STEPS) for _ in range(RUNS)]}

    def profiled(self) -> dict[str, Any]:
        """Steps with the profiler inside the timer, and what its events add up to.

        ``inclusive_seconds`` counts each event with all that runs inside it, ``exclusive_seconds`` without.
        """
        cuda = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._train(2)
        begun = time.perf_counter()
        with profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True) as profiler:
            loop = self._timed(FIRST)
        seconds = time.perf_counter() - begun
        events = [e for e in profiler.key_averages() if e.device_type == DeviceType.CPU]
        return {
            "steps": FIRST,
            "seconds": seconds,
            "loop_seconds": loop,
            "inclusive_seconds": sum(e.cpu_time_total for e in events) / 1e6,
            "exclusive_seconds": sum(e.self_cpu_time_total for e in events) / 1e6,
        }

    def phases(self) -> dict[str, Any]:
        """The time from each mark of the step to the next, by the host's clock: on a GPU that of launching."""
        return self._phases(lambda: None)

    def one_thread(self) -> dict[str, Any]:
        """The phases with a single compute thread, which leaves every other core idle: ``cpu_seconds`` tell."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._train(2)
            return self._phases(lambda: None)
        finally:
            torch.set_num_threads(before)

    def phases_waited_for(self) -> dict[str, Any]:
        """The phases with the device waited for at the end of each."""
        return self._phases(self._synchronize)

    def loss_read(self) -> dict[str, Any]:
        """Steps that each wait for their loss, as printing it does."""
        self._synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            self._train(1).item()
        self._synchronize()
        return {"steps": STEPS, "seconds": time.perf_counter() - begun}

    def unsynchronised(self) -> dict[str, Any]:
        """Steps whose clock stops when the last one is launched, and not when it has been computed."""
        self._synchronize()
        begun = time.perf_counter()
        self._train(STEPS)
        seconds = time.perf_counter() - begun
        self._synchronize()
        return {"steps": STEPS, "seconds": seconds}

    def hidden_devices(self) -> dict[str, Any]:
        """Which GPU ``cuda:0`` is before and after CUDA_VISIBLE_DEVICES names another one, while it is in use."""
        before, kept = self._uuid(), os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        try:
            return {"same_device": before == self._uuid(), "visible": torch.cuda.device_count()}
        finally:
            if kept is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = kept

    def counted(self) -> dict[str, Any]:
        """The parameters of a network, without its weights."""
        with torch.device("meta"):
            network = build_network(COUNTED, image_size=32)
        return {"network": COUNTED, "parameters": count_parameters(network)}

    def witness(self) -> dict[str, Any]:
        """What runs. Its images are of steps that no command of the rank has asked for, so that they prove nothing."""
        return {**super().witness(), "images": None}

    def _phases(self, wait: Callable[[], None]) -> dict[str, Any]:
        """Steps with the time between marks; ``wait`` is called at each mark, before the clock is read."""
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

    def _timed(self, steps: int) -> float:
        self._synchronize()
        begun = time.perf_counter()
        self._train(steps)
        self._synchronize()
        return time.perf_counter() - begun

    def _train(self, steps: int) -> Tensor:
        for _ in range(steps):
            loss = self.step(next(self._batches))
        return loss

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

"""A training of the user's as a workload: model, data and loss are the user's; what a setting names is set here."""

import hashlib
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.data.draws import EpochStream, Plan
from ddpm_lab.data.loaders import Loader, dataset_loader
from ddpm_lab.diffusion.step import Feed, Step, allow_tf32, autocast, placed
from ddpm_lab.workload import RankContext, Training, call_maker, named, place_of

HELD_OUT_SEED = 20_061_968


def own(config: RunConfig, context: RankContext) -> Any:
    """What the option ``make`` returns: a ``Training`` as a workload, or what steps as it is; else raises TypeError."""
    made, maker = _made(config, context)
    if isinstance(made, Training):
        return OwnTraining(config, context, made, maker)
    if inspect.isgenerator(made) or callable(made) or hasattr(made, "step"):
        return made
    raise TypeError(
        f"{named(config.work_name, maker)} returned {type(made).__name__}: let it return a "
        "ddpm_lab.workload.Training, or yield after every step"
    )


def loader_alone(config: RunConfig, context: RankContext) -> Feed:
    """The loader of the user's dataset without training."""
    made, maker = _made(config, context)
    return OwnFeed(config, context, made, named(config.work_name, maker))


def _made(config: RunConfig, context: RankContext) -> tuple[Any, Any]:
    module, _, function = config.work_name.partition(":")
    _seed(config.seed)
    maker = getattr(importlib.import_module(module), function)
    return call_maker(maker, config.work_name, config, context), maker


def _seed(seed: int) -> None:
    """Seed the generators that a user's code may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class OwnFeed(Feed):
    """A rank's batches of the user's data, and what was consumed of them."""

    def __init__(self, config: RunConfig, context: RankContext, made: Training, name: str) -> None:
        self.name, self.images, self.sample = name, 0, ""
        self.samples: int | None = None
        self.indices = hashlib.sha256()
        data = made.data
        indexed = hasattr(data, "__getitem__") and not isinstance(data, list | tuple | IterableDataset)
        if not indexed or not hasattr(data, "__len__"):
            self.loader, self.sample = Loader("ready", _endless(data, name, config.rank_batch_size)), "varies"
            return
        self.samples = len(data)
        if not self.samples:
            raise ValueError(f"{name}: data holds no sample")
        self._data = data
        stream = EpochStream(np.arange(self.samples), config.seed)
        plan = Plan(stream, config.global_batch_size, context.rank, context.world_size)
        self._drawn = plan.draws()
        self.loader = dataset_loader(
            data,
            (indices.tolist() for _, indices, _ in plan.draws()),
            workers=config.loader_workers,
            collate=made.collate,
            pin_memory=config.device == "cuda",
            seed=config.seed * context.world_size + context.rank,
        )

    def note(self, batch: Any) -> None:
        """Count the images of a batch that is about to be used: as drawn, or the length of its first tensor."""
        if self.samples:  # whatever form its collate gives it
            drawn = next(self._drawn)[1]
            self.indices.update(drawn.tobytes())
            count: int | None = len(drawn)
        else:
            count = images_of(batch)
        if count is None:
            raise TypeError(f"{self.name}: a batch is {described(batch)}, without a tensor whose length is its images")
        self.images += count
        if not self.sample:  # now that workers have started: one that opens its file when first asked does so in each
            first, again = (described(self._data[0]) for _ in range(2))
            self.sample = first if first == again else "varies"

    def witness(self) -> dict[str, Any]:
        seen: dict[str, Any] = {"images": self.images, "samples": self.samples, "sample": self.sample}
        if self.samples:
            workers, ready = self.loader.live_workers(), self.loader.prefetch_batches
            seen |= {"loader_workers": workers, "prefetch_batches": ready}
            seen["indices_sha256"] = self.indices.hexdigest()[:16]
        return seen


class OwnTraining(Step):
    """One rank of the user's training."""

    def __init__(self, config: RunConfig, context: RankContext, made: Training, maker: Any) -> None:
        self.made, self.name, self.maker = made, named(config.work_name, maker), place_of(maker)
        self.place = place_of(made.step or made.loss) or self.maker
        self.sets_precision = made.step is None
        self._check()
        self.data = OwnFeed(config, context, made, self.name)
        # Batches of several sizes are trained at several learning rates; of the user's own only their ratio is known.
        ratio = config.optimizer.learning_rate / OptimizerConfig().learning_rate
        for group in made.optimizer.param_groups if made.optimizer and ratio != 1 else ():
            group["lr"] *= ratio
        config = replace(config, optimizer=replace(config.optimizer, clip_norm=None))  # the user's steps as they are
        super().__init__(config, context, placed(made.model, config, context.device), made.optimizer)
        # Equal weights on every rank, and noise of its own on each.
        _seed(int(np.random.SeedSequence([config.seed, context.rank]).generate_state(1)[0]))

    def _check(self) -> None:
        """Raise TypeError for a Training that trains nothing."""
        made = self.made
        if not isinstance(made.model, nn.Module):
            raise TypeError(f"{self.name}: model is {type(made.model).__name__}: give a torch.nn.Module")
        if isinstance(made.model, DistributedDataParallel):
            raise TypeError(f"{self.name}: model is wrapped in DistributedDataParallel: give the module that it wraps")
        if not isinstance(made.optimizer, torch.optim.Optimizer | None):
            raise TypeError(f"{self.name}: optimizer is {type(made.optimizer).__name__}: give a torch.optim.Optimizer")
        if callable(made.loss) == callable(made.step):
            raise TypeError(f"{self.name}: give either a loss(model, batch) or a step(model, batch)")
        trained = {id(p) for p in made.model.parameters() if p.requires_grad}
        # A step of the user's may have optimizers that the lab is not told of.
        if made.optimizer and made.loss:
            trained &= {id(p) for group in made.optimizer.param_groups for p in group["params"]}
        if not trained:
            raise TypeError(
                f"{self.name}: the optimizer holds none of the model's parameters, or none requires a gradient, so "
                "nothing is trained: make it of the parameters() of the model that you return"
            )

    def loss(self, batch: Any, part: slice) -> Tensor:
        del part  # how a batch of the user's could be divided is not known
        assert self.made.loss
        batch = self._moved(batch)
        self.context.mark("forward")
        with autocast(self.config, self.device):
            loss = self._given(self.made.loss, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._no_loss("loss", described(loss))
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._no_loss("loss", f"{described(loss)} without a gradient (detach() or no_grad?)")
        return loss

    def step(self, batch: Any) -> Tensor:
        if self.made.step is None:
            return super().step(batch)
        self.data.note(batch)
        batch = self._moved(batch)
        self.context.mark("whole step")
        loss = self._given(self.made.step, batch)
        if not isinstance(loss, Tensor | float | int) or (isinstance(loss, Tensor) and loss.numel() != 1):
            raise self._no_loss("step", described(loss))
        self.steps += 1
        return torch.as_tensor(loss).detach()

    def _given(self, function: Callable[[Any, Any], Any], batch: Any) -> Any:
        """What the user's loss or step returns. Raises TypeError where ranks cannot exchange all gradients."""
        try:
            return function(self.model, batch)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise TypeError(
                f"{self.name}: the loss leaves some of the model's parameters out, and ranks wait for their gradients: "
                "freeze them with requires_grad_(False), take them out of the model, or, where only some steps leave "
                "them out, add 0 times their sum to the loss"
            ) from error

    def _moved(self, batch: Any) -> Any:
        self.context.mark("copy")
        return moved(batch, self.device, channels_last=self.config.channels_last)

    def _no_loss(self, what: str, returned: str) -> TypeError:
        kind = "a tensor of one number that backward() can be called on" if what == "loss" else "one number"
        return TypeError(
            f"the {what} of {self.config.work_name} ({self.place}) returned {returned}: let it return the mean loss of "
            f"the batch, {kind}"
        )

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run, and what the user's training offers."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # without which nothing was compiled
        # With fullgraph no frame is counted.
        compiled = dynamo and (dynamo.counters["frames"]["ok"] or dynamo.counters["stats"]["unique_graphs"])
        offers = {"dataset": self.data.samples, "loss": self.made.loss, "held_out_loss": self.made.held_out_loss}
        offers |= {"eager": None if self.config.compile == "off" and compiled else True}
        offered = [name for name, there in offers.items() if there is not None]
        seen = {"offers": offered, "maker": self.maker, "place": self.place, **super().witness()}
        if seen.get("channels_last") and not self.config.channels_last:
            del seen["channels_last"]  # as it is written
        # The wrapper exchanges nothing where a loss goes past it. A static graph is first timed in the second step.
        if self.ddp and self.steps > 1 and not any(self.ddp.reducer.get_backward_stats()):
            seen["exchange_enabled"] = False
        return seen

    @torch.no_grad()
    def held_out_loss(self, *, draws: int) -> dict[str, Any] | None:
        """The user's held-out loss, eager, in fp32 where the lab sets that, in eval mode; None but on rank 0."""
        del draws  # how much is looked at is the user's affair
        if self.context.rank or self.made.held_out_loss is None:
            return None
        modes = {module: module.training for module in self.network.modules()}  # some of them may be frozen
        self.network.eval()
        if self.sets_precision:
            allow_tf32(False)
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            _seed(HELD_OUT_SEED)  # what it draws is the same at each look and in each trial
            found = self.made.held_out_loss(self.network)
        random.setstate(states[0])
        np.random.set_state(states[1])
        try:
            loss = float(found)
        except (TypeError, ValueError) as error:
            said = f"held_out_loss returned {described(found)}: let it return a number"
            raise TypeError(f"{self.name}: {said}") from error
        if self.sets_precision:
            allow_tf32(self.config.precision == "tf32")
        for module, training in modes.items():
            module.training = training
        return {"step": self.steps, "loss": loss}


def _endless(data: Any, name: str, size: int) -> Iterator[Any]:
    """The batches of ``data`` over and over. Raises TypeError or RuntimeError where it cannot give them.

    Batches of a DataLoader with fewer than ``size`` images are left out, but for the first: the last of an epoch is.
    """
    if not hasattr(data, "__iter__"):
        raise TypeError(
            f"{name}: data is {type(data).__name__}: give a dataset with len(data) and data[i], or an iterable of "
            "batches"
        )
    count = 0
    while True:
        before = count
        for batch in data:
            listed = not count and isinstance(data, list | tuple | IterableDataset)
            found = tensors_of(batch) if listed else []
            if len({len(t) for t in found if t.ndim}) > 1 and all(t.ndim < 2 for t in found):
                raise TypeError(
                    f"{name}: one batch is {described(batch)}: data that is a list, a tuple or an IterableDataset "
                    "gives ready batches; give single samples as a Dataset with a length"
                )
            if not isinstance(data, DataLoader) or count == before or (images_of(batch) or size) >= size:
                yield batch
                count += 1
        if count == before:
            raise RuntimeError(
                f"the batches of {name} ended after {count}: give an iterable that begins anew, or an endless one"
            )


def images_of(batch: Any) -> int | None:
    """The length of the first tensor in a batch; None where there is none."""
    return next((len(t) for t in tensors_of(batch) if t.ndim), None)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [t for part in parts for t in tensors_of(part)]


def described(value: Any) -> str:
    """Shapes and formats of the tensors in a value, such as "float32 3x32x32, int"."""
    if isinstance(value, Tensor | np.ndarray):
        shape = "x".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')} {shape}".strip()
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {described(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(described, value))})" if value else "nothing"
    return "nothing" if value is None else type(value).__name__


def moved(value: Any, device: torch.device, *, channels_last: bool) -> Any:
    """A batch with its tensors on ``device``; images (N, C, H, W) in the memory format asked for."""
    if isinstance(value, Tensor):
        there = value.to(device, non_blocking=True)
        return there.contiguous(memory_format=torch.channels_last) if channels_last and there.ndim == 4 else there
    if hasattr(value, "to"):  # before mappings, of which some have methods that a loss may call
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(part, device, channels_last=channels_last) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [moved(part, device, channels_last=channels_last) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value

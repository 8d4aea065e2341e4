"""What every training step has in common: batches, number format, Adam, and how to tell what ran."""

import contextlib
import functools
import hashlib
import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpm_lab.checks import missing_to_compile
from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.data.draws import EpochStream, Plan
from ddpm_lab.data.loaders import Batch, open_loader
from ddpm_lab.data.packed import open_packed
from ddpm_lab.workload import RankContext, Unsupported

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def require(config: RunConfig) -> None:
    """Raise Unsupported, with what to install, for a configuration this machine cannot run."""
    if config.compile != "off" and (missing := missing_to_compile(config.device)):
        raise Unsupported(f"{missing}, or leave compiling out (--compile off)")
    if config.device == "cuda":
        if "NVIDIA_TF32_OVERRIDE" in os.environ:
            raise Unsupported("NVIDIA_TF32_OVERRIDE is set, and libraries then compute in another precision: unset it")
        major, _ = torch.cuda.get_device_capability()
        if config.precision in ("bf16", "tf32") and major < 8:
            raise Unsupported(f"this GPU has no {config.precision}: it came with the Ampere generation; use fp16")


def allow_tf32(allow: bool) -> None:
    """Without this a convolution in "fp32" would run in TF32 on recent GPUs, since cuDNN allows it by default."""
    # Torch has old and new names for this, and reading one fails where the other says otherwise.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow
    torch.backends.cudnn.fp32_precision = "tf32" if allow else "ieee"


def autocast(config: RunConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context in which a network runs in the precision of ``config``."""
    dtype = AUTOCAST.get(config.precision)
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def placed(network: nn.Module, config: RunConfig, device: str | torch.device) -> Any:
    """``network``, moved to where it runs and into its memory format."""
    network = network.to(device)
    return network.to(memory_format=torch.channels_last) if config.channels_last else network


def adam(parameters: Iterable[Tensor], config: OptimizerConfig) -> torch.optim.Adam:
    return torch.optim.Adam(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        fused=config.adam == "fused",
        foreach=config.adam == "foreach",
    )


def channels_last_seen(network: nn.Module) -> bool | None:
    """Whether the first convolution of more than a pixel and a channel is channels-last; None where there is none."""
    layers = (m for m in network.modules() if isinstance(m, nn.Conv2d))
    weight = next((m.weight for m in layers if m.kernel_size[0] > 1 and m.weight.shape[1] > 1), None)
    if weight is None:
        return None
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def compile_seen(config: RunConfig, model: Any) -> dict[str, Any]:
    """What was compiled of ``model`` and how, read back from torch; a silent fall-back to eager compiles no frames.

    ``frames_given_up`` were compiled anew until torch ran them eagerly. CUDA graphs that inductor left out, such as
    those with an operator on the CPU, are counted by torch; those that were recorded, in the tree that replays them.
    """
    if config.compile == "off":
        return {"compile": "off"}
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER  # noqa: PLC0415 - only where something was compiled
    from torch._dynamo.utils import counters  # noqa: PLC0415

    times, most = FRAME_COMPILE_COUNTER.values(), torch._dynamo.config.recompile_limit
    seen: dict[str, Any] = {
        "compile": "off",
        "compiled_frames": int(counters["frames"]["ok"]),
        "graphs": int(counters["stats"]["unique_graphs"]),
        "graph_breaks": int(sum(counters["graph_break"].values())),
        "recompiles": sum(n - 1 for n in times),
        "frames_tried": int(counters["frames"]["total"]),
        "frames_given_up": sum(n > most for n in times),
    }
    if not seen["compiled_frames"]:
        return seen
    whole = hasattr(model, "_orig_mod")
    seen["compile"] = "whole" if whole else "regional"
    made: list[Any] = [model] if whole else [getattr(m, "_compiled_call_impl", None) for m in model.modules()]
    asked = (m.get_compiler_config() for m in made if hasattr(m, "get_compiler_config"))
    graphs = {True: "reduce-overhead", False: "default"}
    modes = {"max-autotune" if c["max_autotune"] else graphs[c["triton.cudagraphs"]] for c in asked if c}
    if modes:
        seen["compile_mode"] = " and ".join(sorted(modes))
    if modes & {"reduce-overhead", "max-autotune"}:
        from torch._inductor import cudagraph_trees  # noqa: PLC0415

        seen["cuda_graph_skips"] = int(counters["inductor"]["cudagraph_skips"])
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0  # which torch 2.11 has to be told
        tree = cudagraph_trees.get_manager(device, create_if_none_exists=False)
        seen["cuda_graphs"] = _nodes(tree.roots) if tree else 0
    return seen


def _nodes(children: Any) -> int:
    """CUDA graphs in a part of the tree."""
    return sum(1 + _nodes(node.children) for nodes in children.values() for node in nodes)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class PrecisionWatch:
    """Notes the number format in which a network's first convolution ran, or a linear layer where none was computed.

    A compiled step would run the hook inside its graph, so there ``run``, an eager forward pass in the same context, is
    watched when the witness is asked for.
    """

    def __init__(self, network: nn.Module, device: torch.device, *, run: Callable[[], object]) -> None:
        kinds = (*_CONVOLUTIONS, nn.Linear)
        self.layers: list[nn.Module] = [m for m in network.modules() if isinstance(m, kinds)]
        self.device, self.run = device, run
        self.dtype: torch.dtype | None = None
        self._linear: torch.dtype | None = None
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Watch whatever the network computes next."""
        self._hooks = self._hooks or [layer.register_forward_hook(self._see) for layer in self.layers]

    def _see(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        del inputs
        if isinstance(module, _CONVOLUTIONS):
            self.dtype = self.dtype or output.dtype
            self.settle()
        else:
            self._linear = output.dtype

    def settle(self) -> None:
        """Watch no more: what was not computed yet is not."""
        self.dtype = self.dtype or self._linear
        for hook in self._hooks:
            hook.remove()

    def seen(self) -> str:
        """fp32, tf32, fp16 or bf16."""
        if self.dtype is None:
            self.watch()
            with torch.no_grad():
                self.run()
            self.settle()
        conv = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        single = "tf32" if self.device.type == "cuda" and conv == "tf32" else "fp32"
        names = {torch.float32: single, torch.float16: "fp16", torch.bfloat16: "bf16", None: "nothing"}
        return names.get(self.dtype, str(self.dtype))


class Feed:
    """A rank's batches, and what was really consumed of them. As a workload it takes batches and trains nothing."""

    def __init__(self, config: RunConfig, context: RankContext, *, start_step: int = 0) -> None:
        self.packed = packed = open_packed(Path(config.data))
        stream = EpochStream(packed.train_indices, config.seed, mirror=config.mirror)
        plan = Plan(stream, config.global_batch_size, context.rank, context.world_size, start_step)
        how: dict[str, Any] = {"workers": config.loader_workers, "channels_last": config.channels_last}
        self.loader = open_loader(config.loader, packed, plan, device=context.device, **how)
        self.images = 0
        self.indices = hashlib.sha256()

    def batches(self) -> Iterator[Any]:
        return iter(self.loader)

    def step(self, batch: Any) -> float:
        self.note(batch)
        return 0.0

    def note(self, batch: Batch) -> None:
        """Remember which images were used."""
        self.images += len(batch.indices)
        self.indices.update(batch.indices.tobytes())

    def witness(self) -> dict[str, Any]:
        return {
            "data_sha256": self.packed.manifest.content_hash,
            "loader": self.loader.kind,
            "loader_workers": self.loader.live_workers(),
            "prefetch_batches": self.loader.prefetch_batches,
            "images": self.images,
            "indices_sha256": self.indices.hexdigest()[:16],
        }

    def close(self) -> None:
        self.loader.close()


class Untrained:
    """A workload that has no data, starts nothing, and trains nothing."""

    def batches(self) -> Iterator[Any]:
        return itertools.repeat(None)

    def step(self, batch: Any) -> Any:
        del batch
        return 0.0

    def witness(self) -> dict[str, Any]:
        return {"images": 0}

    def close(self) -> None:
        """Nothing was started."""


class Step(ABC):
    """One rank of a training: a network, its optimizer, and all that a configuration puts around them.

    Subclasses set ``data`` and compute the ``loss``. Without an ``optimizer`` it is the configuration's Adam; ``hook``
    compresses the gradients that ranks exchange. Raises Unsupported for what this machine cannot do.
    """

    data: Any
    averages: Sequence[Tensor] = ()
    sets_precision = True
    """Whether the network runs in the number format of the configuration, and not in one of its own."""

    def __init__(
        self,
        config: RunConfig,
        context: RankContext,
        network: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        hook: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        require(config)
        if self.sets_precision:
            allow_tf32(config.precision == "tf32")
        if not config.is_own:
            torch.backends.cudnn.benchmark = True
        if config.device == "cuda" and config.option("draws", None) == 0:
            # The weights are compared to the last bit: kernels must be the same each time, and add up in one order. A
            # user's training may need an operator that cannot; where that only warns, attention keeps its usual kernel.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch warns of each product
            torch.use_deterministic_algorithms(mode=True, warn_only=config.is_own)
            torch.backends.cudnn.benchmark = False
        self.config, self.context, self.device = config, context, torch.device(context.device)
        self.network = network
        self.parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self.optimizer, self.has_adam = optimizer or adam(self.parameters, config.optimizer), optimizer is None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.model: Any = network
        self.ddp: DistributedDataParallel | None = None
        if context.world_size > 1 and config.exchange.enabled:
            self.model = self.ddp = DistributedDataParallel(
                network,
                device_ids=[self.device] if config.device == "cuda" else None,
                gradient_as_bucket_view=config.exchange.bucket_view,
                static_graph=config.exchange.static_graph,
                bucket_cap_mb=config.exchange.bucket_mb,
            )
            context.watch(self.ddp, hook)
        if config.compile == "whole":
            self.model = torch.compile(self.model, mode=config.compile_mode)
        self.steps = self.losses_read = 0
        self.batch: Any = None
        self.precision = PrecisionWatch(network, self.device, run=self._forward_once)

    def batches(self) -> Iterator[Any]:
        return iter(self.data.loader)

    def close(self) -> None:
        self.data.close()

    @abstractmethod
    def loss(self, batch: Any, part: slice) -> Tensor:
        """Mean loss of the images ``part`` of this rank's share, on the device."""

    def update(self) -> None:  # noqa: B027 - a step without an average does nothing
        """Called after each step, for an average of the weights."""

    def step(self, batch: Any) -> Tensor:
        """One optimizer step; returns this rank's mean loss, still on the device."""
        self.data.note(batch)
        if self.config.compile == "whole" or (self.config.is_own and "torch._dynamo" in sys.modules):
            self.batch = batch  # for the witness, which cannot look into what is compiled, be it by the user
        elif self.precision.dtype is None:
            self.precision.watch()  # and not before: a held-out loss runs the network in another format
        mark, parts = self.context.mark, self.config.accumulation
        size = self.config.rank_batch_size // parts
        losses: list[Tensor] = []
        for i in range(parts):
            # Only the last micro-batch exchanges gradients: they add up locally until then.
            quiet = self.ddp.no_sync() if self.ddp and i < parts - 1 else contextlib.nullcontext()
            with quiet:
                loss = self.loss(batch, slice(i * size, (i + 1) * size))
                loss = loss / parts if parts > 1 else loss
                mark("backward")
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.precision.settle()
        total = functools.reduce(torch.add, losses)
        if self.config.read_loss:
            total.item()
            self.losses_read += 1
        mark("optimizer")
        self.scaler.unscale_(self.optimizer)
        if self.config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip_norm)
        self.scaler.step(self.optimizer)  # in fp16 it is skipped where gradients overflowed
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.update()
        return total

    def _forward_once(self) -> None:
        """Compute a loss eagerly: how the witness sees into what is compiled."""
        if self.batch is None:  # it was eager, and watched
            return
        compiled, self.model = self.model, self.network
        tried, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # not worth it for one image
        try:
            with torch.compiler.set_stance("force_eager"):
                self.loss(self.batch, slice(0, 1))
        finally:
            self.model, torch.backends.cudnn.benchmark = compiled, tried

    @torch.no_grad()
    def weights_sha256(self) -> str:
        """Hash of weights and averages: equal on every rank, and between runs that learn the same to the last bit."""
        found = hashlib.sha256()
        for weight in (*self.parameters, *self.averages):
            found.update(weight.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def witness(self) -> dict[str, Any]:
        seen = {**compile_seen(self.config, self.model), "parameters": sum(p.numel() for p in self.parameters)}
        seen |= self.data.witness()
        if self.has_adam:
            group = self.optimizer.param_groups[0]
            seen["adam"] = "fused" if group["fused"] else "foreach" if group["foreach"] else "loop"
        if self.context.world_size > 1:
            seen["exchange_enabled"] = self.ddp is not None
        if self.ddp:
            seen["exchange"] = {
                "enabled": True,
                "bucket_view": self.ddp.gradient_as_bucket_view,
                "static_graph": self.ddp.static_graph,
                "bucket_mb": self.ddp.bucket_bytes_cap // 2**20,
            }
        if (channels_last := channels_last_seen(self.network)) is not None:
            seen["channels_last"] = channels_last
        if self.steps:
            seen["read_loss"] = self.losses_read == self.steps
        if self.steps and self.sets_precision and (format_ := self.precision.seen()) != "nothing":
            seen["precision"] = format_
            seen["autocast_scaler"] = self.scaler.is_enabled()
        return seen

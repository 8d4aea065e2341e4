"""The lab's own workload: one optimizer step of a DDPM (Ho et al. 2020, algorithm 1), with every lever a setting."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpm_lab.config import RunConfig
from ddpm_lab.data.draws import EpochStream, noise_and_timesteps, rank_share
from ddpm_lab.data.loader import Batch, FileLoader, Loader, PackedLoader, Plan
from ddpm_lab.data.prepared import open_packed
from ddpm_lab.data.resident import ResidentLoader
from ddpm_lab.model.diffusion import Diffusion
from ddpm_lab.model.unet import build_network
from ddpm_lab.workload import RankContext, Unsupported

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def ddpm(config: RunConfig, context: RankContext) -> Trainer:
    """The DDPM workload. Raises Unsupported for what this machine cannot do."""
    return Trainer(config, context)


def loader_alone(config: RunConfig, context: RankContext) -> LoaderAlone:
    """The loader without training: how many images per second it could deliver."""
    return LoaderAlone(config, context)


class _Data:
    """A rank's batches, and what was really consumed of them."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        packed = open_packed(Path(config.data))
        self.sha256 = packed.manifest.content_hash
        plan = Plan(
            stream=EpochStream(packed.train_indices, config.seed),
            global_batch_size=config.global_batch_size,
            rank=context.rank,
            world_size=context.world_size,
        )
        self.loader: Loader
        if config.loader == "files":
            pin, workers = config.device == "cuda", config.loader_workers
            self.loader = FileLoader(packed, plan, workers=workers, pin_memory=pin, channels_last=config.channels_last)
        else:
            kind = PackedLoader if config.loader == "packed" else ResidentLoader
            self.loader = kind(packed, plan, device=context.device, channels_last=config.channels_last)
        self.device: torch.device | None = None
        self.images = 0
        self.indices = hashlib.sha256()

    def note(self, batch: Batch) -> None:
        """Remember which images were used, and where they lay."""
        self.images += len(batch.indices)
        self.device = batch.images.device
        self.indices.update(batch.indices.tobytes())

    def witness(self) -> dict[str, Any]:
        """Data, loader, and the images used so far."""
        return {
            "data_sha256": self.sha256,
            "loader": self.loader.kind,
            "loader_workers": self.loader.live_workers(),
            "prefetch_batches": self.loader.prefetch_batches,
            "data_device": None if self.device is None else str(self.device),
            "images": self.images,
            "indices_sha256": self.indices.hexdigest()[:16],
        }


class LoaderAlone:
    """Takes batches and does nothing with them."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.data = _Data(config, context)

    def batches(self) -> Iterator[Batch]:
        """Endless batches."""
        return iter(self.data.loader)

    def step(self, batch: Batch) -> float:
        """Nothing is trained: the loss is 0."""
        self.data.note(batch)
        return 0.0

    def witness(self) -> dict[str, Any]:
        """What was loaded."""
        return self.data.witness()

    def close(self) -> None:
        """Stop the loader workers."""
        self.data.loader.close()


class Trainer:
    """One rank of a training run.

    Timesteps and noise are drawn outside the network, per global sample, so that precision, compilation, world size and
    loader change nothing of what is learned from.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        _require(config)
        self.config, self.context = config, context
        self.device = torch.device(context.device)
        self.share = rank_share(config.global_batch_size, context.rank, context.world_size)
        self.data = _Data(config, context)
        self.diffusion = Diffusion(
            schedule=config.diffusion.schedule,
            timesteps=config.diffusion.timesteps,
            objective=config.diffusion.objective,
            loss=config.diffusion.loss,
            min_snr_gamma=config.diffusion.min_snr_gamma,
        ).to(self.device)
        self._allow_tf32(config.precision == "tf32")
        torch.manual_seed(config.seed)  # the same initial weights on every rank
        self.network = build_network(config.network, image_size=config.image_size).to(self.device)
        if config.channels_last:
            self.network = self.network.to(memory_format=torch.channels_last)
        self.ema = copy.deepcopy(self.network).requires_grad_(False)
        self.parameters = list(self.network.parameters())
        self.weights: list[Tensor] = [*self.parameters]
        self.averages: list[Tensor] = [*self.ema.parameters()]
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=config.optimizer.learning_rate, betas=config.optimizer.betas, fused=True
        )
        self.scaler = torch.amp.GradScaler(self.device.type) if config.precision == "fp16" else None
        self.model: Callable[[Tensor, Tensor], Tensor] = self.network
        self.ddp: DistributedDataParallel | None = None
        if context.world_size > 1:
            devices = [self.device] if self.device.type == "cuda" else None
            self.ddp = DistributedDataParallel(self.network, device_ids=devices, gradient_as_bucket_view=True)
            context.watch(self.ddp)
            self.model = self.ddp
        if config.compile != "off":
            self.model = torch.compile(self.model)
        self.steps = 0
        self.convolution_dtype: torch.dtype | None = None
        if config.compile == "off":
            convolution = next(m for m in self.network.modules() if isinstance(m, nn.Conv2d))
            self._hook = convolution.register_forward_hook(self._see)

    @staticmethod
    def _allow_tf32(allow: bool) -> None:
        """Without this a convolution in "fp32" would run in TF32 on recent GPUs, since cuDNN allows it by default."""
        kind = "tf32" if allow else "ieee"
        torch.backends.cuda.matmul.fp32_precision = kind
        torch.backends.cudnn.conv.fp32_precision = kind  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = True

    def _see(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Note the dtype in which a convolution of a real training step ran, once."""
        del module, inputs
        self.convolution_dtype = output.dtype
        self._hook.remove()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the network runs."""
        dtype = AUTOCAST.get(self.config.precision)
        return torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()

    def batches(self) -> Iterator[Batch]:
        """Endless batches of this rank's share."""
        return iter(self.data.loader)

    def loss(self, batch: Batch, part: slice) -> Tensor:
        """Mean loss of the images ``part`` of this rank's share, on the device."""
        mark = self.context.mark
        mark("copy")
        x0 = batch.images[part].to(self.device, non_blocking=True)
        mark("forward")
        noise, t = noise_and_timesteps(
            self.config.seed,
            batch.step,
            self.share.start + part.start,
            self.share.start + part.stop,
            global_batch_size=self.config.global_batch_size,
            shape=x0.shape[1:],
            timesteps=self.diffusion.timesteps,
            device=self.device,
        )
        if self.config.channels_last:
            noise = noise.contiguous(memory_format=torch.channels_last)
        x_t = self.diffusion.q_sample(x0, t, noise)
        with self.autocast():
            prediction = self.model(x_t, t)
        return self.diffusion.prediction_loss(prediction, x0, t, noise).mean()

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step; returns this rank's mean loss, still on the device."""
        self.data.note(batch)
        mark, parts = self.context.mark, self.config.accumulation
        size = len(batch.images) // parts
        total: Tensor | None = None
        for i in range(parts):
            # Only the last micro-batch exchanges gradients: they add up locally until then.
            quiet = self.ddp.no_sync() if self.ddp and i < parts - 1 else contextlib.nullcontext()
            with quiet:
                loss = self.loss(batch, slice(i * size, (i + 1) * size)) / parts
                mark("backward")
                scaled = loss if self.scaler is None else self.scaler.scale(loss)
                scaled.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        mark("optimizer")
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.config.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.steps % self.config.optimizer.ema_every == 0:
            mark("ema")
            self.update_ema()
        assert total is not None
        return total

    @torch.no_grad()
    def update_ema(self) -> None:
        """Move the averaged weights towards the trained ones: ema <- decay ema + (1 - decay) weights."""
        torch._foreach_lerp_(self.averages, self.weights, 1 - self.config.optimizer.ema_decay)

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run."""
        return {
            "precision": self._precision_seen(),
            "autocast_scaler": self.scaler is not None and self.scaler.is_enabled(),
            "compile": self._compile_seen(),
            "parameters": sum(p.numel() for p in self.parameters),
            "weights_device": str(self.parameters[0].device),
            **self._compile_counters(),
            **self.data.witness(),
        }

    def _precision_seen(self) -> str:
        """The number format in which a convolution ran: in a training step, or, compiled, in one more eager forward."""
        dtype = self.convolution_dtype
        if dtype is None:
            seen: list[torch.dtype] = []
            convolution = next(m for m in self.network.modules() if isinstance(m, nn.Conv2d))
            hook = convolution.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
            size = self.config.image_size
            with torch.no_grad(), self.autocast():
                self.network(torch.zeros(1, 3, size, size, device=self.device), torch.zeros(1, device=self.device))
            hook.remove()
            dtype = seen[0]
        if dtype == torch.float32 and self.device.type == "cuda":
            conv = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
            return "tf32" if conv == "tf32" else "fp32"
        return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, str(dtype))

    def _compile_counters(self) -> dict[str, Any]:
        if self.config.compile == "off":
            return {}
        from torch._dynamo.utils import counters  # noqa: PLC0415 - only where something was compiled

        return {
            "compiled_frames": int(counters["frames"]["ok"]),
            "graphs": int(counters["stats"]["unique_graphs"]),
            "graph_breaks": int(sum(counters["graph_break"].values())),
            "recompiles": int(sum(counters["recompiles"].values())),
        }

    def _compile_seen(self) -> str:
        """``whole`` only if frames were compiled; a silent fall-back to eager compiles none."""
        return "whole" if self._compile_counters().get("compiled_frames", 0) else "off"

    def close(self) -> None:
        """Stop the loader workers."""
        self.data.loader.close()


def _require(config: RunConfig) -> None:
    """Raise Unsupported, with what to install, for a configuration this machine cannot run."""
    if config.compile != "off":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise Unsupported(f"no C++ compiler ({compiler}); on Debian or Ubuntu: apt install g++")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise Unsupported("no Python headers (Python.h); on Debian or Ubuntu: apt install python3-dev")
    if config.device == "cuda":
        major, _ = torch.cuda.get_device_capability()
        if config.precision in ("bf16", "tf32") and major < 8:
            raise Unsupported(f"this GPU has no {config.precision}: it came with the Ampere generation; use fp16")

"""What a rank is fed: its batches by the loader that the configuration names, and what was really consumed of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ddpm_lab.config import RunConfig
from ddpm_lab.data.draws import EpochStream, Plan
from ddpm_lab.data.loaders import Batch, open_loader
from ddpm_lab.data.packed import open_packed
from ddpm_lab.workload import RankContext


class Feed:
    """A rank's batches, and what was really consumed of them."""

    def __init__(self, config: RunConfig, context: RankContext, *, start_step: int = 0) -> None:
        self.packed = packed = open_packed(Path(config.data))
        self.sha256 = packed.manifest.content_hash
        plan = Plan(
            stream=EpochStream(packed.train_indices, config.seed),
            global_batch_size=config.global_batch_size,
            rank=context.rank,
            world_size=context.world_size,
            start_step=start_step,
        )
        self.loader = open_loader(
            config.loader,
            packed,
            plan,
            workers=config.loader_workers,
            device=context.device,
            channels_last=config.channels_last,
        )
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


class AnyFeed(Protocol):
    """Batches, and what was consumed of them."""

    loader: Any

    def note(self, batch: Any) -> None:
        """Remember what was used."""
        ...

    def witness(self) -> dict[str, Any]:
        """What was used so far."""
        ...


class LoaderAlone:
    """Takes batches and does nothing with them."""

    def __init__(self, data: AnyFeed) -> None:
        self.data = data

    def batches(self) -> Iterator[Any]:
        """Endless batches."""
        return iter(self.data.loader)

    def step(self, batch: Any) -> float:
        """Nothing is trained: the loss is 0."""
        self.data.note(batch)
        return 0.0

    def witness(self) -> dict[str, Any]:
        """What was loaded."""
        return self.data.witness()

    def close(self) -> None:
        """Stop the loader workers."""
        self.data.loader.close()

"""Is planted harm called worse, and no default, with the settings of ``ddpm-lab run quality``?

    python benchmarks/quality.py --data path/to/cifar-10/train --seeds 5

Trains ``tiny`` from each seed as ``run quality`` does: fp32 as the baseline, what must not be worse, and faults.
Prints the verdict on each, with what it rests on, and writes every held-out loss to a file;
``benchmarks/published/quality-tiny.json`` is one, which ``tests/test_explain_quality.py`` replays. ``--long 500000``
trains the baseline on so many images instead, once, in bf16: the loss that shows harm lies half-way, in the logarithm,
between the first and the last of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpm_lab.config import TRAINING, RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.data.packed import read_manifest, resolve
from ddpm_lab.explain import quality
from ddpm_lab.measure.trial import LOOKS
from ddpm_lab.model.training import Training
from ddpm_lab.setting import usual_settings
from ddpm_lab.workload import RankContext

DRAWS = 512


class Rounded(Training):
    """Weights kept in bf16."""

    @torch.no_grad()
    def step(self, batch: Batch) -> Tensor:
        """A step, after which every weight is rounded."""
        with torch.enable_grad():
            loss = super().step(batch)
        for parameter in self.parameters:
            parameter.copy_(parameter.bfloat16())
        return loss


class Unscaled(Training):
    """fp16 without scaled gradients."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.scaler = None


def planted(base: RunConfig) -> dict[str, tuple[type[Training], RunConfig]]:
    """What is trained beside the baseline: first what must not be worse, then faults."""

    def optimizer(**settings: Any) -> RunConfig:
        return replace(base, optimizer=replace(base.optimizer, **settings))

    found: dict[str, tuple[type[Training], RunConfig]] = {
        "default": (Training, replace(base, **usual_settings(base.device))),
        "learning rate 0.002": (Training, optimizer(learning_rate=2e-3)),
        "learning rate 2": (Training, optimizer(learning_rate=2.0)),
        "average never moved": (Training, optimizer(ema_every=10**9)),
        "weights in bf16": (Rounded, base),
    }
    if base.device == "cuda":
        found["fp16 unscaled"] = (Unscaled, replace(base, precision="fp16"))
    return found


def train(kind: type[Training], config: RunConfig, looks: list[int]) -> list[dict[str, float]]:
    """Held-out losses after so many images each."""
    device = "cuda:0" if config.device == "cuda" else "cpu"
    threads = torch.get_num_threads()
    trainer = kind(config, RankContext(rank=0, world_size=1, device=device, threads=threads, mark=lambda _: None))
    batches, found = trainer.batches(), []
    for images in looks:
        while trainer.steps * config.global_batch_size < images:
            trainer.step(next(batches))
        found.append({"images": images, "loss": round((trainer.held_out_loss(draws=DRAWS) or {})["loss"], 6)})
    trainer.close()
    return found


def verdict(rows: list[dict[str, Any]], name: str) -> quality.Equivalence:
    """That on the configuration ``name``."""
    losses = {(r["configuration"], r["seed"]): [h["loss"] for h in r["held_out"]] for r in rows}
    base = np.array([v for (label, _), v in losses.items() if label == "fp32"])
    apart = [v[-1] - losses["fp32", seed][-1] for (label, seed), v in losses.items() if label == name]
    return quality.equivalence(apart, quality.margin_of(base[:, -1], base[:, -2]))


def main() -> None:
    """Train, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--long", type=int, default=0, metavar="IMAGES")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", default="benchmarks/results/quality.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        folder = resolve(options.data, Path(cache), image_size=32)
        base = RunConfig(
            purpose="quality",
            workload=TRAINING,
            device=options.device,
            global_batch_size=options.batch,
            data=str(folder),
            data_sha256=read_manifest(folder).content_hash,
        )
        images = options.long or options.images
        looks = [options.batch * round(share * images / options.batch) for share in LOOKS]
        tried = {"fp32": (Training, base), **({} if options.long else planted(base))}
        if options.long:
            tried = {"default": (Training, replace(base, **usual_settings(base.device)))}
        rows = []
        for seed in range(1 if options.long else options.seeds):
            for name, (kind, config) in tried.items():
                held_out = train(kind, replace(config, seed=seed), looks)
                rows.append({"configuration": name, "seed": seed, "batch": options.batch})
                rows[-1] |= {"kernels": config.kernels, "held_out": held_out}
                print(f"{name}, seed {seed}: loss {held_out[-1]['loss']:.4f} after {images:,} images", flush=True)
                path = Path(options.output)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(rows, indent=1) + "\n")
    for name in [] if options.long else list(tried)[1:]:
        print(f"{name}: {quality.full(verdict(rows, name))}")


if __name__ == "__main__":
    main()

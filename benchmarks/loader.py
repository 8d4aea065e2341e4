"""How many images per second do the loaders deliver, without any training?

    python benchmarks/loader.py --data path/to/cifar-10/train --batch 8 32 128

In each round every loader has a turn, in an order of its own; it is built for its turn and ended after it, so that
nothing else runs beside it. A turn begins when what was ready ahead is consumed. A batch is what a training step takes:
floating point, mirrored, in the step's memory format, on the device. Prints images per second and the ratio to decoding
files in two workers, with its 95 % interval over rounds, and writes all turns to a file. Rounds in which other
processes took more than a tenth of the cores are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from ddpm_lab.data.draws import EpochStream, Plan
from ddpm_lab.data.loaders import Loader, open_loader
from ddpm_lab.data.packed import PackedImages, open_packed, resolve
from ddpm_lab.explain.stats import estimate
from ddpm_lab.measure.hardware import CpuClock, gpus, usable_cores
from ddpm_lab.processor import processor

REFERENCE = "files, 2 workers"
DISTURBED = 0.1


def loaders(packed: PackedImages, device: str) -> dict[str, Callable[[Plan], Loader]]:
    """What is compared: how to open each loader for a plan."""

    def made(kind: str, workers: int = 0) -> Callable[[Plan], Loader]:
        return lambda plan: open_loader(kind, packed, plan, workers=workers, device=device, channels_last=True)

    return {
        "files, 0 workers": made("files"),
        "files, 1 worker": made("files", 1),
        REFERENCE: made("files", 2),
        "packed": made("packed"),
        "resident": made("resident"),
    }


def images_per_second(loader: Loader, device: str, seconds: float) -> float:
    """Take batches for so many seconds, and wait for the device at both ends."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    for _ in range(10 + loader.prefetch_batches):
        batch = next(loader)
    wait()
    count, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        for _ in range(4):
            batch = next(loader)
            images = batch.images.to(device, non_blocking=True)
            count += len(images)
    wait()
    return count / (time.perf_counter() - begun)


def main() -> None:
    """Take turns, and say who delivers how much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="as for the lab: a folder of images, an archive, ...")
    parser.add_argument("--batch", type=int, nargs="+", default=[32])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a turn")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in this process")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--output-dir", default="benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    output = Path(options.output_dir).absolute()
    packed = open_packed(resolve(options.data, output / "prepared", progress=print))
    place = processor() if options.device == "cpu" else gpus()[torch.device(options.device).index or 0].name
    hardware = f"{place}, {usable_cores()} cores, {options.threads} torch threads"
    date = time.strftime("%Y-%m-%d %H:%M")
    print(f"{packed.manifest.describe()}; {hardware}, {date}")
    turns: list[dict[str, object]] = []
    for batch in options.batch:
        plan = Plan(stream=EpochStream(packed.train_indices, seed=0), global_batch_size=batch)
        found: dict[str, list[float]] = {}
        rounds = 0
        for number in range(options.rounds):
            order = list(loaders(packed, options.device).items())
            random.Random(number).shuffle(order)
            clock, begun = CpuClock.read(), time.perf_counter()
            speeds_of_round = {}
            for name, make in order:
                with closing(make(plan)) as loader:
                    speeds_of_round[name] = images_per_second(loader, options.device, options.seconds)
            others = clock.others_cores(CpuClock.read(), time.perf_counter() - begun) or 0.0
            disturbed = others > DISTURBED * usable_cores()
            rounds += not disturbed
            for name, speed in speeds_of_round.items():
                turns.append({"batch": batch, "round": number, "loader": name, "images_per_second": speed})
                turns[-1] |= {"others_cores": round(others, 3), "left_out": disturbed}
                if not disturbed:
                    found.setdefault(name, []).append(speed)
        print(f"batch {batch}, {rounds} rounds of {options.rounds}{':' if rounds else ': too busy, run it again'}")
        for name, speeds in sorted(found.items(), key=lambda item: statistics.median(item[1])):
            ratio = estimate([math.log(a / b) for a, b in zip(speeds, found[REFERENCE], strict=True)])
            print(
                f"  {name:18}{statistics.median(speeds):12,.0f} images/s"
                f"{ratio.value:8.2f} times {REFERENCE} ({ratio.low:.2f} to {ratio.high:.2f})"
            )
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"loader-{time.strftime('%Y%m%d-%H%M%S')}.json"
    about = {"hardware": hardware, "device": options.device, "torch": torch.__version__, "date": date}
    about["data"] = packed.manifest.describe()
    target.write_text(json.dumps({**about, "seconds": options.seconds, "turns": turns}, indent=1))
    print(f"raw numbers: {target}")


if __name__ == "__main__":
    main()

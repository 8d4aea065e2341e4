"""A window of the lab's trainer on the fake CUDA: how often its ranks wait for their device, printed as JSON.

``python fake_cuda_window.py SETTINGS``, those of a RunConfig as JSON.
"""

import ctypes
import json
import sys

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.group import Group
from ddpm_lab.training.train import Trainer


class Watched(Trainer):
    """The lab's trainer, which tells what the fake CUDA has seen."""

    def waits(self, start: float, end: float) -> int:
        ask = ctypes.CDLL(None).fake_cuda_waits
        ask.argtypes = [ctypes.c_double] * 2
        return int(ask(start, end))


def main() -> None:
    config = RunConfig.from_dict({"workload": "fake_cuda_window:Watched", "device": "cuda", **json.loads(sys.argv[1])})
    with Group(config, threads=1) as group:
        # DDP times its own first ten steps, and waits for its events then.
        reports = group.window(settle=12, steps=10, limit=60, stage="testing")
        # A rank may still be at its first steps while the other is timed: each is asked about its own window.
        spans = [{name: report[name] for name in ("start", "end")} for report in reports]
        waits = [group.call("waits", 60, **span)[rank] for rank, span in enumerate(spans)]
        print(json.dumps({"waits": waits, "devices": [w["device"] for w in group.witness()]}))


if __name__ == "__main__":
    main()

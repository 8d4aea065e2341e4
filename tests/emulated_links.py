"""Predicted against measured: real groups over emulated links, some held out of the fit, and what is predicted of them.

A step waits a known time, so that ranks do not fight for cores, and then exchanges a message. Links are fitted to
all-reduces alone, for some link settings and numbers of ranks; from these the steps of all others are predicted.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from namespaces import Link, hosts

from ddpm_lab.explain.link_fit import Timing, fit_link
from ddpm_lab.explain.prediction import Cluster, Compute, Exchanged, Prediction, Speed, predict

HERE = Path(__file__).resolve().parent
MESSAGES = (2**10, 2**14, 2**16, 2**18)
EXCHANGES: tuple[dict[str, float], ...] = tuple({"message_bytes": size} for size in MESSAGES)
STEPS: tuple[dict[str, float], ...] = (
    {"message_bytes": 2**18, "buckets": 1, "compute_seconds": 0.02},
    {"message_bytes": 2**20, "buckets": 4, "compute_seconds": 0.03},
    {"message_bytes": 2**20, "buckets": 1, "compute_seconds": 0.05},
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A step that was predicted before it was looked at; ``new_link`` says that nothing of its link was fitted."""

    link: Link
    ranks: int
    step: dict[str, float]
    measured: float
    predicted: Prediction
    new_link: bool

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.measured - 1


def measure(link: Link, groups: Mapping[int, Sequence[Mapping[str, float]]], steps: int) -> dict[int, list[float]]:
    """Median seconds of a step with each of the options of a group, by number of ranks, over links of one kind."""
    jobs = "".join(
        json.dumps({"ranks": ranks, "options": [dict(each) for each in options], "steps": steps}) + "\n"
        for ranks, options in groups.items()
    )
    with hosts([link] * max(groups)) as made:
        places = json.dumps([[host.namespace, host.address] for host in made])
        command = [sys.executable, str(HERE / "rank_groups.py"), places]
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        run = subprocess.run(
            command,
            input=jobs,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return {count: json.loads(line) for count, line in zip(groups, run.stdout.splitlines(), strict=True)}


def outcomes(measured: Mapping[Link, Mapping[int, list[float]]], fitted_ranks: Sequence[int]) -> Iterator[Outcome]:
    """Predictions for every step that was held out.

    ``measured`` holds the seconds of EXCHANGES for ``fitted_ranks``, and those of STEPS for other ranks. A link of
    which nothing was fitted is predicted from its delay and rate, by how latency and bandwidth of the fitted ones
    follow from theirs.
    """
    links = {
        link: fit_link(
            [
                Timing(ranks=n, message_bytes=size, seconds=seconds)
                for n in fitted_ranks
                for size, seconds in zip(MESSAGES, by_ranks[n], strict=True)
            ]
        )
        for link, by_ranks in measured.items()
        if by_ranks.keys() >= set(fitted_ranks)
    }
    slope, overhead = np.polyfit([k.delay_seconds for k in links], [v.alpha for v in links.values()], 1)
    stretch = np.mean([v.beta * _rate(k) for k, v in links.items()])
    for link, by_ranks in measured.items():
        known = links.get(link) or replace(
            max(links.values(), key=lambda v: v.spread),
            alpha=float(overhead + slope * link.delay_seconds),
            beta=float(stretch / _rate(link)),
        )
        held_out = {n: row for n, row in by_ranks.items() if n not in fitted_ranks}
        for (ranks, row), i in itertools.product(held_out.items(), range(len(STEPS))):
            step = STEPS[i]
            compute = Compute(speeds=(Speed(rank_batch=1, seconds=step["compute_seconds"], log_error=0.0, freedom=1),))
            found = predict(
                Cluster(inner=known),
                compute,
                Exchanged(message_bytes=step["message_bytes"], buckets=int(step["buckets"])),
                ranks,
                1,
            )
            yield Outcome(
                link=link, ranks=ranks, step=step, measured=row[i], predicted=found, new_link=link not in links
            )


def median_error(found: Sequence[Outcome]) -> float:
    """The median of how far predictions are off, as a share."""
    return float(np.median([abs(o.error) for o in found])) if found else math.nan


def _rate(link: Link) -> float:
    """Bytes a second."""
    assert link.bits_per_second is not None
    return link.bits_per_second / 8

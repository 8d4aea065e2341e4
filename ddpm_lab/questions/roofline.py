"""How far a training step is from what its machine can do: a roofline of the network's work (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import Study, rank_zero
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import LIMITS

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
NEEDED = ("convolution", "matrix product")
"""Kinds of work that no fusing removes."""
OPTIMIZER = "optimizer"
OPTIMIZER_BYTES = 28
"""Of each weight in a step of Adam: weight and two moments read and written, the gradient read, four bytes each."""


@dataclass(frozen=True, slots=True)
class Part:
    """Work of one kind for an image: its FLOP, and its seconds at the machine's peaks, the longer of FLOP and bytes."""

    kind: str
    flop: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Peaks of the machine (per second), the parts of a step, and what an image really takes."""

    precision: str
    flops: float
    bandwidth: float
    parts: tuple[Part, ...]
    measured_seconds: float

    @property
    def flop_share(self) -> float:
        """Model FLOP utilisation (Chowdhery et al. 2022, appendix B): FLOP of an image over what the peak does then."""
        return sum(p.flop for p in self.parts) / self.measured_seconds / self.flops

    @property
    def headroom(self) -> float:
        """How many times as fast the step could be, if all but convolutions, products and the optimizer were free.

        Caches can make the least time too long.
        """
        least = sum(p.seconds for p in self.parts if p.kind in (*NEEDED, OPTIMIZER))
        return max(1.0, self.measured_seconds / least)


def roofline(study: Study, own: Comparison | None) -> Roofline | None:
    """The roofline of ``own``, a row of the lab's trainer, from the work and the peaks of its network and device.

    None where these were not measured in its precision, where it does not train, and where it is faster than the peak:
    then one of the two is wrong.
    """
    if own is None or own.config.workload != DDPM:
        return None
    peaks, work, precision = _peaks(study, own.config), _work(study, own.config), own.config.precision
    if not {"bandwidth", "fp32", precision} <= peaks.keys() or not work:
        return None
    flops, bandwidth, parts = peaks[precision], peaks["bandwidth"], []
    for name, of in work.items():
        kind, flop, size = name, of.get("flop", 0.0), BYTES[precision] * of["elements"]
        if name == "weights":
            kind, flop, size = OPTIMIZER, 0.0, OPTIMIZER_BYTES * of["elements"] / own.batch
        parts.append(Part(kind, flop, max(flop / flops, size / bandwidth)))
    line = Roofline(
        precision=precision,
        flops=flops,
        bandwidth=bandwidth,
        parts=tuple(sorted(parts, key=lambda p: -p.seconds)),
        measured_seconds=own.step_seconds / own.batch,
    )
    return line if line.flop_share <= 1 else None


def _peaks(study: Study, config: RunConfig) -> dict[str, float]:
    """FLOP/s by precision, the better of a matrix product and a convolution, and bytes/s of a copy."""
    found: dict[str, float] = {}
    for row in comparisons(study):
        if not row.family.startswith(LIMITS) or not row.sets or row.role == "twin" or not _alike(row.config, config):
            continue
        seen = _seen(study, lambda c: c.run_id == row.run_id)  # noqa: B023
        if seen.get("flop"):
            precision, speed = row.config.precision, seen["flop"] / row.step_seconds
            found[precision] = max(found.get(precision, 0.0), speed)
        elif seen.get("bytes"):
            found["bandwidth"] = seen["bytes"] / row.step_seconds
    return found


def _seen(study: Study, of: Callable[[RunConfig], bool], key: str = "") -> dict[str, Any]:
    """The last that rank 0 of any such configuration witnessed, or of it a ``key``; empty without."""
    found = (rank_zero(r) for r in reversed(study.records) if of(r.config))
    return next((value for seen in found if (value := seen.get(key) if key else seen)), {})


def table(study: Study, own: Comparison | None) -> Table:
    """Work of each kind for an image and its seconds at the machine's peaks, then what an image takes; may be empty."""
    if (line := roofline(study, own)) is None:
        return []
    rows = [(part.kind, f"{part.flop / 1e9:.2f}" if part.flop else phrases.DASH, part.seconds) for part in line.parts]
    rows += [("measured", "", line.measured_seconds)]
    return [{"Work": kind, "GFLOP/image": flop, "Seconds/image": phrases.seconds(each)} for kind, flop, each in rows]


def peaks(study: Study) -> str:
    """The peaks of the machine, as they were measured last, in words; empty where they were not."""
    last = next((r.config for r in reversed(study.records) if r.family.startswith(LIMITS)), None)
    found = _peaks(study, last) if last else {}
    copied = found.pop("bandwidth", None)
    told = [f"{phrases.significant(found[name] / 1e9)} GFLOP/s in {name}" for name in sorted(found)]
    told += [f"{phrases.significant(copied / 1e9)} GB/s in a copy"] if copied else []
    return phrases.joined(told)


def _work(study: Study, config: RunConfig) -> dict[str, dict[str, float]]:
    return _seen(study, lambda c: _alike(c, config), "work")


def _alike(one: RunConfig, other: RunConfig) -> bool:
    """Whether what was measured of one says something of the other: the same network, image size and device."""
    return all(getattr(one, name) == getattr(other, name) for name in ("network", "image_size", "device"))


def flop_per_image(study: Study, config: RunConfig) -> float | None:
    """FLOP of forward and backward for an image by the network of ``config``, or None where it was not counted."""
    return sum(part["flop"] for part in _work(study, config).values()) or None


def sentence(study: Study, own: Comparison | None) -> str:
    """How far from the limit, in two sentences; empty where it was not measured."""
    line = roofline(study, own)
    if line is None:
        return ""
    return (
        f"It reaches {100 * line.flop_share:.0f} % of this machine's {phrases.significant(line.flops / 1e9)} GFLOP/s "
        f"in {line.precision}. Roofline limit: {line.headroom:.1f} times as fast, with element-wise operations and "
        "normalisation free."
    )

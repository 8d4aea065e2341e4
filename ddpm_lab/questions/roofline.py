"""How far a training step is from what its machine can do: a roofline of the network's work (Williams et al. 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import Study, rank_zero
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import LIMITS

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
OPTIMIZER = "optimizer"
NEEDED = ("convolution", "matrix product", OPTIMIZER)
"""Kinds of work that no fusing removes."""
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
    """The machine's peak (FLOP/s in ``precision``), the parts of a step, and what an image really takes."""

    precision: str
    flops: float
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
        least = sum(p.seconds for p in self.parts if p.kind in NEEDED)
        return max(1.0, self.measured_seconds / least)


def roofline(study: Study, own: Comparison | None) -> Roofline | None:
    """The roofline of ``own``, a row of the lab's trainer, from the work and the peaks of its network and device.

    None where these were not measured in its precision, where it does not train, and where it is faster than the peak:
    then one of the two is wrong.
    """
    if own is None or own.config.workload != DDPM:
        return None
    known, work, precision = _peaks(study, own.config), _work(study, own.config), own.config.precision
    if not {"bandwidth", "fp32", precision} <= known.keys() or not work:
        return None
    parts = []
    for kind, of in work.items():
        flop, size = of.get("flop", 0.0), BYTES[precision] * of["elements"]
        if kind == "weights":
            kind, flop, size = OPTIMIZER, 0.0, OPTIMIZER_BYTES * of["elements"] / own.batch  # noqa: PLW2901
        parts.append(Part(kind, flop, max(flop / known[precision], size / known["bandwidth"])))
    parts.sort(key=lambda p: -p.seconds)
    seconds = own.step_seconds / own.batch
    line = Roofline(precision=precision, flops=known[precision], parts=tuple(parts), measured_seconds=seconds)
    return line if line.flop_share <= 1 else None


def _peaks(study: Study, config: RunConfig) -> dict[str, float]:
    """FLOP/s by precision, the better of a matrix product and a convolution, and bytes/s of a copy."""
    found: dict[str, float] = {}
    witnessed = {r.run_id: seen for r in study.records if (seen := rank_zero(r))}
    for row in comparisons(study):
        if row.family.startswith(LIMITS) and row.sets and row.role != "twin" and _alike(row.config, config):
            seen = witnessed.get(row.run_id, {})
            if seen.get("flop"):
                precision, speed = row.config.precision, seen["flop"] / row.step_seconds
                found[precision] = max(found.get(precision, 0.0), speed)
            elif seen.get("bytes"):
                found["bandwidth"] = seen["bytes"] / row.step_seconds
    return found


def _work(study: Study, config: RunConfig) -> dict[str, dict[str, float]]:
    """FLOP and elements of an image by kind of work, as rank 0 counted them last; empty where it did not."""
    counted = (rank_zero(r).get("work") for r in reversed(study.records) if _alike(r.config, config))
    return next(filter(None, counted), {})


def _alike(one: RunConfig, other: RunConfig) -> bool:
    """Whether what was measured of one says something of the other: the same network, image size and device."""
    return all(getattr(one, name) == getattr(other, name) for name in ("network", "image_size", "device"))


def flop_per_image(study: Study, config: RunConfig) -> float | None:
    """FLOP of forward and backward for an image by the network of ``config``, or None where it was not counted."""
    return sum(part["flop"] for part in _work(study, config).values()) or None


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

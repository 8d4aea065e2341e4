"""Synthetic records of several ranks: strong and weak scaling by planted ratios."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from records import CPU, GPUS, on, sets, study

from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import LOST, WEAK
from ddpm_lab.questions import exchange as exchanges
from ddpm_lab.record import RunRecord

ONE = RunConfig(device="cuda", network="seed", global_batch_size=64)
TWO = RunConfig(world_size=2)


def strong(ratios: Mapping[int, float], base: RunConfig = ONE, **values: Any) -> list[RunRecord]:
    """Sets of one and of n GPUs, or CPU ranks, that share a batch; the planted ratio of each n."""
    shared = {n: (replace(base, world_size=n), ratio) for n, ratio in ratios.items()}
    return _sets(shared, base, f"{base.network}, batch {base.global_batch_size}", **values)


def weak(ratios: Mapping[int, float], base: RunConfig = ONE, **values: Any) -> list[RunRecord]:
    """The same with a batch for each; the planted ratio is that of the throughputs."""
    batch = base.global_batch_size
    grown = {n: (replace(base, world_size=n, global_batch_size=n * batch), ratio) for n, ratio in ratios.items()}
    return _sets(grown, base, f"{base.network}, batch {batch} per rank{WEAK}", **{"primary": "", **values})


def family(batch: int, ratio: float, *, grows: bool = False, ranks: int = 8, **values: Any) -> list[RunRecord]:
    """One and several, as a benchmark leaves them, with a batch that they share, or (``grows``) that each has."""
    device = values.pop("device", "cuda")
    base = RunConfig(device=device, network="seed" if device == "cuda" else "tiny", global_batch_size=batch)
    return (weak if grows else strong)({ranks: ratio}, base, **{"seed": batch + grows, "primary": None, **values})


def paired(shared: Mapping[int, float], grown: Mapping[int, float], **values: Any) -> Study:
    """A study of speed-ups by a batch that is shared, and by one for each."""
    found = [r for batch, ratio in grown.items() for r in family(batch, ratio, grows=True, **values)]
    return study([*found, *(r for batch, ratio in shared.items() for r in family(batch, ratio, **values))])


def switched_off(base: RunConfig = ONE) -> list[RunRecord]:
    """A part of the lost scaling: no scaling, and with a ratio that would lead every list."""
    two = replace(base, world_size=2)
    off = {"no exchange": (replace(two, exchange=ExchangeConfig(enabled=False)), 50.0)}
    values: dict[str, Any] = {"experiment": "multi_gpu", "family": f"seed, batch {base.global_batch_size}{LOST}"}
    return on(GPUS if base.device == "cuda" else CPU, sets(off, baseline=two, **values))


def _sets(
    of: dict[int, tuple[RunConfig, float]],
    base: RunConfig,
    family: str,
    failed: tuple[str, str] | None = None,
    **values: Any,
) -> list[RunRecord]:
    """Sets of several numbers, or of one alone, of which each of several has ``failed``, if so: status and reason."""
    unit, machine = ("GPU", GPUS) if base.device == "cuda" else ("rank", CPU)
    candidates = {f"{n} {unit}s": row for n, row in of.items()}
    if failed:
        values["failures"] = {label: (config, *failed) for label, (config, _) in candidates.items()}
        candidates = {}
    common = {"baseline_label": f"1 {unit}", "experiment": "multi_gpu", "primary": next(reversed(candidates), "")}
    return on(machine, sets(candidates, baseline=base, family=family, **{**common, **values}))


def exchanged(ratio: float, base: RunConfig = TWO, **values: Any) -> list[RunRecord]:
    """Ranks that exchange nothing are so many times as fast, and those with a bf16 hook 1.1 times."""
    rows = {
        exchanges.NO_EXCHANGE: (replace(base, exchange=ExchangeConfig(enabled=False)), ratio),
        "bf16 hook": (replace(base, exchange=ExchangeConfig(hook="bf16")), 1.1),
    }
    common: dict[str, Any] = {"baseline_label": exchanges.BASELINE, "experiment": "exchange", "primary": "bf16 hook"}
    return sets(rows, baseline=base, **{**common, "family": "tiny, batch 32, 2 ranks", **values})

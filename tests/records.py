"""Synthetic records with planted ratios and noise, as the measuring half would write them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_lab.config import TRAINING, RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import Plan
from ddpm_lab.record import Environment, Machine, RankRecord, RunRecord, Window

CPU = Machine(cpu="Example CPU 9000", usable_cores=2, torch="2.15.0", python="3.11")
GPUS = replace(CPU, usable_cores=32, gpus=("Example GPU X",) * 8, driver="600.1")


def environment(machine: Machine = CPU, date: str = "2026-01-03T10:00:00+00:00") -> Environment:
    none: Any = dict.fromkeys(("cuda", "slurm_job_id", "git_commit"))
    known: Any = {"hostname": "host", "python": "3.11.9", "packages": {"torch": machine.torch}, "gpu_uuids": ()}
    return Environment(machine=machine, date=date, ram_bytes=8 << 30, kernel="6.1", load_before=0.1, **none, **known)


def record(config: RunConfig, **values: Any) -> RunRecord:
    """A record with everything that a test does not care about filled in."""
    defaults: dict[str, Any] = {
        "set_id": "set-0",
        "experiment": "amp",
        "family": "tiny, batch 32, 1 rank",
        "role": "baseline",
        "label": "fp32",
        "baseline_id": config.run_id,
        "plan": Plan(),
        "environment": environment(),
        "code_version": "code-1",
        "data_name": "synthetic images",
    }
    return RunRecord(config=config, **{**defaults, **values})


def sets(
    candidates: Mapping[str, tuple[RunConfig, float]],
    *,
    baseline: RunConfig | None = None,
    baseline_label: str = "fp32",
    experiment: str = "amp",
    family: str = "tiny, batch 32, 1 rank",
    count: int = 6,
    turns: int = 6,
    step_seconds: float = 0.010,
    set_noise: float = 0.005,
    turn_noise: float = 0.01,
    drift: float = 0.05,
    twin_ratio: float = 1.0,
    failures: Mapping[str, tuple[RunConfig, str, str]] | None = None,
    mechanism_only: Sequence[str] = (),
    crowded: Sequence[int | tuple[int, int]] = (),
    primary: str | None = None,
    seed: int = 0,
    **values: Any,
) -> list[RunRecord]:
    """``count`` complete sets: baseline, twin and candidates (label -> configuration, planted ratio).

    ``set_noise`` is the spread of the log ratio between sets, ``turn_noise`` of single windows, ``drift`` of what all
    windows of a turn share. In ``crowded`` sets, or turns (set, turn), another process took a core: there candidates,
    in turns all, took three times as long. ``failures`` are label -> configuration, status, reason. ``primary`` is the
    label of the primary comparison, by default that of the first candidate.
    """
    rng = np.random.default_rng(seed)
    base = baseline or RunConfig()
    primary = next(iter(candidates), "") if primary is None else primary
    entries = [("baseline", baseline_label, base, 1.0, 0.0), ("twin", f"{baseline_label} again", base, twin_ratio, 1.0)]
    entries += [("candidate", label, config, ratio, 1.0) for label, (config, ratio) in candidates.items()]
    records = []
    for s in range(count):
        common = {
            "set_id": f"{experiment}-{family}-{seed}-{s}",
            "experiment": experiment,
            "family": family,
            "baseline_id": base.run_id,
            "environment": environment(date=f"2026-01-03T{10 + s // 60:02d}:{s % 60:02d}:00+00:00"),
            **values,
        }
        shared = rng.normal(0, drift, turns)
        for position, (role, label, config, ratio, noisy) in enumerate(entries):
            offset = noisy * rng.normal(0, set_noise)
            windows = []
            for turn in range(turns):
                slow = (s, turn) in crowded
                step = step_seconds * config.global_batch_size / base.global_batch_size / ratio
                step *= float(np.exp(shared[turn] + offset + rng.normal(0, turn_noise)))
                step *= 3 if slow or (s in crowded and role == "candidate") else 1
                windows.append(window(config, turn, position, step, float(slow or s in crowded)))
            more: dict[str, Any] = {"mechanism_only": label in mechanism_only, "windows": tuple(windows)}
            more["primary"] = role == "candidate" and label == primary
            ranks = tuple(map(rank_record, range(config.world_size)))
            records.append(record(config, role=role, label=label, ranks=ranks, **more, **common))
        for label, (config, status, reason) in (failures or {}).items():
            records.append(record(config, role="candidate", label=label, status=status, reason=reason, **common))
    return records


def window(config: RunConfig, turn: int, position: int, step: float, others_cores: float) -> Window:
    """Forty steps of so many seconds."""
    return Window(
        turn=turn,
        position=position,
        start_seconds=float(turn),
        seconds=40 * step,
        images=40 * config.global_batch_size,
        steps=40,
        rank_seconds=(40 * step,) * config.world_size,
        step_seconds=(step,) * 40,
        data_seconds=(0.001,) * config.world_size,
        others_cores=others_cores,
    )


def rank_record(rank: int, peak_memory_bytes: int | None = 512 << 20) -> RankRecord:
    none: Any = dict.fromkeys(("device_uuid", "peak_reserved_bytes", "peak_rss_bytes"))
    known: Any = {"device": "cpu", "threads": 2, "losses": (1.0, 0.9), "images": 1280, "indices_sha256": "0" * 64}
    return RankRecord(rank=rank, peak_memory_bytes=peak_memory_bytes, **none, **known)


def windowed(record: RunRecord, times: float = 1.0, **changes: Any) -> RunRecord:
    """The same record, each of whose windows took so many times as long, and has ``changes``."""
    return replace(record, windows=tuple(replace(w, seconds=times * w.seconds, **changes) for w in record.windows))


def with_state(records: Sequence[RunRecord], **state: float | None) -> list[RunRecord]:
    """The same records, with what the machine did in each window."""
    found = {"watched_seconds": 0.5, "cpu_utilisation_percent": 90.0, "rss_bytes": 471 << 20, **state}
    return [windowed(r, state=found) for r in records]


GPU_STATE = {
    "gpu_utilisation_percent": 96.0,
    "gpu_clock_mhz": 1900.0,
    "gpu_clock_min_mhz": 1755.0,
    "gpu_temperature_celsius": 66.0,
    "gpu_power_watts": 400.0,
    "gpu_others": 0.0,
    "allocated_bytes": 3 << 30,
    "reserved_bytes": 4 << 30,
}


def cold(config: RunConfig, seconds: Sequence[float], **values: Any) -> list[RunRecord]:
    """Cold compiles of ``config``, one record each."""
    return [
        record(config, role="cold", set_id=f"cold-{i}", stages={"compile": s}, compile_cache="cold", **values)
        for i, s in enumerate(seconds)
    ]


OPERATORS = {
    "aten::mkldnn_convolution": (5.0, 40),
    "aten::convolution_backward": (7.0, 40),
    "aten::native_group_norm": (1.6, 30),
    "aten::native_group_norm_backward": (1.4, 30),
    "aten::silu": (0.9, 60),
    "aten::mul": (0.7, 90),
    "aten::addmm": (0.5, 20),
    "aten::bmm": (0.4, 16),
    "aten::copy_": (0.8, 70),
    "aten::cat": (0.3, 12),
    "aten::_foreach_addcmul_": (0.6, 4),
    "aten::linalg_vector_norm": (0.2, 80),
    "aten::randn": (0.1, 4),
    "ProfilerStep*": (0.4, 4),
}


def look(record: RunRecord, sets: Sequence[str], date: str) -> RunRecord:
    """An answer that was shown of these sets, on the machine and with the code of a record of them."""
    where = replace(record.environment, date=date)
    return replace(record, role="look", windows=(), environment=where, look={"sets": list(sets), "log_ratios": {}})


def profile(config: RunConfig, **values: Any) -> RunRecord:
    """A profile record with hand-made operator times (seconds)."""
    operators = [
        {"name": name, "calls": calls, "self_cpu_seconds": seconds / 10, "self_device_seconds": 0.0}
        for name, (seconds, calls) in OPERATORS.items()
    ]
    found = {"steps": 4, "wall_seconds": 2.2, "schedule": {}, "operators": operators, "traces": ["trace.json.gz"]}
    return record(config, experiment="profile", role="profile", label="fp32", profile=found, **values)


PHASES = {"data": 3.9, "copy": 0.3, "forward": 23.4, "backward": 34.0, "optimizer": 3.4, "ema": 0.1}
"""Milliseconds of a step in the proportions of a published budget."""


def time_budget(*ranks: Mapping[str, float], residual: float = 0.0, **window: Any) -> RunRecord:
    """A profile record with a time budget: milliseconds of each phase for each rank, and of what lies in none."""

    def line(phases: Mapping[str, float], times: float, without: Sequence[str] = (), **more: Any) -> dict[str, Any]:
        kept = {name: times * ms for name, ms in phases.items() if name not in without}
        total = (sum(kept.values()) + residual) / 1e3
        seconds = {name: ms / 1e3 for name, ms in kept.items()}
        found = {"step_seconds": total, "phases": seconds, "residual_seconds": residual / 1e3, "spans": {}}
        return {**found, "helpers_cpu_seconds": 0.0, **more}

    found = [
        {
            "unsynchronised": line(phases, 1.0, **window),
            "synchronised": line(phases, 1.1),
            "profiled": line(phases, 1.5, ("ema", "communication")),
        }
        for phases in ranks or (PHASES,)
    ]
    config = RunConfig(purpose="profile", world_size=len(found), global_batch_size=32 * len(found))
    made = profile(config)
    assert made.profile is not None
    made.profile["budget"] = {"steps": 120, "rounds": 6, "others_cores": 0.0, "ranks": found}
    return made


def trials(
    candidates: Mapping[str, tuple[RunConfig, float]],
    *,
    baseline: RunConfig | None = None,
    seeds: int = 8,
    images: int = 8_000,
    seed_noise: float = 0.002,
    pair_noise: float = 0.0002,
    gain: float = 0.01,
    **values: Any,
) -> list[RunRecord]:
    """Trials of a baseline and of candidates (label -> configuration, planted difference of the final loss).

    ``seed_noise`` is the spread between seeds that a pair shares, ``pair_noise`` that of its difference; ``gain`` is
    what the last 5 % of the images are worth. Training losses fall to the final loss and are the same at equal images.
    """
    base = baseline or RunConfig()
    rng = np.random.default_rng(7)
    found = []
    for seed in range(seeds):
        shared = seed_noise * rng.standard_normal()
        for label, (config, worse) in {"fp32": (base, 0.0), **candidates}.items():
            end = 0.35 + shared + (worse + pair_noise * rng.standard_normal() if config != base else 0.0)
            looks = {share: end + gain * (1 - share) / 0.05 for share in (0.0, 0.5, 0.9, 0.95, 1.0)}
            size, steps = config.global_batch_size, images // config.global_batch_size
            quality = {
                "steps": steps,
                "losses": [end + 0.3 * 0.999 ** ((i + 1) * size) for i in range(steps)],
                "held_out": [
                    {"images": round(share * images), "step": 0, "loss": loss} for share, loss in looks.items()
                ],
                "weights_sha256": f"{label}-{seed}",
                "trainer": "code-1",
            }
            options = (("images", images), ("draws", 64))
            config = replace(config, purpose="quality", workload=TRAINING, seed=seed, options=options)  # noqa: PLW2901
            told = {"experiment": "quality", "role": "quality", "label": label, "baseline_id": base.run_id}
            found.append(record(config, **{**told, "quality": quality, **values}))
    return found


def gradient_check(error: float) -> dict[str, Any]:
    """What a check finds of a step in fp32 whose gradient is off by so much."""
    step: dict[str, Any] = {"loss_error": 0.0, "gradient_error": error, "ranks_error": 0.0, "nonfinite": 0}
    step |= {"skipped": False, "worst_layer": {"name": "stem.bias", "error": error}}
    return {"gradients": {"precision": "fp32", "loss": "l1", "steps": [step]}}


def with_fid(record: RunRecord, fid: float) -> RunRecord:
    """The same trial, whose FID was measured on 2,500 images."""
    told = {"fid": fid, "images": 2_500, "training_images": 2_500, "inception_sha256": "ab" * 32}
    return replace(record, quality={**(record.quality or {}), "fid": {**told, "sampler": "ddim", "steps": 50}})


def study(records: Sequence[RunRecord], experiment: str | None = None) -> Study:
    return Study(experiment=experiment or records[0].experiment, records=tuple(records), output_dir=Path())


def on(machine: Machine, records: Sequence[RunRecord]) -> list[RunRecord]:
    """The same records, measured on ``machine``."""
    return [replace(r, environment=replace(r.environment, machine=machine)) for r in records]

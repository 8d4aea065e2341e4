"""The primary comparison of each question, and configurations for cores that others leave free."""

from __future__ import annotations

from typing import Any

import pytest
from setups import setup as on

from ddpm_lab.checks import ConfigError
from ddpm_lab.questions.amp import amp
from ddpm_lab.questions.ask import ask
from ddpm_lab.training.setting import Setup

MACHINES = {"1 core": (0, 1), "2 cores": (0, 2), "64 cores": (0, 64), "8 GPUs": (8, 64)}


def setup(machine: str, preset: str = "quick", **changes: Any) -> Setup:
    gpus, cores = MACHINES[machine]
    return on(preset, gpus, **{"cores": cores, **changes})


@pytest.mark.parametrize(
    ("name", "machine", "preset", "grid", "primary"),
    [
        ("amp", "2 cores", "quick", {}, "bf16"),
        ("amp", "8 GPUs", "full", {}, "bf16"),
        ("multi_gpu", "2 cores", "quick", {}, "2 ranks"),
        ("multi_gpu", "8 GPUs", "full", {}, "8 GPUs"),
        ("workers", "2 cores", "quick", {}, "2 workers"),
        ("workers", "64 cores", "full", {}, "2 workers"),
        ("workers", "2 cores", "smoke", {}, "1 worker"),
        ("workers", "64 cores", "quick", {"worker_counts": [0, 4, 8]}, "8 workers"),
        ("torch_compile", "2 cores", "full", {}, "compiled"),
        ("batch_size", "2 cores", "quick", {}, "batch 32"),
        ("batch_size", "2 cores", "quick", {"global_batch_sizes": [8, 64]}, "batch 64"),
        ("exchange", "2 cores", "quick", {}, "bf16 hook"),
    ],
)
def test_a_question_has_one_primary_comparison(
    name: str, machine: str, preset: str, grid: dict[str, Any], primary: str
) -> None:
    first, *others = ask(name, setup(machine, preset), **grid).families
    assert first.primary == primary
    assert [label for label, _ in first.candidates].count(primary) == 1
    assert not any(f.primary for f in others)


@pytest.mark.parametrize(("machine", "name"), [("1 core", "multi_gpu"), ("1 core", "workers")])
def test_a_primary_comparison_that_needs_more_cores_is_left_out_and_not_replaced(machine: str, name: str) -> None:
    experiment = ask(name, setup(machine, limited=True))
    first, *_ = experiment.families
    assert first.primary not in dict(first.candidates)
    assert {row[1] for row in experiment.left_out} == {"2 ranks" if name == "multi_gpu" else "2 workers"}
    assert all("free" in reason for _, _, reason in experiment.left_out)


def test_configurations_for_free_cores_say_their_threads() -> None:
    here = setup("64 cores", cores=3, limited=True)
    assert [here.config(world_size=n, global_batch_size=n).threads for n in (1, 2, 3)] == [3, 1, 1]
    assert setup("64 cores").config().threads == 0, "all that there are"
    assert setup("8 GPUs", limited=True).config().threads == 0
    with pytest.raises(ConfigError, match="2 CPU ranks need 2 cores, 1 are free, since other processes take the rest"):
        amp(setup("1 core", limited=True), world_sizes=[2])

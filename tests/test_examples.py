"""The examples: every step of them runs."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_processes import context

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.training.own import own
from ddpm_lab.training.setting import Own

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("classifier", "fp32"), ("diffusion", "bf16")])
def test_an_example_trains_as_its_label_says(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "diffusion":
        pytest.importorskip("diffusers", reason="diffusers is not installed: make peers")
    monkeypatch.syspath_prepend(str(CHECKOUT))
    settings = Own(name=f"examples.{name}:make").settings()
    config = RunConfig(**settings, global_batch_size=4, precision=precision)
    training = own(config, context())
    losses = [float(training.step(batch)) for batch in itertools.islice(training.batches(), 3)]
    assert all(0 < loss < 10 for loss in losses)
    assert mismatches(config, [{"rank": 0, "device": "cpu", "steps": 3, **training.witness()}]) == []
    if training.made.held_out_loss:
        assert math.isfinite(training.held_out_loss(draws=1)["loss"])


@pytest.mark.slow
def test_the_plain_script_steps() -> None:
    command = [sys.executable, str(CHECKOUT / "examples" / "script.py"), "--channels-last", "--steps", "2"]
    assert subprocess.run(command, check=True, timeout=180, capture_output=True).stdout == b""

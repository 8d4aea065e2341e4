"""Plans, presets and experiments."""

import dataclasses

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.plan import PRESETS, Experiment, Family, Plan, preset


def test_plans_are_pooled_only_when_they_are_equal() -> None:
    plans = [
        Plan(),
        Plan(window_seconds=0.5),
        Plan(window_steps=6),
        Plan(settle_steps=3),
        Plan(warmup_steps=11),
    ]
    assert len({plan.key for plan in plans}) == len(plans) == len(dataclasses.fields(Plan))
    assert Plan(turns=12).key == Plan().key, "a comparison's turns are fixed by its first set"
    with pytest.raises(ConfigError, match=r"plan.turns is -1"):
        Plan(turns=-1)


def test_presets_are_what_the_readme_promises() -> None:
    smoke, quick, full = (preset(name) for name in ("smoke", "quick", "full"))
    assert set(PRESETS) == {"smoke", "quick", "full"}
    assert (smoke.sets, smoke.plan.turns, smoke.cold_compiles) == (1, 2, 1)
    assert quick.sets == 6, "fewer sets never give a verdict"
    assert smoke.minutes is not None
    assert smoke.minutes <= 3
    assert quick.minutes is not None
    assert quick.minutes < 10
    assert full.minutes is None
    assert full.sets >= quick.sets
    with pytest.raises(ConfigError, match="preset is 'huge': choose one of smoke, quick, full"):
        preset("huge")


def test_an_experiment_lists_what_it_compares_and_profiles() -> None:
    base, bf16, profiled = RunConfig(), RunConfig(precision="bf16"), RunConfig(purpose="profile")
    family = Family(name="f", baseline=base, baseline_label="fp32", candidates=(("bf16", bf16),))
    experiment = Experiment(name="amp", families=(family, family), profiles=(("f", "fp32", profiled),))
    assert experiment.configurations == (base, bf16, base, bf16, profiled)

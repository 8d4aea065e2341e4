"""The question: the configuration asked about is the baseline of everything, and what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
from setups import setup

from ddpm_lab.bottleneck import bottleneck
from ddpm_lab.checks import ConfigError
from ddpm_lab.plan import Experiment


def test_the_present_settings_are_profiled_and_are_every_baseline() -> None:
    found = bottleneck(setup(), global_batch_size=16, loader="files", loader_workers=1, precision="bf16")
    ((_, _, profile),) = found.profiles
    assert len(found.families) == 2
    for family in found.families:
        assert family.baseline.differences(profile).keys() == {"purpose"}
        assert (family.baseline.loader, family.baseline.precision) == ("files", "bf16")


def labels(found: Experiment) -> list[str]:
    return [label for family in found.families for label, _ in family.candidates]


def test_smoke_measures_a_few_changes_and_names_choose() -> None:
    assert len(labels(bottleneck(setup("smoke")))) == 4
    assert labels(bottleneck(setup(), only=["batch 64", "bf16"])) == ["bf16", "batch 64"]
    assert len(labels(bottleneck(setup()))) > 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precison": "bf16"}, ["'precison'", "precision"]),
        ({"workload": "mine:step"}, ["workload", "'mine:step'", "leave it out"]),
        ({"loader": "files", "loader_workers": 9}, ["loader_workers", "9", "2 cores"]),
        ({"world_size": 3}, ["3 CPU ranks"]),
        ({"only": ["bf17"]}, ["changes", "'bf17'", "batch 64"]),
        ({"only": []}, ["changes", "list"]),
        ({"precision": "fp16"}, ["'fp16'", "CUDA"]),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        bottleneck(setup(), **settings)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)

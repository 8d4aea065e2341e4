"""The question of the trainers: who is compared with whom, in what, and what is refused."""

from typing import Any

import pytest
import setups

from ddpm_lab.plan import FLASH_ATTENTION, FORMATS, TUNED
from ddpm_lab.questions.peers import PEERS, PUBLISHED, peers
from ddpm_lab.training.setting import Setup

pytestmark = pytest.mark.usefixtures("multiplying_bf16")


def setup(**changes: Any) -> Setup:
    return setups.setup(**{"preset": "full", "network": "seed", **changes})


def test_others_come_as_they_are_and_tuned_on_equal_batches_with_equal_objective() -> None:
    found = peers(setup(preset="quick")).families[0]
    steps = ("", f", in bf16{FORMATS}", TUNED)
    assert [label for label, _ in found.candidates] == [peer + step for step in steps for peer in PEERS]
    for name, config in found.candidates:
        assert config.global_batch_size == found.baseline.global_batch_size == 32
        assert config.diffusion == found.baseline.diffusion
        assert (config.precision, config.channels_last) == (("fp32", False) if name in PEERS else ("bf16", True))
        assert (config.freed_memory == "kept") == ("tuned" in name)
        assert config.read_loss == ("tuned" not in name)
        assert config.optimizer.adam == ("fused" if "tuned" in name else "loop")
        assert config.optimizer.ema == ("foreach" if "tuned" in name else "loop")
        assert config.option(FLASH_ATTENTION, None) is None
        assert config.workload == PEERS[name.split(", ")[0]]
        assert (config.implementation == "plain") == (PUBLISHED in name)
    formats = {"diffusers": {"precision": "fp32", "channels_last": False}}
    rows = dict(peers(setup(preset="quick", formats=formats)).families[0].candidates)
    assert (rows["diffusers, tuned"].precision, rows["diffusers, tuned"].channels_last) == ("fp32", False)

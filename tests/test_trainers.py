"""The question of the trainers: who is compared with whom, in what, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import peer_records
import pytest
import records as make
import setups

from ddpm_lab.explain import phrases
from ddpm_lab.explain.answer import Answer
from ddpm_lab.plan import FLASH_ATTENTION, FORMATS, OURS, TUNED
from ddpm_lab.questions.peers import PEERS, PUBLISHED, answer, peers
from ddpm_lab.record import RunRecord
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
    formats = {"diffusers": {"precision": "fp32", "channels_last": False}, OURS: {"precision": "fp32"}}
    found = peers(setup(preset="quick", formats=formats)).families[0]
    tuned = dict(found.candidates)["diffusers, tuned"]
    assert (tuned.precision, tuned.channels_last) == ("fp32", False)
    assert (found.baseline.precision, found.baseline.kernels) == ("fp32", "fused")


def test_time_to_the_loss_that_all_reached_is_time_an_image_by_images() -> None:
    """Here this trainer reaches the other's final loss after nine tenths of the images, each in 1 / 1.6 of its time."""
    ((_, (row,)),) = trained(worse=0.02).tables()
    assert (row["Held-out loss"], row["Images to it"], row["This trainer's"]) == ("0.3700", "8,000", "7,200")
    assert row["Of this trainer's time"].startswith("1.78 ")
    assert row["Time to it"] == phrases.seconds(1.6 * 8000 / 32)
    assert [name for _, _, name in trained(worse=0.02).figures()] == ["time_to_loss"]
    assert "; quality of slow, tuned: " in trained(worse=0.02).finding.claim, "it is the other that was judged"
    assert not trained(worse=1.0).tables(), "it ends above what this trainer begins with"
    ((_, (row,)),) = trained(worse=0.02, rises=0.1).tables()
    assert (row["Held-out loss"], row["This trainer's"]) == ("0.3700", "7,200"), "what it loses again it has reached"
    assert not answer(peer_records.study(*peer_records.against())).figures()


def test_the_table_turns_the_repeated_baseline_as_the_finding_does() -> None:
    shown = answer(peer_records.study(*peer_records.against(twin_ratio=1.1)))
    (cell,) = (row["This trainer is"] for row in shown.table() if row["Configuration"].endswith("repeated"))
    low_to_high = cell.split("(")[1].rstrip(")")
    assert cell.startswith("0.9")
    assert f"the baseline repeated {low_to_high}" in shown.finding.evidence


def test_a_trainer_with_fewer_seeds_takes_none_from_another() -> None:
    ((_, rows),) = trained(worse=0.02, beside={"slow": 0.02}).tables()
    assert [(row["Configuration"], row["Seeds"]) for row in rows] == [("slow", "1"), ("slow, tuned", "3")]


def test_what_another_machine_learned_counts_and_a_seed_once() -> None:
    """Of five published seeds this machine tried three too; published ones of half the images are left out."""
    theirs = (*learned(0.02, seeds=5, code_version="another"), *learned(0.5, seeds=9, images=4_000))
    ((_, (row,)),) = trained(worse=0.02, published=theirs).tables()
    assert (row["Held-out loss"], row["This trainer's"], row["Seeds"]) == ("0.3700", "7,200", "5")


def trained(*, worse: float, published: tuple[RunRecord, ...] = (), **more: Any) -> Answer:
    """Answer for planted times, with what ``learned`` gives as this machine's trials."""
    timed = peer_records.against(set_noise=0, turn_noise=0, drift=0)
    return answer(peer_records.study(*timed, trials=learned(worse, **more), published_trials=published))


def learned(
    worse: float, *, rises: float = 0.0, beside: Mapping[str, float] | None = None, seeds: int = 3, **how: Any
) -> tuple[RunRecord, ...]:
    """Runs of this trainer and of another, whose lowest loss is larger by so much; then it rises.

    Of others ``beside`` there is one.
    """
    rival = peer_records.other("a")
    every = {label: (replace(rival, precision="fp32"), apart) for label, apart in (beside or {}).items()}
    every["slow, tuned"] = rival, worse
    trials = make.trials(every, baseline=peer_records.OWN, seeds=seeds, seed_noise=0.0, pair_noise=0.0, **how)
    trials = [t for t in trials if t.label not in (beside or ()) or not t.config.seed]
    trials = [replace(t, config=replace(t.config, workload=rival.workload)) if t.label != "fp32" else t for t in trials]
    for held_out in ((t.quality or {})["held_out"] for t in trials if rises and t.label != "fp32"):
        held_out.append({"images": 8_400, "step": 0, "loss": held_out[-1]["loss"] + rises})
    return tuple(trials)

"""What is said of other trainers and of a machine's limits, from records with planted ratios and peaks."""

import dataclasses
from typing import Any, cast

import pytest
import records as make
from cells import column
from peer_records import COMMON, FAMILY, OWN, WHOLE, against, machine, other, study

from ddpm_lab.explain import findings, phrases, stats
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.plan import BOTH_FP32, LEVERS, OURS
from ddpm_lab.questions import peers
from ddpm_lab.questions.ask import answer


def test_levers_are_shown_apart_and_other_networks_as_families() -> None:
    change = {"NCHW": (dataclasses.replace(OWN, channels_last=False), 0.9)}
    rows = make.sets(change, baseline=OWN, family=FAMILY + LEVERS, count=9, **COMMON)
    small = dataclasses.replace(OWN, network="ddpm", global_batch_size=8)
    rival = {"slow": (dataclasses.replace(small, workload="peer:a"), 0.5)}
    there = make.sets(rival, baseline=small, baseline_label=OURS, family="ddpm, batch 8", count=7, **COMMON)
    both = study(*WHOLE.records, *rows, *there)
    assert "NCHW" not in {r.label for r in peers.other_trainers(both)}
    assert answer(both).finding.ratio == answer(WHOLE).finding.ratio, "of the network that its evidence is about"
    (lever,) = (c for c in comparisons(both) if c.label == "NCHW")
    assert findings.command_of(both, lever) == "ddpm-lab run peers --batch-size 32 --parts levers"
    (levers,) = (rows for caption, rows in answer(both).tables() if caption.startswith("What each setting"))
    assert column(levers, "Configuration")[-1] == "NCHW"
    families = ["ddpm, batch 8", *(FAMILY + end for end in ("", BOTH_FP32))]
    own = [row for row in answer(both).table() if row["Configuration"] == f"{OURS} (baseline)"]
    assert sorted(row["Family"] for row in own) == families
    assert len(answer(both).figure().axes) == len(families)
    alone = answer(study(*(r for r in both.records if r.family.endswith(LEVERS)))).finding
    assert (alone.status, alone.verdict) == ("answered", "slower"), "asked for alone, the levers are the answer"


def test_an_open_answer_names_the_command() -> None:
    few = answer(study(*against(count=2))).finding
    assert (few.status, few.way_out) == (stats.TOO_FEW, "ddpm-lab run peers --batch-size 32")
    assert answer(WHOLE).finding.way_out == ""


def test_others_that_cannot_run_here_are_named_with_the_reason() -> None:
    why = "diffusers is not installed: make peers"
    values: dict[str, Any] = {"baseline_label": OURS, "family": FAMILY, "step_seconds": 1.0, **COMMON}
    missing = {"diffusers": (other("c", precision="fp32"), "unsupported", why)}
    found = answer(study(*make.sets({}, baseline=OWN, failures=missing, **values), *machine())).finding
    assert (found.status, "diffusers" in found.headline, why in found.claim) == ("failed", True, True)


# --- the roofline -----------------------------------------------------------------------------------------------------


def test_the_roofline_of_a_known_machine() -> None:
    """400 GFLOP/s and 40 GB/s: 8 GFLOP take 20 ms; 40 MB of normalisation take 1 ms; the optimizer 0.22 ms."""
    line = peers.roofline(WHOLE, peers.this_trainer(WHOLE))
    assert line is not None
    optimizer = 28 * 10e6 / 32 / 40e9
    assert {p.kind: p.seconds for p in line.parts} == pytest.approx(
        {"convolution": 20e-3, "normalisation": 1e-3, "optimizer": optimizer}
    )
    assert line.measured_seconds == pytest.approx(1 / 32, rel=0.03)
    assert line.flop_share == pytest.approx(0.64, rel=0.03)
    assert line.headroom == pytest.approx(line.measured_seconds / (20e-3 + optimizer))
    shown = {row["Work"]: row["Seconds/image"] for row in peers.limits_table(WHOLE, peers.this_trainer(WHOLE))}
    assert (shown["convolution"], shown["measured"]) == ("20.0 ms", phrases.seconds(line.measured_seconds))
    found = answer(study(*machine())).finding
    assert found.headline == "Peaks of this machine: 400 GFLOP/s in bf16, 200 GFLOP/s in fp32 and 40.0 GB/s in a copy"
    assert (found.status, found.verdict) == ("answered", "measured")


def test_each_of_several_gpus_is_held_against_the_peak_of_one() -> None:
    on_gpus = dataclasses.replace(OWN, device="cuda")
    one = dataclasses.replace(cast(Comparison, peers.this_trainer(WHOLE)), config=on_gpus)
    eight = dataclasses.replace(on_gpus, world_size=8, global_batch_size=256)
    many = dataclasses.replace(one, config=eight, images_per_second=8 * one.images_per_second)
    peaks = study(*machine(device="cuda"))
    assert peers.roofline(peaks, many) == peers.roofline(peaks, one) is not None
    assert "each GPU's" in peers.limits_sentence(peaks, many)


def test_without_peaks_nothing_is_said_of_limits() -> None:
    single = [r for r in machine() if r.label != "product, bf16"]  # no peak of another precision is taken
    wrong = machine(work=16e9)  # 400 GFLOP/s cannot do 16 GFLOP in a thirty-second of a second
    for records in ([], single, wrong):
        of = study(*against(), *records)
        own = peers.this_trainer(of)
        assert (peers.roofline(of, own), peers.limits_sentence(of, own), peers.limits_table(of, own)) == (
            None,
            "",
            [],
        )


@pytest.mark.parametrize("other", [{"network": "tiny"}, {"image_size": 64}, {"device": "cuda"}])
def test_the_limits_are_those_of_the_network_that_is_spoken_of(other: dict[str, Any]) -> None:
    """A second network, size or device in the same ledger, measured before or after, changes nothing."""
    elsewhere = machine(4e9, 1e9, work=1e6, **other)
    for records in ((*WHOLE.records, *elsewhere), (*elsewhere, *WHOLE.records)):
        both = study(*records)
        assert peers.roofline(both, peers.this_trainer(both)) == peers.roofline(WHOLE, peers.this_trainer(WHOLE))
    alone = study(*against(), *elsewhere)
    assert peers.limits_sentence(alone, peers.this_trainer(alone)) == ""
    assert set(column(answer(alone).table(), "GFLOP/image")) == {phrases.DASH}

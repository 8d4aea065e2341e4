"""How far a step is from the limits of a machine whose peaks are planted."""

from __future__ import annotations

from typing import Any

import pytest
from cells import column
from peer_records import WHOLE, against, machine, study

from ddpm_lab.explain import phrases
from ddpm_lab.plan import OURS
from ddpm_lab.questions import peers
from ddpm_lab.questions import roofline as limits
from ddpm_lab.questions.ask import answer


def test_the_roofline_of_a_known_machine() -> None:
    """400 GFLOP/s and 40 GB/s: 8 GFLOP take 20 ms; 40 MB of normalisation take 1 ms; the optimizer 0.22 ms."""
    line = limits.roofline(WHOLE, peers.this_trainer(WHOLE))
    assert line is not None
    assert (line.flops, line.bandwidth) == pytest.approx((400e9, 40e9), rel=1e-6)
    optimizer = 28 * 10e6 / 32 / 40e9
    assert {p.kind: p.seconds for p in line.parts} == pytest.approx(
        {"convolution": 20e-3, "normalisation": 1e-3, "optimizer": optimizer}
    )
    assert line.measured_seconds == pytest.approx(1 / 32, rel=0.03)
    assert line.flop_share == pytest.approx(0.64, rel=0.03)
    assert line.headroom == pytest.approx(line.measured_seconds / (20e-3 + optimizer))
    shown = {row["Work"]: row["Seconds/image"] for row in limits.table(WHOLE, peers.this_trainer(WHOLE))}
    assert (shown["convolution"], shown["measured"]) == ("20.0 ms", phrases.seconds(line.measured_seconds))


def test_without_peaks_nothing_is_said_of_limits() -> None:
    alone = study(*against())
    assert limits.sentence(alone, peers.this_trainer(alone)) == ""
    assert not limits.table(alone, peers.this_trainer(alone))
    single = study(*against(), *(r for r in machine() if r.label != "product, bf16"))
    assert limits.roofline(single, peers.this_trainer(single)) is None, "no peak of another precision is taken"
    # 400 GFLOP/s cannot do 16 GFLOP in a thirty-second of a second.
    wrong = study(*against(), *machine(work=16e9))
    assert limits.roofline(wrong, peers.this_trainer(wrong)) is None


@pytest.mark.parametrize("other", [{"network": "tiny"}, {"image_size": 64}, {"device": "cuda"}])
def test_the_limits_are_those_of_the_network_that_is_spoken_of(other: dict[str, Any]) -> None:
    """A second network, size or device in the same ledger, measured before or after, changes nothing."""
    elsewhere = machine(4e9, 1e9, work=1e6, **other)
    for records in ((*WHOLE.records, *elsewhere), (*elsewhere, *WHOLE.records)):
        both = study(*records)
        assert limits.roofline(both, peers.this_trainer(both)) == limits.roofline(WHOLE, peers.this_trainer(WHOLE))
    alone = study(*against(), *elsewhere)
    assert limits.sentence(alone, peers.this_trainer(alone)) == ""
    mine = [r for r in answer(WHOLE).table() if r["Configuration"] == f"{OURS} (baseline)"]
    assert mine[0]["GFLOP/image"] == "8.00"
    assert set(column(answer(alone).table(), "GFLOP/image")) == {"\N{EN DASH}"}


def test_the_limits_alone_are_told() -> None:
    found = answer(study(*machine())).finding
    assert found.headline == "Peaks of this machine: 400 GFLOP/s in bf16, 200 GFLOP/s in fp32 and 40.0 GB/s in a copy"
    assert (found.status, found.verdict) == ("answered", "measured")

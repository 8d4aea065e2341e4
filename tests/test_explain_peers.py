"""What is said, drawn and listed of the trainers, from records with planted ratios."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import records as make
from cells import column
from matplotlib.figure import Figure
from matplotlib.text import Text
from peer_records import COMMON, FAMILY, OWN, WHOLE, against, machine, other, study

from ddpm_lab.explain import stats
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import BOTH_FP32, LEVERS, OURS, SAMPLING
from ddpm_lab.questions import peers
from ddpm_lab.questions.ask import answer


def test_ratios_are_turned_round_and_the_answer_is_about_the_primary_comparison() -> None:
    rows = {(r.label, r.family): r for r in peers.other_trainers(WHOLE)}
    planted = {("slow", ""): 4, ("slow, tuned", ""): 1.6, ("slow", BOTH_FP32): 1.25, ("slow", SAMPLING): 2}
    assert rows.keys() == {(name, FAMILY + end) for name, end in (*planted, ("absent", ""))}
    for (name, end), ratio in planted.items():
        row = rows[name, FAMILY + end]
        assert row.ratio.contains(ratio)
        assert row.ratio.value == pytest.approx(ratio, rel=0.02)
        assert row.verdict == stats.FASTER
    assert math.isnan(rows["absent", FAMILY].ratio.value)
    found = answer(WHOLE).finding
    assert (found.status, found.verdict) == ("answered", "faster")
    assert found.ratio == rows["slow, tuned", FAMILY].ratio.value
    assert "slow, tuned" in found.headline
    assert "absent is not" in found.claim
    assert answer(study(*against(count=2))).finding.status == stats.TOO_FEW
    shown = [row["This trainer is"] for row in answer(WHOLE).table() if row["Configuration"] == "slow, tuned"]
    assert shown[0].startswith("1.6")


def test_a_step_of_sampling_has_the_work_that_it_witnessed_and_not_that_of_training() -> None:
    seen = {"ranks": [{"flop_per_image": 3.05e9}]}
    told = [dataclasses.replace(r, witness=seen) if r.family.endswith(SAMPLING) else r for r in WHOLE.records]
    for records, work in ((told, "3.05"), (WHOLE.records, "\N{EN DASH}")):
        rows = answer(study(*records)).table()
        shown = {(r["Configuration"], r["Family"].removeprefix(FAMILY)): r["GFLOP/image"] for r in rows}
        assert (shown["slow", SAMPLING], shown[f"{OURS} (baseline)", ""]) == (work, "8.00")


def beside_another_network() -> Study:
    """Comparisons and levers of one network, and of another at a smaller batch."""
    change = {"NCHW": (dataclasses.replace(OWN, channels_last=False), 0.9)}
    rows = make.sets(change, baseline=OWN, family=FAMILY + LEVERS, count=9, **COMMON)
    small = dataclasses.replace(OWN, network="ddpm", global_batch_size=8)
    rival = {"slow": (dataclasses.replace(small, workload="peer:a"), 0.5)}
    there = make.sets(rival, baseline=small, baseline_label=OURS, family="ddpm, batch 8", count=7, **COMMON)
    return study(*WHOLE.records, *rows, *there)


def words(drawn: Figure | None) -> str:
    assert drawn is not None
    return " ".join(" ".join(text.get_text().split()) for text in drawn.findobj(Text))


def test_levers_and_other_networks_are_shown_apart() -> None:
    both = beside_another_network()
    assert "NCHW" not in {r.label for r in peers.other_trainers(both)}
    (levers,) = (rows for caption, rows in answer(both).tables() if caption.startswith("What each setting"))
    assert column(levers, "Configuration")[-1] == "NCHW"
    said = words(peers.levers_figure(both))
    assert all(word in said for word in ("seed network", "batch 32 \N{MIDDLE DOT} ", "9 sets of 6 turns"))
    assert "3 other comparisons" in words(answer(both).figure()), "another network, fp32 alone, sampling"
    shown = answer(both).table()
    families = ["ddpm, batch 8", *(FAMILY + end for end in ("", SAMPLING, BOTH_FP32))]
    assert sorted(set(column(shown, "Family"))) == families
    own = [row for row in shown if row["Configuration"] == f"{OURS} (baseline)"]
    assert sorted(row["Family"] for row in own) == families
    assert {row["Peak memory"] for row in own} == {"512 MiB"}
    alone = answer(study(*(r for r in both.records if r.family.endswith(LEVERS)))).finding
    assert (alone.status, alone.verdict) == ("answered", "slower"), "asked for alone, the levers are the answer"


def test_others_that_cannot_run_here_are_named_with_the_reason() -> None:
    why = "diffusers is not installed: make peers"
    values: dict[str, Any] = {"baseline_label": OURS, "family": FAMILY, "step_seconds": 1.0, **COMMON}
    missing = {"diffusers": (other("c", precision="fp32"), "unsupported", why)}
    found = answer(study(*make.sets({}, baseline=OWN, failures=missing, **values), *machine())).finding
    assert (found.status, found.headline) == ("failed", "Every candidate failed: diffusers")
    assert why in found.claim
    peaks = answer(study(*machine())).finding
    assert (peaks.status, peaks.verdict) == ("answered", "measured")

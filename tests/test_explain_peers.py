"""What is said, drawn and listed of the trainers, from records with planted ratios."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import records as make
from cells import column
from matplotlib.figure import Figure
from matplotlib.text import Text
from peer_records import COMMON, FAMILY, OWN, WHOLE, against, machine, other, study

from ddpm_lab.explain import decisions
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import BOTH_FP32, LEVERS, OURS, SAMPLING
from ddpm_lab.questions import peers
from ddpm_lab.questions.ask import answer


def test_ratios_are_turned_round_and_the_answer_is_about_the_primary_comparison() -> None:
    rows = {r.label: r for r in peers.other_trainers(WHOLE)}
    assert set(rows) == {"slow", "slow, tuned", "absent", "slow" + BOTH_FP32, "slow" + SAMPLING}
    for name, ratio in (("slow", 4), ("slow, tuned", 1.6), ("slow" + BOTH_FP32, 1.25), ("slow" + SAMPLING, 2)):
        assert rows[name].ratio.contains(ratio)
        assert rows[name].ratio.value == pytest.approx(ratio, rel=0.02)
        assert rows[name].verdict == decisions.FASTER
    assert math.isnan(rows["absent"].ratio.value)
    found = answer(WHOLE).finding
    assert (found.status, found.verdict, found.ratio) == ("answered", "faster", rows["slow, tuned"].ratio.value)
    assert "slow, tuned" in found.headline
    assert "absent is not" in found.claim
    assert answer(study(*against(count=2))).finding.status == decisions.TOO_FEW


def test_a_step_of_sampling_has_the_work_that_it_witnessed_and_not_that_of_training() -> None:
    seen = {"ranks": [{"flop_per_image": 3.05e9}]}
    told = [dataclasses.replace(r, witness=seen) if r.family.endswith(SAMPLING) else r for r in WHOLE.records]
    for records, work in ((told, "3.05"), (WHOLE.records, "\N{EN DASH}")):
        shown = {r["Configuration"]: r["GFLOP/image"] for r in answer(study(*records)).table()}
        assert (shown["slow" + SAMPLING], shown[f"{OURS} (baseline)"]) == (work, "8.00")


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
    assert [r.label for r in peers.levers(both)] == ["NCHW"]
    assert "NCHW" not in {r.label for r in peers.other_trainers(both)}
    for figure, sets in ((peers.levers_figure(both), "9 sets"), (peers.roofline_figure(both), "6 sets")):
        said = words(figure)
        assert "seed network" in said
        assert "batch 32 \N{MIDDLE DOT} " in said
        assert f"\N{MIDDLE DOT} {sets} of 6 turns" in said
    assert "3 other comparisons" in words(answer(both).figure()), "another network, fp32 alone, sampling"
    shown = answer(both).table()
    mine = [f"{OURS} (baseline){end}" for end in ("", BOTH_FP32, SAMPLING, ", on ddpm at batch 8")]
    names = column(shown, "Configuration")
    assert [name for name in names if "(baseline)" in name] == mine
    for name in mine[1:]:
        following = names[names.index(name) + 1]
        assert following == "slow" + name.removeprefix(f"{OURS} (baseline)"), "before the others of its family"
    own = [row for row in shown if row["Configuration"] in mine]
    assert all(row["Peak memory"] == "512 MiB" and re.match(r"\d", row["Images/s"]) for row in own)


def test_others_that_cannot_run_here_are_named_with_the_reason_beside_what_was_measured() -> None:
    why = "diffusers is not installed: make peers"
    formats = {"diffusers": "fp32", "diffusers, tuned": "bf16"}
    missing = {name: (other("c", precision=p), "unsupported", why) for name, p in formats.items()}
    values: dict[str, Any] = {"baseline_label": OURS, "family": FAMILY, "step_seconds": 1.0, **COMMON}
    found = answer(study(*make.sets({}, baseline=OWN, failures=missing, **values), *machine())).finding
    assert found.headline == "No other trainer can run here: diffusers"
    assert found.status == "failed"
    for said in (why, "images/s in bf16", "400 GFLOP/s in bf16"):
        assert said in found.claim
    crashed = {"diffusers": (other("c"), "crashed", "signal 9")}
    failed = answer(study(*make.sets({}, baseline=OWN, failures=crashed, **values))).finding
    assert (failed.status, failed.headline.partition(":")[0]) == ("failed", "Every candidate failed")

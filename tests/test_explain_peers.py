"""What is said, drawn and listed of the trainers, from records with planted ratios."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import records as make
from cells import by, column
from matplotlib.figure import Figure
from matplotlib.text import Text
from peer_records import COMMON, FAMILY, OWN, WHOLE, against, machine, other, pair, study

from ddpm_lab.explain import decisions
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import BOTH_FP32, LEVERS, OURS, SAMPLING
from ddpm_lab.questions import peers
from ddpm_lab.questions.ask import answer


def test_ratios_are_turned_round_with_their_intervals_and_verdicts() -> None:
    rows = {r.label: r for r in peers.other_trainers(WHOLE)}
    assert set(rows) == {"slow", "slow, tuned", "absent", "slow" + BOTH_FP32, "slow" + SAMPLING}
    for name, ratio in (("slow", 4), ("slow, tuned", 1.6), ("slow" + BOTH_FP32, 1.25), ("slow" + SAMPLING, 2)):
        assert rows[name].ratio.low < ratio < rows[name].ratio.high
        assert rows[name].ratio.value == pytest.approx(ratio, rel=0.02)
        assert rows[name].verdict == "faster"
    assert math.isnan(rows["absent"].ratio.value)


def test_the_answer_is_about_the_primary_comparison() -> None:
    found = answer(WHOLE).finding
    assert "slow, tuned" in found.headline
    assert (found.status, found.verdict) == ("answered", decisions.FASTER)
    assert "absent of seed, batch 32 (unsupported: absent is not" in found.claim
    assert found.low < 1.6 < found.high


def test_compilation_that_was_not_tried_on_a_cpu_is_said() -> None:
    words = "Compilation of the others is not tried on a CPU but in full."
    assert words in answer(WHOLE).finding.claim
    whole = {"slow, tuned, compiled": (other("a", compile="whole"), 1 / 1.5)}
    more = make.sets(whole, baseline=OWN, baseline_label=OURS, family=FAMILY, step_seconds=1.0, **COMMON)
    said = answer(study(*against(), *more)).finding.claim
    assert words not in said
    assert words not in answer(study(*pair(BOTH_FP32, 0.8))).finding.claim


def test_two_sets_claim_nothing() -> None:
    found = answer(study(*against(count=2))).finding
    assert found.status == decisions.TOO_FEW


def test_published_records_say_that_they_are_not_from_here() -> None:
    assert "Published records, not measured here" in answer(study(*against(), published=True)).finding.claim
    assert "Published" not in answer(WHOLE).finding.claim


def test_the_table_has_a_row_for_everyone_and_the_reason_of_the_missing() -> None:
    shown = by(answer(WHOLE).table(), "Configuration")
    assert list(shown)[:2] == [f"{OURS} (baseline)", f"{OURS}, repeated"]
    assert shown["absent"]["Note"] == "absent is not installed: make peers"
    assert shown["slow"]["This trainer is"].startswith(("3.9", "4.0"))


def test_a_step_of_sampling_has_the_work_that_it_witnessed_and_not_that_of_training() -> None:
    seen = {"ranks": [{"flop_per_image": 3.05e9}]}
    told = [dataclasses.replace(r, witness=seen) if r.family.endswith(SAMPLING) else r for r in WHOLE.records]
    for records, work in ((told, "3.05"), (WHOLE.records, "\N{EN DASH}")):
        shown = {r["Configuration"]: r["GFLOP/image"] for r in answer(study(*records)).table()}
        assert (shown["slow" + SAMPLING], shown[f"{OURS} (baseline)"]) == (work, "8.00")


def test_levers_are_shown_apart() -> None:
    change = {"fp32": (dataclasses.replace(OWN, precision="fp32"), 0.5)}
    rows = make.sets(change, baseline=OWN, baseline_label="as by default", family=FAMILY + LEVERS, **COMMON)
    both = study(*against(), *rows)
    assert [r.label for r in peers.levers(both)] == ["fp32"]
    assert "fp32" not in {r.label for r in peers.other_trainers(both)}
    assert isinstance(peers.levers_figure(both), Figure)


def test_figures_and_their_words() -> None:
    assert isinstance(answer(WHOLE).figure(), Figure)
    assert [name for _, _, name in answer(WHOLE).figures()] == ["limits"]
    assert len(answer(WHOLE).tables()) == 1


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


def test_figures_name_the_network_batch_and_sets_of_what_they_draw() -> None:
    both = beside_another_network()
    levers, limit = words(peers.levers_figure(both)), words(peers.roofline_figure(both))
    whole = words(peers.figure(both, "title"))
    for said, sets in ((levers, "9 sets"), (limit, "6 sets")):
        assert "seed network" in said
        assert "batch 32 \N{MIDDLE DOT} " in said
        assert f"\N{MIDDLE DOT} {sets} of 6 turns" in said
    assert "seed network" in whole
    assert "The table has 3 other comparisons." in whole, "another network, fp32 alone, sampling"


def test_this_trainer_has_a_row_in_each_of_its_families() -> None:
    shown = answer(beside_another_network()).table()
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
    for words in (why, "images/s in bf16", "It reaches 6", "Peaks of this machine: 400 GFLOP/s in bf16"):
        assert words in found.claim
    crashed = {"diffusers": (other("c"), "crashed", "signal 9")}
    assert answer(study(*make.sets({}, baseline=OWN, failures=crashed, **values))).finding.headline.startswith(
        "Every candidate failed"
    )


def test_nothing_measured_is_said_with_the_command() -> None:
    found = answer(study()).finding
    assert found.status == "not measured"
    assert "peers" in found.claim
    assert isinstance(answer(study()).figure(), Figure)

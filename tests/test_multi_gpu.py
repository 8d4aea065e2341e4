"""Strong and weak scaling: kept apart, with planted efficiencies and their bands."""

from dataclasses import replace
from typing import Any

import pytest
import records as make
from scaled_records import ONE, strong, switched_off, weak

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions
from ddpm_lab.explain.bands import S000, Bands, bands
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.table import plain
from ddpm_lab.plan import WEAK
from ddpm_lab.questions import recommendation
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.multi_gpu import layout, scaling_rows
from ddpm_lab.record import RunRecord


def study(*records: list[RunRecord]) -> Study:
    return make.study([r for part in records for r in part])


def rated(*records: list[RunRecord], bands: Bands | None = None) -> str:
    """What is said of the efficiency of the comparison that leads."""
    of = study(*records)
    return answer(replace(of, bands=bands or of.bands)).finding.notes[0]


def test_weak_scaling_is_over_equal_images() -> None:
    rows = {(r.scaling, r.label): r for r in scaling_rows(study(strong({2: 1.6}), weak({2: 1.9})))}
    for kind, planted in (("strong", 1.6), ("weak", 1.9)):
        row = rows[kind, "2 GPUs"]
        assert row.ratio.value == pytest.approx(planted, rel=0.02)
        assert row.efficiency.value == pytest.approx(planted / 2, rel=0.02)
        # 1.9 times the images a second: a step of twice the images takes 2 / 1.9 as long.
        assert row.images_per_second == pytest.approx(planted * rows[kind, "1 GPU"].images_per_second, rel=0.03)


def test_the_answer_is_strong_scaling_and_weak_alone_is_an_answer_too() -> None:
    found = answer(study(strong({2: 1.84, 8: 6.45}), weak({8: 7.6}))).finding
    assert found.ratio == pytest.approx(6.45, rel=0.02)
    assert "share the same" not in found.claim, "GPUs share no cores"
    assert answer(study(weak({2: 1.8}))).finding.ratio == pytest.approx(1.8, rel=0.02)


def test_the_bands_are_those_that_were_asked_for() -> None:
    records = strong({8: 6.45})
    assert "), good" in rated(records)
    assert "by S000's bands." in rated(records, bands=S000)
    own = bands({"splendid": 0.8, "rest": 0})
    assert "), splendid" in rated(records, bands=own)
    (shown,) = [c for c in answer(replace(study(records), bands=own)).table()[0] if "Efficiency" in c]
    assert shown == "Efficiency, by your own bands"


def test_an_efficiency_is_called_good_only_if_its_whole_interval_is() -> None:
    assert "does not decide" in rated(strong({2: 1.7}, set_noise=0.15))
    assert "; short of good scaling" in rated(strong({2: 1.46}, set_noise=0.07)), "neither end is good"
    assert "; good scaling" in rated(strong({2: 1.9}))
    once = study(strong({2: 1.99}, count=1))
    assert "no interval" in answer(once).table()[-1]["Efficiency, by S001's bands"]
    assert "scaling" not in answer(once).finding.notes[0]
    assert answer(once).finding.status == decisions.TOO_FEW


def test_more_than_the_ranks_can_give_has_no_band_and_says_what_it_may_be() -> None:
    beyond = rated(strong({2: 2.5}))
    assert "above 100 %" in beyond
    assert "caches" in beyond
    assert "perfect" not in beyond
    assert "perfect" in rated(strong({2: 2.01}, set_noise=0.02)), "an interval that holds 100 % has its band"


def test_ranks_of_a_cpu_share_its_cores() -> None:
    records = make.sets({"2 ranks": (RunConfig(world_size=2), 1.1)}, baseline_label="1 rank", experiment="multi_gpu")
    rating, shared, *_ = answer(study(records)).finding.notes
    assert "poor scaling" in rating
    assert "same 2 cores" in shared


def test_families_that_do_not_scale_are_left_to_others() -> None:
    with_lost, without = study(strong({2: 1.6}), switched_off()), study(strong({2: 1.6}))
    assert [r.label for r in scaling_rows(with_lost)] == [r.label for r in scaling_rows(without)]
    assert "no exchange" not in answer(with_lost).finding.claim + plain(answer(with_lost).table())
    changes = recommendation.measured(make.study(with_lost.records, "recommendation"))
    assert [r.label for r in changes] == ["2 GPUs"], "without an exchange nothing is trained"
    both = make.study([*strong({2: 1.6}), *weak({2: 1.9})], "recommendation")
    assert {r.family for r in recommendation.measured(both)} == {"seed, batch 64"}, "a ratio between batches is no gain"


def test_a_layout_names_devices_and_hosts() -> None:
    assert layout(RunConfig(device="cpu")) == "1 CPU rank"
    assert layout(RunConfig(device="cuda", world_size=8, nodes=2)) == "8 GPUs on 2 hosts"


def test_a_note_stays_until_its_own_family_has_measured_it() -> None:
    """Two GPUs with 128 images are strong scaling of 128 and weak scaling of 64."""
    large = replace(ONE, global_batch_size=128)
    values: dict[str, Any] = {"experiment": "multi_gpu", "family": f"seed, batch 64 per rank{WEAK}", "set_id": ""}
    note = make.record(
        replace(large, world_size=2),
        role="note",
        label="2 GPUs",
        baseline_id=ONE.run_id,
        status="left out",
        reason="did not fit into the time that was given",
        **values,
    )
    notes = make.on(make.GPUS, [note])
    rows = scaling_rows(study(strong({2: 1.6}, base=large), weak({4: 3.5}), notes))
    assert [(r.scaling, r.label) for r in rows if r.role == "note"] == [("weak", "2 GPUs")]
    assert not [r for r in scaling_rows(study(weak({2: 1.9}), notes)) if r.role == "note"]

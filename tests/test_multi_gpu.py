"""Strong and weak scaling: kept apart, with planted efficiencies and their bands."""

from dataclasses import replace

import pytest
import records as make
from scaled_records import strong, switched_off, weak

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions
from ddpm_lab.explain.bands import S000, Bands, bands
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.table import plain
from ddpm_lab.questions import changes
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.multi_gpu import scaling_rows
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
    both = answer(study(strong({2: 1.84, 8: 6.45}), weak({8: 7.6}))).finding
    assert both.ratio == pytest.approx(6.45, rel=0.02)
    assert answer(study(weak({2: 1.8}))).finding.ratio == pytest.approx(1.8, rel=0.02)


def test_the_bands_are_those_that_were_asked_for() -> None:
    records, own = strong({8: 6.45}), bands({"splendid": 0.8, "rest": 0})
    assert "), good" in rated(records)
    assert "by S000's bands." in rated(records, bands=S000)
    assert "), splendid" in rated(records, bands=own)
    shown = answer(replace(study(records), bands=own)).table()
    assert "Efficiency, by your own bands" in shown[0]


@pytest.mark.parametrize(
    ("ratio", "noise", "words"),
    [
        (1.7, 0.15, "does not decide"),
        (1.46, 0.07, "; short of good scaling"),  # neither end is good
        (1.9, 0.005, "; good scaling"),
        (2.01, 0.02, "perfect"),  # an interval that holds 100 % has its band
        (2.5, 0.005, "above 100 %"),
    ],
)
def test_an_efficiency_is_called_by_its_whole_interval(ratio: float, noise: float, words: str) -> None:
    assert words in rated(strong({2: ratio}, set_noise=noise))


def test_one_set_has_no_band_and_ranks_of_a_cpu_share_its_cores() -> None:
    once = answer(study(strong({2: 1.99}, count=1)))
    assert "no interval" in once.table()[-1]["Efficiency, by S001's bands"]
    assert (once.finding.status, "scaling" in once.finding.notes[0]) == (decisions.TOO_FEW, False)
    records = make.sets({"2 ranks": (RunConfig(world_size=2), 1.1)}, baseline_label="1 rank", experiment="multi_gpu")
    assert "2 cores" in answer(study(records)).finding.notes[1]


def test_families_that_do_not_scale_are_left_to_others() -> None:
    with_lost, without = study(strong({2: 1.6}), switched_off()), study(strong({2: 1.6}))
    assert [r.label for r in scaling_rows(with_lost)] == [r.label for r in scaling_rows(without)]
    assert "no exchange" not in answer(with_lost).finding.claim + plain(answer(with_lost).table())
    found = changes.measured(make.study(with_lost.records, "recommendation"))
    assert [r.label for r in found] == ["2 GPUs"], "without an exchange nothing is trained"
    both = make.study([*strong({2: 1.6}), *weak({2: 1.9})], "recommendation")
    assert {r.family for r in changes.measured(both)} == {"seed, batch 64"}, "a ratio between batches is no gain"

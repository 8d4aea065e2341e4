"""Strong and weak scaling: kept apart, with planted efficiencies and their bands."""

from dataclasses import replace
from typing import Any

import pytest
import records as make
from cells import by, column

from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.explain import decisions, gains, scaling
from ddpm_lab.explain.bands import S000, bands
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.table import plain
from ddpm_lab.plan import LOST, WEAK
from ddpm_lab.questions.answers import answer
from ddpm_lab.record import RunRecord

ONE = RunConfig(device="cuda", network="seed", global_batch_size=64)


def strong(ratios: dict[int, float], base: RunConfig = ONE, **values: Any) -> list[RunRecord]:
    """Sets of one and of n GPUs that share a batch; the planted ratio of each n."""
    shared = {f"{n} GPUs": (replace(base, world_size=n), ratio) for n, ratio in ratios.items()}
    return _sets(shared, base, f"seed, batch {base.global_batch_size}", **values)


def weak(ratios: dict[int, float], base: RunConfig = ONE, **values: Any) -> list[RunRecord]:
    """The same with a batch for each GPU; the planted ratio is that of the throughputs."""
    grown = {
        f"{n} GPUs": (replace(base, world_size=n, global_batch_size=n * base.global_batch_size), ratio)
        for n, ratio in ratios.items()
    }
    return _sets(grown, base, f"seed, batch {base.global_batch_size} per rank{WEAK}", **values)


def lost() -> list[RunRecord]:
    """What is switched off to see where time goes: no scaling, and with a ratio that would lead every list."""
    two = replace(ONE, world_size=2)
    off = {"no exchange": (replace(two, exchange=ExchangeConfig(enabled=False)), 50.0)}
    return _sets(off, two, f"seed, batch 64{LOST}")


def _sets(
    candidates: dict[str, tuple[RunConfig, float]], base: RunConfig, family: str, **values: Any
) -> list[RunRecord]:
    label = f"{base.world_size} GPU{'s' if base.world_size > 1 else ''}"
    primary = "" if WEAK in family else list(candidates)[-1]
    values = {"baseline_label": label, "experiment": "multi_gpu", "family": family, "primary": primary, **values}
    found = make.sets(candidates, baseline=base, **values)
    return make.on(make.GPUS, found)


def claim(*records: list[RunRecord], **values: Any) -> str:
    return answer(replace(study(*records), **values)).finding.claim


def study(*records: list[RunRecord]) -> Study:
    return make.study([r for part in records for r in part])


def test_weak_scaling_is_over_equal_images() -> None:
    rows = {(r.scaling, r.label): r for r in scaling.rows(study(strong({2: 1.6}), weak({2: 1.9})))}
    for kind, planted in (("strong", 1.6), ("weak", 1.9)):
        row = rows[kind, "2 GPUs"]
        assert row.ratio.value == pytest.approx(planted, rel=0.02)
        assert row.efficiency.value == pytest.approx(planted / 2, rel=0.02)
        # 1.9 times the images a second: a step of twice the images takes 2 / 1.9 as long.
        assert row.images_per_second == pytest.approx(planted * rows[kind, "1 GPU"].images_per_second, rel=0.03)


def test_the_answer_is_strong_scaling_with_efficiency_and_band_and_weak_is_told_beside_it() -> None:
    found = answer(study(strong({2: 1.84, 8: 6.45}), weak({8: 7.6}))).finding
    assert found.ratio == pytest.approx(6.45, rel=0.02)
    assert "with 2 GPUs (excellent) and 8" in found.claim
    assert "8 GPUs (good), by S001's bands; 8 GPUs: short of good scaling on one node (above 85 %)" in found.claim
    assert "share the same" not in found.claim, "GPUs share no cores"


def test_weak_scaling_alone_is_an_answer_too() -> None:
    found = answer(study(weak({2: 1.8}))).finding
    assert found.ratio == pytest.approx(1.8, rel=0.02)
    assert "90 % with 2 GPUs" in found.claim


def test_the_bands_are_those_that_were_asked_for() -> None:
    records = strong({8: 6.45})
    assert "(good), by S000's bands." in claim(records, bands=S000)
    own = bands({"splendid": 0.8, "rest": 0})
    assert "(splendid), by your own bands." in claim(records, bands=own)
    (shown,) = [c for c in answer(replace(study(records), bands=own)).table()[0] if "Efficiency" in c]
    assert shown == "Efficiency, by your own bands"


def test_an_efficiency_is_called_good_only_if_its_whole_interval_is() -> None:
    wide = claim(strong({2: 1.7}, set_noise=0.15))
    assert "good; its interval: overhead to " in wide
    assert "the interval does not decide whether this is good scaling" in wide
    between = claim(strong({2: 1.46}, set_noise=0.07))
    assert "overhead to good" in between
    assert "short of good scaling on one node (above 85 %)" in between, "neither end is good"
    once = claim(strong({2: 1.99}, count=1))
    assert "(no interval, so no band)" in once
    cell = answer(study(strong({2: 1.99}, count=1))).table()[-1]["Efficiency, by S001's bands"]
    assert "no interval" in cell
    assert "good scaling" not in once
    assert answer(study(strong({2: 1.99}, count=1))).finding.status == decisions.TOO_FEW


def test_more_than_the_ranks_can_give_has_no_band_and_says_what_it_may_be() -> None:
    beyond = claim(strong({2: 2.5}))
    assert "all of it above 100 %, which more ranks alone cannot give" in beyond
    assert "perfect" not in beyond
    assert "the machine was busy)" not in beyond
    busy: dict[str, float | None] = {"gpu_others_percent": 50.0}
    first = [
        replace(r, windows=tuple(replace(w, state=busy) for w in r.windows)) if r.set_id.endswith("-0") else r
        for r in strong({2: 2.5})
    ]
    assert "; the machine was busy)" in claim(first), "one of the sets lay beside another process on the GPU"
    assert "perfect" in claim(strong({2: 2.01}, set_noise=0.02)), "an interval that holds 100 % has its band"


def test_ranks_of_a_cpu_share_its_cores() -> None:
    records = make.sets({"2 ranks": (RunConfig(world_size=2), 1.1)}, baseline_label="1 rank", experiment="multi_gpu")
    said = claim(records)
    assert "55 % with 2 ranks (overhead), by S001's bands; poor scaling (below 70 %)." in said
    assert "All ranks share the same 2 cores: expect no efficiency near 100 %." in said


def test_families_that_do_not_scale_are_left_to_others() -> None:
    with_lost, without = study(strong({2: 1.6}), lost()), study(strong({2: 1.6}))
    assert [r.label for r in scaling.rows(with_lost)] == [r.label for r in scaling.rows(without)]
    assert "no exchange" not in answer(with_lost).finding.claim + plain(answer(with_lost).table())
    changes = gains.measured(make.study(with_lost.records, "recommendation"))
    assert [r.label for r in changes] == ["2 GPUs"], "without an exchange nothing is trained"


def test_a_ratio_between_batches_is_no_recommendation() -> None:
    both = make.study([*strong({2: 1.6}), *weak({2: 1.9})], "recommendation")
    assert {r.family for r in gains.measured(both)} == {"seed, batch 64"}


def test_the_table_shows_both_kinds_in_rows_of_their_own() -> None:
    shown = answer(study(strong({2: 1.6}), weak({2: 1.9}))).table()
    families = list(dict.fromkeys(column(shown, "Family")))
    assert families == ["seed, batch 64, strong scaling", "seed, batch 64 per rank, weak scaling"]
    alone = answer(study(strong({2: 1.6}))).table()
    assert set(column(alone, "Family")) == {"seed, batch 64, strong scaling"}
    cell = by(alone, "Configuration")["2 GPUs"]["Efficiency, by S001's bands"]
    assert cell.startswith("80 %, good (")


@pytest.mark.parametrize(
    ("device", "ranks", "nodes", "words"),
    [
        ("cpu", 1, 1, "1 CPU rank"),
        ("cpu", 4, 1, "4 CPU ranks"),
        ("cuda", 1, 1, "1 GPU"),
        ("cuda", 8, 1, "8 GPUs"),
        ("cuda", 8, 2, "8 GPUs on 2 hosts"),
        ("cpu", 2, 2, "2 CPU ranks on 2 hosts"),
    ],
)
def test_layouts(device: str, ranks: int, nodes: int, words: str) -> None:
    assert scaling.layout(RunConfig(device=device, world_size=ranks, nodes=nodes)) == words


def test_a_note_stays_until_its_own_family_has_measured_it() -> None:
    """Two GPUs with 128 images are strong scaling of 128 and weak scaling of 64."""
    large = replace(ONE, global_batch_size=128)
    config = replace(large, world_size=2)
    note = make.record(
        config,
        role="note",
        label="2 GPUs",
        experiment="multi_gpu",
        family=f"seed, batch 64 per rank{WEAK}",
        baseline_id=ONE.run_id,
        status="left out",
        reason="did not fit into the time that was given",
        set_id="",
    )
    rows = scaling.rows(study(strong({2: 1.6}, base=large), weak({4: 3.5}), make.on(make.GPUS, [note])))
    assert [(r.scaling, r.label) for r in rows if r.role == "note"] == [("weak", "2 GPUs")]
    measured = scaling.rows(study(weak({2: 1.9}), make.on(make.GPUS, [note])))
    assert not [r for r in measured if r.role == "note"]

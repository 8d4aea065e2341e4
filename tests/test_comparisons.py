"""Comparisons of records with planted ratios."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import records as make
from cells import column

from ddpm_lab.config import LOADER_ALONE, RunConfig
from ddpm_lab.explain import decisions, stats
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, Comparison, comparisons, peak
from ddpm_lab.explain.frames import Study
from ddpm_lab.questions.ask import answer
from ddpm_lab.record import RunRecord

BF16 = RunConfig(precision="bf16")


def row(records: list[RunRecord], label: str) -> Comparison:
    (found,) = (r for r in comparisons(make.study(records)) if r.label == label)
    return found


def names_of(study: Study) -> list[str]:
    return list(dict.fromkeys(c.family for c in comparisons(study)))


def answered(
    records: Sequence[RunRecord], *looks: RunRecord, label: str = "bf16", resolution: float = 0.03
) -> Comparison:
    """The row of a label, after so many looks."""
    study = replace(make.study(records), looks=looks, resolution=resolution)
    (found,) = (r for r in comparisons(study) if r.label == label)
    return found


def planted(logs: Mapping[str, Sequence[float]], twin: Sequence[float], **values: Any) -> list[RunRecord]:
    """Sets of one turn in which configurations have these log ratios exactly, and the twin its own."""
    configs = {label: replace(BF16, seed=i) for i, label in enumerate(logs)}
    made = make.sets(
        {label: (config, 1.0) for label, config in configs.items()},
        **{"count": len(twin), "turns": 1, "set_noise": 0.0, "turn_noise": 0.0, "drift": 0.0, **values},
    )
    wanted = {"fp32": [0.0] * len(twin), "fp32 again": twin, **logs}
    return [
        replace(r, windows=tuple(replace(w, seconds=w.seconds * math.exp(-wanted[r.label][s])) for w in r.windows))
        for r, s in ((r, int(r.set_id.rpartition("-")[2])) for r in made)
    ]


def look(records: Sequence[RunRecord], sets: Iterable[int], minute: int) -> RunRecord:
    """An answer that was shown after these sets."""
    ids = [r.set_id for r in records if r.role == "baseline" and int(r.set_id.rpartition("-")[2]) in set(sets)]
    base = next(r for r in records if r.role == "baseline")
    date = f"2026-01-04T10:{minute:02d}:00+00:00"
    return replace(
        base, role="look", windows=(), environment=make.environment(date=date), look={"sets": ids, "log_ratios": {}}
    )


def other_look(question: int, logs: Mapping[str, Iterable[float]], minute: int) -> RunRecord:
    """An answer to another question, with the log ratios of its comparisons."""
    found = make.record(RunConfig(seed=100 + question), experiment=f"other {question}", role="look")
    date = f"2026-01-04T10:{minute:02d}:00+00:00"
    shown = {"sets": [f"other-{question}"], "log_ratios": {name: list(values) for name, values in logs.items()}}
    return replace(found, environment=make.environment(date=date), look=shown)


ROUND = [0.01, -0.01, 0.012, -0.012, 0.008, -0.008, 0.01, -0.01]
NONE = [0.0, 0.001, 0.0, -0.001, 0.0005, -0.0005, 0.0, 0.0]
"""A twin's log ratios, close to none."""


def test_planted_ratio_is_found_within_its_interval() -> None:
    records = make.sets({"bf16": (BF16, 1.62)}, count=12, seed=2)
    bf16, twin = row(records, "bf16"), row(records, "fp32 again")
    assert bf16.ratio.low < 1.62 < bf16.ratio.high
    assert (bf16.verdict, bf16.primary, bf16.answered, bf16.why) == (decisions.FASTER, True, True, "")
    assert bf16.images_per_second == pytest.approx(1.62 * 32 / 0.010, rel=0.05)
    assert bf16.step_seconds * bf16.images_per_second == pytest.approx(32)
    assert bf16.projected_seconds == pytest.approx(50_000 / bf16.images_per_second)
    assert (twin.verdict, row(records, "fp32").verdict) == ("baseline", "baseline")
    assert bf16.noise.ends == twin.ratio.ends


def test_ratio_is_of_equal_work_and_not_of_steps() -> None:
    """A configuration with twice the batch and twice the time a step is as fast."""
    config = RunConfig(global_batch_size=64)
    assert row(make.sets({"batch 64": (config, 1.0)}), "batch 64").ratio.value == pytest.approx(1, abs=0.02)


def test_baseline_and_twin_together_are_the_baseline() -> None:
    """A twin that is faster by a log ratio of t makes the baseline faster by t / 2."""
    twin, logs = [0.02, -0.04, 0.0, 0.01], [0.5, 0.5, 0.5, 0.5]
    records = planted({"bf16": logs}, twin)
    assert [math.log(r) for r in row(records, "bf16").set_ratios] == pytest.approx([0.49, 0.52, 0.5, 0.495])
    assert [math.log(r) for r in row(records, "fp32 again").set_ratios] == pytest.approx(twin)


def test_crowded_sets_do_not_count_and_are_counted() -> None:
    quiet = make.sets({"bf16": (BF16, 1.5)}, count=7)
    bf16 = row(make.sets({"bf16": (BF16, 1.5)}, count=7, crowded=[0, 4]), "bf16")
    expected = row([r for r in quiet if r.set_id[-1] not in "04"], "bf16")
    assert (bf16.sets, bf16.disturbed_sets, bf16.verdict) == (5, 2, decisions.FASTER)
    assert bf16.set_ratios == pytest.approx(expected.set_ratios)
    assert bf16.images_per_second == pytest.approx(expected.images_per_second)
    drowned = row(make.sets({"bf16": (BF16, 1.5)}, count=4, crowded=range(4)), "bf16")
    assert (drowned.sets, drowned.disturbed_sets, drowned.answered) == (0, 4, False)


def test_only_sets_that_hold_both_sides_count() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}, count=8)
    lost = [r for r in records if not (r.role == "baseline" and r.set_id.endswith("-7"))]
    late = [r for r in lost if not (r.role == "candidate" and r.set_id.endswith("-6"))]
    assert row(late, "bf16").sets == 6
    assert row(late, "fp32 again").sets == 7


def test_an_effect_within_what_the_twin_differs_by_is_not_called() -> None:
    twin = [0.05 + x for x in ROUND[:6]]
    size = abs(math.log(row(planted({}, twin), "fp32 again").ratio.high))
    for sign, more, word in ((1, 0.02, "faster"), (-1, 0.02, "slower"), (1, -0.02, None), (-1, -0.02, None)):
        logs = [t / 2 + sign * (size + more) for t in twin]
        found = row(planted({"bf16": logs}, twin), "bf16")
        assert not found.ratio.contains(1)
        assert found.verdict == (word or decisions.INCONCLUSIVE)
        assert bool(found.why) == (word is None)


def test_too_few_sets_have_a_ratio_and_no_verdict() -> None:
    one, three, four = (row(make.sets({"bf16": (BF16, 1.62)}, count=n), "bf16") for n in (1, 3, 4))
    assert [c.verdict for c in (one, three, four)] == [decisions.TOO_FEW, decisions.TOO_FEW, decisions.FASTER]
    assert one.ratio.value == pytest.approx(1.62, rel=0.05)
    assert not one.ratio.exists
    assert math.isinf(one.resolves)
    assert three.ratio.low > 1


def test_the_same_speed_is_an_answer_for_the_resolution_that_was_asked_for() -> None:
    logs = [0.02 + x / 2 for x in (0.04, -0.04, 0.04, -0.04, 0.04, -0.04)]
    records = planted({"bf16": logs}, NONE[:6])
    usual, wide = answered(records), answered(records, resolution=0.1)
    assert (usual.verdict, usual.answered, usual.resolved, usual.why) == (decisions.INCONCLUSIVE, False, False, "")
    assert (wide.verdict, wide.answered, wide.resolved) == (decisions.SAME, True, False)
    narrow = answered(planted({"bf16": [x / 2 for x in ROUND[:6]]}, NONE[:6]))
    assert narrow.verdict == decisions.SAME


def test_the_primary_comparison_is_tested_alone_and_the_others_together() -> None:
    """The same sets: called where they are primary, not called as one of two secondary comparisons."""
    logs = [0.035 + 3 * x for x in ROUND]
    third = [0.001 + 4 * x for x in ROUND]
    records = planted({"bf16": logs, "second": logs, "third": third}, NONE)
    study = make.study(records)
    primary, second, last = (c for c in comparisons(study) if c.role == "candidate")
    p = primary.ratio.p
    assert p < 0.035 < 2 * p < 0.05
    assert primary.p == pytest.approx(p)
    assert (primary.level, primary.verdict) == (0.035, decisions.FASTER)
    assert [second.p, last.p] == pytest.approx(stats.holm([p, last.ratio.p]))
    assert (second.ratio, second.verdict) == (primary.ratio, decisions.INCONCLUSIVE)
    assert second.ratio.low > 1
    assert "3.5 %" in second.why, "an interval that excludes 1 and no call: the reason stands beside it"
    alone = row(planted({"second": logs}, NONE, primary=""), "second")
    assert (alone.primary, alone.verdict) == (False, decisions.FASTER)


def test_secondary_comparisons_are_corrected_over_all_families() -> None:
    families = [
        make.sets(
            {"bf16": (replace(BF16, seed=s), 1.0)},
            baseline=RunConfig(seed=s),
            family=f"family {s}",
            seed=s,
            primary="bf16" if s == 0 else "",
        )
        for s in range(5)
    ]
    first, *others = (
        c for c in comparisons(make.study([r for family in families for r in family])) if c.role == "candidate"
    )
    assert first.p == pytest.approx(first.ratio.p)
    assert [c.p for c in others] == pytest.approx(stats.holm([c.ratio.p for c in others]))


def test_each_look_is_paid_for_and_those_of_one_moment_are_one() -> None:
    records = planted({"bf16": [0.034 + 3 * x for x in ROUND]}, NONE)
    looks = [look(records, range(4), 0), look(records, range(4, 8), 30)]
    two, one = (
        answered(records, *looks),
        answered(records, *(look(records, sets, 0) for sets in (range(4), range(4, 8)))),
    )
    assert decisions.level_of_look(2) < two.ratio.p < decisions.level_of_look(1)
    assert (two.verdict, two.level, two.sets) == (decisions.INCONCLUSIVE, decisions.level_of_look(2), 8)
    assert "0.75 %" in two.why
    assert (one.verdict, one.level, one.sets) == (decisions.FASTER, 0.035, 8)
    again = answered(records, *looks, look(records, range(8), 50))
    assert again == two, "a look at nothing new is none"


def test_a_look_at_another_family_of_the_question_is_no_look_at_this_one() -> None:
    mine = planted({"bf16": [0.034 + 3 * x for x in ROUND]}, NONE)
    other = make.sets({"other": (replace(BF16, seed=5), 1.0)}, baseline=RunConfig(seed=5), family="other", seed=5)
    before = replace(look(mine, range(8), 0), baseline_id=other[0].baseline_id)
    before = replace(before, look={"sets": sorted({r.set_id for r in other}), "log_ratios": {}})
    now = look(mine, range(8), 30)
    assert answered([*mine, *other], before, now).level == decisions.level_of_look(1)


def test_what_a_set_takes_is_of_the_sets_of_the_comparison() -> None:
    """Four sets with two candidates, then four with the other alone."""
    both = make.sets({"bf16": (BF16, 1.0), "other": (RunConfig(seed=3), 1.0)}, count=4)
    alone = make.sets({"other": (RunConfig(seed=3), 1.0)}, count=4, seed=1)
    found = [replace(r, stages={"start": 2.0, "steady": 3.0}) for r in (*both, *alone)]
    assert row(found, "bf16").set_seconds == 15


def test_the_scatter_of_what_the_machine_has_shown_by_then_steadies() -> None:
    """Four sets that scatter by 3 %, beside many comparisons that scatter by 0.5 %: not called alone, called beside."""
    records = planted({"bf16": [0.04, 0.08, 0.01, 0.07]}, [0.0] * 4)
    mine = look(records, range(4), 30)
    rng = np.random.default_rng(3)
    told = [{"a": rng.normal(0, 0.02, 12), "twin": rng.normal(0, 0.02 / stats.TWIN_SCALE, 12)} for _ in range(4)]
    before = [other_look(i, logs, 10) for i, logs in enumerate(told)]
    after = [other_look(i, logs, 40) for i, logs in enumerate(told)]
    alone, beside, later = (answered(records, mine, *others) for others in ([], before, after))
    expected = stats.estimate(
        [log for _, log in beside.logs],
        stats.spread_of([v * (stats.TWIN_SCALE if k == "twin" else 1) for logs in told for k, v in logs.items()]),
    )
    assert beside.ratio == expected
    assert beside.ratio.df == 7
    assert beside.ratio.half_width < alone.ratio.half_width
    assert (alone.verdict, beside.verdict) == (decisions.INCONCLUSIVE, decisions.FASTER)
    assert later == alone


def test_what_is_resolved_and_the_minutes_that_would_resolve_more() -> None:
    records = [
        replace(r, stages={"start": 2.0, "steady": 3.0})
        for r in planted({"bf16": [0.01 + 4 * x for x in ROUND[:6]]}, NONE[:6])
    ]
    found = answered(records)
    assert found.verdict == decisions.INCONCLUSIVE
    assert found.resolves == pytest.approx(math.exp(2 * found.ratio.half_width) - 1)
    assert found.set_seconds == 15, "baseline, twin and this configuration"
    needed = decisions.sets_to_resolve([log for _, log in found.logs])
    assert needed is not None
    assert found.sets_needed == needed > 6
    assert found.minutes_needed == pytest.approx((needed - 6) * 15 / 60)
    assert answered(records, resolution=0.5).minutes_needed == 0
    assert math.isnan(answered(records[:3]).minutes_needed)


def test_a_failure_in_one_set_is_told_beside_the_sets_that_count() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}, count=7)
    broken = [
        replace(r, status="crashed", reason="lost", windows=()) if r.label == "bf16" and r.set_id.endswith("-3") else r
        for r in records
    ]
    bf16 = row(broken, "bf16")
    assert (bf16.status, bf16.sets, bf16.failed_sets, bf16.reason) == ("ok", 6, 1, "lost")


def test_a_mechanism_has_no_speed_and_efficiency_is_speed_up_by_ranks() -> None:
    ranks = RunConfig(world_size=4, oversubscribe=True)
    found = row(make.sets({"4 ranks": (ranks, 1.3)}, mechanism_only=["4 ranks"]), "4 ranks")
    assert found.verdict == MECHANISM_ONLY
    values = (found.ratio.value, found.images_per_second, found.efficiency.value, found.step_seconds)
    assert all(np.isnan(value) for value in values)
    two = row(make.sets({"2 ranks": (RunConfig(world_size=2), 1.5)}), "2 ranks")
    assert two.efficiency.ends == pytest.approx([v / 2 for v in two.ratio.ends])


def test_a_note_disappears_once_its_configuration_is_measured() -> None:
    base = RunConfig(loader="files", workload=LOADER_ALONE)
    config, family, why = replace(base, loader_workers=8), "loader alone, batch 32", "did not fit into the time"
    for change in (
        {},
        {"label": "eight"},  # renamed since: the same configuration
        {"baseline_id": "0123456789ab"},  # compared with another baseline then
        {"config": base},  # the note carried the baseline's configuration
    ):
        values: dict[str, Any] = {"config": config, "label": "8 workers", "baseline_id": base.run_id, **change}
        note = make.record(**values, family=family, role="note", set_id="", status="left out", reason=why)
        other = make.sets({"2 workers": (replace(base, loader_workers=2), 1.5)}, baseline=base, family=family)
        assert [c.reason for c in comparisons(make.study([*other, note])) if c.role == "note"] == [why]
        later = make.sets({"8 workers": (config, 1.5)}, baseline=base, family=family, seed=1)
        for records in ([*other, note, *later], [*other, *later, note]):
            after = comparisons(make.study(records))
            assert "note" not in {c.role for c in after}
            assert len({c.family for c in after}) == 1
            assert why not in answer(make.study(records)).finding.claim


def test_a_note_of_other_data_or_another_family_stays() -> None:
    base = RunConfig(loader="files")
    config = replace(base, loader_workers=8)
    note = make.record(
        replace(config, precision="bf16"),
        label="8 workers",
        family="training, bf16",
        baseline_id=replace(base, precision="bf16").run_id,
        role="note",
        set_id="",
        status="left out",
        reason="did not fit into the time",
    )
    measured = make.sets({"8 workers": (config, 1.5)}, baseline=base, family="training, fp32")
    assert "note" in {c.role for c in comparisons(make.study([*measured, note]))}


def sweep() -> list[RunRecord]:
    """Two image sizes whose families have one name, and one that says its size already."""
    found = []
    for size in (32, 64):
        for family, workload in (("loader alone, batch 32", LOADER_ALONE), ("training", RunConfig().workload)):
            base = RunConfig(loader="files", workload=workload, image_size=size, data_sha256=f"{size}abcdef012345")
            name = f"training, {size}x{size} pixels" if family == "training" and size == 64 else family
            found += make.sets(
                {"2 workers": (replace(base, loader_workers=2), 1.5)},
                baseline=base,
                baseline_label="0 workers",
                experiment="workers",
                family=name,
                step_seconds=0.01 * size,
                seed=size,
            )
    return found


def test_every_name_says_its_image_size_where_there_are_several() -> None:
    names = [
        "loader alone, batch 32, 32x32 pixels",
        "training, 32x32 pixels",
        "loader alone, batch 32, 64x64 pixels",
        "training, 64x64 pixels",
    ]
    study = make.study(sweep())
    assert names_of(study) == names
    assert list(dict.fromkeys(column(answer(study).table(), "Family"))) == names
    shown = {ax.get_title(loc="left") for ax in answer(study).figure().axes}
    assert set(names) <= shown
    one = make.study([r for r in sweep() if r.config.image_size == 32])
    assert names_of(one) == ["loader alone, batch 32", "training"]


def test_equal_family_names_with_other_baselines_or_data_are_told_apart() -> None:
    for change, words in (({"seed": 3}, "seed 3"), ({"data_sha256": "fedcba9876543210"}, "data fedcba98")):
        base = RunConfig(**change)
        other = make.sets({"bf16": (replace(base, precision="bf16"), 1.5)}, baseline=base, seed=3)
        names = names_of(make.study(make.sets({"bf16": (BF16, 1.5)}) + other))
        assert names == ["tiny, batch 32, 1 rank", f"tiny, batch 32, 1 rank ({words})"]


def test_unknown_memory_is_unknown() -> None:
    ranks = (make.rank_record(0), make.rank_record(1, peak_memory_bytes=None))
    record: RunRecord = replace(make.sets({}, count=1)[0], ranks=ranks)
    assert np.isnan(peak(record, "peak_memory_bytes"))
    assert np.isnan(peak(replace(record, ranks=()), "peak_memory_bytes"))

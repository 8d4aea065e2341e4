"""Comparisons of records with planted ratios."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import records as make

from ddpm_lab.config import LOADER_ALONE, RunConfig
from ddpm_lab.explain import phrases, selection, stats
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.record import RunRecord

BF16 = RunConfig(precision="bf16")
ROUND = np.array([0.01, -0.01, 0.012, -0.012, 0.008, -0.008, 0.01, -0.01])
NONE = [0.0, 0.001, 0.0, -0.001, 0.0005, -0.0005, 0.0, 0.0]
"""A twin's log ratios, close to none."""


def row(
    records: Sequence[RunRecord], label: str = "bf16", looks: Sequence[RunRecord] = (), resolution: float = 0.03
) -> Comparison:
    """The row of a label, after so many looks."""
    study = replace(make.study(records), looks=tuple(looks), resolution=resolution)
    (found,) = (r for r in comparisons(study) if r.label == label)
    return found


def number(record: RunRecord) -> int:
    """The number of a record's set."""
    return int(record.set_id.rpartition("-")[2])


def planted(logs: Mapping[str, Iterable[float]], twin: Sequence[float], **values: Any) -> list[RunRecord]:
    """Sets of one turn in which configurations have these log ratios exactly, and the twin its own."""
    made = make.sets(
        {label: (replace(BF16, seed=i), 1.0) for i, label in enumerate(logs)},
        **{"count": len(twin), "turns": 1, "set_noise": 0.0, "turn_noise": 0.0, "drift": 0.0, **values},
    )
    wanted = {"fp32": [0.0] * len(twin), "fp32 again": twin, **{k: list(v) for k, v in logs.items()}}
    return [make.windowed(r, math.exp(-wanted[r.label][number(r)])) for r in made]


def look(records: Sequence[RunRecord], sets: Iterable[int], minute: int) -> RunRecord:
    """An answer that was shown after these sets."""
    bases, sets = [r for r in records if r.role == "baseline"], set(sets)
    shown = [r.set_id for r in bases if number(r) in sets]
    return make.look(bases[0], shown, f"2026-01-04T10:{minute:02d}:00+00:00")


def other_look(question: int, logs: Mapping[str, Iterable[float]], minute: int) -> RunRecord:
    """An answer to another question, with the log ratios of its comparisons."""
    shown = {"sets": [f"other-{question}"], "log_ratios": {name: list(values) for name, values in logs.items()}}
    when = make.environment(date=f"2026-01-04T10:{minute:02d}:00+00:00")
    config = RunConfig(seed=100 + question)
    return make.record(config, experiment=f"other {question}", role="look", environment=when, look=shown)


def test_planted_ratio_is_found_within_its_interval() -> None:
    records = make.sets({"bf16": (BF16, 1.62)}, count=12, seed=2)
    bf16, twin = row(records), row(records, "fp32 again")
    assert bf16.ratio.low < 1.62 < bf16.ratio.high
    assert (bf16.verdict, bf16.primary, bf16.answered, bf16.why) == (stats.FASTER, True, True, "")
    assert bf16.images_per_second == pytest.approx(1.62 * 32 / 0.010, rel=0.05)
    assert bf16.step_seconds * bf16.images_per_second == pytest.approx(32)
    assert bf16.projected_seconds == pytest.approx(50_000 / bf16.images_per_second)
    assert (twin.verdict, row(records, "fp32").verdict) == ("baseline", "baseline")
    assert bf16.noise.ends == twin.ratio.ends


def test_only_sets_that_hold_both_sides_count_and_a_failure_in_one_is_told() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}, count=8)
    lost = {("baseline", 7), ("candidate", 6)}
    late = [r for r in records if (r.role, number(r)) not in lost]
    assert (row(late).sets, row(late, "fp32 again").sets) == (6, 7)
    broken = [
        replace(r, status="crashed", reason="lost", windows=()) if (r.role, number(r)) == ("candidate", 3) else r
        for r in records
    ]
    bf16 = row(broken)
    assert (bf16.status, bf16.sets, bf16.failed_sets, bf16.reason) == ("ok", 7, 1, "lost")


def test_an_effect_within_what_the_twin_differs_by_is_not_called() -> None:
    twin = 0.05 + ROUND[:6]
    size = abs(math.log(row(planted({}, [*twin]), "fp32 again").ratio.high))
    for sign, more, word in ((1, 0.02, "faster"), (-1, 0.02, "slower"), (1, -0.02, None), (-1, -0.02, None)):
        found = row(planted({"bf16": twin / 2 + sign * (size + more)}, [*twin]))
        assert not found.ratio.contains(1)
        assert found.verdict == (word or stats.INCONCLUSIVE)
        assert bool(found.why) == (word is None)


def test_a_twin_speaks_for_its_own_family() -> None:
    """Two families of one baseline, such as strong and weak scaling: only the second one's twin is off."""
    off = 0.1 + ROUND[:6]
    first = planted({"two": 0.4 + ROUND[:6]}, NONE[:6], family="strong")
    second = planted({"bf16": 0.05 + ROUND[:6]}, [*off], family="weak", primary="", seed=1)
    second = [replace(r, set_id=f"{r.set_id[:-2]}9{r.set_id[-2:]}") for r in second]
    assert row(second).verdict == row([*first, *second]).verdict == stats.INCONCLUSIVE
    assert row([*first, *second], "two").verdict == stats.FASTER


def test_what_the_twin_forbade_by_chance_is_called_once_more_sets_clear_it() -> None:
    logs, twin = 0.03 + ROUND[[0, 1, 2, 3, 4, 5, 6, 7] * 2], np.resize(ROUND, 16) / 4
    twin[:4] += 0.05
    records = planted({"bf16": logs + twin / 2}, [*twin])
    first = [r for r in records if number(r) < 4]
    looks = [look(records, range(4), 0), look(records, range(16), 30)]
    before, after = row(first, looks=looks[:1]), row(records, looks=looks)
    assert (before.verdict, before.sets) == (stats.INCONCLUSIVE, 4)
    assert "repeated baseline" in before.why
    assert (after.verdict, after.sets) == (stats.FASTER, 4), "the call that was made first"


def test_the_primary_comparison_is_tested_alone_and_the_others_together() -> None:
    """The same sets: called where they are primary, not called as one of two secondary comparisons."""
    logs = 0.035 + 3 * ROUND
    records = planted({"bf16": logs, "second": logs, "third": 0.001 + 4 * ROUND}, NONE)
    primary, second, last = (c for c in comparisons(make.study(records)) if c.role == "candidate")
    p = primary.ratio.p
    assert p < 0.035 < 2 * p < 0.05
    assert primary.p == pytest.approx(p)
    assert (primary.level, primary.verdict) == (0.035, stats.FASTER)
    assert [second.p, last.p] == pytest.approx(stats.holm([p, last.ratio.p]))
    assert (second.ratio, second.verdict) == (primary.ratio, stats.INCONCLUSIVE)
    assert second.ratio.low > 1
    assert "3.5 %" in second.why, "an interval that excludes 1 and no call: the reason stands beside it"
    alone = row(planted({"second": logs}, NONE, primary=""), "second")
    assert (alone.primary, alone.verdict) == (False, stats.FASTER)


def test_an_interval_that_leaves_1_out_does_not_show_it() -> None:
    found = row(planted({"bf16": 0.0305 + 3 * ROUND}, NONE))
    assert (found.verdict, round(found.ratio.low, 2)) == (stats.FASTER, 1)
    assert float(phrases.between(found.ratio).split()[0]) > 1
    assert phrases.times(stats.Interval(value=1.04, low=0.997, high=1.08)) == "1.04 (1.00 to 1.08)"


def test_who_asks_again_for_one_of_several_gets_the_same_answer() -> None:
    """Alone it would be called: by the call that asks for it alone, or as the primary one of a later call."""
    logs = 0.035 + 3 * ROUND
    records = planted({"second": logs, "third": 0.001 + 4 * ROUND}, NONE, primary="")
    second, third = (c for c in comparisons(make.study(records)) if c.role == "candidate")
    assert second.verdict == stats.INCONCLUSIVE
    later = [replace(r, primary=r.label == "second") if number(r) > 5 else r for r in records]
    for told in (records, later):
        asked = selection.study(told, "amp", run_ids=[RunConfig().run_id, second.run_id])
        rows = comparisons(asked)
        assert [(c.verdict, c.p) for c in rows if c.role == "candidate"] == [(second.verdict, second.p)]
        assert third.run_id not in {c.run_id for c in rows} | {r.run_id for r in asked.records}


def test_each_look_is_paid_for_and_those_of_one_moment_are_one() -> None:
    records = planted({"bf16": 0.034 + 3 * ROUND}, NONE)
    looks = [look(records, range(4), 0), look(records, range(4, 8), 30)]
    two, one = (row(records, looks=found) for found in (looks, [look(records, r, 0) for r in (range(4), range(4, 8))]))
    assert stats.level_of_look(2) < two.ratio.p < stats.level_of_look(1)
    assert (two.verdict, two.level, two.sets) == (stats.INCONCLUSIVE, stats.level_of_look(2), 8)
    assert (one.verdict, one.level, one.sets) == (stats.FASTER, 0.035, 8)
    again = row(records, looks=[*looks, look(records, range(8), 50)])
    assert repr(again) == repr(two), "a look at nothing new is none"
    other = make.sets({"other": (replace(BF16, seed=5), 1.0)}, baseline=RunConfig(seed=5), family="other", seed=5)
    before = replace(looks[0], look={"sets": sorted({r.set_id for r in other}), "log_ratios": {}})
    assert row([*records, *other], looks=[before, look(records, range(8), 30)]).level == 0.035, "of another family"


def test_a_figure_counts_the_sets_of_its_answer() -> None:
    records = make.sets({"bf16": (RunConfig(precision="bf16"), 1.2)}, count=9)
    seen = list(dict.fromkeys(r.set_id for r in records))[:6]
    shown = replace(make.study(records), looks=(make.look(records[0], seen, "2026-01-03T12:00:00+00:00"),))
    assert [c.sets for c in comparisons(shown) if c.role == "candidate"] == [6]
    assert phrases.context(shown).endswith("6 sets of 6 turns")


def test_the_scatter_of_what_the_machine_has_shown_by_then_steadies() -> None:
    """Four sets that scatter by 3 %, beside many comparisons that scatter by 0.5 %: not called alone, called beside."""
    records = planted({"bf16": [0.04, 0.08, 0.01, 0.07]}, [0.0] * 4)
    mine = look(records, range(4), 30)
    rng = np.random.default_rng(3)
    told = [{"a": rng.normal(0, 0.02, 12), "twin": rng.normal(0, 0.02 / stats.TWIN_SCALE, 12)} for _ in range(4)]
    before, after = ([other_look(i, logs, minute) for i, logs in enumerate(told)] for minute in (10, 40))
    alone, beside, later = (row(records, looks=[mine, *others]) for others in ([], before, after))
    spread = stats.spread_of(v * (stats.TWIN_SCALE if k == "twin" else 1) for logs in told for k, v in logs.items())
    assert beside.ratio == stats.estimate([log for _, log in beside.logs], spread)
    assert beside.ratio.half_width < alone.ratio.half_width
    assert (alone.verdict, beside.verdict) == (stats.INCONCLUSIVE, stats.FASTER)
    assert repr(later) == repr(alone)


def test_what_is_resolved_and_the_minutes_that_would_resolve_more() -> None:
    stages = {"start": 2.0, "steady": 3.0}
    records = planted({"bf16": 0.01 + 4 * ROUND[:6]}, NONE[:6], stages=stages)
    found = row(records)
    assert found.ratio.resolves == pytest.approx(math.exp(2 * found.ratio.half_width) - 1)
    assert found.set_seconds == 15, "baseline, twin and this configuration"
    assert found.sets_needed == stats.sets_to_resolve([log for _, log in found.logs])
    assert found.minutes_needed == pytest.approx((found.sets_needed - 6) * 15 / 60)
    assert row(records, resolution=0.5).minutes_needed == 0
    assert math.isnan(row(records[:3]).minutes_needed)


def test_a_note_disappears_once_its_configuration_is_measured() -> None:
    """Beside whichever baseline, by this run or a later one."""
    base = RunConfig(loader="files", workload=LOADER_ALONE)
    config, family = replace(base, loader_workers=8), "loader alone, batch 32"
    other = make.sets({"2 workers": (replace(base, loader_workers=2), 1.5)}, baseline=base, family=family)
    later = make.sets({"8 workers": (config, 1.5)}, baseline=base, family=family, seed=1)
    left_out: dict[str, Any] = {
        "family": family,
        "role": "note",
        "set_id": "",
        "status": "left out",
        "reason": "no time",
    }
    for change in ({}, {"baseline_id": "0123456789ab"}, {"config": base}):
        values: dict[str, Any] = {"config": config, "label": "8 workers", "baseline_id": base.run_id, **change}
        note = make.record(**values, **left_out)
        assert [c.reason for c in comparisons(make.study([*other, note])) if c.role == "note"] == ["no time"]
        for records in ([*other, note, *later], [*other, *later, note]):
            after = comparisons(make.study(records))
            assert ("note" in {c.role for c in after}, len({c.family for c in after})) == (False, 1)


def test_what_is_measured_of_another_baseline_changes_no_answer() -> None:
    """Three secondary comparisons, of which one is near its limit; then as many of another network, in their sets."""
    near = [0.012, -0.002, 0.011, 0.001, 0.009, 0.0, 0.012, 0.002]
    logs = {"a": near, "b": NONE, "c": NONE}
    mine = planted(logs, NONE, primary="")
    other = [
        replace(
            r, config=replace(r.config, network="seed"), family="seed", baseline_id="seed", set_id=f"seed-{r.set_id}"
        )
        for r in planted(dict.fromkeys("defghi", NONE), NONE, primary="")
    ]
    alone, beside = row(mine, "a"), row([*mine, *other], "a")
    assert (beside.p, beside.verdict, beside.ratio) == (alone.p, alone.verdict, alone.ratio)
    assert alone.p > row(planted({"a": near}, NONE, primary=""), "a").p, "corrected for those of its own baseline"

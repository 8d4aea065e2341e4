"""Comparisons of records with planted ratios."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import records as make

from ddpm_lab.config import LOADER_ALONE, RunConfig
from ddpm_lab.explain import figures, findings, stats, tables
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, comparisons, peak
from ddpm_lab.record import RunRecord

BF16 = RunConfig(precision="bf16")


def row(records: list[RunRecord], label: str) -> dict[str, Any]:
    (found,) = (r for r in comparisons(make.study(records)) if r["label"] == label)
    return found


def test_planted_ratio_is_found_within_its_interval() -> None:
    records = make.sets({"bf16": (BF16, 1.62)}, count=12, seed=2)
    bf16 = row(records, "bf16")
    assert bf16["low"] < 1.62 < bf16["high"]
    assert bf16["verdict"] == stats.FASTER
    assert bf16["images_per_second"] == pytest.approx(1.62 * 32 / 0.010, rel=0.05)
    assert bf16["step_seconds"] * bf16["images_per_second"] == pytest.approx(32)
    assert bf16["projected_seconds"] == pytest.approx(50_000 / bf16["images_per_second"])
    assert row(records, "fp32 again")["verdict"] == stats.NOT_RESOLVED
    assert bf16["noise_low"] == row(records, "fp32 again")["low"]
    assert bf16["comparisons"] == 2


def test_ratio_is_of_equal_work_and_not_of_steps() -> None:
    """A configuration with twice the batch and twice the time a step is as fast."""
    config = RunConfig(global_batch_size=64)
    assert row(make.sets({"batch 64": (config, 1.0)}), "batch 64")["ratio"] == pytest.approx(1, abs=0.02)


def test_a_disturbed_turn_is_dropped_for_all() -> None:
    disturbed = make.sets({"bf16": (BF16, 1.5)}, dropped=[(0, 1), (3, 2)], drift=0.0)
    # Only the baseline's window is marked: the candidate's turn must go with it.
    assert sum(w.dropped for r in disturbed for w in r.windows) == 2
    bf16 = row(disturbed, "bf16")
    assert bf16["turns_dropped"] == 2
    clean = [replace(r, windows=tuple(w for w in r.windows if w.others_cores == 0)) for r in disturbed]
    assert bf16["set_ratios"] == pytest.approx(row(clean, "bf16")["set_ratios"])
    assert bf16["images_per_second"] == pytest.approx(row(clean, "bf16")["images_per_second"])


def test_only_sets_that_hold_both_sides_count() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}, count=8)
    lost = [r for r in records if not (r.role == "baseline" and r.set_id.endswith("-7"))]
    late = [r for r in lost if not (r.role == "candidate" and r.set_id.endswith("-6"))]
    assert row(late, "bf16")["sets"] == 6
    assert row(late, "fp32 again")["sets"] == 7


def test_a_baseline_that_differs_from_itself_takes_every_verdict() -> None:
    records = make.sets({"bf16": (BF16, 1.62)}, twin_ratio=1.05)
    other = make.sets({"bf16": (replace(BF16, seed=1), 1.5)}, family="seed 1", baseline=RunConfig(seed=1), seed=1)
    frame = pd.DataFrame(comparisons(make.study(records + other)))
    assert set(frame[frame["role"] != "baseline"]["verdict"]) == {stats.NOT_TRUSTED}


def test_few_sets_have_no_verdict() -> None:
    one, five = (row(make.sets({"bf16": (BF16, 1.62)}, count=n), "bf16") for n in (1, 5))
    assert one["verdict"] == five["verdict"] == stats.NOT_RESOLVED
    assert one["ratio"] == pytest.approx(1.62, rel=0.05)
    assert np.isnan(one["low"])
    assert five["low"] > 1


def test_comparisons_are_corrected_over_all_families() -> None:
    families = [
        make.sets({"bf16": (replace(BF16, seed=s), 1.0)}, baseline=RunConfig(seed=s), family=f"family {s}", seed=s)
        for s in range(5)
    ]
    frame = pd.DataFrame(comparisons(make.study([r for family in families for r in family])))
    assert set(frame["comparisons"]) == {10}
    tested = frame[frame["p"].notna()]
    assert list(tested["p_holm"]) == pytest.approx(stats.holm(list(tested["p"])))


def test_failures_are_rows() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}, failures={"fp16": (RunConfig(seed=9), "oom", "no room")})
    failed = row(records, "fp16")
    assert (failed["status"], failed["reason"], failed["sets"], failed["verdict"]) == ("oom", "no room", 0, "oom")
    assert row(records, "bf16")["verdict"] == stats.FASTER


def test_a_failure_in_one_set_is_told_beside_the_sets_that_count() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}, count=7)
    broken = [
        replace(r, status="crashed", reason="lost", windows=()) if r.label == "bf16" and r.set_id.endswith("-3") else r
        for r in records
    ]
    bf16 = row(broken, "bf16")
    assert (bf16["status"], bf16["sets"], bf16["failed_sets"], bf16["reason"]) == ("ok", 6, 1, "lost")


def test_a_mechanism_has_no_speed() -> None:
    ranks = RunConfig(world_size=4, oversubscribe=True)
    found = row(make.sets({"4 ranks": (ranks, 1.3)}, mechanism_only=["4 ranks"]), "4 ranks")
    assert found["verdict"] == MECHANISM_ONLY
    assert found["comparisons"] == 1
    assert all(np.isnan(found[name]) for name in ("ratio", "images_per_second", "efficiency", "step_seconds"))


def test_efficiency_is_speed_up_by_ranks() -> None:
    ranks = row(make.sets({"2 ranks": (RunConfig(world_size=2), 1.5)}), "2 ranks")
    assert ranks["efficiency"] == pytest.approx(ranks["ratio"] / 2)
    assert ranks["efficiency_low"] == pytest.approx(ranks["low"] / 2)


def test_a_note_stands_until_the_configuration_is_measured() -> None:
    config = RunConfig(loader="files", loader_workers=8, workload=LOADER_ALONE)
    note = make.record(
        config, role="note", label="8 workers", set_id="", status="left out", reason="too many", baseline_id=""
    )
    records = make.sets({"bf16": (BF16, 1.5)})
    assert row([*records, note], "8 workers")["status"] == "left out"
    measured = make.sets({"8 workers": (config, 1.5)})
    assert row([*measured, note], "8 workers")["status"] == "ok"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"label": "eight"},  # renamed since: the same configuration
        {"baseline_id": "0123456789ab"},  # compared with another baseline then
        {"config": RunConfig(loader="files", workload=LOADER_ALONE)},  # the note carried the baseline's configuration
    ],
)
def test_a_note_disappears_once_its_configuration_is_measured(change: dict[str, Any]) -> None:
    base = RunConfig(loader="files", workload=LOADER_ALONE)
    config = replace(base, loader_workers=8)
    family = "loader alone, batch 32"
    values = {"config": config, "label": "8 workers", "baseline_id": base.run_id, **change}
    note = make.record(
        **values, family=family, role="note", set_id="", status="left out", reason="did not fit into the time"
    )
    other = make.sets({"2 workers": (replace(base, loader_workers=2), 1.5)}, baseline=base, family=family)
    before = pd.DataFrame(comparisons(make.study([*other, note])))
    assert list(before[before["role"] == "note"]["reason"]) == ["did not fit into the time"]
    later = make.sets({"8 workers": (config, 1.5)}, baseline=base, family=family, seed=1)
    for records in ([*other, note, *later], [*other, *later, note]):
        after = pd.DataFrame(comparisons(make.study(records)))
        assert "note" not in set(after["role"])
        assert after["family"].nunique() == 1
        assert "did not fit" not in findings.finding(make.study(records)).claim
        assert "did not fit" not in tables.table(make.study(records)).to_string()


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
    assert "note" in set(pd.DataFrame(comparisons(make.study([*measured, note])))["role"])


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
    assert list(pd.DataFrame(comparisons(study))["family"].unique()) == names
    assert list(tables.table(study)["Family"].unique()) == names
    shown = {text.get_text() for text in figures.figure(study).texts}
    assert set(names) <= shown
    one = make.study([r for r in sweep() if r.config.image_size == 32])
    assert list(pd.DataFrame(comparisons(one))["family"].unique()) == ["loader alone, batch 32", "training"]


def test_the_loader_is_compared_with_training_at_the_same_image_size() -> None:
    claim = findings.finding(make.study(sweep())).claim
    said = re.findall(r"delivers ([\d.,]+) images/s with 0 workers and ([\d.,]+) images/s with 2 workers, where", claim)
    assert len(said) == 1


def test_of_data_of_one_size_the_hash_tells_families_apart() -> None:
    records = []
    for i, data in enumerate(("0123456789abcdef", "fedcba9876543210")):
        base = RunConfig(data_sha256=data)
        records += make.sets({"bf16": (replace(base, precision="bf16"), 1.5)}, baseline=base, seed=i)
    assert list(pd.DataFrame(comparisons(make.study(records)))["family"].unique()) == [
        "tiny, batch 32, 1 rank",
        "tiny, batch 32, 1 rank (data fedcba98)",
    ]


def test_equal_family_names_with_other_baselines_are_told_apart() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}) + make.sets({}, baseline=RunConfig(seed=3), seed=3)
    assert list(pd.DataFrame(comparisons(make.study(records)))["family"].unique()) == [
        "tiny, batch 32, 1 rank",
        "tiny, batch 32, 1 rank (seed 3)",
    ]


def with_bursts(label: str, ratio: float, count: int = 6) -> list[RunRecord]:
    """Sets in which one window of ``label`` takes five times as long."""
    found = make.sets({"bf16": (RunConfig(precision="bf16"), ratio)}, count=count)
    return [
        replace(r, windows=(replace(r.windows[0], seconds=5 * r.windows[0].seconds), *r.windows[1:]))
        if r.label == label
        else r
        for r in found
    ]


@pytest.mark.parametrize(
    ("label", "ratio", "verdict", "words"),
    [
        ("bf16", 1.3, "not resolved (bursts)", "% to its own time"),
        ("bf16", 2.0, "faster", "% to its own time"),
        ("bf16", 0.8, "slower", "% to its own time"),
        ("no one", 1.3, "faster", ""),
    ],
)
def test_bursts_of_one_side_are_told_and_give_no_verdict_where_they_would_turn_it(
    label: str, ratio: float, verdict: str, words: str
) -> None:
    records = with_bursts(label, ratio)
    found = row(records, "bf16")
    assert found["ratio"] == pytest.approx(ratio, rel=0.02)  # the median does not see them
    assert found["bursts"] == (pytest.approx(10 / 6, rel=0.03) if words else 1.0)
    assert found["verdict"] == verdict
    shown = tables.table(make.study(records)).set_index("Configuration").loc["bf16"]
    assert words in str(shown.get("Note", ""))
    assert bool(words) == ("Note" in shown)


def test_unknown_memory_is_unknown() -> None:
    ranks = (make.rank_record(0), make.rank_record(1, peak_memory_bytes=None))
    record: RunRecord = replace(make.sets({}, count=1)[0], ranks=ranks)
    assert np.isnan(peak(record, "peak_memory_bytes"))
    assert np.isnan(peak(replace(record, ranks=()), "peak_memory_bytes"))

"""The table and the speed-up block: literal values of a published guide, and properties of the arithmetic."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.explain.bands import S001
from ddpm_lab.explain.grids import plain_text
from ddpm_lab.explain.summary import (
    ACCURACY,
    APART,
    COLUMNS,
    UNTOLD,
    Row,
    Summary,
    cells,
    grid,
    speed_up_block,
    speed_ups,
)

PUBLISHED = (("1 GPU", 1, 1, 362.45, 0.1187), ("4 GPUs", 4, 1, 95.23, 0.1192), ("8 GPUs", 8, 2, 57.14, 0.1190))


def row(seconds: float | None, **values: object) -> Row:
    told = {"configuration": "tiny", "gpus": 1, "nodes": 1, **values}
    return Row(log="a.out", summary=Summary(seconds=seconds, **told))  # type: ignore[arg-type]


def published() -> list[Row]:
    return [
        row(
            seconds,
            configuration=name,
            gpus=gpus,
            nodes=nodes,
            loss=loss,
            job_id=str(12345 + i),
            epoch_seconds=seconds / 50,
        )
        for i, (name, gpus, nodes, seconds, loss) in enumerate(PUBLISHED)
    ]


def test_the_published_speed_ups() -> None:
    assert speed_up_block(speed_ups(published())) == [
        "Baseline (Single GPU): 362.45 seconds",
        "",
        "4 GPUs:",
        "  Average time: 95.23 seconds",
        "  Speed-up: 3.81x",
        "  Parallel efficiency: 95.2 % (excellent)",
        "",
        "8 GPUs:",
        "  Average time: 57.14 seconds",
        "  Speed-up: 6.34x",
        "  Parallel efficiency: 79.3 % (good)",
        "",
        APART,
        UNTOLD,
    ]


def test_the_published_table() -> None:
    shown = [[cell.strip() for cell in line.split("|")] for line in plain_text(grid(published()))]
    assert shown[0] == list(COLUMNS)
    assert shown[2:] == [
        ["12345", "1 GPU", "1", "1", "362.45", "7.25", "0.1187", ACCURACY],
        ["12346", "4 GPUs", "4", "1", "95.23", "1.90", "0.1192", ACCURACY],
        ["12347", "8 GPUs", "8", "2", "57.14", "1.14", "0.1190", ACCURACY],
    ]
    assert len({line.index("|") for line in plain_text(grid(published())) if "|" in line}) == 1


TIMES = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=5)


@given(TIMES, TIMES, st.integers(2, 64), st.floats(0.1, 100), st.randoms())
def test_ratios_are_averaged_geometrically(
    single: list[float], several: list[float], gpus: int, scale: float, shuffle: object
) -> None:
    """So the speed-up is the mean over all pairs of jobs, in any order, and no unit of time changes it."""
    rows = [row(s) for s in single] + [row(s, gpus=gpus) for s in several]
    (one,) = speed_ups(rows).compared
    assert one.speed_up is not None
    pairs = [math.log(a / b) for a in single for b in several]
    assert math.log(one.speed_up) == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)
    assert one.efficiency == pytest.approx(one.speed_up / gpus)
    assert one.seconds == pytest.approx(sum(several) / len(several))
    shuffle.shuffle(rows)  # type: ignore[attr-defined]
    rescaled = [row((r.summary.seconds or 0) * scale, gpus=r.summary.gpus) for r in rows]
    assert speed_ups(rescaled).compared[0].speed_up == pytest.approx(one.speed_up)
    assert f"({S001.name(one.speed_up / gpus)})" in speed_up_block(speed_ups(rows))[-3]


def test_a_configuration_is_compared_with_its_own_single_device() -> None:
    rows = [row(10.0, configuration="a"), row(30.0, configuration="b"), row(20.0, configuration="b", gpus=2)]
    found = speed_ups([*rows, row(5.0, configuration="c", gpus=2), row(4.0, configuration="a", gpus=0, ranks=2)])
    assert [one.configuration for one in found.compared] == ["b", "c", "a"]
    assert [one.speed_up for one in found.compared] == [pytest.approx(1.5), None, None]
    assert "2 configurations ran on a single GPU, and none is this one" in found.compared[1].missing
    assert "no run on a single CPU rank" in found.compared[2].missing
    block = speed_up_block(found)
    assert block[:2] == ["Baseline (Single GPU; a): 10.00 seconds", "Baseline (Single GPU; b): 30.00 seconds"]
    assert "  Speed-up: unknown (no run on a single CPU rank)" in block


def test_different_amounts_of_work_are_compared_by_the_epoch() -> None:
    rows = [row(100.0, epochs=10.0, epoch_seconds=10.0), row(24.0, gpus=2, epochs=4.0, epoch_seconds=6.0)]
    found = speed_ups(rows)
    assert found.per_epoch
    assert found.compared[0].speed_up == pytest.approx(10 / 6)
    assert speed_up_block(found)[0] == "Baseline (Single GPU): 10.00 seconds per epoch"


def test_other_work_has_no_speed_up() -> None:
    rows = [row(10.0, configuration="tiny, batch 8"), row(5.0, configuration="seed, batch 8", gpus=2)]
    (one,) = speed_ups(rows).compared
    assert (one.speed_up, one.missing) == (None, "the run on a single GPU is of other work: tiny, batch 8")
    (one,) = speed_ups([row(10.0, epochs=10.0), row(2.0, gpus=2, epochs=4.0)]).compared
    assert one.speed_up is None
    assert "other numbers of epochs" in one.missing


def test_a_batch_for_each_device_is_weak_scaling_and_compared_by_the_epoch() -> None:
    alone = row(10.0, configuration="tiny, batch 8", epochs=1.0, epoch_seconds=10.0)
    several = row(6.0, configuration="tiny, batch 16", gpus=2, epochs=1.0, epoch_seconds=6.0)
    (one,) = speed_ups([alone, several]).compared
    assert one.speed_up == pytest.approx(10 / 6)
    assert one.evidence.startswith("weak scaling")
    (one,) = speed_ups([alone, row(6.0, configuration="tiny, batch 32", gpus=2, epochs=1.0)]).compared
    assert one.speed_up is None


def test_a_speed_that_is_not_claimed_takes_no_part() -> None:
    rows = [row(10.0, gpus=0, ranks=1), row(None, gpus=0, ranks=8, note="more ranks than cores")]
    assert speed_up_block(speed_ups(rows)) == []
    assert cells(rows[1])[4] == "unknown"
    assert rows[1].remark == "speed not claimed: more ranks than cores"

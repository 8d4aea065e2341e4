"""The machine's state from records to people: values with units, "not available" for what is unknown, never 0.

A leak is named with its size and place; memory that settles, jumps or is unknown is none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import records as make
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import answers, findings, tables
from ddpm_lab.explain import machine_state as ms
from ddpm_lab.explain.frames import Study
from ddpm_lab.own_settings import OWN
from ddpm_lab.record import RunRecord

TWO = RunConfig(world_size=2)
MIB = 2**20
OWN_CONFIG = RunConfig(workload=OWN, options=(("make", "mine:make"), ("parameters", 9)), loader="files")
SEEN = {"ranks": [{"rank": 0, "place": "mine.py, line 12"}]}


def ranks(device: str = "cpu", **values: Any) -> list[RunRecord]:
    base = RunConfig(device=device)
    found = make.sets(
        {"2 ranks": (dataclasses.replace(base, world_size=2), 1.3)},
        baseline=base,
        baseline_label="1 rank",
        experiment="multi_gpu",
        count=values.pop("count", 6),
        **values,
    )
    return make.on(make.GPUS, found) if device == "cuda" else found


def peaks(records: Sequence[RunRecord], **values: int | None) -> list[RunRecord]:
    """The same records whose ranks hold so much; the second rank a MiB more."""

    def of(rank: int) -> dict[str, int | None]:
        return {name: None if value is None else value + (rank << 20) for name, value in values.items()}

    return [
        dataclasses.replace(r, ranks=tuple(dataclasses.replace(k, **of(k.rank)) for k in r.ranks))  # type: ignore[arg-type]
        for r in records
    ]


def on_cpu(**state: float | None) -> Study:
    records = peaks(ranks(), peak_memory_bytes=None, peak_rss_bytes=500 << 20)
    return make.study(make.with_state(records, **state))


def rows(study: Study) -> dict[str, str]:
    return dict(ms.table(study).itertuples(index=False, name=None))


def with_others(study: Study, others: float | None, stolen: float | None = None) -> Study:
    records = [
        dataclasses.replace(
            r,
            windows=tuple(dataclasses.replace(w, others_cores=others, stolen_seconds=stolen) for w in r.windows),
        )
        for r in study.records
    ]
    return dataclasses.replace(study, records=tuple(records))


def test_a_machine_without_a_gpu_says_so_once() -> None:
    found = rows(with_others(on_cpu(cgroup_throttled_seconds=0.25, ram_used_bytes=3 << 30), 0.5, 0.02))
    assert found["Cores kept busy by other processes"] == "0.50 of 2 on average, at most 0.50"
    assert found["Core time taken by the hypervisor"] == "2.0 % on average, at most 2.0 %"  # of 0.5 s on two cores
    assert found["Held back by a CPU quota"] == "27.0 s in all"  # 6 sets of 6 turns of 3 windows
    assert found["CPU utilisation"] == "90 % on average"
    assert found["Memory of the machine in use"] == "at most 3.0 GiB of 8.0 GiB"
    assert found["Dropped turns"] == "0 of 36"
    assert found["GPU utilisation, clocks, temperature, power and energy"] == ms.NOT_AVAILABLE
    assert found["Peak memory of a rank, 1 rank"] == "500 MiB RSS"
    assert found["Peak memory of a rank, 2 ranks"] == "501 MiB RSS", "of the largest"
    assert not any("Energy" in name for name in found)


def test_a_gpu_is_told_with_units() -> None:
    records = peaks(ranks("cuda"), peak_memory_bytes=3 << 30, peak_reserved_bytes=4 << 30, peak_rss_bytes=2 << 30)
    card = {"ranks": [{"device_total_bytes": 80 << 30}]}
    records = [dataclasses.replace(r, witness=card) for r in make.with_state(records, **make.GPU_STATE)]
    found = rows(make.study(records))
    assert found["GPU utilisation"] == "96 % on average"
    assert found["GPU clock"] == "1,900 MHz on average, at least 1,755 MHz"
    assert found["GPU memory clock"] == "2,619 MHz on average"
    assert found["GPU slowed down by"] == "its power cap in 100 % of windows"
    assert found["GPU temperature"] == "at most 66 \N{DEGREE SIGN}C"
    assert found["Power of a group's GPUs"] == "400 W on average"
    assert found["Other processes on the GPU"] == "at most 0, memory 0 MiB"
    base = [m for m in ms.moments(make.study(records)) if m.record.role == "baseline"]
    joules = sorted(400 * m.record.windows[0].seconds_per_image for m in base)
    assert joules[0] <= float(found["Energy per image, 1 rank"].removesuffix(" J")) <= joules[-1] * 1.01
    assert found["Peak memory of a rank, 1 rank"] == (
        "3.0 GiB allocated, 4.0 GiB reserved: 5 % of the card, 76.0 GiB headroom"
    )


def test_what_is_unknown_is_not_available_and_never_zero() -> None:
    unknown = dict.fromkeys([*make.GPU_STATE, "cpu_utilisation_percent", "rss_bytes"])
    records = peaks(ranks("cuda"), peak_memory_bytes=None, peak_rss_bytes=2 << 30)
    study = with_others(make.study(make.with_state(records, **unknown)), None)
    through_json = [RunRecord.from_dict(json.loads(json.dumps(r.as_dict()))) for r in study.records]
    found = rows(dataclasses.replace(study, records=tuple(through_json)))
    assert found.pop("Dropped turns") == "0 of 36"
    assert found.pop("Peak memory of a rank, 1 rank") == "unknown", "the host's memory is not the GPU's"
    assert found.pop("Peak memory of a rank, 2 ranks") == "unknown"
    assert len(found) >= 12
    assert set(found.values()) == {ms.NOT_AVAILABLE}


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([0, 0x1, 0x2], "nothing"),  # idle, or clocks that somebody has set
        ([0x4, 0, 0, 0], "its power cap in 25 % of windows"),
        ([0x24, 0x20], "its power cap in 50 % of windows and its temperature in 100 % of windows"),
    ],
)
def test_what_slows_a_gpu_down_is_named(masks: list[float], words: str) -> None:
    assert ms._throttled(masks) == words


def test_turns_that_were_dropped_are_counted_once() -> None:
    study = make.study(make.with_state(ranks(dropped=[(0, 1), (2, 3)])))
    assert rows(study)["Dropped turns"] == "2 of 36"
    dropped = sorted({m.turn for m in ms.moments(study) if m.dropped})
    assert dropped == [2, 2 * 6 + 4], "counted from 1 over all sets"


def test_unknown_neighbours_are_told_once_in_the_table_and_in_the_finding() -> None:
    known, unknown = on_cpu(), with_others(on_cpu(), None)
    sentence = "What other processes took is unknown here."
    for study, count in ((known, 0), (unknown, 1)):
        assert findings.finding(study).claim.count(sentence) == count
        assert tables.table(study).to_string().count(sentence) == count
    gpu = make.study(make.with_state(ranks("cuda"), gpu_others=None))
    assert "What other processes took of the GPU is unknown here." in findings.finding(gpu).claim


def test_a_profile_tells_the_state_of_its_time_budget() -> None:
    record = make.time_budget()
    assert record.profile is not None
    record.profile["budget"] |= {"others_cores": 0.3, "state": {"cpu_utilisation_percent": 75.0}}
    found = rows(make.study([record]))
    assert found["Cores kept busy by other processes"].startswith("0.30 of 2")
    assert found["CPU utilisation"] == "75 % on average"
    assert "Dropped turns" not in found
    captions = [caption for caption, _ in tables.more(make.study([record]))]
    assert captions[0] == "The operators in numbers."
    assert captions[-1] == "What the machine did meanwhile."


def test_host_memory_is_named_as_such_wherever_memory_is_told() -> None:
    study = on_cpu()
    finding = findings.finding(study)
    table = tables.table(study)
    assert list(table["Peak memory"]) == ["500 MiB RSS", "500 MiB RSS", "501 MiB RSS"]
    assert "Peak memory of a rank: 501 MiB RSS with 2 ranks and 500 MiB RSS with 1 rank." in finding.claim
    assert "peak memory 501 MiB RSS" in answers.answer_text(study, finding)
    sides = answers.answer_values(study, finding)["sides"]
    assert sides[0]["peak_rss_bytes"] == 500 << 20
    assert sides[0]["peak_memory_bytes"] is None, "unknown is null"


def test_memory_of_a_gpu_is_the_gpus() -> None:
    study = make.study(peaks(ranks("cuda"), peak_memory_bytes=3 << 30, peak_rss_bytes=2 << 30))
    assert set(tables.table(study)["Peak memory"]) == {"3.0 GiB"}
    nothing = make.study(peaks(ranks("cuda"), peak_memory_bytes=None, peak_rss_bytes=2 << 30))
    assert set(tables.table(nothing)["Peak memory"]) == {"unknown"}
    assert "Peak memory" not in findings.finding(nothing).claim


def test_old_records_tell_what_they_hold() -> None:
    """Those of the first schema have windows without a state."""
    old = [
        dataclasses.replace(r, windows=tuple(dataclasses.replace(w, state={}) for w in r.windows))
        for r in peaks(ranks("cpu"), peak_memory_bytes=None, peak_rss_bytes=2 << 20)
    ]
    told = rows(make.study(old))
    assert told["CPU utilisation"] == ms.NOT_AVAILABLE
    assert " of 2 on average" in told["Cores kept busy by other processes"]
    assert any(value.endswith("MiB RSS") for value in told.values())


def test_a_busy_machine_is_said_to_be_busy_and_a_quiet_one_is_not() -> None:
    quiet = make.sets({}, count=1)
    loud = [
        dataclasses.replace(r, windows=tuple(dataclasses.replace(w, others_cores=1.3) for w in r.windows))
        for r in quiet
    ]
    assert ms.busy(make.study(quiet)) == ""
    assert "other processes took 1.3 of 2 cores on average" in ms.busy(make.study(loud))
    unknown = [
        dataclasses.replace(r, windows=tuple(dataclasses.replace(w, others_cores=None) for w in r.windows))
        for r in quiet
    ]
    assert ms.busy(make.study(unknown)) == ""


def test_a_set_that_lay_under_a_neighbour_is_told_where_the_others_were_quiet() -> None:
    """Its turns are no exception in it, so they count; the average over all sets does not show it."""
    records = ranks(count=12)
    hit = records[0].set_id
    told = [
        dataclasses.replace(r, windows=tuple(dataclasses.replace(w, others_cores=0.9) for w in r.windows))
        if r.set_id == hit
        else r
        for r in records
    ]
    said = " The machine was busy in 1 of 12 sets: there other processes took 0.9 of 2 cores on average."
    assert ms.busy(make.study(told)) == said
    assert said in findings.finding(make.study(told)).claim


def held(record: RunRecord, memory: Callable[[int], float | None], kind: str = "rss_bytes") -> RunRecord:
    windows = tuple(dataclasses.replace(w, state={kind: memory(w.turn)}) for w in record.windows)
    return dataclasses.replace(record, windows=windows, witness=SEEN)


def growing(memory: Callable[[int], float | None], kind: str = "rss_bytes", turns: int = 12) -> Study:
    bf16 = dataclasses.replace(OWN_CONFIG, precision="bf16")
    found = make.sets({"bf16": (bf16, 1.2)}, baseline=OWN_CONFIG, turns=turns)
    return make.study([held(r, memory if r.role == "candidate" else lambda _: 300 * MIB, kind) for r in found])


@pytest.mark.parametrize("kind", ["rss_bytes", "allocated_bytes"])
def test_a_leak_is_told_with_its_numbers_and_its_line(kind: str) -> None:
    found = growing(lambda turn: (300 + 3 * turn) * MIB, kind)
    assert [one.record.label for one in ms.leaks(found)] == ["bf16"]
    steps = sum(w.steps + 2 for w in ms.leaks(found)[0].record.windows[1:])
    text = ms.leaking(found)
    what = ms.KINDS[kind]
    assert text == (
        f" mine:make (mine.py, line 12) leaks memory: with bf16 a rank holds 33 MiB more {what} after 12 "
        f"windows than after the first, about {33 * 1024 / steps:.3g} KiB a step."
    ).replace(f"{33 * 1024 / steps:.3g}", text.split("about ")[1].split(" KiB")[0])
    assert float(text.split("about ")[1].split(" KiB")[0].replace(",", "")) == pytest.approx(
        33 * 1024 / steps, rel=0.01
    )
    assert text in findings.finding(found).claim


@pytest.mark.parametrize(
    ("memory", "turns"),
    [
        (lambda turn: (300 + 3 * min(turn, 5)) * MIB, 12),  # settles
        (lambda turn: (300 + 50 * (turn > 6)) * MIB, 12),  # jumps once
        (lambda turn: (300 + 0.1 * turn) * MIB, 12),  # too little to matter
        (lambda turn: None if turn == 4 else (300 + 9 * turn) * MIB, 12),  # unknown in between
        (lambda turn: (300 + 90 * turn) * MIB, 2),  # too few windows to tell
    ],
)
def test_other_growth_is_none(memory: Callable[[int], float | None], turns: int) -> None:
    assert ms.leaking(growing(memory, turns=turns)) == ""


@given(st.lists(st.floats(-20, 20), min_size=12, max_size=12))
def test_noise_around_a_level_is_no_leak(noise: Sequence[float]) -> None:
    level = np.array(noise) + 300
    grew = np.diff(level) > 0
    record = held(make.sets({}, baseline=OWN_CONFIG, count=1, turns=12)[0], lambda turn: float(level[turn]) * MIB)
    assert (ms.leak(record) is None) == (grew.mean() < 0.9 or level[-1] - level[0] < 8)


def test_one_odd_set_of_many_is_no_leak() -> None:
    first, *others = make.sets({}, baseline=OWN_CONFIG, count=6, turns=12)
    grows = held(first, lambda turn: (300 + 5 * turn) * MIB)
    assert ms.leaking(make.study([grows, *(held(r, lambda _: 300 * MIB) for r in others)])) == ""
    assert ms.leaking(make.study([grows]))

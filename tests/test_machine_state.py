"""The machine's state from records to people: values with units, "not available" for what is unknown, never 0."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import answers, findings, tables
from ddpm_lab.explain import machine_state as ms
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

TWO = RunConfig(world_size=2)
MIB = 2**20
DISTURBED = "Disturbed sets, which do not count"


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
    found = rows(with_others(on_cpu(cgroup_throttled_seconds=0.25, ram_used_bytes=3 << 30), 0.2, 0.02))
    assert found["Cores kept busy by other processes"] == "0.20 of 2 on average, at most 0.20"
    assert found["Core time taken by the hypervisor"] == "2.0 % on average, at most 2.0 %"  # of 0.5 s on two cores
    assert found["Held back by a CPU quota"] == "27.0 s in all"  # 6 sets of 6 turns of 3 windows
    assert found["CPU utilisation"] == "90 % on average"
    assert found["Memory of the machine in use"] == "at most 3.0 GiB of 8.0 GiB"
    assert found[DISTURBED] == "0 of 6"
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
    assert found.pop(DISTURBED) == "0 of 6"
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


def test_sets_that_do_not_count_are_counted_once() -> None:
    crowded = [(0, 1), (2, 3), (2, 4)]
    study = make.study(make.with_state(ranks(crowded=crowded)))
    assert rows(study)[DISTURBED] == "1 of 6", "one crowded turn of six is not enough"
    assert sorted({m.turn for m in ms.moments(study) if m.disturbed}) == [13, 14, 15, 16, 17, 18], "over all sets"


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
    assert DISTURBED not in found
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


def test_sets_that_others_disturbed_are_told_and_quiet_or_unknown_ones_are_not() -> None:
    quiet = make.study(make.sets({}, count=2))
    assert ms.busy(quiet) == ""
    assert ms.busy(with_others(quiet, None)) == ""
    assert ms.busy(with_others(quiet, 1.3)) == " 2 of 2 sets were disturbed by other processes and do not count."


def test_fewer_cores_than_the_machine_has_are_told() -> None:
    one = make.study(make.sets({"bf16": (RunConfig(threads=1, precision="bf16"), 1.3)}, baseline=RunConfig(threads=1)))
    assert ms.cores_used(with_others(one, 0.5)) == " Measured with 1 of 2 cores: other processes took the rest."
    for idle in (one, with_others(one, 0.4), with_others(one, None)):
        assert ms.cores_used(idle) == " Measured with 1 of 2 cores.", "it was asked for"
    assert ms.cores_used(on_cpu()) == ""


def test_a_set_that_lay_under_a_neighbour_is_told_in_the_finding() -> None:
    study = make.study(ranks(count=12, crowded=[(0, turn) for turn in range(6)]))
    said = " 1 of 12 sets was disturbed by other processes and does not count."
    assert ms.busy(study) == said
    assert said in findings.finding(study).claim

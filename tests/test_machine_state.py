"""The machine's state from records to people: values with units, "not available" for what is unknown, never 0."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import records as make
from cells import column

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import machine_state as ms
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions.ask import answer
from ddpm_lab.record import RunRecord

DISTURBED = "Disturbed sets, which do not count"


def ranks(device: str = "cpu", **values: Any) -> list[RunRecord]:
    base = RunConfig(device=device)
    named: dict[str, Any] = {"baseline": base, "baseline_label": "1 rank", "experiment": "multi_gpu"}
    found = make.sets({"2 ranks": (replace(base, world_size=2), 1.3)}, **named, **values)
    return make.on(make.GPUS, found) if device == "cuda" else found


def peaks(records: Sequence[RunRecord], **values: Any) -> list[RunRecord]:
    """The same records whose ranks hold so much."""
    return [replace(r, ranks=tuple(replace(k, **values) for k in r.ranks)) for r in records]


def rows(study: Study) -> dict[str, str]:
    return {row["Meanwhile"]: row["Value"] for row in ms.table(study)}


def with_others(study: Study, others: float | None) -> Study:
    return replace(study, records=tuple(make.windowed(r, others_cores=others) for r in study.records))


def test_what_is_unknown_is_not_available_and_never_zero() -> None:
    unknown = dict.fromkeys([*make.GPU_STATE, "cpu_utilisation_percent", "rss_bytes"])
    records = peaks(ranks("cuda"), peak_memory_bytes=None, peak_rss_bytes=2 << 30)
    study = with_others(make.study(make.with_state(records, **unknown)), None)
    found = rows(study)
    assert found.pop(DISTURBED) == "0 of 6"
    assert {found.pop(f"Peak memory of a rank, {name}") for name in ("1 rank", "2 ranks")} == {"unknown"}
    assert set(found.values()) == {ms.NOT_AVAILABLE}
    assert any("unknown" in note for note in answer(study).finding.notes)


@pytest.mark.parametrize(("others", "taken"), [(0.5, True), (0.4, False), (None, False)])
def test_fewer_cores_than_the_machine_has_are_told(others: float | None, taken: bool) -> None:
    one = RunConfig(threads=1)
    study = make.study(make.sets({"bf16": (replace(one, precision="bf16"), 1.3)}, baseline=one))
    (told,) = ms.warnings(with_others(study, others))
    assert "1 of 2 cores" in told
    assert ("other processes" in told) == taken
    assert ms.warnings(replace(study, records=(*study.records, *make.sets({}, seed=1)))) == (), "all cores answered too"


def test_a_gpu_is_told_with_units() -> None:
    records = peaks(ranks("cuda"), peak_memory_bytes=3 << 30, peak_reserved_bytes=4 << 30, peak_rss_bytes=2 << 30)
    card = {"ranks": [{"device_total_bytes": 80 << 30}]}
    study = make.study([replace(r, witness=card) for r in make.with_state(records, **make.GPU_STATE)])
    expected = {
        "GPU utilisation": "96 % on average",
        "GPU clock": "1,900 MHz on average",
        "Lowest GPU clock": "1,755 MHz",
        "GPU temperature": "at most 66 \N{DEGREE SIGN}C",
        "Power of a group's GPUs": "400 W on average",
        "Peak memory of a rank, 1 rank": "3.0 GiB allocated, 4.0 GiB reserved: 5 % of the card, 76.0 GiB headroom",
    }
    assert rows(study).items() >= expected.items()
    assert set(column(answer(study).table(), "Peak memory")) == {"3.0 GiB"}, "the GPU's, and not the host's"

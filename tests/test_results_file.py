"""The results as files: they keep to the published schema, and say what the records say."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from paired_records import alone, family, paired
from records import study
from results_schema import SCHEMA, validator

from ddpm_lab.explain import results_file
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.grids import csv_text
from ddpm_lab.explain.scaling import rows

STUDIES = {
    "gpus": paired({256: 1.6, 64: 0.8}, {32: 6.45}),
    "ranks": paired({16: 1.1}, {8: 1.2}, device="cpu", ranks=2),
    "one set": paired({16: 1.1}, {8: 1.2}, count=1),
    "failed": study([*family(64, 1.6), *family(128, 1.0, failed=("oom", "needs 90 GiB"))]),
    "one alone": alone(single=True),
    "several alone": alone(single=False),
    "mechanism": paired({16: 1.1}, {}, device="cpu", ranks=2, mechanism_only=["2 ranks"]),
    "empty": Study(experiment="multi_gpu", records=(), output_dir=Path()),
}


def test_the_schema_is_one_and_refuses_what_it_does_not_name() -> None:
    good = results_file.document(STUDIES["gpus"])
    assert validator().is_valid(good)
    assert not validator().is_valid({**good, "more": 1})
    assert not validator().is_valid({k: v for k, v in good.items() if k != "environment"})
    wrong = json.loads(json.dumps(good))
    wrong["configurations"][0]["devices"] = 0
    assert not validator().is_valid(wrong)
    assert SCHEMA["properties"]["schema"]["const"].endswith(f" {results_file.VERSION}")


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("side", [None, "single", "multi"])
def test_every_document_keeps_to_the_schema(name: str, side: str | None) -> None:
    text = json.dumps(
        results_file.document(STUDIES[name], side=side, ledger="trace_output/ledger.jsonl"), allow_nan=False
    )
    validator().validate(json.loads(text))


def test_the_values_are_those_of_the_comparisons() -> None:
    answer = STUDIES["gpus"]
    found = results_file.document(answer)
    by_id = {(c["run_id"], c["scaling"]): c for c in found["configurations"]}
    for row in rows(answer):
        if row["role"] == "twin":
            continue
        one = by_id[row["run_id"], row["scaling"]]
        assert one["images_per_second"]["value"] == pytest.approx(row["images_per_second"], rel=1e-5)
        assert one["epoch_seconds"]["value"] == pytest.approx(50_000 / row["images_per_second"], rel=1e-5)
        assert one["epoch_seconds"]["low"] <= one["epoch_seconds"]["value"] <= one["epoch_seconds"]["high"]
        assert one["sets"] == len(one["runs"]) == 6
        steps = [s for run in one["runs"] for s in run["step_seconds"]]
        kept = [r for r in answer.records if (r.role, r.run_id) == (row["role"], row["run_id"])]
        assert len(steps) == sum(w.steps for r in kept if r.family == row["family"] for w in r.windows)
    gains = {(c["scaling"], c["batch_size"]): c for c in found["comparisons"]}
    assert gains["weak", 32]["speedup"]["value"] == pytest.approx(6.45, rel=0.02)
    assert gains["weak", 32]["efficiency"]["value"] == pytest.approx(6.45 / 8, rel=0.02)
    assert gains["weak", 32]["recommendation"] is None
    assert gains["strong", 64]["recommendation"] == "single GPU preferred"
    assert [m["batches"] for m in found["geometric_means"]] == [2]


def test_what_is_not_known_is_null() -> None:
    failed = results_file.document(STUDIES["failed"])
    lost = next(c for c in failed["configurations"] if c["status"] == "oom")
    assert lost["images_per_second"] == lost["epoch_seconds"] == {"value": None, "low": None, "high": None}
    assert (lost["step_seconds"], lost["sets"], lost["runs"]) == (None, 0, [])
    assert [c["speedup"]["value"] is None for c in failed["comparisons"]] == [False, True]
    one = results_file.document(STUDIES["one set"])["comparisons"][0]
    assert one["speedup"]["value"] is not None
    assert (one["speedup"]["low"], one["speedup"]["high"], one["noise_floor"]) == (None, None, None)


def test_one_side_is_told_without_the_other() -> None:
    for side, devices in (("single", 1), ("multi", 8)):
        found = results_file.document(STUDIES["gpus"], side=side)
        assert {c["devices"] for c in found["configurations"]} == {devices}
        assert found["comparisons"] == []


@pytest.mark.parametrize("name", STUDIES)
def test_the_table_opens_in_pandas(name: str) -> None:
    found = results_file.document(STUDIES[name])
    frame = pd.read_csv(io.StringIO(csv_text(results_file.rows(found))))
    assert len(frame) == len(found["configurations"])
    for read, one in zip(frame.to_dict("records"), found["configurations"], strict=True):
        assert read["run_id"] == one["run_id"] or float(read["run_id"]) == float(one["run_id"])
        for field, value in (("sets", one["sets"]), ("images_per_second_low", one["images_per_second"]["low"])):
            assert read[field] == value or (value is None and math.isnan(read[field]))
        if one["side"] == "single":
            assert math.isnan(read["speedup"])
    if name == "gpus":
        assert frame["speedup"].dropna().tolist() == [c["speedup"]["value"] for c in found["comparisons"]]
        assert frame["images_per_second"].dtype == float

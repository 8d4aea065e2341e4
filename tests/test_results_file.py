"""The results as files: plain rows that say what the records say."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from paired_records import alone, family, paired
from records import study

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


def test_the_values_are_those_of_the_comparisons() -> None:
    answer = STUDIES["gpus"]
    found = results_file.rows(answer)
    by_id = {(one["run_id"], one["scaling"]): one for one in found}
    for row in rows(answer):
        if row.role == "twin":
            continue
        one = by_id[row.run_id, row.scaling]
        assert one["images_per_second"] == pytest.approx(row.images_per_second, rel=1e-5)
        assert one["epoch_seconds"] == pytest.approx(50_000 / row.images_per_second, rel=1e-5)
        assert one["sets"] == 6
    gains = {(one["scaling"], one["global_batch_size"]): one for one in found if one["side"] == "multi"}
    assert gains["weak", 256]["speedup"] == pytest.approx(6.45, rel=0.02)
    assert gains["weak", 256]["efficiency"] == pytest.approx(6.45 / 8, rel=0.02)
    assert gains["weak", 256]["recommendation"] is None
    assert gains["strong", 64]["recommendation"] == "single GPU preferred"


def test_what_is_not_known_is_null() -> None:
    failed = results_file.rows(STUDIES["failed"])
    lost = next(one for one in failed if one["status"] == "oom")
    assert (lost["images_per_second"], lost["epoch_seconds"], lost["step_seconds"]) == (None, None, None)
    assert [one["speedup"] is None for one in failed if one["side"] == "multi"] == [False, True]
    one = next(one for one in results_file.rows(STUDIES["one set"]) if one["side"] == "multi")
    assert one["speedup"] is not None
    assert (one["speedup_low"], one["speedup_high"]) == (None, None)


@pytest.mark.parametrize("name", STUDIES)
def test_the_rows_are_the_same_as_json_and_in_pandas(name: str) -> None:
    found = results_file.rows(STUDIES[name])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    frame = pd.read_csv(io.StringIO(csv_text(results_file.grid(found))))
    assert len(frame) == len(found)
    for read, one in zip(frame.to_dict("records"), found, strict=True):
        assert read["run_id"] == one["run_id"] or float(read["run_id"]) == float(one["run_id"])
        for field in ("sets", "images_per_second"):
            assert read[field] == one[field] or (one[field] is None and math.isnan(read[field]))
        if one["side"] == "single":
            assert math.isnan(read["speedup"])

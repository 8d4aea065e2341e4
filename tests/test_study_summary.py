"""The summary of records: the same table as of logs, with paired speed-ups, and never more than was measured."""

from __future__ import annotations

import io
from dataclasses import replace

import pandas as pd
import pytest
import records as make
from paired_records import alone, family, paired

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.grids import csv_text
from ddpm_lab.explain.scaling import rows
from ddpm_lab.explain.study_summary import of_study
from ddpm_lab.explain.summary import ACCURACY, COLUMNS, grid, plain, speed_up_block


def test_the_columns_of_s001_from_records() -> None:
    answer = paired({64: 1.6}, {32: 6.45}, set_noise=0.001)
    runs, _ = of_study(answer, "ledger.jsonl")
    head, *shown = grid(runs)
    assert tuple(head[:-1]) == COLUMNS
    assert [(row[2], row[3], row[7]) for row in shown] == [
        (gpus, "1", ACCURACY) for gpus in ("1", "8") for _ in range(2)
    ] or {row[2] for row in shown} == {"1", "8"}
    told = {(r.family, r.ranks): r for r in rows(answer) if r.role != "twin"}
    for run in runs:
        of = told[run.summary.configuration or "", run.summary.ranks or 0]
        assert run.summary.epoch_seconds == of.projected_seconds
        kept = [w for r in answer.records if r.family == of.family and r.role == of.role for w in r.windows]
        assert run.summary.seconds == pytest.approx(sum(w.seconds for w in kept))
        assert run.summary.epochs == pytest.approx(sum(w.images for w in kept) / 50_000)
        assert of.projected_seconds == pytest.approx(
            50_000 * sum(w.seconds for w in kept) / sum(w.images for w in kept), rel=0.1
        )


def test_the_speed_up_is_the_paired_one() -> None:
    """Times that drift between sets give another ratio of means than of pairs."""
    answer = paired({64: 1.6}, {}, set_noise=0.001, drift=1.0)
    (gain,) = (r for r in rows(answer) if r.role == "candidate")
    _, found = of_study(answer)
    (one,) = found.compared
    assert one.speed_up == gain.ratio.value
    block = "\n".join(speed_up_block(found))
    assert block.startswith(f"Baseline (Single GPU): {found.baselines[0].seconds:,.2f} seconds per epoch")
    assert "6 sets, faster)" in block
    assert f"  Parallel efficiency: {100 * gain.efficiency.value:.1f} % (overhead by S001, 20 to 20 %" in block
    assert all(part in block for part in ("Example GPU X", "2026-01-03", "projection", "turns"))


def test_too_few_sets_are_said_to_be_too_few() -> None:
    _, found = of_study(paired({64: 1.6}, {}, count=3))
    assert "3 sets, too few sets)" in "\n".join(speed_up_block(found))


def test_the_loss_is_that_of_trials_and_accuracy_none() -> None:
    base = RunConfig(global_batch_size=32)
    two = replace(base, world_size=2, global_batch_size=64)
    found = make.sets({"2 ranks": (two, 1.2)}, baseline=base, baseline_label="1 rank", experiment="multi_gpu")
    trained = make.trials({"2 ranks": (two, 0.01)}, baseline=base, seed_noise=0, pair_noise=0)
    answer = replace(make.study(found), trials=tuple(trained))
    runs, _ = of_study(answer)
    one, several = (run.summary.loss for run in runs)
    assert one == pytest.approx(0.35)
    assert several == pytest.approx(0.36)
    assert all(run.summary.loss is None for run in of_study(make.study(found))[0])


def test_cpu_ranks_are_no_gpus() -> None:
    runs, found = of_study(paired({16: 1.1}, {}, device="cpu", ranks=2))
    assert [(run.summary.gpus, run.summary.ranks) for run in runs] == [(0, 1), (0, 2)]
    assert "2 CPU ranks; 6 sets; quality not measured" in grid(runs)[2][-1]
    assert speed_up_block(found)[0].startswith("Baseline (Single CPU rank):")


def test_failures_mechanisms_and_sides_alone() -> None:
    runs, found = of_study(make.study([*family(64, 1.6), *family(128, 1.0, failed=("oom", "needs 90 GiB"))]))
    assert [run.note for run in runs if run.summary.seconds is None] == ["8 GPUs; out of memory: needs 90 GiB"]
    assert len(found.compared) == 1
    runs, found = of_study(paired({16: 1.1}, {}, device="cpu", ranks=2, mechanism_only=["1 rank", "2 ranks"]))
    assert [run.summary.seconds for run in runs] == [None, None]
    assert found.compared == ()
    _, found = of_study(alone(single=False))
    assert "  Speed-up: unknown (no run on a single device beside it)" in speed_up_block(found)
    assert speed_up_block(of_study(alone(single=True))[1]) == []


def test_the_table_opens_in_pandas() -> None:
    runs, _ = of_study(paired({64: 1.6}, {32: 6.45}), "ledger.jsonl")
    frame = pd.read_csv(io.StringIO(csv_text(plain(runs))))
    assert list(frame.columns[: len(COLUMNS)]) == list(COLUMNS)
    assert frame["GPUs"].tolist() == [run.summary.gpus for run in runs]
    assert frame["Time (s)"].tolist() == pytest.approx([run.summary.seconds for run in runs])
    assert frame["Val Loss"].isna().all()

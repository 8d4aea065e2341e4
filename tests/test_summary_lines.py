"""What a run says at its end: from records and from a run's folder, and never more than was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import records as make
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab import summary_lines
from ddpm_lab.config import RunConfig
from ddpm_lab.explain.summary import Summary
from ddpm_lab.record import Window
from ddpm_lab.run_folder import RunFolder, trained
from ddpm_lab.slurm_logs import read_log
from ddpm_lab.summary_lines import job_id, lines, name_of, of_records, of_training


def window(seconds: float, images: int, **values: object) -> Window:
    given = {"turn": 0, "position": 0, "start_seconds": 0.0, "steps": 1, "rank_seconds": (), "step_seconds": ()}
    return Window(seconds=seconds, images=images, **{**given, "data_seconds": (), **values})  # type: ignore[arg-type]


def test_the_time_of_an_epoch_comes_from_the_windows_of_sets() -> None:
    config = RunConfig(data_sha256="ff", precision="bf16", global_batch_size=8)
    kept = [window(2.0, 300, state={"gpu_utilisation_percent": 80.0}), window(2.0, 500)]
    ours = make.record(config, windows=tuple(kept))
    twin, note = (make.record(config, role=role, windows=tuple(kept)) for role in ("twin", "note"))
    (summary,) = of_records([ours, twin, note], {"ff": 1600}).values()
    assert summary.configuration == "tiny, batch 8, precision bf16"
    assert summary.seconds == 4.0
    assert (summary.epochs, summary.epoch_seconds) == (0.5, 8.0)
    assert (summary.gpus, summary.ranks, summary.nodes) == (0, 1, 1)
    assert (summary.loss, summary.gpu_percent) == (None, 80.0)


def test_a_speed_that_shows_only_a_mechanism_is_not_told() -> None:
    config = RunConfig(world_size=4, global_batch_size=8, oversubscribe=True)
    (summary,) = of_records([make.record(config, mechanism_only=True, windows=(window(1.0, 8),))], {}).values()
    assert (summary.seconds, summary.epoch_seconds) == (None, None)
    assert "Total training time: not claimed (more ranks than cores, or CPU ranks on a GPU machine)" in lines(summary)


def test_the_best_held_out_loss_of_a_trial_and_no_time() -> None:
    looks = [{"images": n, "loss": loss} for n, loss in ((0, 0.9), (8, 0.4), (16, 0.5))]
    trial = make.record(RunConfig(), role="quality", quality={"held_out": looks})
    failed = make.record(RunConfig(seed=1), role="quality", status="crashed")
    (summary,) = of_records([trial, failed], {}).values()
    assert (summary.loss, summary.seconds) == (0.4, None)
    assert "Total training time: not measured" in lines(summary)


def test_what_trains_nothing_has_no_summary_and_titles_are_distinct() -> None:
    reduce, limit = (RunConfig(workload=f"ddpm_lab.model.{name}") for name in ("allreduce:all_reduce", "limits:copy"))
    records = [make.record(c, windows=(window(1.0, 8),)) for c in (reduce, limit)]
    assert of_records(records, {}) == {}
    same = [make.record(RunConfig(seed=i), label="1 rank", family=f"batch {i}") for i in range(2)]
    assert list(of_records(same, {})) == ["batch 0, 1 rank", "batch 1, 1 rank"]


def test_names_tell_everything_but_seed_and_ranks_apart() -> None:
    plain = RunConfig()
    assert name_of(plain) == "tiny, batch 32"
    assert name_of(RunConfig(seed=3, world_size=2, data="x", data_sha256="y")) == name_of(plain)
    adam = dataclasses.replace(plain.optimizer, adam="loop", clip_norm=None)
    others = [
        *(RunConfig(precision="bf16"), RunConfig(global_batch_size=64), RunConfig(channels_last=False)),
        *(
            RunConfig(optimizer=adam),
            RunConfig(network="seed"),
            RunConfig(image_size=64),
            RunConfig(options=(("a", 1),)),
        ),
    ]
    names = [name_of(c) for c in (plain, *others)]
    assert len(set(names)) == len(names)
    assert name_of(RunConfig(optimizer=adam)) == "tiny, batch 32, optimizer.clip_norm None, optimizer.adam loop"


ROWS = st.lists(st.tuples(st.floats(0.01, 1e5), st.none() | st.floats(0.001, 2)), min_size=1, max_size=30)


@given(ROWS, st.integers(1, 256))
def test_seconds_of_a_run_are_those_of_its_steps(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, float | None]], batch: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    with RunFolder(folder) as run:
        run.open_logs(0)
        for i, (rate, loss) in enumerate(rows, 1):
            more = {} if loss is None else {"held_out_loss": loss}
            run.log([{"step": i, "loss": 1.0, "images_per_second": float(f"{rate:.6g}"), **more}])
    steps, seconds, best = trained(folder, batch)
    assert steps == len(rows)
    assert seconds == pytest.approx(sum(batch / rate for rate, _ in rows), rel=1e-4)
    assert best == min((loss for _, loss in rows if loss is not None), default=None)


def test_a_folder_without_a_log_has_no_steps(tmp_path: Path, data: Path) -> None:
    assert trained(tmp_path, 8) == (0, 0.0, None)
    assert of_training(RunConfig(data=str(data)), tmp_path, None).epoch_seconds is None


def test_the_job_is_named_as_slurm_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert job_id() is None
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert job_id() == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert job_id() == "11_0"


def test_small_numbers_keep_their_digits() -> None:
    shown = lines(Summary(seconds=0.001234, epoch_seconds=362.4567, loss=0.000123456, epochs=0.5))
    assert "Total training time: 0.001234 seconds" in shown
    assert "Time per epoch: 362.46 seconds" in shown
    assert "Best validation loss: 0.000123456" in shown


@pytest.mark.slow
def test_train_and_run_end_with_their_summaries(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert summary_lines.train_count(RunConfig(data=str(data))) > 0
    common = ("--data", data, "--image-size", 8)
    train = (*common, "--batch-size", 8, "--steps", 3, "--sample-every", 0, "--output-dir", tmp_path / "run")
    code, out, err = call("train", *train)
    assert code == 0, err
    assert out == f"{tmp_path}/run/checkpoints/step-00000003.pt\n", "what a script reads stays as it was"
    (tmp_path / "slurm-8.out").write_text(err + out)
    (row,) = read_log(tmp_path / "slurm-8.out")
    steps, seconds, best = trained(tmp_path / "run", 8)
    assert steps == 3
    assert row.summary.loss == pytest.approx(best, rel=1e-5)
    assert row.summary.seconds == pytest.approx(seconds, rel=0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    code, out, err = call(
        "run",
        "multi_gpu",
        *common,
        "--preset",
        "smoke",
        "--batch-sizes",
        8,
        "--world-sizes",
        "1",
        "--output-dir",
        tmp_path,
        "--json",
    )
    assert code == 0, err
    (tmp_path / "slurm-9.out").write_text(err + out)
    rows = read_log(tmp_path / "slurm-9.out")
    assert rows[0].summary.seconds is not None
    assert rows[0].summary.configuration is not None
    assert rows[0].summary.configuration.startswith("tiny, batch 8, 8x8 pixels")
    assert (rows[0].summary.gpus, rows[0].summary.ranks) == (0, 1)

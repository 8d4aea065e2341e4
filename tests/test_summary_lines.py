"""What a run says at its end: from records and from a run's folder, and never more than was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import records as make
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.record import Window
from ddpm_lab.reports.summary_lines import MECHANISM, of_records, of_training
from ddpm_lab.training.run_folder import RunFolder, name_of, trained


def window(seconds: float, images: int, **values: object) -> Window:
    given = {"turn": 0, "position": 0, "start_seconds": 0.0, "steps": 1, "rank_seconds": (), "step_seconds": ()}
    return Window(seconds=seconds, images=images, **{**given, "data_seconds": (), **values})  # type: ignore[arg-type]


def test_the_time_of_an_epoch_comes_from_the_windows_of_sets() -> None:
    config = RunConfig(data_sha256="ff", precision="bf16", global_batch_size=8)
    kept = [window(2.0, 300, state={"gpu_utilisation_percent": 80.0}), window(2.0, 500)]
    ours = make.record(config, windows=tuple(kept))
    twin, note = (make.record(config, role=role, windows=tuple(kept)) for role in ("twin", "note"))
    (summary,) = of_records([ours, twin, note], {"ff": 1600})
    assert summary.configuration == "tiny, batch 8, precision bf16"
    assert summary.seconds == 4.0
    assert (summary.epochs, summary.epoch_seconds) == (0.5, 8.0)
    assert (summary.gpus, summary.ranks, summary.nodes) == (0, 1, 1)
    assert (summary.loss, summary.gpu_percent) == (None, 80.0)


def test_a_speed_that_shows_only_a_mechanism_is_not_told() -> None:
    config = RunConfig(world_size=4, global_batch_size=8, oversubscribe=True)
    (summary,) = of_records([make.record(config, mechanism_only=True, windows=(window(1.0, 8),))], {})
    assert (summary.seconds, summary.epoch_seconds, summary.note) == (None, None, MECHANISM)


def test_the_best_held_out_loss_of_a_trial_and_no_time() -> None:
    looks = [{"images": n, "loss": loss} for n, loss in ((0, 0.9), (8, 0.4), (16, 0.5))]
    trial = make.record(RunConfig(), role="quality", quality={"held_out": looks})
    failed = make.record(RunConfig(seed=1), role="quality", status="crashed")
    (summary,) = of_records([trial, failed], {})
    assert (summary.loss, summary.seconds) == (0.4, None)


def test_what_trains_nothing_has_no_summary() -> None:
    reduce, limit = (
        RunConfig(workload=f"ddpm_lab.training.{name}") for name in ("allreduce:all_reduce", "limits:copy")
    )
    assert of_records([make.record(c, windows=(window(1.0, 8),)) for c in (reduce, limit)], {}) == []


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

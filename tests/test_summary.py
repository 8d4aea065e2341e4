"""Runs as a table with speed-ups, from jobs, folders and records; and what differs between two of them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import records as make
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st
from paired_records import alone, family, paired

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import LOSSES, NETWORKS, DiffusionConfig, RunConfig
from ddpm_lab.explain.bands import S001
from ddpm_lab.explain.grids import plain_text
from ddpm_lab.ledger import Ledger
from ddpm_lab.questions.multi_gpu import scaling_rows
from ddpm_lab.reports.benchmark import summary_of
from ddpm_lab.reports.summary import (
    ACCURACY,
    COLUMNS,
    HOW,
    Row,
    Run,
    Scaling,
    Summary,
    differences,
    grid,
    of_record,
    speed_up_block,
    speed_ups,
    unexpected,
)
from ddpm_lab.settings_file import settings_text
from ddpm_lab.training.run_folder import RunFolder

PUBLISHED = ((1, 1, 362.45, 0.1187), (4, 1, 95.23, 0.1192), (8, 2, 57.14, 0.1190))
BASE = RunConfig()


def row(seconds: float | None, **values: object) -> Row:
    told = {"configuration": "tiny", "gpus": 1, "nodes": 1, **values}
    return Row(log="a.out", summary=Summary(seconds=seconds, **told))  # type: ignore[arg-type]


def published() -> list[Row]:
    return [
        row(
            seconds,
            configuration=None,
            gpus=gpus,
            nodes=nodes,
            loss=loss,
            job_id=str(12345 + i),
            epoch_seconds=seconds / 50,
        )
        for i, (gpus, nodes, seconds, loss) in enumerate(PUBLISHED)
    ]


def compared(found: list[Row]) -> list[Scaling]:
    return [one for one in speed_ups(found).sizes if one.devices > 1]


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_the_published_speed_ups() -> None:
    assert speed_up_block(speed_ups(published()))[:11] == [
        "Baseline (Single GPU): 362.45 seconds",
        "",
        "4 GPUs:",
        "  Average time: 95.23 seconds",
        "  Speed-up: 3.81x",
        "  Parallel efficiency: 95.2 % (excellent)",
        "",
        "8 GPUs on 2 nodes:",
        "  Average time: 57.14 seconds",
        "  Speed-up: 6.34x",
        "  Parallel efficiency: 79.3 % (good)",
    ]


def test_the_published_table() -> None:
    shown = [[cell.strip() for cell in line.split("|")] for line in plain_text(grid(published()))]
    assert shown[0] == list(COLUMNS)
    assert shown[2:] == [
        ["12345", "1 GPU", "1", "1", "362.45", "7.25", "0.1187", ACCURACY],
        ["12346", "4 GPUs", "4", "1", "95.23", "1.90", "0.1192", ACCURACY],
        ["12347", "8 GPUs on 2 nodes", "8", "2", "57.14", "1.14", "0.1190", ACCURACY],
    ]


TIMES = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=5)


@given(TIMES, TIMES, st.integers(2, 64))
def test_ratios_are_averaged_geometrically(single: list[float], several: list[float], gpus: int) -> None:
    """So the speed-up is the mean over all pairs of jobs."""
    (one,) = compared([row(s) for s in single] + [row(s, gpus=gpus) for s in several])
    assert one.speed_up is not None
    pairs = [math.log(a / b) for a in single for b in several]
    assert math.log(one.speed_up) == pytest.approx(sum(pairs) / len(pairs), abs=1e-9)
    assert one.efficiency == pytest.approx(one.speed_up / gpus)
    assert one.rating == S001.name(one.speed_up / gpus)


def test_a_configuration_is_compared_with_its_own_single_device() -> None:
    alone_ = [row(10.0, configuration="a"), row(30.0, configuration="b")]
    several = [row(20.0, configuration="b", gpus=2), row(5.0, configuration="c", gpus=2)]
    found = compared([*alone_, *several, row(4.0, configuration="a", gpus=0, ranks=2)])
    assert [one.speed_up for one in found] == [pytest.approx(1.5), None, None]
    assert "a single GPU, only: a; b" in found[1].evidence
    assert found[2].evidence.endswith("a single CPU rank")


def test_different_amounts_of_work_are_compared_by_the_epoch_or_not_at_all() -> None:
    one, two = row(100.0, epochs=10.0, epoch_seconds=10.0), row(24.0, gpus=2, epochs=4.0, epoch_seconds=6.0)
    assert [s.speed_up for s in compared([one, two])] == [pytest.approx(10 / 6)]
    assert speed_up_block(speed_ups([one, two]))[0] == "Baseline (Single GPU): 10.00 seconds per epoch"
    unknown = replace(two, summary=replace(two.summary, epoch_seconds=None))
    assert [s.speed_up for s in compared([one, unknown])] == [None]


def test_a_batch_for_each_device_is_weak_scaling() -> None:
    lone = row(10.0, configuration="tiny, batch 8", epochs=1.0)
    (one,) = compared([lone, row(6.0, configuration="tiny, batch 16", gpus=2, epochs=1.0)])
    assert one.speed_up == pytest.approx(10 / 6)
    assert one.evidence.startswith("weak")
    (one,) = compared([lone, row(6.0, configuration="tiny, batch 32", gpus=2, epochs=1.0)])
    assert one.speed_up is None


def test_a_speed_that_is_not_claimed_takes_no_part() -> None:
    found = [row(10.0, gpus=0, ranks=1), row(None, gpus=0, ranks=8, note="more ranks than cores")]
    assert speed_up_block(speed_ups(found)) == []
    assert grid(found)[2][4] == "unknown"
    assert found[1].remark == "speed not claimed: more ranks than cores"


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_give_the_times_of_their_windows_and_paired_speed_ups() -> None:
    """Times that drift between sets give another ratio of means than of pairs."""
    answer = paired({64: 1.6}, {32: 6.45}, set_noise=0.001, drift=1.0)
    runs, found = summary_of(answer, "ledger.jsonl")
    shown = {(r.family, r.ranks): r for r in scaling_rows(answer) if r.role != "twin"}
    for run in runs:
        of = shown[run.summary.configuration or "", run.summary.ranks or 0]
        windows = [w for r in answer.records if (r.family, r.role) == (of.family, of.role) for w in r.windows]
        assert run.summary.seconds == pytest.approx(sum(w.seconds for w in windows))
        assert run.summary.epochs == pytest.approx(sum(w.images for w in windows) / 50_000)
        assert run.summary.epoch_seconds == of.projected_seconds
    gains = {s.configuration: s.speed_up for s in found.sizes if s.devices > 1}
    assert gains == {r.family: r.ratio.value for r in shown.values() if r.ranks > 1}
    (weak, *_) = [s for s in found.sizes if s.devices > 1 and "weak" in (s.configuration or "")]
    assert weak.rating == "good"


def test_the_loss_is_that_of_trials() -> None:
    base = RunConfig(global_batch_size=32)
    two = replace(base, world_size=2, global_batch_size=64)
    found = make.sets({"2 ranks": (two, 1.2)}, baseline=base, baseline_label="1 rank", experiment="multi_gpu")
    trained = make.trials({"2 ranks": (two, 0.01)}, baseline=base, seed_noise=0, pair_noise=0)
    runs, _ = summary_of(replace(make.study(found), trials=tuple(trained)), "")
    assert [run.summary.loss for run in runs] == [pytest.approx(0.35), pytest.approx(0.36)]
    assert all(run.summary.loss is None for run in summary_of(make.study(found), "")[0])


def test_what_failed_or_ran_alone_has_no_speed_up() -> None:
    lost = make.study([*family(64, 1.6), *family(128, 1.0, failed=("oom", "needs 90 GiB"))])
    runs, found = summary_of(lost, "")
    assert [run.note for run in runs if run.summary.seconds is None] == ["8 GPUs; out of memory: needs 90 GiB"]
    assert [s.speed_up is None for s in found.sizes if s.devices > 1] == [False]
    hidden = paired({16: 1.1}, {}, device="cpu", ranks=2, mechanism_only=["1 rank", "2 ranks"])
    assert [run.summary.seconds for run in summary_of(hidden, "")[0]] == [None, None]
    assert [s.speed_up for s in summary_of(alone(single=False), "")[1].sizes] == [None]


# --- what differs ----------------------------------------------------------------------------------------------------

CONFIGS = st.builds(
    RunConfig,
    network=st.sampled_from(list(NETWORKS)),
    world_size=st.sampled_from([1, 2, 4]),
    precision=st.sampled_from(["fp32", "bf16"]),
    diffusion=st.builds(DiffusionConfig, loss=st.sampled_from(LOSSES)),
    optimizer=st.sampled_from([BASE.optimizer, replace(BASE.optimizer, adam="loop", learning_rate=1e-4)]),
)


def run(config: RunConfig) -> Run:
    return Run(name="a run", config=config)


def leaves(config: RunConfig) -> dict[str, object]:
    """Every setting by name, found by another way: through JSON's text."""
    found: dict[str, object] = {}
    for name, value in json.loads(json.dumps(config.as_dict())).items():
        for inner, v in value.items() if isinstance(value, dict) else [(None, value)]:
            found[f"{name}.{inner}" if inner else name] = v
    return found


@given(CONFIGS, CONFIGS)
def test_exactly_what_differs_is_found(one: RunConfig, other: RunConfig) -> None:
    found = differences(run(one), run(other))
    mine, theirs = leaves(one), leaves(other)
    assert set(found) == {n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n)}
    assert (not found) == (one.run_id == other.run_id)
    assert differences(run(other), run(one)) == {n: pair[::-1] for n, pair in found.items()}
    assert unexpected(found, list(found)) == []
    assert unexpected(found, None) == [n for n in found if n not in HOW]


def test_what_is_trained_should_not_differ() -> None:
    other = replace(BASE, seed=1, image_size=64, data_sha256="a" * 64, diffusion=DiffusionConfig(objective="v"))
    wrong = unexpected(differences(run(BASE), run(replace(other, world_size=2))), None)
    assert set(wrong) == {"seed", "image_size", "data_sha256", "diffusion.objective"}


def test_where_both_ran_counts_and_the_place_of_the_images_does_not() -> None:
    here = make.record(replace(BASE, data="/one"))
    there = dataclasses.replace(
        here, config=replace(BASE, data="/other"), environment=make.environment(make.GPUS), code_version="code-2"
    )
    found = differences(of_record("a", here), of_record("b", there))
    assert list(found) == unexpected(found, None) == ["machine", "code version"]
    assert differences(of_record("a", here), run(BASE)) == {}, "what a file cannot know does not differ"


def test_a_table_stands_for_all_in_it_and_a_name_that_is_none_is_refused() -> None:
    found = differences(run(BASE), run(replace(BASE, optimizer=replace(BASE.optimizer, learning_rate=1e-3))))
    assert unexpected(found, ["optimizer"]) == []
    with pytest.raises(ConfigError, match="'ranks', which is no setting"):
        unexpected({}, ["ranks"])


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "l.jsonl"
    Ledger(path).append(make.sets({"bf16": (replace(BASE, precision="bf16"), 1.5)}, count=2))
    return path


def trained(folder: Path, config: RunConfig, steps: int) -> Path:
    with RunFolder(folder) as made:
        made.write_settings(config, {"steps": steps})
        made.open_logs(0)
        made.log([{"step": i + 1, "loss": 1.0, "images_per_second": 64.0, "held_out_loss": 0.5} for i in range(steps)])
    return folder


def test_ledgers_logs_and_run_folders_are_one_table(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    Ledger(path).append(paired({64: 1.6}, {}).records)
    (tmp_path / "slurm-5.out").write_text("srun: error\n")
    words = (path, tmp_path / "slurm-5.out", trained(tmp_path / "run", replace(BASE, seed=1), 2))
    code, out, err = call("summary", *words, "--csv", tmp_path / "t.csv", "--markdown", tmp_path / "t.md", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(r["configuration"], r["found"]) for r in found["runs"]] == [
        *[("seed, batch 64", True)] * 2,
        (None, False),
        ("tiny, batch 32", True),
    ]
    assert (found["runs"][-1]["seconds"], found["runs"][-1]["loss"], found["runs"][-1]["steps"]) == (1.0, 0.5, 2)
    assert [s["speed_up"] is None for s in found["speed_ups"]] == [True, False, True]
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [r["Time (s)"] for r in csv.DictReader(file)][2:] == ["", "1.0"]
    assert (tmp_path / "t.md").read_text().startswith("| Job ID |")
    assert call("summary", tmp_path / "slurm-5.out")[0] == 1
    assert call("summary", tmp_path / "none.out")[0] == 2


def test_two_runs_of_a_ledger(call: Call, ledger: Path) -> None:
    set_id, other = make.sets({}, count=1)[0].set_id, replace(BASE, precision="bf16")
    for named in ((BASE.run_id, other.run_id), (f"{set_id}:fp32", f"{set_id}:bf16")):
        code, out, err = call("summary", *named, "--ledger", ledger, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == {"differences": {"precision": ["fp32", "bf16"]}, "unexpected": []}
    code, out, _ = call("summary", BASE.run_id, other.run_id, "--ledger", ledger, "--json", "--only", "seed")
    assert (code, json.loads(out)["unexpected"]) == (1, ["precision"])


def test_two_run_folders_and_files(call: Call, tmp_path: Path) -> None:
    one, other = trained(tmp_path / "a", BASE, 2), trained(tmp_path / "b", replace(BASE, precision="bf16"), 3)
    code, out, _ = call("summary", one, other)
    lines = out.splitlines()
    assert (code, lines[0].startswith("Job ID")) == (0, True)
    assert {line.split(" | ")[0].strip() for line in lines if line.endswith((" yes", " no"))} == {
        "precision",
        "train.steps",
    }
    assert "losses do not compare" in lines[-1]
    assert call("summary", one, other, "--only", "precision")[0] == 1
    (tmp_path / "own.toml").write_text(settings_text({"world_size": 2, "train": {"steps": 2}}))
    found = json.loads(call("summary", one, tmp_path / "own.toml", "--json")[1])
    assert found["differences"] == {"world_size": [1, 2]}
    assert call("summary", one, one)[1].splitlines()[-1] == "Nothing differs: both do the same work."


@pytest.mark.parametrize(
    ("a", "words"),
    [
        ("123456789abc", ["A is '123456789abc'", "no run id", "l.jsonl"]),
        ("SET", ["the set has fp32, fp32 again, bf16"]),
        ("SET:int8", ["'SET:int8'", "fp32"]),
        ("none.toml", ["A: cannot read none.toml"]),
    ],
)
def test_what_cannot_be_found_is_refused(call: Call, ledger: Path, a: str, words: list[str]) -> None:
    set_id = make.sets({}, count=1)[0].set_id
    code, out, err = call("summary", a.replace("SET", set_id), BASE.run_id, "--ledger", ledger)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(word.replace("SET", set_id) in err for word in words), err

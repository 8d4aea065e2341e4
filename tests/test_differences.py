"""What differs between two runs: every difference and nothing else, and whether only what should differ does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import records as make
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import LOSSES, NETWORKS, DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.explain.differences import HOW, Run, differences, grid, of_record, sentence, unexpected
from ddpm_lab.ledger import Ledger
from ddpm_lab.run_folder import RunFolder
from ddpm_lab.settings_file import settings_text

BASE = RunConfig()
CONFIGS = st.builds(
    RunConfig,
    network=st.sampled_from(list(NETWORKS)),
    world_size=st.sampled_from([1, 2, 4]),
    global_batch_size=st.sampled_from([32, 64]),
    precision=st.sampled_from(["fp32", "bf16"]),
    seed=st.integers(0, 2),
    diffusion=st.builds(DiffusionConfig, loss=st.sampled_from(LOSSES)),
    optimizer=st.builds(
        OptimizerConfig, learning_rate=st.sampled_from([1e-4, 2e-4]), adam=st.sampled_from(["fused", "loop"])
    ),
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
def test_exactly_what_differs_is_shown(one: RunConfig, other: RunConfig) -> None:
    found = differences(run(one), run(other))
    mine, theirs = leaves(one), leaves(other)
    assert {d.setting for d in found} == {n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n)}
    assert (found == []) == (one.run_id == other.run_id)
    assert [(d.setting, d.values[::-1]) for d in differences(run(other), run(one))] == [
        (d.setting, d.values) for d in found
    ]
    assert unexpected(found, [d.setting for d in found]) == []
    assert [d.setting for d in unexpected(found, None)] == [d.setting for d in found if d.setting not in HOW]


def test_only_what_should_differ() -> None:
    found = differences(run(BASE), run(replace(BASE, world_size=2, precision="bf16")))
    assert sentence(found, None).startswith("Only what should differ does: world_size and precision")
    assert sentence(found, ["world_size", "precision"]).startswith("Only what should differ does")
    assert sentence(found, ["world_size"]).startswith("precision should not differ (only world_size may differ)")
    assert sentence(found, []).startswith("world_size and precision should not differ (nothing may differ)")
    assert sentence([], None) == "Nothing differs: both do the same work."


def test_another_training_is_told() -> None:
    other = replace(BASE, world_size=2, global_batch_size=64, optimizer=OptimizerConfig(learning_rate=4e-4))
    found = differences(run(BASE), run(other))
    said = sentence(found, None)
    assert said.startswith("global_batch_size and optimizer.learning_rate should not differ")
    assert "another training" in said
    assert "As it should be: world_size." in said
    assert unexpected(found, ["optimizer", "world_size", "global_batch_size"]) == [], "a table stands for all in it"
    head, *rows = grid(found, run(BASE), run(other))
    assert list(head) == ["Setting", "a run", "a run", "Says"]
    assert ["world_size", "1", "2", "how it is trained"] in [list(r) for r in rows]


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, seed=1),
        replace(BASE, network="seed"),
        replace(BASE, image_size=64),
        replace(BASE, data_sha256="a" * 64),
        replace(BASE, diffusion=DiffusionConfig(objective="v")),
        replace(BASE, optimizer=OptimizerConfig(ema_every=1)),
    ],
)
def test_what_is_trained_should_not_differ(other: RunConfig) -> None:
    found = differences(run(BASE), run(other))
    assert [d.kind for d in unexpected(found, None)] == ["what"]


def test_where_both_ran_counts_and_the_place_of_the_images_does_not() -> None:
    here = make.record(replace(BASE, data="/one"))
    there = replace(
        here, config=replace(BASE, data="/other"), environment=make.environment(make.GPUS), code_version="code-2"
    )
    found = differences(of_record("a", here), of_record("b", there))
    assert [(d.setting, d.kind) for d in found] == [("machine", "where"), ("code version", "where")]
    assert "compares no records" in sentence(found, None)
    assert differences(of_record("a", here), run(BASE)) == [], "what a file cannot know does not differ"


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'ranks', which is no setting"):
        unexpected([], ["ranks"])


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    bf16 = replace(BASE, precision="bf16")
    Ledger(tmp_path / "l.jsonl").append(make.sets({"bf16": (bf16, 1.5)}, count=2))
    return tmp_path / "l.jsonl"


def test_runs_of_a_ledger(call: Call, ledger: Path) -> None:
    other = replace(BASE, precision="bf16")
    code, out, err = call("diff", BASE.run_id, other.run_id, "--ledger", ledger)
    assert (code, err) == (0, "")
    assert [line.split(" | ")[0].strip() for line in out.splitlines()][2:3] == ["precision"]
    assert out.splitlines()[-1].startswith("Only what should differ does: precision")
    set_id = make.sets({}, count=1)[0].set_id
    code, out, _ = call("diff", f"{set_id}:fp32", f"{set_id}:bf16", "--ledger", ledger, "--json", "--only", "seed")
    assert code == 1
    found = json.loads(out)
    assert found["differences"] == [{"setting": "precision", "a": "fp32", "b": "bf16", "kind": "how"}]
    assert found["unexpected"] == ["precision"]


def test_run_folders_and_files(call: Call, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.write_settings(replace(BASE, seed=3), {"steps": 5})
    (tmp_path / "own.toml").write_text(settings_text({"world_size": 2, "train": {"steps": 7}}))
    code, out, err = call("diff", tmp_path / "run", tmp_path / "own.toml")
    assert (code, err) == (0, "")
    assert {line.split(" | ")[0].strip() for line in out.splitlines()[2:-1]} == {"seed", "world_size", "train.steps"}
    assert call("diff", tmp_path / "run", tmp_path / "run")[1] == "Nothing differs: both do the same work.\n"


def test_another_length_is_told_for_the_losses_sake(call: Call, tmp_path: Path) -> None:
    for name, steps, precision in (("a", 20, "fp32"), ("b", 14, "bf16")):
        with RunFolder(tmp_path / name) as folder:
            folder.write_settings(replace(BASE, precision=precision), {"steps": steps})
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b")
    *_, row, said = out.splitlines()
    assert (code, row.split(" | ")[0].strip()) == (0, "train.steps")
    assert all(part in row for part in ("20", "14", "how long it is trained"))
    assert said.startswith("train.steps should not differ (only how it is trained may differ). As it should be: precis")
    assert "losses do not compare" in said
    code, out, _ = call("diff", tmp_path / "a", tmp_path / "b", "--only", "precision,train.steps")
    assert code == 0, "a length that is allowed still makes other losses"
    assert "Only what should differ does" in out
    assert "losses do not compare" in out
    assert call("diff", tmp_path / "a", tmp_path / "b", "--only", "precision")[0] == 1


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
    code, out, err = call("diff", a.replace("SET", set_id), BASE.run_id, "--ledger", ledger)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(word.replace("SET", set_id) in err for word in words), err
    assert call("diff", BASE.run_id, ledger.parent, "--ledger", ledger)[2].startswith("ddpm-lab: B: ")

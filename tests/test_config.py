"""Configurations: an identity that holds, a round trip through JSON, and refusals in one sentence."""

import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DiffusionConfig, ExchangeConfig, OptimizerConfig, RunConfig
from ddpm_lab.plan import Plan

# For every field a value that differs from ``START`` and is valid beside it.
START = RunConfig(device="cuda", loader="files", global_batch_size=32)
OTHER: dict[str, Any] = {
    "purpose": "profile",
    "workload": "somebody.elses:training",
    "device": "cpu",
    "world_size": 2,
    "nodes": 2,
    "global_batch_size": 64,
    "accumulation": 2,
    "precision": "tf32",
    "compile": "whole",
    "compile_mode": "max-autotune",
    "channels_last": False,
    "implementation": "plain",
    "kernels": "fused",
    "freed_memory": "kept",
    "attention_axis": "positions",
    "read_loss": True,
    "loader": "packed",
    "loader_workers": 3,
    "data": "elsewhere",
    "data_sha256": "ff",
    "network": "seed",
    "image_size": 64,
    "diffusion": DiffusionConfig(timesteps=500),
    "optimizer": OptimizerConfig(ema_every=7),
    "exchange": ExchangeConfig(bucket_mb=1),
    "seed": 1,
    "oversubscribe": True,
    "threads": 3,
    "revision": "1234567890ab",
    "options": (("micro_steps", 7),),
}
NEEDS: dict[str, dict[str, Any]] = {
    "compile_mode": {"compile": "whole"},
    "implementation": {"network": "seed"},
    "kernels": {"device": "cpu"},
    "freed_memory": {"device": "cpu"},
    "attention_axis": {"network": "seed"},
    "exchange": {"world_size": 2},
    "nodes": {"world_size": 2},
}
"""Settings that are refused where they would have no effect: what each needs."""
NESTED: list[tuple[str, Any]] = [
    *(
        ("diffusion", DiffusionConfig(**values))
        for values in (
            {"schedule": "linear"},
            {"timesteps": 999},
            {"objective": "v"},
            {"loss": "l2"},
            {"loss": "l2", "min_snr_gamma": 5.0},
        )
    ),
    *(
        ("optimizer", OptimizerConfig(**values))
        for values in (
            {"learning_rate": 1e-4},
            {"betas": (0.9, 0.999)},
            {"clip_norm": None},
            {"ema_decay": 0.9},
            {"ema_every": 1},
            {"ema_warmup": False},
            {"adam": "loop"},
            {"ema": "loop"},
        )
    ),
    *(
        ("exchange", ExchangeConfig(**values))
        for values in (
            {"enabled": False},
            {"bucket_view": False},
            {"static_graph": True},
            {"bucket_mb": 1},
            {"hook": "bf16"},
            {"hook": "fp16"},
        )
    ),
    ("exchange", ExchangeConfig(nccl="pcie")),
]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RunConfig)])
def test_every_setting_but_the_data_folder_is_part_of_the_identity(name: str) -> None:
    start = dataclasses.replace(START, **NEEDS.get(name, {}))
    changed = dataclasses.replace(start, **{name: OTHER[name]})
    assert getattr(changed, name) != getattr(start, name)
    assert (changed.run_id != start.run_id) == (name != "data")
    assert set(start.differences(changed)) == ({name} if name != "data" else set())


@pytest.mark.parametrize(
    "settings",
    [
        {"compile_mode": "max-autotune"},
        {"compile_mode": "reduce-overhead", "compile": "whole"},
        {"implementation": "plain"},
        {"attention_axis": "positions", "network": "ddpm"},
        {"freed_memory": "kept", "device": "cuda"},
        {"kernels": "fused", "compile": "whole"},
        {"kernels": "fused", "channels_last": False},
        {"kernels": "fused", "network": "seed", "implementation": "plain"},
        {"compile": "regional", "network": "seed", "implementation": "plain"},
        {"exchange": ExchangeConfig(static_graph=True)},
        {"exchange": ExchangeConfig(hook="bf16")},
        {"exchange": ExchangeConfig(nccl="pcie"), "world_size": 2},
        {"exchange": ExchangeConfig(nccl="pcie"), "device": "cuda"},
        {"loader": "still", "purpose": "quality"},
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RunConfig(**settings)


def test_settings_of_diffusion_and_optimizer_are_part_of_the_identity() -> None:
    ids = [RunConfig(world_size=2, device="cuda", **{name: value}).run_id for name, value in NESTED]
    assert len({RunConfig(world_size=2, device="cuda").run_id, *ids}) == len(NESTED) + 1
    walked = {(name, f.name) for name, value in NESTED for f in dataclasses.fields(value)}
    changed = {
        (name, f.name)
        for name, value in NESTED
        for f in dataclasses.fields(value)
        if getattr(value, f.name) != getattr(type(value)(), f.name)
    }
    assert changed == walked, "a setting is never varied by this test"


def test_the_identity_does_not_depend_on_how_a_configuration_came_about() -> None:
    values = START.as_dict()
    backwards = RunConfig.from_dict(dict(reversed(values.items())))
    stepwise = dataclasses.replace(dataclasses.replace(RunConfig(global_batch_size=32), device="cuda"), loader="files")
    assert backwards.run_id == stepwise.run_id == START.run_id
    ordered, reordered = (RunConfig(options=o) for o in ((("a", 1), ("b", 2)), (("b", 2), ("a", 1))))
    assert ordered.run_id == reordered.run_id


def test_the_identity_is_the_same_in_another_process() -> None:
    code = (
        "from ddpm_lab.config import *; from ddpm_lab.plan import *; print(RunConfig(seed=3).run_id, Plan(turns=4).key)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [RunConfig(seed=3).run_id, Plan(turns=4).key]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RunConfig)])
def test_round_trip_through_json(name: str) -> None:
    config = dataclasses.replace(START, **{**NEEDS.get(name, {}), name: OTHER[name]})
    again = RunConfig.from_dict(json.loads(json.dumps(config.as_dict())))
    assert again == config
    assert again.run_id == config.run_id


@pytest.mark.parametrize(("name", "value"), NESTED)
def test_nested_settings_survive_json(name: str, value: Any) -> None:
    config = RunConfig(world_size=2, device="cuda", **{name: value})
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RunConfig)])
def test_a_configuration_goes_to_another_process_by_name(name: str) -> None:
    """So that an older version of the lab, which runs a revision, puts no value in another setting's place."""
    config = dataclasses.replace(START, **{**NEEDS.get(name, {}), name: OTHER[name]})
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    _, (told,) = RunConfig(seed=3).__reduce__()
    assert told == {"seed": 3, "diffusion": {}, "optimizer": {}, "exchange": {}}


def test_an_option_has_its_value_or_the_default() -> None:
    config = RunConfig(options=(("micro_steps", 7),))
    assert config.option("micro_steps", 100) == 7
    assert config.option("fault", "none") == "none"


def test_ranks_share_the_batch() -> None:
    assert RunConfig(global_batch_size=96, world_size=3, accumulation=2).rank_batch_size == 32


REFUSED: list[tuple[type, dict[str, Any], list[str]]] = [
    (RunConfig, {"purpose": "fun"}, ["purpose", "'fun'", "timing, profile"]),
    (RunConfig, {"device": "tpu"}, ["device", "'tpu'", "cpu, cuda"]),
    (RunConfig, {"precision": "fp8"}, ["precision", "'fp8'", "fp32, tf32, fp16, bf16"]),
    (RunConfig, {"compile": True}, ["compile", "True", "off, regional, whole"]),
    (RunConfig, {"loader": "tape"}, ["loader", "'tape'", "packed, files, resident"]),
    (RunConfig, {"network": "huge"}, ["network", "'huge'", "tiny, seed, ddpm, s000"]),
    (RunConfig, {"world_size": 0}, ["world_size", "0", "at least 1"]),
    (RunConfig, {"world_size": True}, ["world_size", "True", "whole number"]),
    (RunConfig, {"world_size": "2"}, ["world_size", "'2'", "whole number"]),
    (RunConfig, {"global_batch_size": 1.5}, ["global_batch_size", "1.5", "whole number"]),
    (RunConfig, {"accumulation": 0}, ["accumulation", "0", "at least 1"]),
    (RunConfig, {"loader_workers": -1}, ["loader_workers", "-1", "at least 0"]),
    (RunConfig, {"seed": -1}, ["seed", "-1", "at least 0"]),
    (RunConfig, {"image_size": 0}, ["image_size", "0", "at least 1"]),
    (RunConfig, {"image_size": 30}, ["image_size", "30", "'tiny'", "multiple of 4"]),
    (RunConfig, {"image_size": 36, "network": "ddpm"}, ["image_size", "36", "'ddpm'", "multiple of 8"]),
    (RunConfig, {"workload": "train"}, ["workload", "'train'", "module:function"]),
    (RunConfig, {"workload": ":train"}, ["workload", "':train'", "module:function"]),
    (RunConfig, {"workload": "module:not a name"}, ["workload", "module:function"]),
    (RunConfig, {"world_size": 4, "nodes": 3}, ["world_size 4", "3 nodes", "multiple of 3"]),
    (RunConfig, {"global_batch_size": 32, "world_size": 3}, ["32", "3 ranks", "multiple of 3"]),
    (
        RunConfig,
        {"global_batch_size": 32, "world_size": 2, "accumulation": 5},
        ["32", "2 ranks", "5 micro-batches", "multiple of 10"],
    ),
    (RunConfig, {"loader_workers": 2}, ["loader_workers", "2", "'packed'", "loader 'files'"]),
    (RunConfig, {"loader": "resident", "loader_workers": 2}, ["loader_workers", "2", "'resident'", "loader 'files'"]),
    (RunConfig, {"precision": "tf32"}, ["'tf32'", "CUDA", "fp32 or bf16"]),
    (RunConfig, {"precision": "fp16"}, ["'fp16'", "CUDA", "fp32 or bf16"]),
    (RunConfig, {"threads": -1}, ["threads", "-1", "at least 0"]),
    (RunConfig, {"loader": "still", "purpose": "check"}, ["'still'", "packed, files or resident"]),
    (ExchangeConfig, {"hook": "int8"}, ["exchange.hook", "'int8'", "none, bf16, fp16"]),
    (ExchangeConfig, {"nccl": "nvlink"}, ["exchange.nccl", "'nvlink'", "default, pcie"]),
    (ExchangeConfig, {"enabled": False, "hook": "bf16"}, ["exchange.hook", "'bf16'", "exchange.enabled", "leave it"]),
    (DiffusionConfig, {"schedule": "quadratic"}, ["diffusion.schedule", "'quadratic'", "linear, cosine"]),
    (DiffusionConfig, {"objective": "score"}, ["diffusion.objective", "'score'", "noise, x0, v"]),
    (DiffusionConfig, {"loss": "l3"}, ["diffusion.loss", "'l3'", "l1, l2"]),
    (DiffusionConfig, {"timesteps": 1}, ["diffusion.timesteps", "1", "at least 2"]),
    (DiffusionConfig, {"loss": "l2", "min_snr_gamma": 0.0}, ["diffusion.min_snr_gamma", "0.0", "above 0"]),
    (DiffusionConfig, {"loss": "l1", "min_snr_gamma": 5.0}, ["diffusion.min_snr_gamma", "'l1'", "l2"]),
    (OptimizerConfig, {"learning_rate": 0.0}, ["optimizer.learning_rate", "0.0", "above 0"]),
    (OptimizerConfig, {"learning_rate": float("nan")}, ["optimizer.learning_rate", "nan", "above 0"]),
    (OptimizerConfig, {"betas": (0.9, 1.0)}, ["optimizer.betas", "1.0", "[0, 1)"]),
    (OptimizerConfig, {"betas": (0.9,)}, ["optimizer.betas", "(0.9,)", "two numbers"]),
    (OptimizerConfig, {"learning_rate": math.inf}, ["optimizer.learning_rate is inf", "finite"]),
    (OptimizerConfig, {"learning_rate": 10**400}, ["optimizer.learning_rate", "finite"]),
    (DiffusionConfig, {"loss": "l2", "min_snr_gamma": math.inf}, ["diffusion.min_snr_gamma is inf", "finite"]),
    (RunConfig, {"oversubscribe": "yes"}, ["oversubscribe is 'yes'", "True, False"]),
    (OptimizerConfig, {"clip_norm": -1.0}, ["optimizer.clip_norm", "-1.0", "above 0", "null"]),
    (OptimizerConfig, {"ema_decay": 1.0}, ["optimizer.ema_decay", "1.0", "[0, 1)"]),
    (OptimizerConfig, {"ema_every": 0}, ["optimizer.ema_every", "0", "at least 1"]),
    (OptimizerConfig, {"learning_rate": "fast"}, ["optimizer.learning_rate", "'fast'", "above 0"]),
    (OptimizerConfig, {"betas": 0.9}, ["optimizer.betas", "0.9", "list"]),
    (OptimizerConfig, {"betas": (0.9, "b")}, ["optimizer.betas", "'b'", "two numbers"]),
    (OptimizerConfig, {"clip_norm": True}, ["optimizer.clip_norm", "True", "above 0"]),
    (OptimizerConfig, {"ema_decay": None}, ["optimizer.ema_decay", "None", "[0, 1)"]),
    (DiffusionConfig, {"loss": "l2", "min_snr_gamma": "5"}, ["diffusion.min_snr_gamma", "'5'", "above 0"]),
    (RunConfig, {"diffusion": "cosine"}, ["diffusion", "'cosine'", "schedule, timesteps, objective"]),
    (RunConfig, {"optimizer": None}, ["optimizer", "None", "learning_rate, betas"]),
    (Plan, {"turns": -1}, ["plan.turns", "-1", "at least 0"]),
    (Plan, {"window_steps": 0}, ["plan.window_steps", "0", "at least 1"]),
    (Plan, {"settle_steps": 0}, ["plan.settle_steps", "0", "at least 1"]),
    (Plan, {"warmup_steps": 2.0}, ["plan.warmup_steps", "2.0", "whole number"]),
    (Plan, {"window_seconds": 0.0}, ["plan.window_seconds", "0.0", "above 0"]),
    (Plan, {"window_seconds": "0.4"}, ["plan.window_seconds", "'0.4'", "above 0"]),
    (Plan, {"window_seconds": float("inf")}, ["plan.window_seconds", "inf"]),
]


@pytest.mark.parametrize(("kind", "settings", "words"), REFUSED)
def test_a_refusal_names_the_value_the_place_and_the_remedy(
    kind: type, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        kind(**settings)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


def test_a_setting_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'batch_size'.*global_batch_size"):
        RunConfig.from_dict({"batch_size": 32})


@pytest.mark.parametrize(
    ("place", "name", "allowed"),
    [
        ("diffusion", "steps", "loss, min_snr_gamma, objective, schedule, timesteps"),
        ("optimizer", "lr", "adam, betas, clip_norm, ema, ema_decay, ema_every, ema_warmup, learning_rate"),
    ],
)
def test_a_nested_setting_that_does_not_exist_is_named(place: str, name: str, allowed: str) -> None:
    values = {**RunConfig().as_dict(), place: {name: 1}}
    with pytest.raises(ConfigError) as refusal:
        RunConfig.from_dict(values)
    assert str(refusal.value) == f"{place} has no setting {name!r}: it has {allowed}"


def test_a_notebook_shows_a_refusal_without_the_labs_insides() -> None:
    with pytest.raises(ConfigError) as refusal:
        RunConfig(precision="fp8")
    (line,) = refusal.value._render_traceback_()
    assert line == f"ConfigError: {refusal.value}"

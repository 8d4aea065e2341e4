"""Configurations: an identity that holds, a round trip through JSON, and refusals in one sentence."""

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import OWN, PARTS, DiffusionConfig, ExchangeConfig, OptimizerConfig, RunConfig, digest

# For every field a value that differs from ``START`` and is valid beside it.
START = RunConfig(device="cuda", loader="files", global_batch_size=32)
OTHER: dict[str, Any] = {
    **{"purpose": "profile", "workload": "somebody.elses:training", "device": "cpu", "world_size": 2, "nodes": 2},
    **{"global_batch_size": 64, "accumulation": 2, "precision": "tf32", "compile": "whole"},
    **{"compile_mode": "max-autotune", "channels_last": False, "implementation": "plain", "kernels": "fused"},
    **{"freed_memory": "kept", "attention_axis": "positions", "read_loss": True, "loader": "packed"},
    **{"mirror": False},
    **{"loader_workers": 3, "data": "elsewhere", "data_sha256": "ff", "network": "seed", "image_size": 64},
    **{"diffusion": DiffusionConfig(timesteps=500), "optimizer": OptimizerConfig(ema_every=7)},
    **{"exchange": ExchangeConfig(bucket_mb=1), "seed": 1, "oversubscribe": True, "threads": 3},
    **{"revision": "1234567890ab", "options": (("micro_steps", 7),)},
}
NEEDS: dict[str, dict[str, Any]] = {
    "compile_mode": {"compile": "whole"},
    **{name: {"network": "seed"} for name in ("implementation", "attention_axis")},
    **{name: {"device": "cpu"} for name in ("kernels", "freed_memory")},
    **{name: {"world_size": 2} for name in ("exchange", "nodes")},
}
"""Settings that are refused where they would have no effect: what each needs."""
INSIDE: dict[str, dict[str, Any]] = {
    "diffusion": {"schedule": "linear", "timesteps": 999, "objective": "v", "loss": "l2", "min_snr_gamma": 5.0},
    "optimizer": {
        **{"learning_rate": 1e-4, "betas": (0.9, 0.999), "clip_norm": None, "ema_decay": 0.9},
        **{"ema_every": 1, "ema_warmup": False, "adam": "loop", "ema": "loop"},
    },
    "exchange": {
        **{"enabled": False, "bucket_view": False, "static_graph": True, "bucket_mb": 1},
        **{"hook": "bf16", "nccl": "pcie"},
    },
}


@pytest.mark.parametrize("name", OTHER)
def test_every_setting_but_the_data_folder_is_part_of_the_identity_and_survives(name: str) -> None:
    assert set(OTHER) == {f.name for f in dataclasses.fields(RunConfig)}
    start = dataclasses.replace(START, **NEEDS.get(name, {}))
    changed = dataclasses.replace(start, **{name: OTHER[name]})
    assert (changed.run_id != start.run_id) == (name != "data")
    assert set(start.differences(changed)) == ({name} if name != "data" else set())
    again = RunConfig.from_dict(json.loads(json.dumps(changed.as_dict())))
    assert (again, again.run_id) == (changed, changed.run_id)
    assert pickle.loads(pickle.dumps(changed)) == changed == copy.deepcopy(changed)


def test_so_is_every_setting_of_its_parts() -> None:
    usual = RunConfig(world_size=2, device="cuda")
    ids = {usual.run_id}
    for part in PARTS:
        kind: Any = type(getattr(usual, part))
        assert set(INSIDE[part]) == {f.name for f in dataclasses.fields(kind)}
        for name, value in INSIDE[part].items():
            needs = {"loss": "l2"} if name == "min_snr_gamma" else {}
            changed: dict[str, Any] = {part: {**needs, name: value}}
            config = RunConfig.from_dict({**usual.as_dict(), **changed})
            assert config == dataclasses.replace(usual, **{part: kind(**changed[part])})
            ids.add(config.run_id)
    assert len(ids) == 1 + sum(map(len, INSIDE.values()))


def test_another_process_and_the_identity_are_told_what_is_not_usual() -> None:
    """So that another version of the lab puts no value in another setting's place, and a new one keeps the ids."""
    config = RunConfig(seed=3, data="images", world_size=2, exchange=ExchangeConfig(hook="bf16"))
    told = {"seed": 3, "world_size": 2, "exchange": {"hook": "bf16"}}
    assert config.__reduce__()[1] == ({**told, "data": "images"},)
    assert config.run_id == digest(told)


REFUSED: list[tuple[type, dict[str, Any], list[str]]] = [
    # without effect
    (RunConfig, {"compile_mode": "max-autotune"}, ["compile_mode"]),
    (RunConfig, {"implementation": "plain"}, ["implementation"]),
    (RunConfig, {"freed_memory": "kept", "device": "cuda"}, ["freed_memory"]),
    (RunConfig, {"kernels": "fused", "compile": "whole"}, ["kernels"]),
    (RunConfig, {"compile": "regional", "network": "seed", "implementation": "plain"}, ["compile"]),
    (RunConfig, {"exchange": ExchangeConfig(static_graph=True)}, ["exchange"]),
    (RunConfig, {"exchange": ExchangeConfig(nccl="pcie"), "world_size": 2}, ["exchange.nccl"]),
    (RunConfig, {"loader": "still", "purpose": "quality"}, ["loader"]),
    (ExchangeConfig, {"enabled": False, "hook": "bf16"}, ["exchange.hook", "'bf16'", "exchange.enabled"]),
    (RunConfig, {"mirror": False, "workload": OWN}, ["mirror", "choose one of True"]),
    # no such value
    (RunConfig, {"loader": "pakced"}, ["loader", "packed, files, resident", "did you mean packed?"]),
    (RunConfig, {"compile": True}, ["compile", "True", "off, regional, whole"]),
    (RunConfig, {"world_size": True}, ["world_size", "True"]),
    (RunConfig, {"global_batch_size": 1.5}, ["global_batch_size", "1.5"]),
    (RunConfig, {"diffusion": "cosine"}, ["diffusion", "'cosine'", "schedule, timesteps, objective"]),
    (OptimizerConfig, {"learning_rate": math.nan}, ["optimizer.learning_rate", "nan"]),
    (OptimizerConfig, {"betas": (0.9, 1.0)}, ["optimizer.betas", "1.0"]),
    (OptimizerConfig, {"clip_norm": -1.0}, ["optimizer.clip_norm", "-1.0", "null"]),
    # not together
    (RunConfig, {"image_size": 36, "network": "ddpm"}, ["image_size", "36", "'ddpm'", "multiple of 8"]),
    (
        RunConfig,
        {"device": "cuda", "compile": "whole", "compile_mode": "max-autotune", "accumulation": 2},
        ["accumulation is 2", "'max-autotune'", "compile_mode default"],
    ),
    (
        RunConfig,
        {"world_size": 2, "accumulation": 2, "exchange": ExchangeConfig(static_graph=True)},
        ["accumulation is 2", "exchange.static_graph", "accumulation 1"],
    ),
    (RunConfig, {"world_size": 2, "accumulation": 5}, ["32", "2 ranks", "5 micro-batches", "multiple of 10"]),
    (RunConfig, {"loader_workers": 2}, ["loader_workers", "2", "'packed'"]),
    (RunConfig, {"precision": "fp16"}, ["'fp16'", "CUDA"]),
    (DiffusionConfig, {"loss": "l1", "min_snr_gamma": 5.0}, ["diffusion.min_snr_gamma", "'l1'"]),
]


@pytest.mark.parametrize(("kind", "settings", "words"), REFUSED)
def test_a_refusal_names_the_value_the_place_and_the_remedy(
    kind: type, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        kind(**settings)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    assert all(word in sentence for word in words), sentence
    assert refusal.value._render_traceback_() == [f"ConfigError: {sentence}"], "what a notebook shows"


TAKEN_BY_OWN = {
    *("purpose", "workload", "device", "world_size", "nodes", "global_batch_size", "precision", "compile"),
    *("compile_mode", "channels_last", "freed_memory", "loader", "loader_workers", "optimizer", "exchange", "seed"),
    *("oversubscribe", "threads", "revision", "options"),
    *("data", "data_sha256", "network", "image_size", "diffusion"),  # which it brings itself
}


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_that_a_training_of_the_users_does_not_take_is_refused_there(name: str) -> None:
    """A label would tell of it, and no witness of such a training says otherwise."""
    own = dataclasses.replace(START, workload=OWN, **NEEDS.get(name, {}))
    if name in TAKEN_BY_OWN:
        dataclasses.replace(own, **{name: OTHER[name]})
    else:
        with pytest.raises(ConfigError, match=rf"^{name} of "):
            dataclasses.replace(own, **{name: OTHER[name]})


def test_a_table_with_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'batch_size'.*global_batch_size"):
        RunConfig.from_dict({"batch_size": 32})
    with pytest.raises(ConfigError, match=r"'lr'.*adam, betas, clip_norm, ema,"):
        RunConfig.from_dict({"optimizer": {"lr": 1}})

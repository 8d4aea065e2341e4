"""What groups do on their own: trials and their FID, what they record and refuse, time budgets and profiles."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import done_alone
from PIL import Image
from test_archives import Payload

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import SAME_WEIGHTS, TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.data.packed import open_packed, prepare, read_manifest
from ddpm_lab.explain import quality
from ddpm_lab.explain.quality import GOOD, IDENTICAL, NOT_ENOUGH, WORSE
from ddpm_lab.measure.alone import BUDGET_SECONDS, LOOKS, profile_alone, take_budget, train_once
from ddpm_lab.measure.group import Group
from ddpm_lab.measure.sets import Instrument, Member, Slot
from ddpm_lab.plan import Plan
from ddpm_lab.questions.quality import fid_of
from ddpm_lab.record import RunRecord
from ddpm_lab.training import fid as module
from ddpm_lab.training.fid import plan_fid
from ddpm_lab.training.setting import usual_settings

Tried = Callable[..., RunRecord]
PICTURES = 16


@pytest.fixture(scope="module")
def config(synthetic: RunConfig) -> RunConfig:
    """A trial on the synthetic images."""
    options = (("images", 160), ("draws", 40))
    return replace(synthetic, purpose="quality", workload=TRAINING, options=options)


@pytest.fixture
def tried(tmp_path: Path) -> Tried:
    """Runs one trial of a configuration and returns its record."""
    return lambda config, **asked: done_alone(tmp_path, config, partial(train_once, **asked))


def learned(record: RunRecord) -> dict[str, Any]:
    assert record.status == "ok", record.reason
    assert record.quality is not None
    return record.quality


@pytest.mark.slow
def test_a_trial_records_every_loss_and_looks_on_the_way(data: Path, tried: Tried) -> None:
    options = (("images", 160), ("draws", 40))
    config = RunConfig(purpose="quality", workload=TRAINING, options=options, global_batch_size=8, image_size=8)
    config = replace(config, data=str(data), data_sha256=read_manifest(data).content_hash)
    record = tried(config)
    found = learned(record)
    assert found["steps"] == len(found["losses"]) == 20
    assert [look["images"] for look in found["held_out"]] == sorted({8 * round(share * 20) for share in LOOKS})
    assert found["held_out"][-1]["loss"] < found["held_out"][0]["loss"]
    assert record.windows == (), "a trial supplies no speed"
    assert record.stages["training"] > 0, "what it took says when the next one would end"
    record = tried(replace(config, optimizer=OptimizerConfig(learning_rate=1e30, clip_norm=None)))
    assert record.status == "diverged"


@pytest.mark.slow
def test_what_changes_no_arithmetic_is_identical(config: RunConfig, tried: Tried) -> None:
    base = tried(config)
    assert quality.compare([base], [tried(config)]).verdict == IDENTICAL, "the same seed, the same weights"
    assert learned(tried(replace(config, seed=1)))["weights_sha256"] != learned(base)["weights_sha256"]
    changes: list[dict[str, Any]] = [{"loader": "files", "loader_workers": 1, "read_loss": True}]
    changes += [{"loader": "resident", "freed_memory": "kept"}]
    assert {name for change in changes for name in change} == SAME_WEIGHTS.keys()
    for change in changes:
        assert quality.compare([base], [tried(replace(config, **change))]).verdict == IDENTICAL


@pytest.mark.slow
def test_a_planted_fault_is_worse_and_another_rounding_is_not(
    config: RunConfig, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate that gets to the loss that shows harm in 120 steps; ``docs/measured`` has the usual one."""
    monkeypatch.setattr(quality, "shows_harm", lambda _: 0.6)  # with so few pixels
    quick = OptimizerConfig(learning_rate=5e-3)
    config = replace(config, optimizer=quick, options=(("images", 960), ("draws", 64)), threads=1)
    frozen = replace(config, optimizer=dataclasses.replace(quick, ema_every=1000))
    configs = {"base": config, "bf16": replace(config, **usual_settings("cpu")), "frozen average": frozen}
    runs = {name: [tried(replace(c, seed=seed)) for seed in range(5)] for name, c in configs.items()}
    verdicts = {name: quality.compare(runs["base"], found).verdict for name, found in runs.items()}
    # Of what is rounded otherwise five seeds may be too few to say anything, and never say worse.
    assert verdicts["bf16"] in (*GOOD, NOT_ENOUGH)
    assert verdicts["frozen average"] == WORSE


@pytest.mark.parametrize(("step_seconds", "ema_every", "prefetch"), [(1e-5, 10, 0), (0.03, 1, 4), (9.0, 7, 4)])
def test_windows_hold_whole_cycles_and_end_in_time(
    instrument: Instrument, step_seconds: float, ema_every: int, prefetch: int
) -> None:
    asked: dict[str, Any] = {}

    def ask(*_: object, **values: Any) -> list[dict[str, Any]]:
        asked.update(values)
        return [{"memory": {"rss_bytes": 3}}, {"memory": {"rss_bytes": 5}}]

    config = RunConfig(purpose="profile", optimizer=OptimizerConfig(ema_every=ema_every))
    slot = Slot(Member("profile", "p", config), Plan(), instrument)
    slot.group, slot.warm_step_seconds = cast("Any", SimpleNamespace(pids=(1,), ask=ask)), step_seconds
    slot.witness = [{"prefetch_batches": prefetch}]
    taken, steps, rounds = take_budget(slot), asked["steps"], asked["rounds"]
    assert steps % ema_every == 0
    assert steps >= max(10 * prefetch, 0.999 * slot.plan.window_seconds / step_seconds)
    assert asked["settle"] >= prefetch
    assert rounds == 1 or 2 * rounds * steps * step_seconds <= BUDGET_SECONDS
    assert (taken["steps"], taken["state"]["rss_bytes"]) == (steps * rounds, 5), "the largest rank's"


@pytest.mark.slow
def test_a_profile_record_holds_the_budget_and_no_speed(tmp_path: Path) -> None:
    config = RunConfig(workload="lab_workloads:phased", purpose="profile", global_batch_size=8)
    plan = Plan(turns=2, window_seconds=0.1, warmup_steps=5)
    record = done_alone(
        tmp_path, config, partial(profile_alone, traces=[tmp_path / "t.json.gz"]), role="profile", plan=plan
    )
    assert (record.status, record.windows) == ("ok", ())
    record = RunRecord.from_dict(json.loads(json.dumps(record.as_dict())))
    assert record.profile is not None
    budget = record.profile["budget"]
    (rank,) = budget["ranks"]
    assert budget["state"]["rss_bytes"] <= record.ranks[0].peak_rss_bytes
    running, profiled = rank["unsynchronised"], rank["profiled"]
    # the trace saw the same phases; a step's sleeps and busy loops take as long under the profiler
    assert set(profiled["phases"]) == set(running["phases"])
    for phase in ("forward", "backward"):
        shares = (values["phases"][phase] / values["step_seconds"] for values in (running, profiled))
        assert next(shares) == pytest.approx(next(shares), abs=0.05)


Array = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]


def features(weights: str, images: Pixels) -> Array:
    """Pooled features (N, 2048) by torch-fidelity itself, without torchmetrics."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3  # noqa: PLC0415

    network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=weights)
    (found,) = network(torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2))
    return np.asarray(found, dtype=np.float64)


def closed_formula(one: Array, two: Array) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)); the last trace is the sum of the singular values of X1 X2^T."""
    spread = [(x - x.mean(0)) / np.sqrt(len(x) - 1) for x in (one, two)]
    squares = sum(float((x**2).sum()) for x in spread)
    cross = float(np.linalg.svd(spread[0] @ spread[1].T, compute_uv=False).sum())
    return float(((one.mean(0) - two.mean(0)) ** 2).sum()) + squares - 2 * cross


@pytest.fixture
def pictures(tmp_path: Path) -> RunConfig:
    """As many training images as are drawn, and a few that are held out."""
    rng = np.random.default_rng(0)
    for folder, count in (("train", PICTURES), ("held-out", 3)):
        (tmp_path / folder).mkdir()
        for n in range(count):
            coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((32, 32)).save(tmp_path / folder / f"{n}.png")
    manifest = prepare(tmp_path / "train", tmp_path / "prepared", held_out=tmp_path / "held-out")
    assert manifest.train_count == PICTURES
    return RunConfig(data=str(tmp_path / "prepared"), data_sha256=manifest.content_hash, global_batch_size=8)


@pytest.mark.slow
def test_a_trials_fid_is_the_closed_formula(
    pictures: RunConfig, inception: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, call = list[Pixels](), Group.call

    def looked_at(group: Group, name: str, *limits: float, **asked: Any) -> Any:
        seen.extend([np.load(asked["generated"])] if name == "distance" else [])
        return call(group, name, *limits, **asked)

    monkeypatch.setattr(Group, "call", looked_at)
    optimizer, options = OptimizerConfig(ema_every=1), (("images", 16), ("draws", 10))
    config = replace(pictures, purpose="quality", workload=TRAINING, optimizer=optimizer, options=options)
    fid = plan_fid(inception, PICTURES, None)
    record = done_alone(tmp_path / "cache", config, partial(train_once, fid=fid))
    assert record.status == "ok", record.reason
    found = fid_of([record])
    assert found is not None
    assert "reason" not in found
    packed = open_packed(Path(pictures.data))
    (drawn,), real = seen, packed.images[packed.train_indices]
    expected = closed_formula(features(inception, drawn), features(inception, real))
    assert found["fid"] == pytest.approx(expected, rel=1e-3)
    assert expected > 1
    assert (found["images"], found["training_images"]) == (PICTURES, PICTURES)
    assert found["inception_sha256"] == hashlib.sha256(Path(inception).read_bytes()).hexdigest()


# What it needs


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("no_such_package_anywhere",))
    with pytest.raises(ConfigError, match=r"no_such_package_anywhere.*make fid"):
        plan_fid(str(tmp_path), 2, None)


@pytest.mark.slow
def test_only_torch_fidelitys_inception_is_taken(inception: str, tmp_path: Path) -> None:
    content = Path(inception).read_bytes()
    assert plan_fid(inception, 2, None).sha256 == hashlib.sha256(content).hexdigest()
    state = torch.load(inception, weights_only=True)
    state.pop("Mixed_7c.branch1x1.conv.weight")
    for name, bad in {
        "cut": content[:1_000_000],
        "tensor": torch.zeros(3),
        "missing": state,
        "malicious": {**state, "harm": Payload(Path.write_text, tmp_path / "harm", "ran")},
    }.items():
        file = tmp_path / name
        torch.save(bad, file)
        if isinstance(bad, bytes):
            file.write_bytes(bad)
        with pytest.raises(ConfigError, match="does not hold the weights"):
            plan_fid(str(file), 2, None)
    assert not (tmp_path / "harm").exists()

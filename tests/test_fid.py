"""What a FID needs is checked beforehand; a trial's is the closed formula on features computed apart."""

import hashlib
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import Call, done_alone
from fresh_processes import context
from PIL import Image
from test_archives import Payload

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.data.packed import open_packed, prepare
from ddpm_lab.measure.alone import MOST_IMAGES, train_once
from ddpm_lab.questions import trained
from ddpm_lab.training import fid as module
from ddpm_lab.training.fid import Fid, plan_fid

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
def data(tmp_path: Path) -> RunConfig:
    """As many training images as a trial keeps of those it draws, and a few that are held out."""
    rng = np.random.default_rng(0)
    for folder, count in (("train", MOST_IMAGES), ("held-out", 3)):
        (tmp_path / folder).mkdir()
        for n in range(count):
            coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((32, 32)).save(tmp_path / folder / f"{n}.png")
    manifest = prepare(tmp_path / "train", tmp_path / "prepared", held_out=tmp_path / "held-out")
    assert manifest.train_count == MOST_IMAGES
    return RunConfig(data=str(tmp_path / "prepared"), data_sha256=manifest.content_hash, global_batch_size=8)


@pytest.mark.slow
def test_a_trials_fid_is_the_closed_formula(data: RunConfig, inception: str, tmp_path: Path) -> None:
    optimizer, options = OptimizerConfig(ema_every=1), (("images", 16), ("draws", 10))
    config = replace(data, purpose="quality", workload=TRAINING, optimizer=optimizer, options=options)
    fid = plan_fid(inception, MOST_IMAGES, None)
    record = done_alone(tmp_path / "cache", config, partial(train_once, draw=True, fid=fid))
    assert record.status == "ok", record.reason
    found = trained.fid_of([record])
    assert found is not None
    assert "reason" not in found
    packed = open_packed(Path(data.data))
    drawn, real = trained.pixels(record), packed.images[packed.train_indices]
    expected = closed_formula(features(inception, drawn), features(inception, real))
    assert found["fid"] == pytest.approx(expected, rel=1e-3)
    assert expected > 1
    assert (found["images"], found["training_images"]) == (MOST_IMAGES, MOST_IMAGES)
    assert found["inception_sha256"] == hashlib.sha256(Path(inception).read_bytes()).hexdigest()


@pytest.mark.slow
def test_what_is_kept_of_the_training_images_is_what_was_found(data: RunConfig, inception: str, tmp_path: Path) -> None:
    options = {"inception": inception, "sha256": hashlib.sha256(Path(inception).read_bytes()).hexdigest()}
    config = replace(data, options=tuple(options.items()))
    np.save(tmp_path / "generated.npy", np.zeros((2, 32, 32, 3), dtype=np.uint8))
    sums = []
    for kept in (False, True, False):
        seen: list[str] = []
        fid = Fid(config, context(mark=seen.append))
        fid.metric.compute = lambda: torch.tensor(0.0)  # takes longest, and is tested above
        fid.distance(generated=str(tmp_path / "generated.npy"), count=2, cache=str(tmp_path / "cache"))
        assert ("training images" not in seen) == kept
        if kept:
            next((tmp_path / "cache").iterdir()).write_bytes(b"torn")
        sums.append([getattr(fid.metric, name) for name in module._SUMS])
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*sums, strict=True))


# What it needs


def test_missing_packages_and_files_are_named(monkeypatch: pytest.MonkeyPatch, call: Call, tmp_path: Path) -> None:
    if all(map(find_spec, module.PACKAGES)):
        asked = ("--preset", "smoke", "--inception", tmp_path / "weights.pth", "--output-dir", tmp_path / "out")
        code, out, err = call("run", "quality", *asked)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert f"inception is '{tmp_path}/weights.pth'" in err
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

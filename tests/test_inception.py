"""What a FID needs is looked at before anything starts; which trials draw; a FID changes nothing that is trained."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Call

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.plan import Trial
from ddpm_lab.questions.quality import quality
from ddpm_lab.questions.workers import workers
from ddpm_lab.training import inception
from ddpm_lab.training.inception import inception_sha256, plan_fid
from ddpm_lab.training.setting import Images, Setup

RAN = "ran"


class Malicious:
    """A pickle that runs code when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, RAN))


def test_missing_packages_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inception, "PACKAGES", ("no_such_package_anywhere",))
    with pytest.raises(ConfigError, match=r"needs no_such_package_anywhere, which is not installed: make fid"):
        inception_sha256(str(tmp_path))


@pytest.mark.skipif(
    not all(map(find_spec, inception.PACKAGES)), reason="torchmetrics or torch-fidelity is not installed: make fid"
)
@pytest.mark.parametrize(
    "arguments",
    [
        "run quality --preset smoke --data {}/none --inception {}/weights.pth --output-dir {}/out",
        "sample {}/none.pt --count 9 --data synthetic --inception {}/weights.pth",
    ],
)
def test_a_missing_file_is_refused_before_anything_else(call: Call, tmp_path: Path, arguments: str) -> None:
    code, out, err = call(*arguments.replace("{}", str(tmp_path)).split())
    assert (code, out) == (2, "")
    assert f"inception is '{tmp_path}/weights.pth': there is no such file; give" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_only_torch_fidelitys_inception_is_taken(inception: str, tmp_path: Path) -> None:
    good = Path(inception)
    assert inception_sha256(inception) == plan_fid(inception, 2, None).sha256
    files = {name: tmp_path / f"{name}.pth" for name in ("text", "cut", "other", "tensor", "missing", "malicious")}
    files["text"].write_text("no tensors")
    files["cut"].write_bytes(good.read_bytes()[:1_000_000])
    torch.save({"fc.weight": torch.zeros(3)}, files["other"])
    torch.save(torch.zeros(3), files["tensor"])
    state = torch.load(good, weights_only=True)
    state.pop("Mixed_7c.branch1x1.conv.weight")
    torch.save(state, files["missing"])
    torch.save({**state, "harm": Malicious(tmp_path / "harm")}, files["malicious"])
    for file in files.values():
        with pytest.raises(ConfigError, match="does not hold the weights of torch-fidelity's Inception: give its file"):
            inception_sha256(str(file))
    assert not (tmp_path / "harm").exists()


@pytest.fixture
def setup(synthetic: RunConfig) -> Setup:
    images = Images(folder=synthetic.data, sha256=synthetic.data_sha256, name="synthetic images")
    return Setup(preset="smoke", network="tiny", images=images, device="cpu", gpus=0, usable_cores=2, seed=5)


def drawing(trials: tuple[Trial, ...]) -> list[tuple[str, int]]:
    return [(t.label, t.config.seed) for t in trials if t.draw]


def test_the_first_seed_of_each_configuration_draws(setup: Setup) -> None:
    trials = quality(setup, seeds=3).trials
    assert drawing(trials) == [("fp32", 5), ("bf16", 5), ("2 micro-batches", 5)]
    assert not any(t.fid for t in trials)
    assert drawing(workers(setup).trials) == [], "whose trials show that the weights are identical"


@pytest.mark.slow
def test_a_fid_is_asked_of_what_draws_and_changes_no_run(setup: Setup, inception: str) -> None:
    plain = quality(setup, seeds=2).trials
    asked = quality(setup, seeds=2, inception=inception).trials
    assert [t.config.run_id for t in asked] == [t.config.run_id for t in plain]
    assert [t.fid is not None for t in asked] == [t.draw for t in plain]
    assert {t.fid.images for t in asked if t.fid} == {64}
    count = read_manifest(Path(setup.images.folder)).train_count
    full = quality(replace(setup, preset="full"), seeds=1, inception=inception).trials[0].fid
    assert full is not None
    assert full.images == count, "no more than there are to train on"
    with pytest.raises(ConfigError, match=f"the data has {count:,}: give at most that"):
        quality(setup, inception=inception, fid_images=count + 1)

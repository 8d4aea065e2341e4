"""The commands train and sample: their options, what they refuse, and one walk through both as a user would."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Call
from PIL import Image

from ddpm_lab.training import training_run
from ddpm_lab.training.run_folder import RunFailed
from ddpm_lab.training.stopping import Stopped
from ddpm_lab.training.training_run import Outcome


def test_how_a_run_ends_is_its_exit_code(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[Any, int, str]] = [
        (RunFailed("the loss is no longer finite at step 7"), 1, "ddpm-lab: the loss is no longer finite at step 7"),
        (Stopped(15), 143, "ddpm-lab: SIGTERM, stopped at once"),
        (Stopped(2), 130, "ddpm-lab: SIGINT, stopped at once"),
        (Outcome(step=5, checkpoint=tmp_path / "a.pt", loss=0.25), 143, "SIGTERM, saved after step 5"),
    ]
    for end, code, last in ends:

        def train(*_: object, stop: Any, end: Any = end, **__: object) -> Outcome:
            if isinstance(end, BaseException):
                raise end
            stop.number = 15
            assert isinstance(end, Outcome)
            return end

        monkeypatch.setattr(training_run, "train", train)
        found, out, err = call("train", "--data", data, "--image-size", 8, "--steps", 9, "--output-dir", tmp_path)
        assert (found, out) == (code, "")
        assert err.splitlines()[-1].startswith(last)


@pytest.mark.slow
def test_train_go_on_and_sample(call: Call, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = tmp_path / "settings.toml"
    settings.write_text("seed = 2\n[train]\nsave_every = 2\nsample_every = 4\nevaluate_every = 4\nkeep = 2\n")
    common = ("--data", data, "--image-size", 8, "--batch-size", 8, "--config", settings, "--output-dir", folder)
    code, out, err = call("train", *common, "--steps", 4)
    assert code == 0, err
    assert out == f"{folder}/checkpoints/step-00000004.pt\n"
    assert any("step 4 of 4, loss 0." in line for line in err.splitlines())
    code, out, err = call("train", "--config", folder / "config.toml", "--output-dir", folder, "--steps", 6)
    assert code == 0, err
    assert "train: goes on after step 4 of 6, from" in err
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [(r["step"], "held_out_loss" in r) for r in rows] == [(n, n in (4, 6)) for n in range(1, 7)]
    assert sorted(p.name for p in (folder / "samples").iterdir()) == ["step-00000004.png", "step-00000006.png"]
    checkpoint = folder / "checkpoints" / "step-00000006.pt"
    code, out, err = call("sample", checkpoint, "--count", 36, "--steps", 50, "--seed", 2, "--grid")
    assert code == 0, err
    assert out == f"{folder}/checkpoints/step-00000006/grid.png\n"
    assert "sample: made 36 images" in err
    # The grid that training drew is of the same images, but for its number format.
    mine, theirs = (np.asarray(Image.open(p), dtype=int) for p in (out.strip(), folder / "samples/step-00000006.png"))
    assert mine.shape == theirs.shape
    assert np.mean(abs(mine - theirs)) < 3
    code, _, err = call("sample", checkpoint, "--count", 36, "--steps", 50, "--seed", 2)
    assert (code, err) == (0, "sample: all 36 images are there\n")

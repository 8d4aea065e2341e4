"""Drawn images and FIDs: every pixel as it was, in the same columns, and only from the same noise."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import records as make
from cells import column
from matplotlib.text import Text
from PIL import Image

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import charts
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions import trained
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.quality import samples_figure

SETTINGS = {"bf16": (RunConfig(precision="bf16"), 1.6, 0.0), "batch 64": (RunConfig(global_batch_size=64), 1.2, 0.05)}
Pixels = np.ndarray[Any, Any]


def images(label: str, side: int = 32) -> Pixels:
    rng = np.random.default_rng(sum(label.encode()))
    return rng.integers(0, 255, (16, side, side, 3), dtype=np.uint8)


def studied(side: int = 32, **values: Any) -> Study:
    speeds = make.sets({name: (config, ratio) for name, (config, ratio, _) in SETTINGS.items()}, experiment="quality")
    trials = make.trials({name: (config, harm) for name, (config, _, harm) in SETTINGS.items()})
    found = [r if r.config.seed else make.drew(r, images(r.label, side), **values) for r in trials]
    return replace(make.study(speeds, "quality"), trials=tuple(found))


def rendered(study: Study) -> tuple[Pixels, list[str]]:
    figure = samples_figure(study)
    assert figure is not None
    pixels = np.asarray(Image.open(io.BytesIO(charts.png(figure))).convert("RGB"))
    return pixels, [" ".join(t.get_text().split()) for t in figure.findobj(Text) if isinstance(t, Text)]


def rows_of(pixels: Pixels, label: str, times: int, side: int = 32) -> list[tuple[int, int]]:
    """Where the first image of a configuration stands in the picture, magnified: (top, left)."""
    tile = images(label, side)[0].repeat(times, axis=0).repeat(times, axis=1)
    places = zip(*(found.tolist() for found in np.nonzero((pixels == tile[0, 0]).all(-1))), strict=True)
    size = side * times
    return [(t, x) for t, x in places if np.array_equal(pixels[t : t + size, x : x + size], tile)]


@pytest.mark.parametrize(("side", "times"), [(32, 2), (16, 4)])
def test_every_pixel_is_there_magnified_beside_its_loss_verdict_and_fid(side: int, times: int) -> None:
    study = studied(side, fid=123.4)
    pixels, texts = rendered(study)
    (first,), (second,), (third,) = (rows_of(pixels, label, times, side) for label in ("fp32", *SETTINGS))
    assert first[1] == second[1] == third[1], "one noise, one column"
    assert first[0] < second[0] < third[0], "the baseline comes first"
    losses = {r.label: r.quality["held_out"][-1]["loss"] for r in study.trials if r.quality and not r.config.seed}
    for label, verdict in (("fp32", "baseline"), ("bf16", "not worse"), ("batch 64", "worse")):
        assert f"{label}: {verdict}, held-out loss {losses[label]:.4f}, FID 123.4 (2,500 images)" in texts
    assert column(answer(study).table(), "FID") == ["123.4 (2,500 images)"] * 3
    assert "FID" not in answer(studied()).table()[0]


def test_only_what_came_from_the_same_noise_stands_beside_it() -> None:
    of = studied()
    other = [make.drew(r, images("a"), steps=25) if (r.label, r.config.seed) == ("bf16", 0) else r for r in of.trials]
    pixels, texts = rendered(replace(of, trials=tuple(other)))
    assert not any(t.startswith("bf16: ") for t in texts)
    assert rows_of(pixels, "bf16", 2) == []
    late = [r if r.label != "fp32" else replace(r, quality={**(r.quality or {}), "samples": {}}) for r in of.trials]
    assert samples_figure(replace(of, trials=tuple(late))) is None, "the baseline drew nothing"


def test_a_fid_is_never_without_its_count_and_what_is_wrong_with_it_is_told() -> None:
    trial = make.trials({}, seeds=1)[0]
    assert trained.fid_of([trial]) is None
    found = trained.fid_of([trial, make.drew(trial, images("a"), fid=123.456)])
    assert found is not None
    few = {**found, "fid": 1.234, "images": 2_048}
    failed = {**{k: v for k, v in found.items() if k != "fid"}, "reason": "rank 0 was killed by SIGKILL"}
    told = [trained.fid_words(one) for one in (found, few, failed)]
    assert told == ["123.5 (2,500 images)", "1.23 (2,048 images, too few)", "failed"]
    assert ["singular" in trained.fid_method([("bf16", one)]) for one in (few, found)] == [True, False]
    assert "bf16 failed (rank 0 was killed by SIGKILL)" in trained.fid_method([("bf16", failed)])
    assert trained.drawn(replace(trial, quality=None)) == {}
    no_png = {**trained.drawn(trial), "png": "bm8gUE5H"}
    assert trained.drawn(replace(trial, quality={**(trial.quality or {}), "samples": no_png})) == {}, "no image"

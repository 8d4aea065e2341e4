"""Drawn images and FIDs: every pixel as it was, in the same columns, and only from the same noise."""

from __future__ import annotations

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
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.frames import Study
from ddpm_lab.questions import trained
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.quality import samples_figure
from ddpm_lab.record import RunRecord

BF16, LARGE = RunConfig(precision="bf16"), RunConfig(global_batch_size=64)
Pixels = np.ndarray[Any, Any]


def drawing(of: RunRecord, count: int = 16, side: int = 32, **values: Any) -> RunRecord:
    return make.drew(of, images(of.label, count, side), **values)


def images(label: str, count: int = 16, side: int = 32) -> Pixels:
    seed = sum(label.encode())
    return np.random.default_rng(seed).integers(0, 255, (count, side, side, 3), dtype=np.uint8)


def studied(**values: Any) -> Study:
    speeds = make.sets({"bf16": (BF16, 1.6), "batch 64": (LARGE, 1.2)}, experiment="quality")
    trials = make.trials({"bf16": (BF16, 0.0), "batch 64": (LARGE, 0.05)})
    found = [drawing(r, **values) if r.config.seed == 0 else r for r in trials]
    return replace(make.study(speeds, "quality"), trials=tuple(found))


def rendered(study: Study) -> tuple[Pixels, list[str]]:
    figure = samples_figure(study)
    assert figure is not None
    pixels = np.asarray(Image.open(io.BytesIO(style.png(figure))).convert("RGB"))
    return pixels, [t.get_text() for t in figure.findobj(Text) if isinstance(t, Text)]


def rows_of(pixels: Pixels, label: str, times: int, side: int = 32) -> list[tuple[int, int]]:
    """Where the first image of a configuration stands in the picture, magnified: (top, left)."""
    tile = images(label, side=side)[0].repeat(times, axis=0).repeat(times, axis=1)
    tops, lefts = np.nonzero((pixels == tile[0, 0]).all(-1))
    height = width = side * times
    places = zip(tops.tolist(), lefts.tolist(), strict=True)
    return [(t, x) for t, x in places if np.array_equal(pixels[t : t + height, x : x + width], tile)]


@pytest.mark.parametrize(("side", "times"), [(32, 2), (16, 4)])
def test_every_pixel_is_there_magnified_beside_its_loss_verdict_and_fid(side: int, times: int) -> None:
    study = studied(side=side, fid=123.4)
    pixels, texts = rendered(study)
    (first,), (second,), (third,) = (rows_of(pixels, label, times, side) for label in ("fp32", "bf16", "batch 64"))
    assert first[1] == second[1] == third[1], "one noise, one column"
    assert first[0] < second[0] < third[0], "the baseline comes first"
    losses = {r.label: r.quality["held_out"][-1]["loss"] for r in study.trials if r.quality and not r.config.seed}
    told = [" ".join(t.split()) for t in texts]
    for label, verdict in (("fp32", "baseline"), ("bf16", "not worse"), ("batch 64", "worse")):
        assert f"{label}: {verdict}, held-out loss {losses[label]:.4f}, FID 123.4 (2,500 images)" in told


def test_only_what_came_from_the_same_noise_stands_beside_it() -> None:
    of = studied()
    other = [drawing(r, steps=25) if r.label == "bf16" and r.config.seed == 0 else r for r in of.trials]
    pixels, texts = rendered(replace(of, trials=tuple(other)))
    assert not any(t.startswith("bf16: ") for t in texts)
    assert rows_of(pixels, "bf16", 2) == []
    late = [replace(r, quality={k: v for k, v in (r.quality or {}).items() if k != "samples"}) for r in of.trials]
    drawn_later = [drawing(r) if r.label == "bf16" and r.config.seed == 3 else r for r in late]
    assert samples_figure(replace(of, trials=tuple(drawn_later))) is None, "the baseline drew nothing"
    assert samples_figure(replace(of, trials=())) is None


def test_the_table_has_fids_where_there_are_any_and_the_verdict_stays() -> None:
    plain, measured = answer(studied()).table(), answer(studied(fid=123.4)).table()
    assert "FID" not in plain[0]
    assert column(measured, "FID") == ["123.4 (2,500 images)"] * 3
    assert column(measured, "Quality") == column(plain, "Quality")


def test_a_fid_is_never_without_its_count_and_what_is_wrong_with_it_is_told() -> None:
    trial = make.trials({}, seeds=1)[0]
    assert trained.fid_of([trial]) is None
    found = trained.fid_of([trial, make.drew(trial, images("a"), fid=123.456)])
    assert found is not None
    assert trained.fid_words(found) == "123.5 (2,500 images)"
    few = {**found, "fid": 1.234, "images": 2_048}
    assert trained.fid_words(few) == "1.23 (2,048 images, too few)"
    assert ["singular" in trained.fid_method([("bf16", one)]) for one in (few, found)] == [True, False]
    failed = {**{k: v for k, v in found.items() if k != "fid"}, "reason": "rank 0 was killed by SIGKILL"}
    assert trained.fid_words(failed) == "failed"
    assert "bf16 failed (rank 0 was killed by SIGKILL)" in trained.fid_method([("bf16", failed)])
    assert trained.drawn(replace(trial, quality=None)) == {}

"""Drawn images and FIDs out of records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import records as make

from ddpm_lab.explain import samples

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
TRIAL = make.trials({}, seeds=1)[0]


def test_images_come_back_to_the_last_bit() -> None:
    assert (samples.pixels(make.drew(TRIAL, IMAGES)) == IMAGES).all()
    assert samples.drawn(TRIAL) == {}
    assert samples.drawn(replace(TRIAL, quality=None)) == {}


def test_a_fid_is_never_without_its_count_and_few_images_are_told() -> None:
    found = samples.fid([TRIAL, make.drew(TRIAL, IMAGES, fid=123.456)])
    assert found is not None
    assert samples.fid_words(found) == "123.5 (2,500 images)"
    few = {**found, "fid": 1.234, "images": 2_048}
    assert samples.fid_words(few) == "1.23 (2,048 images, too few)"
    assert "covariance is singular" in samples.fid_sentence([("bf16", few)])
    assert "singular" not in samples.fid_sentence([("bf16", found)])
    assert samples.fid_sentence([("bf16", found)]).startswith("bf16 123.5 (2,500 images); each against as many")


def test_what_is_missing_is_told() -> None:
    assert samples.fid([TRIAL]) is None
    assert samples.fid_sentence([]) == "not measured: give --inception FILE"
    told = {"images": 2_500, "steps": 50, "inception_sha256": "ab" * 32, "reason": "rank 0 was killed by SIGKILL"}
    failed = samples.fid([replace(TRIAL, quality={**(TRIAL.quality or {}), "fid": told})])
    assert failed is not None
    assert samples.fid_words(failed) == "failed"
    assert "bf16 failed (rank 0 was killed by SIGKILL)" in samples.fid_sentence([("bf16", failed)])

"""One trial: a group trains for the weights from one seed, and is asked on the way what it has learned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from ddpm_lab.measure.fid import distance
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.seat import Seat
from ddpm_lab.plan import Fid, Trial

LOOKS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Shares of the images after which the held-out loss is computed; the margin of a comparison needs the last two."""
CHUNK = 50
"""Steps between two signs of life."""
SAMPLER_STEPS = 50
"""Steps of DDIM in which a trial draws."""
MOST_IMAGES, MOST_BYTES = 16, 2**18
"""What a record keeps of the images that its trial drew: so many, or fewer where their pixels take more bytes."""


def work_of(trial: Trial) -> Callable[[Seat], dict[str, Any]]:
    """What a trial's group does."""
    return partial(train_once, draw=trial.draw, fid=trial.fid)


def train_once(seat: Seat, *, draw: bool = False, fid: Fid | None = None) -> dict[str, Any]:
    """Train on ``images`` images (an option of the configuration) and compute the held-out loss with ``draws`` draws.

    Returns the record's ``quality``: the mean loss of every step over ranks, the held-out losses with the images and
    steps they came after, and the hash of the final weights; with ``draw`` the images that the averaged weights draw,
    and with ``fid`` the FID of many. The stage ``training`` counts the looks too. Raises GroupFailed where a loss is no
    longer finite, or ranks of one group end with different weights.
    """
    config = seat.config
    steps = max(1, config.option("images", 0) // config.global_batch_size)
    draws = config.option("draws", 0)
    limit = seat.instrument.limits.build_seconds
    say = seat.instrument.progress
    seat.start()
    group = seat.alive
    looks = sorted({round(share * steps) for share in LOOKS}) if draws else [0, steps]
    losses: list[float] = []
    held_out: list[dict[str, Any]] = []

    def look(step: int) -> None:
        if draws:
            answer = group.call("held_out_loss", limit, draws=draws)[0]
            held_out.append({"images": step * config.global_batch_size, **answer})
            if not math.isfinite(answer["loss"]):
                raise GroupFailed("diverged", f"the held-out loss is no longer finite after step {step}")

    begun = time.monotonic()
    look(0)
    for before, after in pairwise(looks):
        for start in range(before, after, CHUNK):
            ranks = group.advance(min(CHUNK, after - start), limit)
            losses += [sum(each) / len(ranks) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
            if not all(math.isfinite(loss) for loss in losses[start:]):
                raise GroupFailed("diverged", f"the training loss is no longer finite after step {len(losses)}")
            say(f"{seat.member.label}: seed {config.seed}, step {len(losses)} of {steps}")
        look(after)
    seat.stages["training"] = time.monotonic() - begun
    seat.hear_witness()
    hashes = group.call("weights_sha256", limit)
    if len(set(hashes)) > 1 and config.exchange.enabled:
        raise GroupFailed("refused", f"{len(hashes)} ranks ended with {len(set(hashes))} different sets of weights")
    return {
        "quality": {
            "steps": steps,
            "losses": [round(loss, 6) for loss in losses],
            "held_out": held_out,
            "weights_sha256": hashes[0],
            **(_samples(seat) if draw else {}),
            **(_fid(seat, fid) if fid else {}),
        }
    }


def _samples(seat: Seat) -> dict[str, Any]:
    """The first images of the averaged weights: those of equal seeds come from the same noise."""
    count = min(MOST_IMAGES, MOST_BYTES // (3 * seat.config.image_size**2))
    if not count:
        return {}
    seat.instrument.progress(f"{seat.member.label}: drawing {count} images")
    limit, steps = seat.instrument.limits.build_seconds, _steps(seat)
    png = seat.alive.call("draw_png", limit, count=count, steps=steps)[0]
    return {"samples": {"png": png, "images": count, "seed": seat.config.seed, "sampler": "ddim", "steps": steps}}


def _fid(seat: Seat, fid: Fid) -> dict[str, Any]:
    """The FID of a trial's images; where it fails the trial stands, and says why there is none."""
    config, instrument = seat.config, seat.instrument
    generated, steps = seat.alive.folder / "generated.npy", _steps(seat)
    asked = {"images": fid.images, "inception_sha256": fid.sha256, "sampler": "ddim", "steps": steps}
    instrument.progress(f"{seat.member.label}: drawing {fid.images:,} images for the FID")
    seat.alive.call("draw_pixels", instrument.limits.build_seconds, path=str(generated), count=fid.images, steps=steps)
    try:
        found = distance(
            fid,
            generated,
            data=config.data,
            device=config.device,
            threads=instrument.usable_cores,
            cache=instrument.cache / "fid",
            start_method=instrument.start_method,
            progress=lambda text: instrument.progress(f"{seat.member.label}: FID, {text}"),
        )
    except GroupFailed as failed:
        found = {"reason": failed.reason}
    return {"fid": {**asked, **found}}


def _steps(seat: Seat) -> int:
    return min(SAMPLER_STEPS, seat.config.diffusion.timesteps)

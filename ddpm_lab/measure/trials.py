"""Trials: gradient checks before them, which the ledger lacks, as many as the time allows, and how one is made."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from ddpm_lab.measure.fid import distance
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.held import Held
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Seat
from ddpm_lab.plan import NOT_TRAINED, Fid, Trial

TRIAL_SECONDS, COMPILE_SECONDS = 30.0, 60.0
"""Forecast for a trial, and for its compiling, until something like it has shown better."""


class Trials:
    """The trials of an experiment, in the order in which they are made."""

    def __init__(self, trials: Sequence[Trial], held: Held) -> None:
        self._trials, self._held = trials, held

    def of(self, timed: set[str]) -> list[Trial]:
        """Those of configurations that are timed under these run ids: what has no speed is not trained either."""
        return [t for t in self._trials if t.timed is None or t.timed.run_id in timed]

    def missing(self, trials: Sequence[Trial] | None = None) -> list[Trial]:
        """Those of ``trials``, or of all, that are still to be made: neither here, nor known to fail or to be wrong."""
        return [t for t in self._lacking(trials) if not self._unsound(t)]

    def unsound(self, trials: Sequence[Trial]) -> list[tuple[Trial, str]]:
        """The first that is missing of each configuration whose gradient check failed, with a sentence that says so."""
        first = {(t.family, t.label): (t, why) for t in reversed(self._lacking(trials)) if (why := self._unsound(t))}
        return [(t, f"{NOT_TRAINED}: its gradient check failed ({why})") for t, why in first.values()]

    def _lacking(self, trials: Sequence[Trial] | None) -> list[Trial]:
        held, lasting = self._held, self._held.lasting
        asked = (t for t in (self._trials if trials is None else trials) if t.config.run_id not in lasting)
        return [t for t in asked if not held.trained(t.config.run_id, t.fid)]

    def _unsound(self, trial: Trial) -> str:
        """Why a trial's gradients are wrong; empty where they are not, or where its baseline's are wrong too."""
        return "" if self._held.unsound(trial.baseline) else self._held.unsound(trial.config)

    def seconds(self, trials: Sequence[Trial]) -> float:
        """What ``trials`` will take."""
        seen = self._seen_so_far()
        usual = sum(seen) / len(seen) if seen else TRIAL_SECONDS
        return sum(usual if (known := self._known(t)) is None else known for t in trials)

    def run(
        self,
        trials: Sequence[Trial],
        progress: Progress,
        seconds_left: Callable[[], float | None],
        train: Callable[[Trial], object],
    ) -> Sequence[Trial]:
        """Make one after the other until the next cannot end in time; returns those that did not fit."""
        for i, trial in enumerate(trials):
            left, known = seconds_left(), self._known(trial)
            expected = max(self._seen_so_far(), default=0.0) / 2 if known is None else known
            if left is not None and left < expected:
                progress.prefix = ""
                progress.always(f"{len(trials) - i} trials did not fit into the time")
                return trials[i:]
            progress.prefix = f"trial {i + 1} of {len(trials)},"
            to_come = self.seconds(trials[i:])
            progress.expect(to_come if left is None else min(left, to_come))
            train(trial)
        return ()

    def _seen_so_far(self) -> list[float]:
        return [s for t in self._trials if (s := self._held.trial_seconds(t.config)) is not None]

    def _known(self, trial: Trial) -> float | None:
        """What a trial will take: as one with another seed, else its images at the speed that sets have shown."""
        if (seen := self._held.trial_seconds(trial.config)) is not None or trial.timed is None:
            return seen
        image = self._held.image_seconds(trial.timed.run_id)
        compiling = COMPILE_SECONDS if trial.config.compile != "off" else 0.0
        return None if image is None else image * trial.config.option("images", 0) + compiling


def short_of(trials: Sequence[Trial], left: Sequence[Trial]) -> list[tuple[Trial, str]]:
    """A sentence for each configuration of ``left``, with the first of its ``trials`` that is missing."""
    planned, lacking = (Counter((t.family, t.label) for t in some) for some in (trials, left))
    first = {(t.family, t.label): t for t in reversed(left)}
    return [
        (first[key], f"{count} of {planned[key]} runs for quality did not fit into the time that was given")
        for key, count in lacking.items()
    ]


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


WARM_STEPS = 10
"""Steps before the comparison. Some layers start at zero, and those before them have no gradient for three steps."""
STEPS = 3


def compare_gradients(seat: Seat) -> dict[str, Any]:
    """Train some steps as the seat's configuration says, and compare loss and gradient of the last ``STEPS`` with fp32.

    Its workload is ``config.CHECK``. Returns the record's ``quality``, with the answer of ``model.gradient_check``'s
    ``compare`` on the weights of rank 0. Raises GroupFailed where the group fails, or does not run what its label says.
    """
    limit = seat.instrument.limits.build_seconds
    seat.instrument.progress(f"{seat.member.label}: comparing loss and gradient with fp32")
    seat.start()
    seat.alive.advance(WARM_STEPS, limit)
    seat.hear_witness()
    answer = seat.alive.call("compare", limit, steps=STEPS)[0]
    return {"quality": {"gradients": answer}}

"""Everything random about the data of a training step, as a function of the seed and the global position.

Images are consumed as one global stream: position ``p`` is the p-th image of the run, batch ``s`` of size B is the
positions ``s B`` to ``(s + 1) B - 1``, and rank ``r`` of ``W`` takes the r-th of W equal, contiguous parts. Image,
flip, timestep and noise belong to the position, so they are the same whatever the number of ranks and the loader.

Seeds come from ``numpy.random.SeedSequence`` over (run seed, purpose, number): a hash, so that neighbouring seeds give
unrelated streams, where added ones would overlap.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

BLOCK_POSITIONS = 4096
CHUNK_SAMPLES = 8
Draws = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.bool_]]
_PERMUTATION, _FLIP, _NOISE = 1, 2, 3


def rank_share(global_batch_size: int, rank: int, world_size: int) -> range:
    """Positions within a global batch of one rank, of which the batch is a multiple (``RunConfig``)."""
    share = global_batch_size // world_size
    return range(rank * share, (rank + 1) * share)


class EpochStream:
    """The order in which images, ``train_indices``, are used: one permutation after another, without end.

    An epoch is a permutation of all the images, drawn from (seed, epoch). What does not fill a global batch opens the
    next one, so no image is dropped: after k epochs' worth of positions each image was used exactly k times, and at any
    other moment the counts of two images differ by at most one.
    """

    def __init__(self, train_indices: npt.NDArray[np.int64], seed: int, *, mirror: bool = True) -> None:
        self.train_indices = np.asarray(train_indices, dtype=np.int64)
        self.epoch_size = len(self.train_indices)
        self.mirror, self._seed = mirror, seed
        self._flip_key = np.random.SeedSequence([seed, _FLIP]).generate_state(1, np.uint64)[0]
        self._permutation = lru_cache(maxsize=2)(self._draw_permutation)

    def _draw_permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # Sorting raw 64-bit output: numpy guarantees that stream for ever, and not that of Generator.permutation.
        raw = np.random.PCG64(np.random.SeedSequence([self._seed, _PERMUTATION, epoch])).random_raw(self.epoch_size)
        return self.train_indices[np.argsort(raw, kind="stable")]

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Image indices at the global positions ``start`` to ``stop - 1``."""
        size = self.epoch_size
        parts = [
            self._permutation(epoch)[max(start - epoch * size, 0) : stop - epoch * size]
            for epoch in range(start // size, -(-stop // size))
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def flips(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Whether each position's image is mirrored: the top bit of SplitMix64 (Steele et al. 2014) of the position."""
        if not self.mirror:
            return np.zeros(stop - start, dtype=np.bool_)
        state = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._flip_key
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        heads: npt.NDArray[np.bool_] = (state ^ (state >> np.uint64(31))) >> np.uint64(63) == 1
        return heads


class Plan(NamedTuple):
    """Which part of which batches a loader gives: one rank's, endlessly."""

    stream: EpochStream
    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    start_step: int = 0

    def blocks(self) -> Iterator[Draws]:
        """Give, for many steps at once, the first step, image indices and whether to mirror them, both (k, n)."""
        size = self.global_batch_size
        share = rank_share(size, self.rank, self.world_size)
        steps = max(1, min(BLOCK_POSITIONS, self.stream.epoch_size) // size)
        for step in itertools.count(self.start_step, steps):
            start, stop = step * size, (step + steps) * size
            indices = self.stream.indices(start, stop).reshape(steps, size)[:, share.start : share.stop]
            flips = self.stream.flips(start, stop).reshape(steps, size)[:, share.start : share.stop]
            yield step, indices, flips

    def draws(self) -> Iterator[Draws]:
        """Give each step with its image indices and whether to mirror them, both (n,), without end."""
        for step, indices, flips in self.blocks():
            yield from zip(itertools.count(step), indices, flips, strict=False)


def noise_and_timesteps(
    seed: int,
    step: int,
    start: int,
    stop: int,
    *,
    global_batch_size: int,
    shape: Sequence[int],
    timesteps: int,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw noise and timesteps for the samples ``start`` to ``stop - 1`` of the global batch of one step.

    Noise is standard normal, float32 (stop - start, *shape) for a sample of ``shape`` (C, H, W); timesteps are uniform
    over 0 to ``timesteps`` - 1, int64 (stop - start,).

    On a CPU the batch is drawn in chunks of 8 samples, each with a seed of its own, so a rank draws little more than
    its share; on another device the whole global batch is drawn and cut, which costs less than many small kernels. In
    both, what a sample gets does not depend on how the batch is divided; between kinds of device it differs.
    """
    device = torch.device(device)
    chunk_samples = CHUNK_SAMPLES if device.type == "cpu" else global_batch_size
    first, last = start // chunk_samples, (stop - 1) // chunk_samples
    generator = torch.Generator(device)
    noise, t = [], []
    for chunk in range(first, last + 1):
        state = np.random.SeedSequence([seed, _NOISE, step, chunk]).generate_state(1, np.uint64)
        generator.manual_seed(int(state[0]))
        t.append(torch.randint(timesteps, (chunk_samples,), generator=generator, device=device))
        noise.append(torch.randn(chunk_samples, *shape, generator=generator, device=device))
    offset = first * chunk_samples
    part = slice(start - offset, stop - offset)
    return torch.cat(noise)[part], torch.cat(t)[part]

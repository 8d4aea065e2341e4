"""The order of the images and the noise of a step: functions of seed and position, whatever the number of ranks."""

import itertools
from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.data.draws import CHUNK_SAMPLES, EpochStream, Plan, noise_and_timesteps


def test_the_order_is_fixed_for_ever() -> None:
    """Records of runs years apart stay comparable, and a resumed run goes on where it stopped."""
    stream = EpochStream(np.arange(10), seed=0)
    assert stream.indices(0, 14).tolist() == [7, 4, 5, 1, 9, 8, 6, 2, 0, 3, 2, 1, 4, 7]
    assert stream.flips(0, 14).astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    raw = np.random.PCG64(np.random.SeedSequence([3, 1, 1])).random_raw(20_000)  # seed, purpose, epoch
    order = EpochStream(np.arange(20_000), seed=3).indices(20_000, 40_000)
    assert np.array_equal(order, np.argsort(raw, kind="stable"))


@given(st.integers(1, 50), st.integers(0, 2**63), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_epochs_are_permutations_and_nothing_is_dropped(
    images: int, seed: int, epochs: int, world_size: int, share: int
) -> None:
    ids = np.arange(images) * 7 + 5
    stream = EpochStream(ids, seed)
    size = share * world_size
    steps = epochs * images // size
    plans = [Plan(stream=stream, global_batch_size=size, rank=r, world_size=world_size) for r in range(world_size)]
    drawn = zip(range(steps), *(plan.draws() for plan in plans), strict=False)
    order = np.concatenate([np.empty(0, int), *(indices for _, *ranks in drawn for _, indices, _ in ranks)])
    assert np.array_equal(order, stream.indices(0, steps * size))  # whatever the world size
    for epoch in range(len(order) // images):
        assert sorted(order[epoch * images : (epoch + 1) * images]) == list(ids)
    counts = Counter({int(i): 0 for i in ids}) + Counter(order.tolist())
    whole, rest = divmod(len(order), images)
    assert all(counts[i] in ({whole, whole + 1} if rest else {whole}) for i in ids.tolist())


def test_flips_are_fair_and_independent_coins() -> None:
    flips = np.stack([EpochStream(np.arange(5), seed).flips(0, 40_000) for seed in (0, 1)]).astype(float)
    assert np.abs(flips.mean(axis=1) - 0.5).max() < 0.0125  # five standard deviations
    assert abs(np.corrcoef(flips)[0, 1]) < 0.025
    assert abs(np.corrcoef(flips[0, 1:], flips[0, :-1])[0, 1]) < 0.025


def draw(step: int, start: int, stop: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return noise_and_timesteps(seed, step, start, stop, global_batch_size=size, shape=(3, 4, 4), timesteps=1000)


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 40), st.data())
def test_noise_and_timesteps_do_not_depend_on_the_partition(
    seed: int, step: int, size: int, data: st.DataObject
) -> None:
    noise, t = draw(step, 0, size, size, seed)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    parts = [draw(step, start, stop, size, seed) for start, stop in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat([part[0] for part in parts]), noise)
    assert torch.equal(torch.cat([part[1] for part in parts]), t)


def test_noise_is_normal_and_timesteps_are_uniform() -> None:
    noise, t = draw(0, 0, 4_000, 4_000)
    values = noise.double().flatten()
    count = len(values)
    assert abs(values.mean()) < 5 / count**0.5
    assert abs(values.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / count) ** 0.5
    assert (noise.dtype, t.dtype) == (torch.float32, torch.int64)
    assert 0 <= t.min() < 10
    assert 990 <= t.max() < 1000
    counts = torch.bincount(t // 100, minlength=10).double()
    assert ((counts - 400) ** 2 / 400).sum() < 40  # chi-square with 9 degrees of freedom
    across_chunks = np.corrcoef(noise[:-CHUNK_SAMPLES].flatten(), noise[CHUNK_SAMPLES:].flatten())[0, 1]
    assert abs(across_chunks) < 5 / count**0.5

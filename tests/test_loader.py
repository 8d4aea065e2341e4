"""The order of the data, the two loaders that follow it, and the noise that belongs to it."""

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import ddpm_lab
from ddpm_lab.data.draws import CHUNK_SAMPLES, EpochStream, _stable_order, noise_and_timesteps, rank_share
from ddpm_lab.data.folder import DataError, ImageError
from ddpm_lab.data.loader import FileLoader, Loader, PackedLoader, Plan
from ddpm_lab.data.packed import PackedImages, open_packed, prepare
from ddpm_lab.data.synthetic import generate

CHECKOUT = Path(ddpm_lab.__file__).parent.parent


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedImages:
    folder = tmp_path_factory.mktemp("loader")
    (folder / "images").mkdir()
    for number, pixels in enumerate(generate(60, 8)):
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    prepare(folder / "images", folder / "packed", image_size=8)
    return open_packed(folder / "packed")


def plan_for(packed: PackedImages, global_batch_size: int = 12, *, flip: bool = True) -> Plan:
    return Plan(stream=EpochStream(packed.train_indices, seed=3, flip=flip), global_batch_size=global_batch_size)


@given(st.integers(1, 50), st.integers(0, 2**63), st.integers(1, 6), st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))
def test_epochs_are_permutations_and_nothing_is_dropped(
    images: int, seed: int, epochs: int, world_size: int, share: int
) -> None:
    ids = np.arange(images) * 7 + 5
    stream = EpochStream(ids, seed)
    batch = share * world_size
    steps = epochs * images // batch
    consumed = [
        stream.indices(step * batch + rank_share(batch, rank, world_size).start, step * batch + (rank + 1) * share)
        for step in range(steps)
        for rank in range(world_size)
    ]
    order = np.concatenate([*consumed, np.empty(0, int)])
    assert np.array_equal(order, stream.indices(0, steps * batch))  # whatever the world size
    for epoch in range(len(order) // images):
        assert sorted(order[epoch * images : (epoch + 1) * images]) == list(ids)
    counts = Counter({int(i): 0 for i in ids}) + Counter(order.tolist())
    whole, rest = divmod(len(order), images)
    assert all(counts[i] in ({whole, whole + 1} if rest else {whole}) for i in ids.tolist())


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = [
        EpochStream(np.arange(100), seed).indices(100 * epoch, 100 * (epoch + 1)).tobytes()
        for seed in (0, 1, 2)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9


def test_first_positions_are_uniform_over_the_images() -> None:
    firsts = Counter(int(EpochStream(np.arange(4), seed).indices(0, 1)[0]) for seed in range(2_000))
    assert all(abs(firsts[i] - 500) < 5 * np.sqrt(2_000 * 0.25 * 0.75) for i in range(4))


def test_the_order_is_fixed_for_ever() -> None:
    """Records of runs years apart stay comparable, and a resumed run goes on where it stopped."""
    stream = EpochStream(np.arange(10), seed=0)
    assert stream.indices(0, 14).tolist() == [7, 4, 5, 1, 9, 8, 6, 2, 0, 3, 2, 1, 4, 7]
    assert stream.flips(0, 14).astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1]


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3) | st.integers(2**63, 2**63 + 9), min_size=1, max_size=80))
def test_the_fast_order_is_the_stable_one(values: list[int]) -> None:
    raw = np.array(values, dtype=np.uint64)
    assert np.array_equal(_stable_order(raw), np.argsort(raw, kind="stable"))


def test_the_fast_order_of_a_whole_epoch_is_the_stable_one() -> None:
    raw = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    assert np.array_equal(_stable_order(raw), np.argsort(raw, kind="stable"))


@given(st.integers(0, 10**12), st.integers(0, 300), st.integers(0, 300))
def test_flips_belong_to_the_position(start: int, first: int, second: int) -> None:
    stream = EpochStream(np.arange(5), seed=1)
    whole = stream.flips(start, start + first + second)
    assert np.array_equal(whole[first:], stream.flips(start + first, start + first + second))


def test_flips_are_fair_and_independent_coins() -> None:
    flips = np.stack([EpochStream(np.arange(5), seed).flips(0, 40_000) for seed in (0, 1)]).astype(float)
    assert np.abs(flips.mean(axis=1) - 0.5).max() < 0.0125  # five standard deviations
    assert abs(np.corrcoef(flips)[0, 1]) < 0.025
    assert abs(np.corrcoef(flips[0, 1:], flips[0, :-1])[0, 1]) < 0.025
    assert not EpochStream(np.arange(5), 0, flip=False).flips(0, 100).any()


@pytest.mark.parametrize(("batch", "rank", "world"), [(7, 0, 2), (8, 2, 2), (8, -1, 2), (0, 0, 1), (8, 0, 0)])
def test_impossible_shares_are_refused(packed: PackedImages, batch: int, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"divided|does not exist"):
        Plan(stream=EpochStream(packed.train_indices, 0), global_batch_size=batch, rank=rank, world_size=world)


def test_batches_hold_the_named_images_mirrored_and_scaled(packed: PackedImages) -> None:
    loader = PackedLoader(packed, plan_for(packed))
    flips = plan_for(packed).stream.flips(0, 60)
    for step, batch in zip(range(5), loader, strict=False):
        assert batch.step == step
        assert batch.images.dtype == torch.float32
        assert batch.images.shape == (12, 3, 8, 8)
        for image, index, flip in zip(batch.images, batch.indices, flips[12 * step :], strict=False):
            pixels = generate(60, 8)[index]
            expected = (pixels[:, ::-1] if flip else pixels).astype(np.float64) / 127.5 - 1
            assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() < 1e-6
    assert loader.live_workers() == loader.prefetch_batches == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_both_loaders_give_identical_batches(packed: PackedImages, workers: int, channels_last: bool) -> None:
    plan = dataclasses.replace(plan_for(packed), start_step=2)
    reference = PackedLoader(packed, plan, channels_last=channels_last)
    with closing(FileLoader(packed, plan, workers=workers, channels_last=channels_last)) as loader:
        assert loader.prefetch_batches == 2 * workers
        for expected, found in zip((next(reference) for _ in range(9)), loader, strict=False):
            assert torch.equal(found.images, expected.images)
            assert found.images.stride() == expected.images.stride()
            assert np.array_equal(found.indices, expected.indices)
            assert found.step == expected.step
        assert loader.live_workers() == workers
    assert loader.live_workers() == 0
    with pytest.raises(StopIteration):
        next(loader)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    assert expected.images.is_contiguous(memory_format=memory_format)


def share_of(packed: PackedImages, plan: Plan, kind: str) -> Loader:
    return PackedLoader(packed, plan) if kind == "packed" else FileLoader(packed, plan, workers=0)


@pytest.mark.parametrize("kind", ["packed", "file"])
@settings(max_examples=20)
@given(world_size=st.sampled_from([1, 2, 3, 4]), share=st.integers(1, 7), step=st.integers(0, 40))
def test_ranks_together_have_the_batch_of_one(
    packed: PackedImages, kind: str, world_size: int, share: int, step: int
) -> None:
    whole = dataclasses.replace(plan_for(packed, share * world_size), start_step=step)
    expected = next(PackedLoader(packed, whole))
    parts = [
        next(share_of(packed, dataclasses.replace(whole, rank=rank, world_size=world_size), kind))
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat([part.images for part in parts]), expected.images)
    assert np.array_equal(np.concatenate([part.indices for part in parts]), expected.indices)


def test_a_loader_leaves_torchs_random_state_alone(packed: PackedImages) -> None:
    before = torch.get_rng_state()
    with closing(FileLoader(packed, plan_for(packed), workers=0)) as loader:
        next(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_held_out_images_never_appear(packed: PackedImages) -> None:
    loader = PackedLoader(packed, plan_for(packed))
    seen = {int(index) for _, batch in zip(range(30), loader, strict=False) for index in batch.indices}
    assert seen == set(packed.train_indices.tolist())
    assert not seen & set(packed.held_out_indices.tolist())


@pytest.fixture
def own_files(tmp_path: Path) -> PackedImages:
    for number, pixels in enumerate(generate(20, 8)):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    prepare(tmp_path, tmp_path.parent / f"{tmp_path.name}-packed", image_size=8)
    return open_packed(tmp_path.parent / f"{tmp_path.name}-packed")


def test_missing_files_are_refused_before_a_worker_starts(own_files: PackedImages) -> None:
    assert own_files.files is not None
    Path(own_files.files[4]).unlink()
    with pytest.raises(DataError, match="gone or have changed"):
        FileLoader(own_files, plan_for(own_files), workers=2)


def test_a_file_damaged_later_is_named(own_files: PackedImages) -> None:
    assert own_files.files is not None
    with closing(FileLoader(own_files, plan_for(own_files), workers=1)) as loader:
        path = own_files.files[own_files.train_indices[0]]
        Path(path).write_bytes(b"damaged")
        with pytest.raises(ImageError, match=path):
            list(zip(range(10), loader, strict=False))
        start = time.monotonic()
    assert time.monotonic() - start < 2
    assert loader.live_workers() == 0


def test_impossible_workers_are_refused(packed: PackedImages) -> None:
    with pytest.raises(ValueError, match="-1 loader workers"):
        FileLoader(packed, plan_for(packed), workers=-1)


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_process(packed: PackedImages, tmp_path: Path) -> None:
    code = (
        "import psutil\n"
        "from pathlib import Path\n"
        "from ddpm_lab.data.loader import *\n"
        "from ddpm_lab.data.draws import EpochStream\n"
        "from ddpm_lab.data.packed import open_packed\n"
        f"packed = open_packed(Path({str(packed.dest)!r}))\n"
        "plan = Plan(stream=EpochStream(packed.train_indices, 0), global_batch_size=8)\n"
        "loader = FileLoader(packed, plan, workers=2)\n"
        "next(loader)\n"
        "print(*[child.pid for child in psutil.Process().children()], loader.live_workers(), flush=True)\n"
        "input()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
        assert process.stdout is not None
        *pids, live = (int(word) for word in process.stdout.readline().split())
        assert (len(pids), live) == (2, 2)
        process.kill()
        start = time.monotonic()
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() - start < 10:
            time.sleep(0.05)
        assert time.monotonic() - start < 4
        process.communicate()


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


def test_every_sample_of_every_step_has_noise_of_its_own() -> None:
    draws = [draw(step, 0, 20, 20, seed) for step in range(3) for seed in range(3)]
    first_values = torch.cat([noise[:, 0, 0, 0] for noise, _ in draws])
    assert len(set(first_values.tolist())) == 9 * 20


def test_noise_is_normal_and_timesteps_are_uniform() -> None:
    noise, t = draw(0, 0, 4_000, 4_000)
    values = noise.double().flatten()
    count = len(values)
    assert abs(values.mean()) < 5 / count**0.5
    assert abs(values.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / count) ** 0.5
    assert noise.dtype == torch.float32
    assert t.dtype == torch.int64
    assert 0 <= t.min() < 10
    assert 990 <= t.max() < 1000
    counts = torch.bincount(t // 100, minlength=10).double()
    assert ((counts - 400) ** 2 / 400).sum() < 40  # chi-square with 9 degrees of freedom
    across_chunks = np.corrcoef(noise[:-CHUNK_SAMPLES].flatten(), noise[CHUNK_SAMPLES:].flatten())[0, 1]
    assert abs(across_chunks) < 5 / count**0.5


def test_samples_outside_the_batch_are_refused() -> None:
    for start, stop in ((0, 9), (-1, 2), (3, 3)):
        with pytest.raises(ValueError, match="not part of a batch of 8"):
            draw(0, start, stop, 8)


def test_seeds_of_their_own_cost_little_beside_the_numbers() -> None:
    generator = torch.Generator()

    def plain() -> None:
        torch.randint(1000, (64,), generator=generator)
        torch.randn(64, 3, 32, 32, generator=generator)

    def seeded() -> None:
        noise_and_timesteps(0, 1, 0, 64, global_batch_size=64, shape=(3, 32, 32), timesteps=1000)

    def seconds(draw: Callable[[], None]) -> float:
        start = time.perf_counter()
        draw()
        return time.perf_counter() - start

    # In turns, and the shortest of many: a neighbour makes both slower, but hardly every one of them.
    times = [(seconds(seeded), seconds(plain)) for _ in range(50)]
    assert min(t for t, _ in times) < 3 * min(t for _, t in times)


@pytest.mark.gpu
def test_on_a_gpu_the_partition_does_not_matter_either() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def on_gpu(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return noise_and_timesteps(
            0, 1, start, stop, global_batch_size=96, shape=(3, 32, 32), timesteps=1000, device="cuda"
        )

    noise, t = on_gpu(0, 96)
    assert noise.is_cuda
    assert t.is_cuda
    assert torch.equal(torch.cat([on_gpu(0, 32)[0], on_gpu(32, 96)[0]]), noise)
    assert torch.equal(torch.cat([on_gpu(0, 32)[1], on_gpu(32, 96)[1]]), t)

"""Loaders: values as by the plain definition, processes that end; images and noise by seed and position alone."""

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset

import ddpm_lab
from ddpm_lab.data import loaders
from ddpm_lab.data.draws import CHUNK_SAMPLES, EpochStream, Plan, noise_and_timesteps, rank_share
from ddpm_lab.data.folder import DataError, ImageError
from ddpm_lab.data.loaders import Batch, dataset_loader, open_loader
from ddpm_lab.data.packed import PackedImages, open_packed, prepare
from ddpm_lab.data.synthetic import generate
from ddpm_lab.workload import Unsupported

SIDE, ROW = 8, 3 * 8 * 8
KINDS = ["packed", "packed, not copied", "resident", "resident, not mirrored", "files"]


def prepared(folder: Path, count: int) -> PackedImages:
    (folder / "images").mkdir()
    for number, image in enumerate(generate(count, SIDE)):
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
    prepare(folder / "images", folder / "packed", image_size=SIDE)
    return open_packed(folder / "packed")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedImages:
    return prepared(tmp_path_factory.mktemp("loaders"), 60)


def plan_for(packed: PackedImages, global_batch_size: int = 12, mirror: bool = True, **settings: int) -> Plan:
    stream = EpochStream(packed.train_indices, seed=3, mirror=mirror)
    return Plan(stream=stream, global_batch_size=global_batch_size, **settings)


def scaled(images: npt.NDArray[np.uint8], channels_last: bool) -> torch.Tensor:
    """The plain definition, uint8 (n, S, S, 3) to float32 (n, 3, S, S)."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.from_numpy(images).permute(0, 3, 1, 2).to(torch.float32, memory_format=layout).div_(127.5).sub_(1)


def plain(packed: PackedImages, plan: Plan, channels_last: bool = False) -> Iterator[Batch]:
    """Each batch by itself, as the definition reads."""
    step = plan.start_step
    share = rank_share(plan.global_batch_size, plan.rank, plan.world_size)
    while True:
        positions = [step * plan.global_batch_size + p for p in (share.start, share.stop)]
        indices, flips = plan.stream.indices(*positions), plan.stream.flips(*positions)
        flips = flips & plan.stream.mirror
        images = np.stack(
            [packed.images[i][:, ::-1] if f else packed.images[i] for i, f in zip(indices, flips, strict=True)]
        )
        yield Batch(images=scaled(images, channels_last), indices=indices, step=step)
        step += 1


def same(found: Batch, expected: Batch) -> bool:
    return (
        found.images.dtype == torch.float32
        and torch.equal(found.images.cpu(), expected.images)
        and found.images.stride() == expected.images.stride()
        and np.array_equal(found.indices, expected.indices)
        and found.step == expected.step
    )


def without_copies(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of a loader, which keeps no mirrored images where that is said."""
    kind, _, without = kind.partition(", ")
    if without:
        monkeypatch.setattr(loaders, "MIRRORED_BYTES", 0)
        monkeypatch.setattr(loaders, "MIRROR_SHARE", 0)
    return kind


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_plain_definition(
    packed: PackedImages, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = without_copies(kind, monkeypatch)
    settings: list[dict[str, Any]] = [{}, {"start_step": 11}, {"world_size": 3, "rank": 1}, {"mirror": False}]
    for (place, how), channels_last in itertools.product(enumerate(settings), (True, False)):
        plan = plan_for(packed, **how)
        workers = 2 if kind == "files" and place == 0 else 0
        with closing(open_loader(kind, packed, plan, workers=workers, channels_last=channels_last)) as batches:
            assert (batches.kind, batches.prefetch_batches, batches.live_workers()) == (kind, 2 * workers, workers)
            taken = list(islice(batches, 30))  # six epochs, and a batch keeps its values when later ones are made
        assert all(map(same, taken, plain(packed, plan, channels_last)))
        assert len({batch.images.data_ptr() for batch in taken}) == 30
        assert batches.live_workers() == 0
        assert not {int(i) for batch in taken for i in batch.indices} & set(packed.held_out_indices.tolist())


def test_a_still_loader_repeats_its_first_batch(packed: PackedImages) -> None:
    plan = plan_for(packed, world_size=3, rank=1)
    for channels_last in (True, False):
        taken = list(islice(open_loader("still", packed, plan, channels_last=channels_last), 4))
        first = next(plain(packed, plan, channels_last))
        assert [batch.step for batch in taken] == [0, 1, 2, 3], "noise and timesteps are drawn by the step"
        assert all(same(batch._replace(step=0), first) for batch in taken)
        assert len({batch.images.data_ptr() for batch in taken}) == 1


def test_a_set_that_does_not_fit_is_refused(packed: PackedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    size = packed.manifest.count * ROW
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=size))
    next(open_loader("resident", packed, plan_for(packed)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=size - 1))
    with pytest.raises(Unsupported, match="60 images"):
        open_loader("resident", packed, plan_for(packed))


class Squares(Dataset[torch.Tensor]):
    """Sample i is i squared, and a number that its process draws."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index**2), float(torch.rand(()))])


def test_samples_of_any_dataset_come_as_they_are_listed_and_workers_draw_by_the_seed() -> None:
    listed, drawn = [[3, 1], [2, 2], [0, 5], [4, 4]], []
    for workers, seed in ((0, 0), (2, 0), (2, 0), (2, 1)):
        state = torch.get_rng_state()
        with closing(dataset_loader(Squares(), listed, workers=workers, seed=seed)) as loader:
            assert (loader.live_workers(), loader.prefetch_batches) == (workers, 2 * workers)
            found = list(loader)
        assert [batch[:, 0].tolist() for batch in found] == [[float(i * i) for i in batch] for batch in listed]
        assert loader.live_workers() == 0
        assert not workers or torch.equal(torch.get_rng_state(), state), "nothing is drawn from the run"
        drawn.append(found[0][:, 1].tolist())
    assert drawn[1] == drawn[2] != drawn[3]
    with closing(dataset_loader(Squares(), listed, workers=0, collate=len)) as loader:
        assert next(loader) == 2


def test_files_that_are_gone_or_damaged_are_named(tmp_path: Path) -> None:
    packed = prepared(tmp_path, 20)
    assert packed.files is not None
    path = Path(packed.files[packed.train_indices[0]])
    with closing(open_loader("files", packed, plan_for(packed), workers=1)) as loader:
        path.write_bytes(b"damaged")
        with pytest.raises(ImageError, match=str(path)):
            list(islice(loader, 10))
        start = time.monotonic()
    assert time.monotonic() - start < 2
    assert loader.live_workers() == 0
    path.unlink()
    with pytest.raises(DataError, match="gone or have changed"):
        open_loader("files", packed, plan_for(packed), workers=2)


def test_a_batch_that_does_not_fit_into_shared_memory_is_an_error_and_no_wait(
    packed: PackedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the queue's own thread meets is printed, and the batch never comes."""

    def full(_: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)  # which the workers inherit
    loader = open_loader("files", packed, plan_for(packed), workers=1)
    with closing(loader), pytest.raises(RuntimeError, match="unable to allocate shared memory"):
        next(loader)


ORPHANS = """
import psutil, sys
from pathlib import Path
from ddpm_lab.data.draws import EpochStream, Plan
from ddpm_lab.data.loaders import open_loader
from ddpm_lab.data.packed import open_packed
packed = open_packed(Path(sys.argv[1]))
plan = Plan(stream=EpochStream(packed.train_indices, 0), global_batch_size=8)
loader = open_loader("files", packed, plan, workers=2)
next(loader)
print(*[child.pid for child in psutil.Process().children()], flush=True)
input()
"""


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_process(packed: PackedImages) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(ddpm_lab.__file__).parents[1])}
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment, "text": True}
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(packed.dest)], **how) as process:
        assert process.stdout
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        start = time.monotonic()
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() - start < 10:
            time.sleep(0.05)
        assert time.monotonic() - start < 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_a_busy_device_spoils_no_batch_and_resident_never_waits(
    packed: PackedImages,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    never_waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    """The host runs far ahead of the device, and the memory of batches that are done with is used again."""
    kind = without_copies(kind, monkeypatch)
    how: dict[str, Any] = {"workers": 2 if kind == "files" else 0, "device": "cuda:0"}
    for channels_last in (True, False):
        plan = plan_for(packed)
        with closing(open_loader(kind, packed, plan, channels_last=channels_last, **how)) as batches:
            for found, expected in zip(islice(batches, 30), plain(packed, plan, channels_last), strict=False):
                assert found.images.is_pinned() if kind == "files" else found.images.is_cuda
                assert same(found, expected)
            sums = []
            for batch in islice(batches, 200):
                torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                sums.append(batch.images.cuda().double().sum())
            expected_sums = [batch.images.double().sum() for batch in islice(plain(packed, plan), 30, 230)]
            torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected_sums))
            if kind == "resident":
                with never_waiting():
                    for _ in range(50):
                        next(batches)


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

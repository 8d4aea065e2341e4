"""The fast paths of the data: every value as by the plain definition, whoever makes it, and nothing overwritten."""

import functools
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ddpm_lab.data import loader, resident
from ddpm_lab.data.draws import EpochStream, rank_share
from ddpm_lab.data.loader import Batch, PackedLoader, Plan
from ddpm_lab.data.packed import PackedImages, open_packed, prepare
from ddpm_lab.data.pixels import ModelRange, PixelRows
from ddpm_lab.data.resident import ResidentLoader
from ddpm_lab.data.still import StillLoader
from ddpm_lab.data.synthetic import generate
from ddpm_lab.data.uploads import BUFFERS, Rotation
from ddpm_lab.workload import Unsupported

SIDE, ROW = 8, 3 * 8 * 8
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedImages:
    folder = tmp_path_factory.mktemp("data_path")
    (folder / "images").mkdir()
    for number, pixels in enumerate(generate(60, SIDE)):
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
    prepare(folder / "images", folder / "packed", image_size=SIDE)
    return open_packed(folder / "packed")


def plan_for(packed: PackedImages, global_batch_size: int = 12, **settings: int) -> Plan:
    stream = EpochStream(packed.train_indices, seed=3)
    return Plan(stream=stream, global_batch_size=global_batch_size, **settings)


def scaled(pixels: npt.NDArray[np.uint8], channels_last: bool) -> torch.Tensor:
    """The plain definition, uint8 (n, S, S, 3) to float32 (n, 3, S, S)."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32, memory_format=layout).div_(127.5).sub_(1)


def plain(packed: PackedImages, plan: Plan, channels_last: bool = False) -> Iterator[Batch]:
    """Each batch by itself, as the definition reads."""
    step = plan.start_step
    share = rank_share(plan.global_batch_size, plan.rank, plan.world_size)
    while True:
        positions = [step * plan.global_batch_size + p for p in (share.start, share.stop)]
        indices, flips = plan.stream.indices(*positions), plan.stream.flips(*positions)
        pixels = np.stack(
            [packed.images[i][:, ::-1] if f else packed.images[i] for i, f in zip(indices, flips, strict=True)]
        )
        yield Batch(images=scaled(pixels, channels_last), indices=indices, step=step)
        step += 1


def same(found: Batch, expected: Batch) -> bool:
    return (
        found.images.dtype == torch.float32
        and torch.equal(found.images.cpu(), expected.images)
        and found.images.stride() == expected.images.stride()
        and np.array_equal(found.indices, expected.indices)
        and found.step == expected.step
    )


def test_all_values_have_the_bits_of_the_plain_definition() -> None:
    pixels = np.arange(256, dtype=np.uint8)[:192].reshape(1, SIDE, SIDE, 3)
    pixels = np.concatenate([pixels, pixels + 64])
    for channels_last in (False, True):
        found = ModelRange(SIDE, channels_last=channels_last)(torch.from_numpy(pixels.reshape(2, ROW)))
        assert torch.equal(found, scaled(pixels, channels_last))
    assert set(np.unique(pixels).tolist()) == set(range(256))
    assert (float(found.min()), float(found.max())) == (-1, 1)


@pytest.mark.parametrize("mirrored_ahead", [True, False])
@pytest.mark.parametrize("kind", ["packed", "resident"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("settings", [{}, {"start_step": 11}, {"world_size": 3, "rank": 1}])
def test_batches_are_those_of_the_plain_definition(  # noqa: PLR0917 - each a fixture or a parameter
    packed: PackedImages,
    kind: str,
    channels_last: bool,
    settings: dict[str, int],
    mirrored_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not mirrored_ahead:
        monkeypatch.setattr(loader, "PixelRows", functools.partial(PixelRows, copy_bytes=0))
        monkeypatch.setattr(resident, "MIRROR_SHARE", 0)
    plan = plan_for(packed, **settings)
    make = PackedLoader if kind == "packed" else ResidentLoader
    batches = make(packed, plan, channels_last=channels_last)
    assert (batches.kind, batches.prefetch_batches, batches.live_workers()) == (kind, 0, 0)
    taken = list(islice(batches, 30))  # six epochs, and a batch keeps its values when later ones are made
    assert all(map(same, taken, plain(packed, plan, channels_last)))
    assert len({batch.images.data_ptr() for batch in taken}) == 30
    batches.close()


@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 20), st.integers(0, 50))
def test_draws_made_ahead_are_those_of_each_step(images: int, world_size: int, share: int, start: int) -> None:
    stream = EpochStream(np.arange(images) * 3, seed=1)
    size = share * world_size
    for rank in range(world_size):
        plan = Plan(stream=stream, global_batch_size=size, rank=rank, world_size=world_size, start_step=start)
        for expected, (step, indices, flips) in zip(range(start, start + 40), plan.draws(), strict=False):
            positions = (expected * size + rank * share, expected * size + (rank + 1) * share)
            assert step == expected
            assert np.array_equal(indices, stream.indices(*positions))
            assert np.array_equal(flips, stream.flips(*positions))


def test_a_plan_of_another_set_is_refused(packed: PackedImages) -> None:
    plan = Plan(stream=EpochStream(np.array([0, packed.manifest.count]), 0), global_batch_size=2)
    with pytest.raises(IndexError, match="image 60 of 60 is asked for: use the plan of this set"):
        next(PackedLoader(packed, plan))
    with pytest.raises(IndexError, match="60"):
        ResidentLoader(packed, plan)


def test_a_large_set_stays_where_it_is() -> None:
    """A map may be larger than the memory."""
    images = np.zeros((1_000, 32, 32, 3), dtype=np.uint8)
    peaks = []
    for copy_bytes in (2 * images.nbytes - 1, 2 * images.nbytes):
        tracemalloc.start()
        rows = PixelRows(images, copy_bytes=copy_bytes)
        rows.gather(rows.numbers(np.arange(10), np.arange(10) % 2 == 0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < images.nbytes / 10
    assert 2 * images.nbytes < peaks[1] < 2.5 * images.nbytes


def test_a_set_that_does_not_fit_is_refused_in_one_sentence(
    packed: PackedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(packed.train_indices) * ROW
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=size))
    next(ResidentLoader(packed, plan_for(packed)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=size - 1))
    with pytest.raises(Unsupported, match=r"^the 57 training images take .* MiB and cpu has .* MiB free; use loader"):
        ResidentLoader(packed, plan_for(packed))


class LateCopy:
    """A copy that happens no sooner than somebody waits for it."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run

    def synchronize(self) -> None:
        if self._run is not None:
            self._run()
            self._run = None


class LateUploads:
    """A device that does everything as late as it may: what is overwritten too early shows in its batches."""

    def __init__(self, device: torch.device, batch_size: int, side: int, *, channels_last: bool) -> None:
        assert device.type == "cuda"
        self._scale = ModelRange(side, channels_last=channels_last)
        self._rotation = Rotation([torch.zeros(batch_size, ROW, dtype=torch.uint8) for _ in range(BUFFERS)])
        self._shape = (batch_size, 3, side, side)
        self.copies: list[LateCopy] = []

    def buffer(self) -> npt.NDArray[np.uint8]:
        pixels: npt.NDArray[np.uint8] = self._rotation.take().numpy()
        return pixels

    def send(self) -> torch.Tensor:
        buffer, images = self._rotation.take(), torch.zeros(self._shape)
        self.copies.append(LateCopy(lambda: images.copy_(self._scale(buffer))))
        self._rotation.sent(self.copies[-1])
        return images

    def receive(self, images: torch.Tensor) -> torch.Tensor:
        return images


def test_a_batch_on_its_way_is_never_overwritten(packed: PackedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CudaUploads", LateUploads)
    batches = PackedLoader(packed, plan_for(packed), device="cuda:0")
    assert batches.prefetch_batches == 1
    uploads = batches._uploads
    assert isinstance(uploads, LateUploads)
    taken = []
    for number in range(1, 21):
        taken.append(next(batches))
        assert len(uploads.copies) == number + batches.prefetch_batches  # what it says of itself is what it does
    for copy in uploads.copies:
        copy.synchronize()
    assert all(map(same, taken, plain(packed, plan_for(packed))))


def test_a_rotation_waits_for_the_copy_of_the_buffer_and_no_other() -> None:
    waited: list[int] = []

    class Numbered:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            waited.append(self.number)

    buffers = [torch.zeros(1), torch.ones(1)]
    rotation = Rotation(buffers)
    for number in range(5):
        assert rotation.take() is buffers[number % 2]
        rotation.sent(Numbered(number))
    assert waited == [0, 1, 2]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mirrored_ahead", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("make", [PackedLoader, ResidentLoader])
def test_on_a_gpu_batches_have_the_same_bits(
    packed: PackedImages,
    make: type[PackedLoader | ResidentLoader],
    channels_last: bool,
    mirrored_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not mirrored_ahead:
        monkeypatch.setattr(loader, "PixelRows", functools.partial(PixelRows, copy_bytes=0))
        monkeypatch.setattr(resident, "MIRROR_SHARE", 0)
    batches = make(packed, plan_for(packed), device="cuda:0", channels_last=channels_last)
    for found, expected in zip(islice(batches, 30), plain(packed, plan_for(packed), channels_last), strict=False):
        assert found.images.is_cuda
        assert same(found, expected)
        assert torch.equal(expected.images.to("cuda:0"), found.images)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("make", [PackedLoader, ResidentLoader])
def test_on_a_gpu_a_busy_device_spoils_no_batch(
    packed: PackedImages, make: type[PackedLoader | ResidentLoader]
) -> None:
    """The host runs far ahead of the device, and the memory of batches that are done with is used again."""
    batches = make(packed, plan_for(packed), device="cuda:0")
    sums = []
    for batch in islice(batches, 200):
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        sums.append(batch.images.double().sum())
    expected = [batch.images.double().sum() for batch in islice(plain(packed, plan_for(packed)), 200)]
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected))


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_resident_loader_never_waits_for_the_device(
    packed: PackedImages, never_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    batches = ResidentLoader(packed, plan_for(packed), device="cuda:0")
    next(batches)
    with never_waiting():
        for _ in range(50):
            next(batches)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_set_that_does_not_fit_is_refused(packed: PackedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (1_000, 2_000))
    with pytest.raises(Unsupported, match="cuda:0 has 0 MiB free"):
        ResidentLoader(packed, plan_for(packed), device="cuda:0")


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_still_loader_repeats_its_first_batch(packed: PackedImages, channels_last: bool) -> None:
    plan = plan_for(packed, world_size=3, rank=1)
    batches = StillLoader(packed, plan, channels_last=channels_last)
    assert (batches.kind, batches.prefetch_batches, batches.live_workers()) == ("still", 0, 0)
    first = next(PackedLoader(packed, plan, channels_last=channels_last))
    taken = list(islice(batches, 4))
    assert [batch.step for batch in taken] == [0, 1, 2, 3], "noise and timesteps are drawn by the step"
    for batch in taken:
        assert torch.equal(batch.images, first.images)
        assert batch.images.stride() == first.images.stride()
        assert np.array_equal(batch.indices, first.indices)
    assert len({batch.images.data_ptr() for batch in taken}) == 1

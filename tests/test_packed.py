"""Prepared folders: made once, made again when something changed, never half made, and split for good."""

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import ddpm_lab
from ddpm_lab.data.folder import DataError, decode
from ddpm_lab.data.held_out import MAX_HELD_OUT, split
from ddpm_lab.data.packed import Manifest, open_packed, prepare, resolve
from ddpm_lab.data.synthetic import generate

CHECKOUT = Path(ddpm_lab.__file__).parent.parent
MAKE_CIFAR = CHECKOUT.parent / "shared" / "data" / "make_cifar10.py"


def write_images(folder: Path, images: npt.NDArray[np.uint8], first: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(images, first):
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_images(tmp_path / "train", generate(40, 8))


def build_number(dest: Path) -> int:
    return (dest / "manifest.json").stat().st_ino


def run_python(code: str, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **options)


def test_pixels_files_and_manifest(tmp_path: Path, source: Path) -> None:
    manifest = prepare(source, tmp_path / "dest", image_size=8)
    packed = open_packed(tmp_path / "dest")
    assert np.array_equal(packed.images, generate(40, 8))
    assert packed.files == tuple(f"{source}/{number}.png" for number in range(1, 41))
    assert packed.manifest == manifest
    assert manifest.shape == (40, 8, 8, 3)
    assert manifest.kind == "folder"
    assert manifest.source == str(source)
    assert json.loads((tmp_path / "dest" / "manifest.json").read_text())["count"] == 40
    assert not packed.images.flags.writeable


def test_reused_when_unchanged(tmp_path: Path, source: Path) -> None:
    first = prepare(source, tmp_path / "dest", image_size=8)
    number = build_number(tmp_path / "dest")
    assert prepare(source, tmp_path / "dest", image_size=8) == first
    assert build_number(tmp_path / "dest") == number


@pytest.mark.parametrize("change", ["new file", "changed file", "removed file", "other size", "damaged array"])
def test_rebuilt_when_changed(tmp_path: Path, source: Path, change: str) -> None:
    dest = tmp_path / "dest"
    before = prepare(source, dest, image_size=8)
    mapped = open_packed(dest)
    image_size, images = 8, generate(40, 8)
    if change == "new file":
        write_images(source, generate(41, 8)[40:], first=41)
        images = generate(41, 8)
    elif change == "changed file":
        Image.fromarray(images[7][::-1].copy()).save(source / "8.png")
        images[7] = images[7][::-1]
        assert mapped.files is None
    elif change == "removed file":
        (source / "40.png").unlink()
        images = images[:39]
    elif change == "other size":
        image_size = 4
    else:
        (dest / "images.npy").write_bytes((dest / "images.npy").read_bytes()[:500])
    after = prepare(source, dest, image_size=image_size)
    assert (after.content_hash == before.content_hash) == (change == "damaged array")
    packed = open_packed(dest)
    assert packed.images.shape == (len(images), image_size, image_size, 3)
    if change != "other size":
        assert np.array_equal(packed.images, images)
    if change not in ("damaged array", "removed file"):
        assert np.array_equal(mapped.images, generate(40, 8))  # who had it open keeps what they opened


def test_content_hash_names_the_pixels_and_not_the_place(tmp_path: Path, source: Path) -> None:
    first = prepare(source, tmp_path / "first", image_size=8)
    renamed = write_images(tmp_path / "elsewhere" / "deep", generate(40, 8), first=1001)
    assert prepare(renamed, tmp_path / "second", image_size=8).content_hash == first.content_hash
    changed = generate(40, 8)
    changed[3, 0, 0, 0] ^= 1
    other = prepare(write_images(tmp_path / "c", changed), tmp_path / "third", image_size=8)
    assert other.content_hash != first.content_hash


def test_a_damaged_file_stops_with_its_path_or_is_skipped_and_listed(tmp_path: Path, source: Path) -> None:
    (source / "5.png").write_bytes(b"not an image")
    (source / "31.png").write_bytes((source / "31.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"5\.png.*--skip-bad") as caught:
        prepare(source, tmp_path / "dest", image_size=8)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="not a prepared folder"):
        open_packed(tmp_path / "dest")
    manifest = prepare(source, tmp_path / "dest", image_size=8, skip_bad=True)
    assert [Path(line.split(": ")[0]).name for line in manifest.skipped] == ["5.png", "31.png"]
    packed = open_packed(tmp_path / "dest")
    assert packed.files is not None
    assert len(packed.files) == manifest.count == 38
    assert all(np.array_equal(packed.images[i], decode(packed.files[i], 8)) for i in range(38))
    assert "2 damaged files left out" in manifest.describe()


def test_the_held_out_folder_is_never_trained_on(tmp_path: Path, source: Path) -> None:
    test = write_images(tmp_path / "test", generate(50, 8)[37:])  # three of them are training images too
    manifest = prepare(source, tmp_path / "dest", image_size=8, held_out=test)
    packed = open_packed(tmp_path / "dest")
    assert manifest.train_count == len(packed.train_indices) == 37
    assert list(manifest.unused_indices) == [37, 38, 39]
    assert np.array_equal(packed.images[packed.held_out_indices], generate(50, 8)[37:])
    held_out = {packed.images[i].tobytes() for i in packed.held_out_indices}
    assert not held_out & {packed.images[i].tobytes() for i in packed.train_indices}
    assert packed.files is not None
    assert packed.files[40] == f"{test}/1.png"
    assert "3 left out of training" in manifest.describe()
    with pytest.raises(DataError, match="every training image"):
        prepare(source, tmp_path / "same", image_size=8, held_out=source)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 60), min_size=2, max_size=200))
def test_split_properties(labels: list[int]) -> None:
    images = np.zeros((len(labels), 2, 2, 3), np.uint8)
    images[:, 0, 0, 0] = labels
    if len(set(labels)) == 1:
        with pytest.raises(DataError, match="equal"):
            split(images, None)
        return
    chosen = split(images, None)
    held_out = {labels[i] for i in chosen.held_out}
    assert held_out
    assert not held_out & {label for i, label in enumerate(labels) if i not in set(chosen.held_out)}
    limit = max(1, round(0.05 * len(labels)), min(Counter(labels).values()))
    assert 1 <= len(chosen.held_out) <= limit
    backwards = split(images[::-1], None)
    assert {labels[::-1][i] for i in backwards.held_out} == held_out  # the images decide, not their order


def test_the_held_out_share_has_an_upper_limit() -> None:
    numbers = np.arange(60_000, dtype=np.uint32).view(np.uint8).reshape(-1, 2, 2, 1)
    assert len(split(np.repeat(numbers, 3, axis=3), None).held_out) == MAX_HELD_OUT


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_images(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    if count:
        write_images(folder, generate(count, 8))
    with pytest.raises(DataError, match="few") as caught:
        prepare(folder, tmp_path / "dest", image_size=8)
    assert "\n" not in str(caught.value)


def test_two_images_give_one_to_each_part(tmp_path: Path) -> None:
    manifest = prepare(write_images(tmp_path / "two", generate(2, 8)), tmp_path / "dest", image_size=8)
    assert (manifest.train_count, len(manifest.held_out_indices)) == (1, 1)


def test_destinations_that_would_touch_the_users_files_are_refused(tmp_path: Path, source: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for dest in (source, source / "packed", tmp_path, source / "1.png"):
        with pytest.raises(DataError, match="choose"):
            prepare(source, dest, image_size=8)
    with pytest.raises(DataError, match="choose"):
        prepare(source, tmp_path / "train" / ".." / "train" / "x", image_size=8)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unwritable_destination_is_one_sentence(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="choose another place"):
        prepare(source, tmp_path / "file" / "dest", image_size=8)


def test_missing_sources_are_named(tmp_path: Path, source: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        prepare(tmp_path / "nowhere", tmp_path / "dest")
    with pytest.raises(DataError, match=r"1\.png is neither a folder"):
        prepare(source / "1.png", tmp_path / "dest")
    with pytest.raises(DataError, match="image size 0"):
        prepare(source, tmp_path / "dest", image_size=0)


def test_resolve_packs_once_for_each_choice(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    first = resolve(str(source), cache, image_size=8)
    number = build_number(first)
    assert resolve(str(source), cache, image_size=8) == first
    assert build_number(first) == number
    assert resolve(str(source), cache, image_size=4) != first
    assert resolve(str(first), cache, image_size=8) == first
    with pytest.raises(DataError, match="8x8, not 32x32"):
        resolve(str(first), cache)
    with pytest.raises(DataError, match="--held-out"):
        resolve(str(first), cache, image_size=8, held_out=source)
    assert set(source.iterdir()) == {source / f"{number}.png" for number in range(1, 41)}


def test_synthetic_keeps_its_files_and_survives_a_move(tmp_path: Path) -> None:
    dest = resolve("synthetic", tmp_path, image_size=8)
    assert np.array_equal(open_packed(dest).images, generate(2_000, 8))
    moved = dest.rename(tmp_path / "moved")
    packed = open_packed(moved)
    assert packed.files is not None
    assert np.array_equal(decode(packed.files[1_234], 8), packed.images[1_234])


def test_manifests_of_other_versions_and_damaged_ones_are_refused(tmp_path: Path, source: Path) -> None:
    prepare(source, tmp_path / "dest", image_size=8)
    manifest = tmp_path / "dest" / "manifest.json"
    values = json.loads(manifest.read_text())
    for text in ("{", json.dumps(values | {"schema": 99}), json.dumps({"schema": 1})):
        manifest.write_text(text)
        with pytest.raises(DataError, match="prepare"):
            open_packed(tmp_path / "dest")
    assert prepare(source, tmp_path / "dest", image_size=8).count == 40


def lay_out_cifar(layout: str, out: Path, count: int) -> None:
    if not MAKE_CIFAR.exists():
        pytest.skip(f"real CIFAR-10 images are not at hand ({MAKE_CIFAR.name} is missing beside the checkout)")
    subprocess.run([sys.executable, MAKE_CIFAR, layout, out, "--count", str(count)], check=True)


@pytest.mark.slow
def test_real_images_from_both_folder_layouts(tmp_path: Path) -> None:
    lay_out_cifar("kaggle", tmp_path / "kaggle", 200)
    lay_out_cifar("classes", tmp_path / "classes", 200)
    manifests: list[Manifest] = []
    pixels = []
    for layout in ("kaggle", "classes"):
        manifests.append(prepare(tmp_path / layout / "train", tmp_path / f"{layout}-packed"))
        images = open_packed(tmp_path / f"{layout}-packed").images
        pixels.append(sorted(image.tobytes() for image in images))
    assert pixels[0] == pixels[1]
    assert {manifest.train_count for manifest in manifests} == {190}


@pytest.mark.slow
def test_all_of_cifar_is_packed_once(tmp_path: Path) -> None:
    """Counted in processor time, so that other work on the machine does not decide."""
    lay_out_cifar("kaggle", tmp_path, 50_000)

    def processor_seconds() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    start = processor_seconds()
    manifest = prepare(tmp_path / "train", tmp_path / "dest")
    built = processor_seconds()
    assert (manifest.count, len(manifest.held_out_indices)) == (50_000, 2_500)
    assert prepare(tmp_path / "train", tmp_path / "dest") == manifest
    assert processor_seconds() - built < (built - start) / 3

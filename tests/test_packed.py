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
from ddpm_lab.checks import LabError
from ddpm_lab.data.folder import DataError, ImageError, decode
from ddpm_lab.data.packed import MAX_HELD_OUT, open_packed, prepare, resolve, split
from ddpm_lab.data.synthetic import generate

CHECKOUT = Path(ddpm_lab.__file__).parent.parent


def write_images(folder: Path, images: npt.NDArray[np.uint8], first: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(images, first):
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_images(tmp_path / "train", generate(40, 8))


def run_python(code: str, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, **options)


def test_pixels_files_and_manifest(tmp_path: Path, source: Path) -> None:
    manifest = prepare(source, tmp_path / "dest", image_size=8)
    packed = open_packed(tmp_path / "dest")
    assert np.array_equal(packed.images, generate(40, 8))
    assert packed.files == tuple(f"{source}/{number}.png" for number in range(1, 41))
    assert packed.manifest == manifest
    assert (manifest.kind, manifest.source, manifest.shape) == ("folder", str(source), (40, 8, 8, 3))
    assert not packed.images.flags.writeable
    built = (tmp_path / "dest" / "manifest.json").stat()
    assert prepare(source, tmp_path / "dest", image_size=8) == manifest
    for images, size in ((write_images(tmp_path / "other", generate(5, 8)), 8), (source, 4)):
        with pytest.raises(DataError, match="in 8x8; choose another folder"):
            prepare(images, tmp_path / "dest", image_size=size)
    assert (tmp_path / "dest" / "manifest.json").stat().st_ino == built.st_ino, "what is there stays"


def test_the_synthetic_set_has_the_same_hash_for_ever(tmp_path: Path) -> None:
    """Records name their data by it: over shape, pixels in order and the choice of the held-out images."""
    prepare("synthetic", tmp_path / "prepared")
    packed = open_packed(tmp_path / "prepared")
    assert packed.manifest.content_hash == "1e45d89074da856be740c11c77cc0f14a24082758fc75ebd3409e5d66f62c123"
    assert len(packed.held_out_indices) == 100
    assert np.array_equal(packed.images, generate(2_000))
    packed = open_packed((tmp_path / "prepared").rename(tmp_path / "moved"))
    assert packed.files is not None
    assert Path(packed.files[1_234]).is_relative_to(tmp_path / "moved")
    assert np.array_equal(decode(packed.files[1_234], 32), packed.images[1_234])


@pytest.mark.parametrize("change", ["new file", "changed file", "damaged array"])
def test_rebuilt_when_changed(tmp_path: Path, source: Path, change: str) -> None:
    dest = tmp_path / "dest"
    before = prepare(source, dest, image_size=8)
    mapped = open_packed(dest)
    images = generate(40, 8)
    if change == "new file":
        images = generate(41, 8)
        write_images(source, images[40:], first=41)
    elif change == "changed file":
        images[7] = images[7][::-1]
        write_images(source, images[7:8], first=8)
        assert mapped.files is None
    elif change == "damaged array":
        (dest / "images.npy").write_bytes((dest / "images.npy").read_bytes()[:500])
    after = prepare(source, dest, image_size=8)
    assert (after.content_hash == before.content_hash) == (change == "damaged array")
    renamed = write_images(tmp_path / "elsewhere" / "deep", images, first=1001)
    assert prepare(renamed, tmp_path / "second", image_size=8).content_hash == after.content_hash
    assert np.array_equal(open_packed(dest).images, images)
    if change != "damaged array":
        assert np.array_equal(mapped.images, generate(40, 8))  # who had it open keeps what they opened


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
    said: list[str] = []
    resolve(source, tmp_path / "cache", image_size=8, skip_bad=True, progress=said.append)
    assert "2 damaged files left out" in said[-1]


def test_what_cannot_be_read_now_is_no_damage(source: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # of open files: no further one
    try:
        with pytest.raises(DataError, match="cannot be read") as caught:
            decode(source / "5.png", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(caught.value, ImageError)


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
    chosen, unused = split(images, None)
    held_out = {labels[i] for i in chosen}
    assert held_out
    assert not unused
    assert not held_out & {label for i, label in enumerate(labels) if i not in set(chosen)}
    limit = max(1, round(0.05 * len(labels)), min(Counter(labels).values()))
    assert 1 <= len(chosen) <= limit
    assert {labels[::-1][i] for i in split(images[::-1], None)[0]} == held_out  # the images decide, not their order


def test_the_fewest_and_the_most_that_are_held_out(tmp_path: Path) -> None:
    numbers = np.arange(60_000, dtype=np.uint32).view(np.uint8).reshape(-1, 2, 2, 1)
    assert len(split(np.repeat(numbers, 3, axis=3), None)[0]) == MAX_HELD_OUT
    write_images(tmp_path / "few", generate(1, 8))
    with pytest.raises(DataError, match="only 1 image"):
        prepare(tmp_path / "few", tmp_path / "dest", image_size=8)
    manifest = prepare(write_images(tmp_path / "few", generate(2, 8)), tmp_path / "dest", image_size=8)
    assert (manifest.train_count, len(manifest.held_out_indices)) == (1, 1)


def test_what_cannot_be_prepared_is_named_and_touches_no_files_of_the_users(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for where, dest, size, words in (
        (source, source, 8, "choose"),
        (source, source / "packed", 8, "choose"),
        (source, tmp_path, 8, "choose"),
        (source, tmp_path / "train" / ".." / "train" / "x", 8, "choose"),
        (source, tmp_path / "file" / "dest", 8, "choose"),
        (source, tmp_path / "file", 8, "choose"),
        (tmp_path / "nowhere", tmp_path / "dest", 8, "nowhere"),
        (source / "1.png", tmp_path / "dest", 8, r"1\.png is neither a folder"),
        (source, tmp_path / "dest", 0, "image_size is 0"),
    ):
        with pytest.raises(LabError, match=words):
            prepare(where, dest, image_size=size)
    assert sorted(tmp_path.rglob("*")) == before


def test_resolve_packs_once_for_each_choice(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "cache"
    first = resolve(str(source), cache, image_size=8)
    assert resolve(str(source), cache, image_size=8) == first
    assert resolve(str(source), cache, image_size=4) != first
    assert resolve(str(first), cache, image_size=8, results=first / "runs") == first
    with pytest.raises(DataError, match="8x8, not 32x32"):
        resolve(str(first), cache)
    with pytest.raises(DataError, match="--held-out"):
        resolve(str(first), cache, image_size=8, held_out=source)
    manifest = first / "manifest.json"
    values = json.loads(manifest.read_text())
    for text in ("{", json.dumps(values | {"schema": 99}), json.dumps({"schema": 1})):
        manifest.write_text(text)
        with pytest.raises(DataError, match="prepare"):
            open_packed(first)
    assert resolve(str(source), cache, image_size=8) == first
    assert open_packed(first).manifest.count == 40


def test_two_processes_at_once_share_one_build(tmp_path: Path) -> None:
    write_images(tmp_path / "many", generate(800, 8))
    code = (
        "from pathlib import Path\n"
        "from ddpm_lab.data.packed import open_packed, prepare\n"
        f"dest = Path({str(tmp_path / 'dest')!r})\n"
        f"prepare({str(tmp_path / 'many')!r}, dest, image_size=8)\n"
        "print((dest / 'manifest.json').stat().st_ino, int(open_packed(dest).images.sum()))\n"
    )
    processes = [run_python(code, stdout=subprocess.PIPE) for _ in range(2)]
    (answer,) = {process.communicate(timeout=60)[0] for process in processes}
    assert answer.split()[1] == str(generate(800, 8).sum())


def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path: Path, source: Path) -> None:
    dest = tmp_path / "dest"
    code = (
        "from ddpm_lab.data import packed\n"
        "real = packed.content_hash\n"
        "packed.content_hash = lambda *given, **named: (real(*given, **named), print('done', flush=True), input())\n"
        f"packed.prepare({str(source)!r}, {str(dest)!r}, image_size=8)\n"
    )
    process = run_python(code, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.kill()
    process.communicate()
    with pytest.raises(DataError, match="not a prepared folder"):
        open_packed(dest)
    with pytest.raises(DataError, match="not prepared to its end"):
        resolve(dest, tmp_path / "cache", image_size=8)
    assert prepare(source, dest, image_size=8).count == 40
    assert not list(dest.glob("*.partial"))

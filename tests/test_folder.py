"""Listing a folder in order, and turning its files into pixels."""

import hashlib
import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddpm_lab.data.folder import DataError, ImageError, decode, decode_files, list_images
from ddpm_lab.data.synthetic import generate


def save(path: Path, pixels: object = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.zeros((4, 4, 3), np.uint8) if pixels is None else np.asarray(pixels)
    Image.fromarray(array).save(path, **options)  # type: ignore[arg-type]
    return path


def test_lists_nested_folders_in_numeric_order(tmp_path: Path) -> None:
    expected = ["1.png", "2.JPG", "10.jpeg", "a2/0001.png", "a2/0010.png", "a10/1.png", f"a10/{10**30}.png"]
    for name in random.Random(0).sample(expected, len(expected)):
        save(tmp_path / name)
    for name in ["trainLabels.csv", ".hidden.png", "__MACOSX/1.png", ".cache/1.png", "notes.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"not part of the set")
    (tmp_path / "again").symlink_to(tmp_path)  # a folder that links to itself is listed once
    assert [file.path for file in list_images(tmp_path)] == expected
    for path in (tmp_path / "1.png", tmp_path / "x.png"):
        with pytest.raises(DataError, match=path.name):
            list_images(path)


def test_links_that_lead_nowhere_are_damaged_images(tmp_path: Path) -> None:
    save(tmp_path / "images" / "1.png")
    (tmp_path / "images" / "self.png").symlink_to("self.png")
    (tmp_path / "images" / "lost.png").symlink_to("nowhere")
    (tmp_path / "images" / "folder").symlink_to("folder")
    names = [file.path for file in list_images(tmp_path / "images")]
    assert names == ["1.png", "lost.png", "self.png"]
    bad = decode_files([str(tmp_path / "images" / n) for n in names], np.empty((3, 4, 4, 3), np.uint8), keep_going=True)
    assert [(i, "symbolic links" in why or "No such file" in why) for i, why in bad] == [(1, True), (2, True)]


@pytest.mark.slow
def test_what_takes_long_to_decode_is_refused(tmp_path: Path) -> None:
    Image.new("1", (8_000, 8_000)).save(tmp_path / "1.png")
    stream = io.BytesIO()
    Image.new("L", (64, 64), 100).save(stream, "JPEG", progressive=True)
    start = (whole := stream.getvalue()).rindex(b"\xff\xda")
    (tmp_path / "few.jpg").write_bytes(whole)
    (tmp_path / "many.jpg").write_bytes(whole[:start] + 50 * whole[start:-2] + whole[-2:])
    assert decode(tmp_path / "few.jpg", 8).shape == (8, 8, 3)
    for name, words in (("1.png", "64,000,000 pixels, and the limit"), ("many.jpg", "more than 40 scans")):
        with pytest.raises(ImageError, match=words):
            decode(tmp_path / name, 8)


def test_rgb_grey_and_palette_become_rgb(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    assert np.array_equal(decode(save(tmp_path / "1.png", pixels), 8), pixels)
    grey = pixels[:, :, 0]
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    Image.fromarray(grey).convert("P").save(tmp_path / "palette.png")
    for path in (save(tmp_path / "2.png", grey), save(tmp_path / "3.png", grey.astype(np.uint16) * 256 + 7)):
        assert np.array_equal(decode(path, 8), expected)
    assert np.array_equal(decode(tmp_path / "palette.png", 8), expected)
    Image.fromarray(grey > 127).save(tmp_path / "bits.png")
    assert np.array_equal(decode(tmp_path / "bits.png", 8), (expected > 127) * 255)


def test_transparency_is_composited_on_white(tmp_path: Path) -> None:
    colour, alpha = np.array([200, 100, 0]), np.array([0, 128, 255], np.uint8)
    rgba = np.concatenate([np.broadcast_to(colour, (3, 3, 3)), alpha[None, :, None].repeat(3, 0)], axis=2)
    share = alpha[:, None] / 255
    expected = np.broadcast_to(share * colour + (1 - share) * 255, (3, 3, 3))
    found = decode(save(tmp_path / "1.png", rgba.astype(np.uint8)), 3)
    assert np.abs(found - expected).max() <= 1
    keyed = np.zeros((3, 3, 3), np.uint8)
    keyed[1, 1] = colour
    assert (decode(save(tmp_path / "keyed.png", keyed, transparency=(0, 0, 0)), 3)[0] == 255).all()


def test_other_sizes_are_resized_by_the_shorter_side_and_cropped(tmp_path: Path) -> None:
    for shape in ((40, 20), (20, 40)):
        pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
        half = Image.fromarray(pixels).resize((shape[1] // 2, shape[0] // 2), Image.Resampling.BICUBIC)
        rows, columns = ((side // 2 - 10) // 2 for side in shape)
        expected = np.asarray(half)[rows : rows + 10, columns : columns + 10]
        found = decode(save(tmp_path / "1.png", pixels), 10)
        assert np.abs(found.astype(int) - expected).max() <= 1
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    averaged = decode(save(tmp_path / "1.png", board), 8).astype(int)
    assert np.abs(averaged - 127).max() < 16, "averaged, not picked"


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    found = decode(save(tmp_path / "1.jpg", pixels, exif=exif), 16)
    assert found[:6].max() < 10
    assert found[10:].min() > 245


def test_a_file_that_is_no_whole_image_is_named_in_one_line(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    whole = [save(tmp_path / f"whole.{suffix}", noise).read_bytes() for suffix in ("png", "jpg")]
    other = [b"", b"text", b"GIF89a" + bytes(40), b"\x89PNG\r\n\x1a\n" + bytes(30)]
    at = whole[0].index(b"IDAT")
    other.append(
        whole[0][: at - 4] + b"\0\0\0\1" + whole[0][at:]
    )  # a length that is wrong, for which PIL has no OSError
    path = tmp_path / "17.png"
    for content in [*other, *(image[: len(image) // 2] for image in whole)]:
        path.write_bytes(content)
        with pytest.raises(ImageError, match=str(path)) as caught:
            decode(path, 32)
        assert "\n" not in str(caught.value)


def test_an_interrupt_ends_decoding_soon(tmp_path: Path) -> None:
    """It comes from within the progress report, which runs where Ctrl+C arrives."""
    path = str(save(tmp_path / "1.png", np.ones((4, 4, 3), np.uint8)))
    out = np.zeros((300_000, 4, 4, 3), np.uint8)

    def interrupt(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_files([path] * len(out), out, keep_going=True, progress=interrupt)
    assert 0 < out[:, 0, 0, 0].sum() < 100_000


# The built-in images: the same everywhere, and worth learning from


def test_pixels_are_the_same_on_every_machine() -> None:
    found = hashlib.sha256(generate(150).tobytes()).hexdigest()
    assert found == "25b05736c68e0888d4cb2f421eaf5fae09041f6959e9b6ec1e1442837ed31fcf"
    assert np.array_equal(generate(120)[:30], generate(30)), "more images begin with the same ones"

"""The built-in images: the same everywhere, and worth learning from."""

import hashlib

import numpy as np

from ddpm_lab.data.synthetic import generate


def test_pixels_are_the_same_on_every_machine() -> None:
    found = hashlib.sha256(generate(150).tobytes()).hexdigest()
    assert found == "25b05736c68e0888d4cb2f421eaf5fae09041f6959e9b6ec1e1442837ed31fcf"
    assert np.array_equal(generate(120)[:30], generate(30)), "more images begin with the same ones"


def test_images_have_structure_variety_and_contrast() -> None:
    images = generate(300).astype(float) / 255
    neighbours = np.corrcoef(images[:, :, 1:].ravel(), images[:, :, :-1].ravel())[0, 1]
    assert neighbours > 0.9  # noise has 0: a denoiser could learn nothing
    assert len({image.tobytes() for image in images}) == 300
    assert np.median(images.std(axis=(1, 2, 3))) > 0.1
    assert np.abs(images.mean(axis=(0, 1, 2)) - 0.5).max() < 0.1
    mean_image_error = ((images - images.mean(axis=0)) ** 2).mean()
    assert mean_image_error > 0.03  # one average picture does not explain the set


def test_sizes_show_the_same_picture() -> None:
    large = generate(5, 64).astype(float)
    halved = large.reshape(5, 32, 2, 32, 2, 3).mean(axis=(2, 4))
    assert np.abs(halved - generate(5, 32)).mean() < 6

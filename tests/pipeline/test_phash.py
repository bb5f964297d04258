"""Perceptual hashes of images."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.fft import dctn

from pipeline.phash import gray_thumbnail, perceptual_hash


def photo(seed: int, width: int = 320, height: int = 240) -> Image.Image:
    """A smooth random colour picture."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def bits(image: Image.Image) -> int:
    return int(perceptual_hash([gray_thumbnail(image)])[0])


def test_equals_the_transform_written_out():
    gray = np.random.default_rng(0).random((5, 32, 32)) * 255
    for value, image in zip(perceptual_hash(gray).tolist(), gray):
        low = dctn(image, norm="ortho")[1:9, 1:9].ravel()
        expected = "".join("1" if c > np.median(low) else "0" for c in low)
        assert f"{value:064b}" == expected


def test_copies_are_near_and_others_far():
    original = photo(0)
    packed = io.BytesIO()
    original.save(packed, "JPEG", quality=40)
    copies = [Image.open(packed), original.resize((150, 110)), original.point(lambda v: v * 0.8 + 10)]
    assert max((bits(original) ^ bits(copy)).bit_count() for copy in copies) <= 6
    assert min((bits(original) ^ bits(photo(seed))).bit_count() for seed in range(1, 20)) >= 14


def test_tensor_and_image_agree():
    image = photo(1)
    tensor = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    np.testing.assert_array_equal(gray_thumbnail(tensor), gray_thumbnail(image))
    np.testing.assert_array_equal(gray_thumbnail(image.convert("L")).shape, (32, 32))


def test_batch_changes_nothing_and_flat_images_are_zero():
    thumbnails = np.stack([gray_thumbnail(photo(seed)) for seed in range(6)])
    assert perceptual_hash(thumbnails).tolist() == [int(perceptual_hash([t])[0]) for t in thumbnails]
    assert perceptual_hash([np.full((32, 32), v, np.float32) for v in (0, 77, 255)]).tolist() == [0, 0, 0]
    assert perceptual_hash([]).dtype == np.uint64


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"\(16, 16\)"):
        perceptual_hash(np.zeros((2, 16, 16)))
    with pytest.raises(ValueError, match=r"float32 of shape"):
        gray_thumbnail(torch.zeros(3, 8, 8))

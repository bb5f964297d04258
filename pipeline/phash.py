"""64-bit perceptual hash of an image, in two steps: reduce while decoding, hash in batches.

DCT hash of Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions" (2010), section
3.2.2, as in the pHash library: 32 x 32 grey image, DCT-II, the 8 x 8 coefficients of lowest frequency without
the first row and column, one bit each: above the median or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.transforms.v2.functional import pil_to_tensor

SIDE = 32
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_FREQUENCY, _POSITION = np.arange(1, 9)[:, None], np.arange(SIDE)[None, :]
_BASIS = np.sqrt(2 / SIDE) * np.cos(np.pi * _FREQUENCY * (2 * _POSITION + 1) / (2 * SIDE))
# Coefficients of a flat image are rounding noise of about 1e-13; an 8-bit image's real ones are far above.
_NOISE = 1e-6


def gray_thumbnail(image: torch.Tensor | Image.Image) -> np.ndarray:
    """A decoded image reduced to what the hash needs: (32, 32) float32 luma in [0, 255], whole frame.

    ``image`` is a (C, H, W) uint8 tensor with C 1 or 3, or a PIL image. Large frames are thinned to about 160
    pixels a side first: five samples for each pixel of the thumbnail. Raises ValueError for other tensors.
    """
    if isinstance(image, Image.Image):
        picture = image if image.mode in ("L", "RGB") else image.convert("RGB")
        image = torch.as_tensor(pil_to_tensor(picture))
    if image.ndim != 3 or image.shape[0] not in (1, 3) or image.dtype != torch.uint8:
        raise ValueError(
            f"image is {image.dtype} of shape {tuple(image.shape)}; expected (1 or 3, H, W) uint8"
        )
    step = max(1, min(image.shape[1:]) // (5 * SIDE))
    thin = image[:, ::step, ::step].contiguous(memory_format=torch.contiguous_format)
    small = interpolate(thin[None], (SIDE, SIDE), mode="bilinear", antialias=True)[0].numpy()
    return small[0].astype(np.float32) if len(small) == 1 else np.tensordot(_LUMA, small, axes=1)


def perceptual_hash(thumbnails: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Hashes of n grey thumbnails, (32, 32) float each: (n,) uint64.

    The first coefficient is the highest bit. Flat images hash to 0. Hashes of copies differ in few bits
    (Hamming distance), of unrelated images in about 32. Raises ValueError for another shape.
    """
    gray = np.asarray(thumbnails, dtype=np.float64).reshape(len(thumbnails), *np.shape(thumbnails)[1:])
    if len(gray) == 0:
        return np.empty(0, dtype=np.uint64)
    if gray.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"thumbnails of shape {gray.shape[1:]}; expected ({SIDE}, {SIDE})")
    coefficients = (_BASIS @ gray @ _BASIS.T).reshape(len(gray), 64)
    bits = coefficients > np.median(coefficients, axis=1, keepdims=True) + _NOISE
    return np.packbits(bits, axis=1).view(">u8").ravel().astype(np.uint64)

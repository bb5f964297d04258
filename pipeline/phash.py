"""The 64-bit perceptual hash: signs of the low frequencies of a 32 x 32 luma image (Zauner 2010, pHash)."""

from __future__ import annotations

import numpy as np
from scipy.fft import dct

SIDE = 32
LOW = 8


def _basis() -> np.ndarray:
    """First 8 rows of the orthonormal DCT-II matrix, (8, 32)."""
    return dct(np.eye(SIDE), axis=0, norm="ortho")[:LOW].astype(np.float32)


BASIS = _basis()


def perceptual_hash(thumbs: np.ndarray) -> np.ndarray:
    """float32 (n, 32, 32) luma to uint64 (n,): bit set where a coefficient exceeds the image's median.

    The 8 x 8 lowest DCT-II coefficients are compared with their median, the constant one left out of it.
    """
    low = np.einsum("ui,nij,vj->nuv", BASIS, thumbs, BASIS, optimize=True).reshape(-1, LOW * LOW)
    median = np.median(low[:, 1:], axis=1, keepdims=True)
    return np.packbits(low > median, axis=1).view(">u8").astype(np.uint64).ravel()

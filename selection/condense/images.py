"""Stored images and the training images that they decode to (IDC: Kim et al., ICML 2022, section 4.1).

A stored image of factor f is a sheet of f x f tiles; each tile, enlarged to the full size, is a training image.
The decoded images of a stored image follow each other, so the first s stored images decode to the first s f^2
training images: every prefix of the one is a prefix of the other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate


def decode(stored: torch.Tensor, factor: int) -> torch.Tensor:
    """float (n, K, 3, H, W), K classes side by side, to float (n f^2, K, 3, H, W); differentiable.

    Tiles in reading order; each is enlarged bilinearly. H and W are multiples of f.
    """
    if factor == 1:
        return stored
    n, classes, channels, height, width = stored.shape
    tiles = stored.unflatten(4, (factor, width // factor)).unflatten(3, (factor, height // factor))
    tiles = tiles.permute(0, 3, 5, 1, 2, 4, 6).reshape(-1, channels, height // factor, width // factor)
    whole = interpolate(tiles, (height, width), mode="bilinear", align_corners=False)
    return whole.view(n * factor**2, classes, channels, height, width)


def shrink(images: torch.Tensor, factor: int) -> torch.Tensor:
    """float (n f^2, 3, H, W) onto n sheets (n, 3, H, W), each image shrunk (bilinear, antialiased) into its tile."""
    if factor == 1:
        return images
    total, channels, height, width = images.shape
    small = interpolate(
        images, (height // factor, width // factor), mode="bilinear", align_corners=False, antialias=True
    )
    tiles = small.view(total // factor**2, factor, factor, channels, height // factor, width // factor)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, height, width).clamp(0, 1)


def to_unit(pixels: np.ndarray) -> torch.Tensor:
    """uint8 (..., H, W, 3) to float (..., 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(pixels)).movedim(-1, -3).float().div_(255)


def to_bytes(images: torch.Tensor) -> np.ndarray:
    """float (..., 3, H, W) in [0, 1] to uint8 (..., H, W, 3), rounded."""
    return images.movedim(-3, -1).mul(255).round().clamp(0, 255).to(torch.uint8).contiguous().numpy()

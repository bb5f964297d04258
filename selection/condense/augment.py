"""Differentiable augmentation (Zhao and Bilen, ICML 2021; the settings of IDC): colour, shift, cutout.

It is drawn on the host as plain numbers, one row a group of images, so that real and condensed images of a
class can share it, and applied to normalised images.
"""

from __future__ import annotations

import numpy as np
import torch

SHIFT = 0.125  # of the side, either way; what is missing is grey
CUTOUT = 0.5  # of the side
DRAWS = 7


def draw(rng: np.random.Generator) -> np.ndarray:
    """One augmentation: float64 (7,) in [0, 1): brightness, saturation, contrast, shift and cutout down, right."""
    return rng.random(DRAWS)


def augment(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """float (n, K, 3, H, W), normalised, to the same; draws (K, 7): row k for all images [:, k]."""
    height, width = images.shape[-2:]
    values = torch.from_numpy(draws[:, :3].astype(np.float32)).to(images.device)
    brightness, saturation, contrast = (v.view(-1, 1, 1, 1) for v in values.unbind(1))
    x = images + (brightness - 0.5)
    grey = x.mean(2, keepdim=True)
    x = (x - grey) * (2 * saturation) + grey
    mean = x.mean((2, 3, 4), keepdim=True)
    x = (x - mean) * (contrast + 0.5) + mean
    x = _shifts(draws[:, 3], height).to(x) @ x @ _shifts(draws[:, 4], width).mT.to(x)
    return x * _holes(draws[:, 5:], height, width).to(x)


def _shifts(draws: np.ndarray, side: int) -> torch.Tensor:
    """(K, 1, side, side): matrix k moves rows down by its draw, at most SHIFT of the side; zeros come in."""
    reach = int(side * SHIFT + 0.5)
    by = np.floor(draws * (2 * reach + 1)).astype(np.int64) - reach
    at = np.arange(side)
    return torch.from_numpy((at[:, None] - at[None, :] == by[:, None, None]).astype(np.float32))[:, None]


def _holes(draws: np.ndarray, height: int, width: int) -> torch.Tensor:
    """(K, 1, height, width): 0 inside a rectangle around a random pixel, 1 outside."""
    inside = []
    for axis, side in enumerate((height, width)):
        size = int(side * CUTOUT + 0.5)
        start = np.floor(draws[:, axis] * (side + 1 - size % 2)).astype(np.int64) - size // 2
        at = np.arange(side)
        inside.append((at >= start[:, None]) & (at < start[:, None] + size))
    hole = inside[0][:, :, None] & inside[1][:, None, :]
    return torch.from_numpy((~hole).astype(np.float32))[:, None]

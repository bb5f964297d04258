"""Augmentation of a whole batch at once, on whichever device it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import affine_grid, grid_sample

ASPECT = 4 / 3  # as in torchvision's RandomResizedCrop


@dataclass(kw_only=True)
class AugmentConfig:
    """What is done to a training image; scoring sees images as they are.

    min_area: a random part of at least this share of the area, aspect within 3:4 to 4:3 of the frame's,
    is scaled to the whole; 1 switches it off. flip: probability of a mirror image, which helps small
    trusted sets most; set 0 where captions tell left from right or quote writing in the picture. colour:
    brightness and each channel change by up to this share; off, because captions name colours.
    """

    min_area: float = 0.6
    flip: float = 0.5
    colour: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area={self.min_area}: must be above 0 and at most 1")
        for key in ("flip", "colour"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be between 0 and 1")


def augment(images: torch.Tensor, config: AugmentConfig) -> torch.Tensor:
    """float (n, 3, H, W), values 0 to 255, to the same; draws from torch's global generator."""
    if config.min_area < 1 or config.flip > 0:
        grid = affine_grid(_boxes(images, config), list(images.shape), align_corners=False)
        images = grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    if config.colour > 0:
        n, c = images.shape[:2]
        gain = 1 + config.colour * (_uniform(images, n, 1, 1, 1) + _uniform(images, n, c, 1, 1)) / 2
        images = (images * gain).clamp(0, 255)
    return images


def _boxes(images: torch.Tensor, config: AugmentConfig) -> torch.Tensor:
    """(n, 2, 3) maps from output to input coordinates (-1 to 1): a box within the frame, mirrored or not."""
    n = len(images)
    half = (1 + config.min_area) / 2
    area = half + (1 - half) * _uniform(images, n)
    aspect = (
        torch.exp(math.log(ASPECT) * _uniform(images, n)) if config.min_area < 1 else torch.ones_like(area)
    )
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    mirror = torch.where(torch.rand(n, device=images.device) < config.flip, -1.0, 1.0)
    boxes = torch.zeros(n, 2, 3, device=images.device)
    boxes[:, 0, 0], boxes[:, 1, 1] = width * mirror, height
    boxes[:, 0, 2], boxes[:, 1, 2] = (1 - width) * _uniform(images, n), (1 - height) * _uniform(images, n)
    return boxes


def _uniform(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """float32 in [-1, 1) on the device of `like`."""
    return torch.rand(shape, device=like.device) * 2 - 1

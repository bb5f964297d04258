"""Augmentation of a whole batch at once, on whichever device it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import affine_grid, grid_sample

from filters.network.world import Rows

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


def augment(images: torch.Tensor, config: AugmentConfig, rows: Rows | None = None) -> torch.Tensor:
    """float (n, 3, H, W), values 0 to 255, to the same; draws from torch's global generator.

    rows: which of a batch these images are; the draws are made for all of it, so that an image is changed
    in the same way on whichever worker it lies.
    """
    if len(images) == 0:  # a worker can be without a share in a small batch; grid_sample takes no empty one
        return images
    draw = _Draw(images.device, rows or Rows(torch.arange(len(images)), len(images)))
    if config.min_area < 1 or config.flip > 0:
        grid = affine_grid(_boxes(draw, config), list(images.shape), align_corners=False)
        images = grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    if config.colour > 0:
        gain = 1 + config.colour * (draw(1, 1, 1) + draw(images.shape[1], 1, 1)) / 2
        images = (images * gain).clamp(0, 255)
    return images


class _Draw:
    """Uniform numbers in [-1, 1) for the rows at hand of a whole batch's."""

    def __init__(self, device: torch.device, rows: Rows) -> None:
        self.device, self.n, self.at = device, rows.n, rows.at.to(device)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.rand(self.n, *shape, device=self.device)[self.at] * 2 - 1


def _boxes(draw: _Draw, config: AugmentConfig) -> torch.Tensor:
    """(n, 2, 3) maps from output to input coordinates (-1 to 1): a box within the frame, mirrored or not."""
    half = (1 + config.min_area) / 2
    area = half + (1 - half) * draw()
    aspect = torch.exp(math.log(ASPECT) * draw()) if config.min_area < 1 else torch.ones_like(area)
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    mirror = torch.where((draw() + 1) / 2 < config.flip, -1.0, 1.0)
    boxes = torch.zeros(len(area), 2, 3, device=draw.device)
    boxes[:, 0, 0], boxes[:, 1, 1] = width * mirror, height
    boxes[:, 0, 2], boxes[:, 1, 2] = (1 - width) * draw(), (1 - height) * draw()
    return boxes

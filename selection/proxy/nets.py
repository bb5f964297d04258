"""The networks: small, convolutional, quick on one core."""

from __future__ import annotations

import torch
from torch import nn

ARCHS = ("resnet9", "convnet")


def build_net(arch: str, *, classes: int, width: int, depth: int = 3, image_size: int = 32) -> nn.Module:
    """A network from float (n, 3, image_size, image_size), normalised, to logits (n, classes).

    `resnet9`: the residual network of DAWNBench's fastest CIFAR-10 entries (D. Page, "How to train your
    ResNet", 2018), channels width, 2, 4 and 8 times width, its stem at half the resolution, so that a step
    costs about a third; depth is not used.
    `convnet`: depth blocks of convolution (width channels), InstanceNorm, ReLU and 2x2 average pooling, then a
    linear layer on all positions (Gidaris and Komodakis 2018; the network of dataset condensation).
    """
    if arch == "resnet9":
        return ResNet9(classes, width)
    if arch == "convnet":
        return ConvNet(classes, width, depth, image_size)
    raise ValueError(f"arch={arch}: must be one of {', '.join(ARCHS)}")


def _block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_block(channels, channels), _block(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class ResNet9(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        w = width
        self.body = nn.Sequential(
            _block(3, w, 2),
            _block(w, 2 * w), nn.MaxPool2d(2), _Residual(2 * w),
            _block(2 * w, 4 * w), nn.MaxPool2d(2),
            _block(4 * w, 8 * w), _Residual(8 * w),
            nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(8 * w, classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.125 * self.head(self.body(x))


class ConvNet(nn.Module):
    def __init__(self, classes: int, width: int, depth: int, image_size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for level in range(depth):
            layers += [
                nn.Conv2d(width if level else 3, width, 3, padding=1),
                nn.GroupNorm(width, width),  # a group a channel: InstanceNorm with a gain and a bias
                nn.ReLU(inplace=True),
                nn.AvgPool2d(2),
            ]
        side = image_size >> depth
        self.body = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(width * side * side, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

"""What is condensed, how long, and how the images are updated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CONDENSERS = ("mdc", "idc", "dm", "single")


@dataclass(kw_only=True)
class CondenseConfig:
    """Settings of multisize dataset condensation.

    Attributes:
        images_per_class: n, stored images of each class.
        method: `mdc` matches gradients for all n images and for the most learnable subset; `idc` for all n
            alone; `dm` matches mean features of fresh random networks, with both losses; `single` makes every
            image by itself, as n condensations of one image would.
        factor: f, a stored image decodes to f^2 training images.
        start: real images to start from: `kmeans` (nested prototypes, so that prefixes are good from the first
            step) or `random` (the paper).
        image_size: side of the images, pixels; a multiple of the factor.
        outer, inner: networks, and image steps on each (the paper: 2,000 and 100). `dm` takes as many steps,
            each on a network of its own.
        select_every: outer iterations between two choices of the subset; 0: a twentieth (the paper: 100 of
            2,000).
        image_lr, image_momentum: SGD on pixels in [0, 1], at n = 10; the rate is scaled by n / 10.
        subset_scale: whether the subset's loss is weighted by m / n, which lets a pixel take as large a step from
            it as from the loss of all images. Unweighted (the paper), the first image takes steps n times as large.
        real_batch: real images of each class a step.
        net_images, net_batch, net_lr: real images that the network is trained on after each image step.
        width, depth: of the convolutional network.
        classes_per_group: classes that are condensed in one batch, and the unit of work of a worker. Part of
            what decides the result, to the last bits; every group trains the same networks again.
        seed: decides everything random.
    """

    images_per_class: int = 10
    method: str = "mdc"
    factor: int = 2
    start: str = "kmeans"
    image_size: int = 32
    outer: int = 200
    inner: int = 10
    select_every: int = 0
    image_lr: float = 0.005
    image_momentum: float = 0.5
    subset_scale: bool = True
    real_batch: int = 64
    net_images: int = 500
    net_batch: int = 64
    net_lr: float = 0.01
    width: int = 128
    depth: int = 3
    classes_per_group: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in self.methods():
            raise ValueError(f"method={self.method}: must be {', '.join(self.methods())}")
        if self.start not in ("kmeans", "random"):
            raise ValueError(f"start={self.start}: must be kmeans or random")
        for key in (
            "images_per_class", "factor", "outer", "inner", "real_batch", "net_batch", "width", "depth",
            "classes_per_group",
        ):  # fmt: skip
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be at least 1")
        for key in ("net_images", "select_every", "seed"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}={getattr(self, key)}: must be 0 or more")
        if self.image_size < 8 or self.image_size % self.factor:
            raise ValueError(
                f"image_size={self.image_size}: must be at least 8 and a multiple of factor={self.factor}"
            )
        if self.image_size >> self.depth < 1:
            raise ValueError(f"depth={self.depth}: too deep for image_size={self.image_size}")
        for key in ("image_lr", "net_lr"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}={getattr(self, key)}: must be above 0")
        if not 0 <= self.image_momentum < 1:
            raise ValueError(f"image_momentum={self.image_momentum}: must be at least 0 and below 1")

    @staticmethod
    def methods() -> tuple[str, ...]:
        return CONDENSERS

    @property
    def interval(self) -> int:
        return self.select_every or max(1, self.outer // 20)

    @property
    def decoded(self) -> int:
        """Training images of one stored image."""
        return self.factor**2

    @property
    def rate(self) -> float:
        return self.image_lr * self.images_per_class / 10

    def chunks(self, longest: int = 10) -> Iterator[tuple[int, int]]:
        """(start, stop) of outer iterations after which work is committed; none crosses a choice of the subset."""
        start = 0
        while start < self.outer:
            stop = min(self.outer, start + longest, (start // self.interval + 1) * self.interval)
            yield start, stop
            start = stop

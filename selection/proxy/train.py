"""Training the proxy: equal steps, its own cosine schedule, a clock that stops for evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from selection.draws import Ints
from selection.proxy.images import LabelledImages
from selection.proxy.nets import ARCHS, build_net

MEAN, DEVIATION = 0.47, 0.25
EVALUATION_BATCH = 500


@dataclass(kw_only=True)
class ProxyConfig:
    """The network and how it is trained.

    arch, width, depth: see `selection.proxy.nets`. image_size: side of the square images, pixels.
    lr: peak of the rate, SGD with Nesterov momentum; it rises over the share `warmup` of the steps, then falls
    as a cosine to 0 at the last step that is really taken. weight_decay: on all weights. label_smoothing: as in
    torch. crop: pixels that an image is shifted by at most, what is missing is reflected. flip: mirror images,
    half of the time.
    """

    arch: str = "resnet9"
    width: int = 16
    depth: int = 3
    image_size: int = 32
    batch_size: int = 128
    lr: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.1
    label_smoothing: float = 0.1
    crop: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch={self.arch}: must be one of {', '.join(ARCHS)}")
        for key in ("width", "depth", "batch_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: at least 1")
        if self.image_size < 8:
            raise ValueError(f"image_size={self.image_size}: at least 8 pixels")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr}: above 0")
        for key in ("momentum", "warmup", "label_smoothing"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: at least 0 and below 1")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: 0 or more")
        if not 0 <= self.crop < self.image_size:
            raise ValueError(f"crop={self.crop}: from 0 to image_size - 1 pixels")


@dataclass(frozen=True)
class Point:
    """An evaluation. seconds: of training until then, evaluations left out. loss: mean since the last point.

    unique: distinct rows seen until then. accuracy: share of the test images, in [0, 1].
    """

    step: int
    samples: int
    unique: int
    seconds: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Trained:
    """model: in evaluation mode. points: the evaluations, in order. step_seconds: float64 (steps,), each with
    the drawing of its batch. unique: distinct rows seen in all."""

    model: Proxy
    points: list[Point]
    step_seconds: np.ndarray
    unique: int

    @property
    def seconds(self) -> float:
        """Seconds of training, drawing of the batches included, evaluations left out."""
        return float(self.step_seconds.sum())


class Proxy(nn.Module):
    """From uint8 images (n, H, W, 3) to logits (n, classes). net: the bare network, see `build_net`."""

    def __init__(self, config: ProxyConfig, classes: int) -> None:
        super().__init__()
        self.net = build_net(
            config.arch,
            classes=classes,
            width=config.width,
            depth=config.depth,
            image_size=config.image_size,
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = pixels.permute(0, 3, 1, 2).float().div_(255).sub_(MEAN).div_(DEVIATION)
        return self.net(x.contiguous(memory_format=torch.channels_last))


def train_proxy(
    images: LabelledImages,
    order: Iterable[Ints],
    steps: int,
    *,
    seed: int,
    config: ProxyConfig | None = None,
    test: LabelledImages | None = None,
    evaluations: int = 1,
    on_step: Callable[[int], None] | None = None,
) -> Trained:
    """Train a new network on `steps` batches of `images`.

    order: int64 arrays of row numbers, one a step (see `selection.proxy.order`); more than `steps` are not
    drawn. test: judged at `evaluations` points spread evenly over the steps, the last step among them; without
    it there are no points. on_step: called with the number of steps taken. On a GPU when there is one, in
    bfloat16; else in float32. Raises ValueError when the order ends early, the classes differ, or the images
    have another size than the config says.
    """
    config = config or ProxyConfig()
    for part in (images, test) if test is not None else (images,):
        if part.images.shape[1:3] != (config.image_size, config.image_size):
            raise ValueError(
                f"image_size={config.image_size}: the images are {part.images.shape[1]}x{part.images.shape[2]}"
            )
        if part.classes != images.classes:
            raise ValueError(f"classes of the test set ({part.classes}) differ from {images.classes}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        training = _Training(images, config, steps, seed)
        points, seconds = [], np.zeros(steps)
        batches, losses = iter(order), []
        for step in range(steps):
            started = time.perf_counter()
            rows = next(batches, None)
            if rows is None:
                raise ValueError(f"order: it ended after {step} of {steps} steps")
            losses.append(training.step(rows, step))
            due = test is not None and (step + 1) * evaluations // steps > step * evaluations // steps
            if due and training.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[step] = time.perf_counter() - started
            if due and test is not None:
                points.append(training.point(step, seconds, torch.stack(losses).mean().item(), test))
                losses.clear()
            if on_step is not None:
                on_step(step + 1)
        return Trained(training.model.eval(), points, seconds, int(training.seen_rows.sum()))


class _Training:
    def __init__(self, images: LabelledImages, config: ProxyConfig, steps: int, seed: int) -> None:
        self.images, self.config, self.steps = images, config, steps
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = Proxy(config, len(images.classes)).to(self.device)
        self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            weight_decay=config.weight_decay,
        )
        warm = round(config.warmup * steps)
        at = np.arange(steps)
        self.rates = config.lr * np.where(
            at < warm, (at + 1) / (warm + 1), (1 + np.cos(np.pi * (at - warm) / max(1, steps - warm))) / 2
        )
        self.loss = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
        self.labels = torch.from_numpy(images.labels)
        self.rng = np.random.default_rng(seed)
        self.seen, self.seen_rows = 0, np.zeros(len(images), bool)

    def step(self, rows: Ints, step: int) -> torch.Tensor:
        self.seen += len(rows)
        self.seen_rows[rows] = True
        pixels = augment(self.images.images[rows], self.config.crop, self.config.flip, self.rng)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[step]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(torch.from_numpy(pixels).to(self.device, non_blocking=True))
            loss = self.loss(logits, self.labels[rows].to(self.device, non_blocking=True))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def point(self, step: int, seconds: np.ndarray, loss: float, test: LabelledImages) -> Point:
        result = accuracy(self.model, test)
        self.model.train()
        return Point(step + 1, self.seen, int(self.seen_rows.sum()), float(seconds.sum()), loss, result)


def augment(pixels: np.ndarray, crop: int, flip: bool, rng: np.random.Generator) -> np.ndarray:
    """Shift each of the images (uint8 (n, H, W, 3)) by up to `crop` pixels, mirror half of them; a new array."""
    n, height, width = pixels.shape[:3]
    down, right = rng.integers(-crop, crop + 1, (2, n, 1))
    rows = _reflected(np.arange(height) + down, height)
    columns = _reflected(np.arange(width) + right, width)
    if flip:
        columns = np.where(rng.random((n, 1)) < 0.5, columns[:, ::-1], columns)
    flat = (np.arange(n)[:, None, None] * height + rows[:, :, None]) * width + columns[:, None, :]
    return np.take(pixels.reshape(-1, 3), flat, axis=0)


def _reflected(index: Ints, size: int) -> Ints:
    return size - 1 - np.abs(size - 1 - np.abs(index))


@torch.no_grad()
def accuracy(model: nn.Module, test: LabelledImages) -> float:
    """Share of the test images that get their own label, in [0, 1]. Leaves the model in evaluation mode.

    Raises ValueError for an empty test set.
    """
    if len(test) == 0:
        raise ValueError("test: there are no images to judge with")
    model.eval()
    device = next(model.parameters()).device
    right = 0
    for rows in _pieces(len(test)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(torch.from_numpy(np.ascontiguousarray(test.images[rows])).to(device))
        right += int((logits.argmax(1).cpu().numpy() == test.labels[rows]).sum())
    return right / len(test)


def _pieces(n: int) -> Iterator[slice]:
    for start in range(0, n, EVALUATION_BATCH):
        yield slice(start, start + EVALUATION_BATCH)

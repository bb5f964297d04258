"""One class group through some outer iterations: the work of one worker between two commits.

Everything random at outer iteration t, step i, class c is a function of (seed, t, i, c), and each group trains
the same networks. So a group's images depend on nothing but the configuration, the real images and the subsets
chosen so far: not on other groups, workers, or on where the work was interrupted.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from selection.condense.augment import augment, draw
from selection.condense.config import CondenseConfig
from selection.condense.images import decode, shrink, to_unit
from selection.condense.matching import Terms, feature_distances, feature_loss, gradient_loss, real_side
from selection.condense.subset import Subset
from selection.coresets import order
from selection.proxy.images import LabelledImages
from selection.proxy.nets import ConvNet, build_net
from selection.proxy.train import DEVIATION, MEAN

INIT, NET, MATCH, TRAIN = range(4)  # what a stream of random numbers is for


@dataclass(frozen=True)
class GroupState:
    """images, momentum: float32 (n, K, 3, H, W), pixels in [0, 1]. distances: float64 (n,), F(s) of these classes,
    averaged over the steps of the last chunk; loss: mean over its steps and classes."""

    images: torch.Tensor
    momentum: torch.Tensor
    distances: np.ndarray
    loss: float

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        np.savez(
            buffer, images=self.images.cpu().numpy(), momentum=self.momentum.cpu().numpy(),
            distances=self.distances, loss=self.loss,
        )  # fmt: skip
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> GroupState:
        with np.load(io.BytesIO(data)) as file:
            return cls(
                torch.from_numpy(file["images"]), torch.from_numpy(file["momentum"]), file["distances"],
                float(file["loss"]),
            )  # fmt: skip


class ClassGroup:
    """The classes `classes` (numbers) of `real`. Raises ValueError when one has fewer than n f^2 images."""

    def __init__(
        self, real: LabelledImages, classes: Sequence[int], config: CondenseConfig, device: str = "cpu"
    ) -> None:
        self.real, self.classes, self.config = real, list(classes), config
        self.device = torch.device(device)
        self.labels = torch.tensor(self.classes, device=self.device)
        self.rows = [np.flatnonzero(real.labels == c) for c in self.classes]
        needed = config.images_per_class * config.decoded
        for c, rows in zip(self.classes, self.rows):
            if len(rows) < needed:
                raise ValueError(
                    f"images_per_class={config.images_per_class}: class {real.classes[c]!r} has {len(rows)} images, "
                    f"{needed} are needed to start from (images_per_class * factor^2)"
                )

    def start(self) -> GroupState:
        """Real images, shrunk into the tiles: each class's nested k-means prototypes by pixels, or random ones."""
        sheets = []
        for c, rows in zip(self.classes, self.rows):
            seed = int(self._rng(INIT, 0, 0, c).integers(1 << 31))
            images = self.real.images[rows]
            count = self.config.images_per_class * self.config.decoded
            chosen = order(self.config.start, images.reshape(len(rows), -1), count, seed)
            sheets.append(shrink(to_unit(images[chosen]), self.config.factor))
        stored = torch.stack(sheets, 1)
        return GroupState(stored, torch.zeros_like(stored), np.zeros(len(stored)), 0.0)

    def run(self, state: GroupState, subset: Subset, start: int, stop: int) -> GroupState:
        """Outer iterations start .. stop - 1."""
        images = state.images.to(self.device).clone()
        momentum = state.momentum.to(self.device).clone()
        frozen = images[: subset.frozen].clone()
        distances, losses = torch.zeros(len(images), dtype=torch.float64, device=self.device), []
        for t in range(start, stop):
            net = self.network(t, 0)
            optimizer = self._optimizer(net)
            for i in range(self.config.inner):
                if i and self.config.method == "dm":
                    net = self.network(t, i)
                gradient, loss, apart = self.image_gradient(net, images, subset, t, i)
                momentum.mul_(self.config.image_momentum).add_(gradient)
                images.sub_(self.config.rate * momentum).clamp_(0, 1)
                images[: subset.frozen] = frozen
                momentum[: subset.frozen] = 0
                distances += apart
                losses.append(loss)
                if self.config.method != "dm" and i < self.config.inner - 1:
                    self.train(net, optimizer, t, i)
        distances /= (stop - start) * self.config.inner
        return replace(
            state, images=images.cpu(), momentum=momentum.cpu(), distances=distances.cpu().numpy(),
            loss=torch.stack(losses).double().mean().item(),
        )  # fmt: skip

    def image_gradient(
        self, net: ConvNet, images: torch.Tensor, subset: Subset, t: int, i: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient of the loss by stored pixels (n, K, 3, H, W), the mean loss of a class, and F(s) (n,)."""
        config = self.config
        real, draws = self.real_batch(t, i)
        images = images.detach().requires_grad_()
        made = augment(normalised(decode(images, config.factor)), draws)
        terms = self.terms(subset)
        real = augment(normalised(real.to(self.device)), draws)
        if config.method == "dm":
            with torch.no_grad():
                target = net.body(real.flatten(0, 1)).unflatten(0, real.shape[:2]).mean(0)
            loss, features = feature_loss(net, made, target, terms)
        else:
            side = real_side(net, real, self.labels)
            target = side.features
            loss, features = gradient_loss(net, made, self.labels, side, terms)
        (gradient,) = torch.autograd.grad(loss.sum(), images)
        return gradient, loss.detach().mean(), feature_distances(features, target, config.decoded)

    def terms(self, subset: Subset) -> Terms:
        """The losses of this method, over decoded images."""
        n, decoded, first = self.config.images_per_class, self.config.decoded, subset.first
        if self.config.method == "single":
            return Terms("single", (decoded,) * n, 1 / n)
        if self.config.method == "idc" or first == n:
            return Terms("whole", (n * decoded,))
        weight = first / n if self.config.subset_scale else 1.0
        return Terms("prefix", (first * decoded, (n - first) * decoded), weight)

    def real_batch(self, t: int, i: int) -> tuple[torch.Tensor, np.ndarray]:
        """Real images (B, K, 3, H, W) in [0, 1] and the augmentation (K, 7) that both sides share."""
        chosen, draws = [], []
        for c, rows in zip(self.classes, self.rows):
            rng = self._rng(MATCH, t, i, c)
            draws.append(draw(rng))
            chosen.append(rng.choice(rows, min(self.config.real_batch, len(rows)), replace=False))
        size = min(map(len, chosen))
        pixels = np.stack([self.real.images[rows[:size]] for rows in chosen], 1)
        return to_unit(pixels), np.stack(draws)

    def network(self, t: int, i: int) -> ConvNet:
        """The random network of outer iteration t (of step i of it, for `dm`)."""
        config = self.config
        with torch.random.fork_rng():
            torch.manual_seed(int(self._rng(NET, t, i, 0).integers(1 << 62)))
            net = build_net(
                "convnet", classes=len(self.real.classes), width=config.width, depth=config.depth,
                image_size=config.image_size,
            )  # fmt: skip
        assert isinstance(net, ConvNet)
        return net.to(self.device)

    def train(self, net: ConvNet, optimizer: torch.optim.Optimizer, t: int, i: int) -> None:
        """The network on `net_images` real images of all classes, each under an augmentation of its own."""
        rng = self._rng(TRAIN, t, i, 0)
        size = min(self.config.net_images, len(self.real))
        rows = rng.choice(len(self.real), size, replace=False)
        for part in np.array_split(rows, -(-size // self.config.net_batch)) if size else []:
            draws = np.stack([draw(rng) for _ in part])
            x = normalised(to_unit(self.real.images[part]).to(self.device))
            loss = cross_entropy(
                net(augment(x[None], draws)[0]), torch.from_numpy(self.real.labels[part]).to(self.device)
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    def _optimizer(self, net: ConvNet) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=self.config.net_lr, momentum=0.9, weight_decay=5e-4)

    def _rng(self, purpose: int, t: int, i: int, c: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, purpose, t, i, c])


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Pixels in [0, 1] as the network takes them."""
    return (images - MEAN) / DEVIATION

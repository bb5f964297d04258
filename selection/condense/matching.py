"""What is matched between real and condensed images: weight gradients (IDC) or mean features (DM).

All classes go through the network in one batch. The network normalises each image by itself, so the gradient of
a class is the sum of the contributions of its images alone. The errors at the convolutions' outputs come from
one backward pass; one grouped convolution a layer, a class a group, then gives the weight gradient of every
class, for the first m images and for the rest apart. The loss of all images and the loss of the most learnable
subset share these, and the real gradients.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from selection.proxy.nets import ConvNet

Gradients = list[torch.Tensor]  # one a convolution: (K, out, in, 3, 3), a class a row


@dataclass(frozen=True)
class Real:
    """What real images of each class give: gradients, mean over the images; mean features (K, d)."""

    gradients: Gradients
    features: torch.Tensor


@dataclass(frozen=True)
class Terms:
    """Which sets of decoded images have a loss of their own, in runs of the sizes `splits`.

    kind `whole`: all images. `prefix`: all, and the first run, whose loss has weight `weight`. `single`: each
    run by itself, each with weight `weight` (images that know nothing of each other).
    """

    kind: str
    splits: tuple[int, ...]
    weight: float = 1.0

    def means(self, sums: list[tuple[torch.Tensor, ...]]) -> list[list[torch.Tensor]]:
        """From sums over each run to means over each term's set, for every quantity in the list."""
        if self.kind == "single":
            return [[part / size for part, size in zip(parts, self.splits)] for parts in sums]
        wholes = [[functools.reduce(torch.add, parts) / sum(self.splits)] for parts in sums]
        if self.kind == "prefix":
            for whole, parts in zip(wholes, sums):
                whole.append(parts[0] / self.splits[0])
        return wholes

    def loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        if self.kind == "single":
            return self.weight * functools.reduce(torch.add, losses)
        return losses[0] + self.weight * losses[1] if self.kind == "prefix" else losses[0]


def sum_gradients(
    net: ConvNet, images: torch.Tensor, labels: torch.Tensor, splits: tuple[int, ...], *, graph: bool
) -> tuple[list[Gradients], torch.Tensor]:
    """Sums of the cross-entropy's gradients by convolution weight, class by class, and the features.

    images: (n, K, 3, H, W), normalised; labels: (K,). splits: sizes that add up to n; one sum for each run of
    images. graph: whether the result is to be differentiated. Features are the last block's output (n, K, d).
    """
    x = images.flatten(0, 1)
    inputs, outputs = [], []
    for layer in net.body:
        if isinstance(layer, nn.Conv2d):
            inputs.append(x)
            x = layer(x)
            outputs.append(x)
        else:
            x = layer(x)
    loss = cross_entropy(net.head(x), labels.repeat(len(images)), reduction="sum")
    errors = torch.autograd.grad(loss, outputs, create_graph=graph)
    features = x.unflatten(0, images.shape[:2])
    if not graph:
        inputs, features = [a.detach() for a in inputs], features.detach()
    classes = images.shape[1]
    parts = [
        [
            _weight_gradients(a, e, classes)
            for a, e in zip(a.split([s * classes for s in splits]), e.split([s * classes for s in splits]))
        ]
        for a, e in zip(inputs, errors)
    ]
    return [list(part) for part in zip(*parts)], features


def _weight_gradients(inputs: torch.Tensor, errors: torch.Tensor, classes: int) -> torch.Tensor:
    """(n K, in, H, W) and (n K, out, H, W) to (K, out, in, 3, 3): a 3x3 convolution's gradient, class by class."""
    a = inputs.reshape(-1, classes * inputs.shape[1], *inputs.shape[2:])
    e = errors.reshape(-1, classes * errors.shape[1], *errors.shape[2:])
    shape = a.new_empty(e.shape[1], inputs.shape[1], 3, 3)
    one = [1, 1]
    gradient = torch.ops.aten.convolution_backward(
        e, a, shape, None, one, one, one, False, [0, 0], classes, [False, True, False]
    )[1]
    return gradient.view(classes, errors.shape[1], *shape.shape[1:])


def real_side(net: ConvNet, images: torch.Tensor, labels: torch.Tensor) -> Real:
    """What the real images (B, K, 3, H, W), normalised and augmented, are matched by."""
    (sums,), features = sum_gradients(net, images, labels, (len(images),), graph=False)
    return Real([g / len(images) for g in sums], features.mean(0))


def gradient_loss(
    net: ConvNet, images: torch.Tensor, labels: torch.Tensor, real: Real, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each class (K,), differentiable, and the features (n, K, d), detached.

    L is the squared distance between the mean gradients of real and condensed images over all convolution
    weights (MDC: He et al., ICLR 2024, eq. 4 and 9).
    """
    sums, features = sum_gradients(net, images, labels, terms.splits, graph=True)
    means = terms.means(list(zip(*sums)))
    return terms.loss([_distance(list(part), real.gradients) for part in zip(*means)]), features.detach()


def feature_loss(
    net: ConvNet, images: torch.Tensor, real: torch.Tensor, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over mean features (DM: Zhao and Bilen, WACV 2023, eq. 4). real: (K, d)."""
    features = net.body(images.flatten(0, 1)).unflatten(0, images.shape[:2])
    (means,) = terms.means([tuple(part.sum(0) for part in features.split(terms.splits))])
    return terms.loss([(mean - real).square().sum(1) for mean in means]), features.detach()


def feature_distances(features: torch.Tensor, real: torch.Tensor, decoded: int) -> torch.Tensor:
    """F(s) for s = 1 .. n, averaged over the classes: (n,) float64.

    The squared distance between the mean features of the real images (K, d) and of the first s stored images,
    which are the first s `decoded` of features (n decoded, K, d). MDC, section 3.3.
    """
    sums = features.double().cumsum(0)[decoded - 1 :: decoded]
    counts = torch.arange(1, len(sums) + 1, device=sums.device).view(-1, 1, 1) * decoded
    return (sums / counts - real.double()).square().sum(2).mean(1)


def _distance(a: Gradients, b: Gradients) -> torch.Tensor:
    return torch.stack([(x - y).square().flatten(1).sum(1) for x, y in zip(a, b)]).sum(0)

"""Steps a second of the batched image gradient against a loop over the classes, and their largest difference.

python -m benchmarks.condense [--turns 3]

`loop` is written as the reference is: each class by itself, and for it each of the two losses by itself, with its
own gradients of the real and of the condensed images. `loop, real once` takes the real gradients once for both.
All three in turns within one process on one thread, on the same network, images and augmentation; seconds are
those of the processor, which others on the machine do not lengthen much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from selection.condense import CondenseConfig
from selection.condense.augment import augment
from selection.condense.group import ClassGroup, normalised
from selection.condense.images import decode
from selection.condense.report import step_flops
from selection.condense.run import keep_memory
from selection.condense.subset import Subset
from selection.proxy import LabelledImages

CASES = {
    "8 px, 10 classes, width 32": (
        10, CondenseConfig(factor=1, image_size=8, width=32, depth=2, real_batch=32, images_per_class=10),
    ),
    "32 px, 10 classes, width 32": (10, CondenseConfig(width=32, real_batch=64)),
}  # fmt: skip


FIRST = 3  # the subset with a loss of its own


def images(classes: int, config: CondenseConfig) -> LabelledImages:
    n = classes * max(config.real_batch, config.images_per_class * config.decoded)
    rng = np.random.default_rng(0)
    size = config.image_size
    return LabelledImages(
        rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8), np.arange(n) % classes,
        tuple(map(str, range(classes))), np.zeros(n, "u8,u8"), np.ones(n, np.int64),
    )  # fmt: skip


def looped(group: ClassGroup, net: nn.Module, stored: torch.Tensor, first: int, once: bool) -> torch.Tensor:
    """The image gradient, a class at a time. first: stored images of the subset."""
    real, draws = group.real_batch(0, 0)
    weights = [layer.weight for layer in net.body if isinstance(layer, nn.Conv2d)]
    stored = stored.clone().requires_grad_()
    weight = first / len(stored)
    for k, c in enumerate(group.classes):

        def gradients(x: torch.Tensor, graph: bool, k: int = k, c: int = c) -> tuple[torch.Tensor, ...]:
            x = augment(normalised(x[:, k : k + 1]), draws[k : k + 1])[:, 0]
            loss = cross_entropy(net(x), torch.full((len(x),), c))
            return torch.autograd.grad(loss, weights, create_graph=graph)

        target = gradients(real, False)
        for part, scale in ((len(stored), 1.0), (first, weight)):
            if not once and part == first:
                target = gradients(real, False)
            made = gradients(decode(stored[:part], group.config.factor), True)
            loss = scale * sum((a - b).square().sum() for a, b in zip(made, target))
            loss.backward(inputs=[stored])
    assert stored.grad is not None
    return stored.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    keep_memory()
    for name, (classes, config) in CASES.items():
        group = ClassGroup(images(classes, config), range(classes), replace(config))
        net, stored = group.network(0, 0), group.start().images
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "loop": lambda g=group, n=net, x=stored: looped(g, n, x, FIRST, False),
            "loop, real once": lambda g=group, n=net, x=stored: looped(g, n, x, FIRST, True),
            "batched": lambda g=group, n=net, x=stored: g.image_gradient(n, x, Subset(FIRST, 0), 0, 0)[0],
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        results = {}
        for turn in range(turns + 1):
            for way, call in ways.items():
                started = time.process_time()
                results[way] = call()
                if turn:  # the first warms up
                    seconds[way].append(time.process_time() - started)
        best = {way: min(s) for way, s in seconds.items()}
        apart = (results["batched"] - results["loop"]).abs().max() / results["loop"].abs().max()
        print(f"{name}: gradients differ by {apart:.1e} of the largest; {step_flops(config, classes)}")
        for way, s in best.items():
            print(f"  {way:16} {1 / s:8.2f} steps/s   {best['loop'] / s:5.2f} x the loop")


if __name__ == "__main__":
    main()

"""What a condensation leaves beside its images: how F(s) and the most learnable subset went, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from selection.condense.config import CondenseConfig
from selection.condense.group import ClassGroup
from selection.condense.images import to_bytes
from selection.condense.run import Chunk, Condensed, interval_distances
from selection.condense.subset import Subset
from selection.proxy.images import LabelledImages
from selection.ranked import Item, png


def items_of(condensed: Condensed, classes: Sequence[str]) -> list[Item]:
    """The images, quantised to 8 bits, in rank order."""
    pixels = to_bytes(condensed.images)
    return [
        Item(png(pixels[rank, c]), "png", label, rank, label, {})
        for rank in range(len(pixels))
        for c, label in enumerate(classes)
    ]


def plot_learnable(chunks: Sequence[Chunk], interval: int) -> Figure:
    """Two panels over outer iterations: F(s) for each s, on a logarithmic scale; the subset and what is frozen."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    points = interval_distances(chunks, interval)
    distances = np.array([f for _, f in points])
    at = [(i + 1) * interval for i, _ in points]
    shades = np.linspace(0.15, 0.9, distances.shape[1])
    for s in range(distances.shape[1]):
        above.plot(at, distances[:, s], color=(0.1, 0.3, shades[s]), lw=1, label=f"s = {s + 1}")
    above.set(yscale="log", ylabel="F(s): distance of mean features")
    above.legend(fontsize=7, ncols=2)
    starts = [c.start for c in chunks] + [chunks[-1].stop]
    below.step(starts, [c.first for c in [*chunks, chunks[-1]]], where="post", label="most learnable subset")
    below.step(starts, [c.frozen for c in [*chunks, chunks[-1]]], where="post", label="frozen")
    below.set(xlabel="outer iteration", ylabel="images", ylim=(-0.3, distances.shape[1] + 0.3))
    below.legend(fontsize=7)
    return figure


def step_flops(config: CondenseConfig, classes: int) -> dict[str, int]:
    """Floating-point operations of one image step on all classes, counted by running it, and of one round of the
    network's training, which every class group does for itself."""
    size = config.image_size
    n = max(config.images_per_class * config.decoded, config.real_batch)
    rng = np.random.default_rng(0)
    rows = n * classes
    real = LabelledImages(
        rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8), np.arange(rows) % classes,
        tuple(map(str, range(classes))), np.zeros(rows, "u8,u8"), np.ones(rows, np.int64),
    )  # fmt: skip
    group = ClassGroup(
        real, [0], config
    )  # of a grouped convolution torch counts what an ungrouped one would take
    net, images = group.network(0, 0), group.start().images
    with FlopCounterMode(display=False) as matching:
        group.image_gradient(net, images, Subset(max(1, config.images_per_class // 2), 0), 0, 0)
    with FlopCounterMode(display=False) as training:
        if config.method != "dm":
            group.train(net, torch.optim.SGD(net.parameters(), 0.01), 0, 0)
    training_flops = round(
        training.get_total_flops() * config.net_images / max(1, min(config.net_images, rows))
    )
    return {"matching": matching.get_total_flops() * classes, "training": training_flops}


def cost(config: CondenseConfig, classes: int, condensed: Condensed) -> dict[str, Any]:
    """steps, seconds of the workers, and floating-point operations of the whole condensation."""
    steps = config.outer * config.inner
    flops = step_flops(config, classes)
    groups = -(-classes // config.classes_per_group)
    total = steps * flops["matching"] + config.outer * (config.inner - 1) * flops["training"] * groups
    return {"steps": steps, "seconds": condensed.seconds, "flops": total, "flops_per_step": flops}

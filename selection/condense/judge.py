"""What small sets are worth at every size: networks trained on the first s images of each class, over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from matplotlib.figure import Figure

from selection.proxy import LabelledImages, ProxyConfig, batches, epochs, train_proxy
from selection.ranked import RankedSet


@dataclass(kw_only=True)
class JudgeConfig:
    """How sets are judged: hard labels, one recipe for all sets and sizes.

    seeds: networks trained on each set. steps: of each training, whatever the size of the set. sizes: which s;
    empty for all from 1 to n. proxy: the network; its width, depth and image_size are those of the condensation,
    and a set smaller than its batch is one batch.
    """

    seeds: int = 3
    steps: int = 300
    sizes: list[int] = field(default_factory=list)
    proxy: ProxyConfig = field(
        default_factory=lambda: ProxyConfig(arch="convnet", lr=0.05, label_smoothing=0.0, batch_size=64)
    )

    def __post_init__(self) -> None:
        for key in ("seeds", "steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: at least 1")
        if self.sizes != sorted(set(self.sizes)) or min(self.sizes, default=1) < 1:
            raise ValueError(f"sizes={self.sizes}: numbers from 1 on, rising")


@dataclass(frozen=True)
class Row:
    """accuracy: percent (sizes, seeds). seconds and flops: of making the sets; None where none were spent on it."""

    name: str
    accuracy: np.ndarray
    seconds: float
    flops: float | None
    image_lr: float | None = None

    @property
    def means(self) -> np.ndarray:
        return self.accuracy.mean(1)


def judge(sets: Sequence[RankedSet], test: LabelledImages, config: JudgeConfig) -> np.ndarray:
    """Accuracy in percent, (len(sets), seeds): one set a size, each judged on all seeds."""
    return np.array([[_accuracy(s, test, config, seed) for seed in range(config.seeds)] for s in sets])


def _accuracy(ranked: RankedSet, test: LabelledImages, config: JudgeConfig, seed: int) -> float:
    images = ranked.training_images()
    proxy = replace(config.proxy, batch_size=min(config.proxy.batch_size, len(images)))
    shown = batches(epochs(np.arange(len(images)), seed), proxy.batch_size)
    trained = train_proxy(images, shown, config.steps, seed=seed, config=proxy, test=test)
    return 100 * trained.points[-1].accuracy


def table(rows: Sequence[Row], sizes: Sequence[int]) -> str:
    """One line a row: accuracy at each s, the mean over s, seconds and FLOPs."""
    head = f"{'':16}" + "".join(f"{f's={s}':>7}" for s in sizes) + f"{'mean':>8}{'seconds':>10}{'FLOPs':>10}"
    lines = [head]
    for row in rows:
        numbers = "".join(f"{a:7.1f}" for a in row.means)
        flops = f"{row.flops:.2g}" if row.flops is not None else "-"
        lines.append(f"{row.name:16}{numbers}{row.means.mean():8.1f}{row.seconds:10.0f}{flops:>10}")
    return "\n".join(lines)


def plot(rows: Sequence[Row], sizes: Sequence[int]) -> Figure:
    """Accuracy over s; bands are one standard deviation over the seeds."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        dashed = row.flops is None
        (line,) = axes.plot(sizes, row.means, marker=".", ls="--" if dashed else "-", label=row.name)
        spread = row.accuracy.std(1)
        axes.fill_between(sizes, row.means - spread, row.means + spread, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="images of each class, s", ylabel="test accuracy, %")
    axes.legend(fontsize=8)
    return figure

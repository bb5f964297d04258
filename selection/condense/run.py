"""Condensing a whole set: class groups on workers, one choice of the subset for all, resumable at every commit.

<work>/images/             the real images, decoded once
<work>/progress.json       what is done: loss and F(s) of each chunk of outer iterations
<work>/<stop>-<group>.npz  a group's images after the chunk that ends at outer iteration <stop>
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from pipeline import cluster, storage
from pipeline.cluster import ClusterConfig
from pipeline.progress import Progress
from selection.condense.config import CondenseConfig
from selection.condense.group import ClassGroup, GroupState
from selection.condense.subset import Subset, most_learnable, subset_of
from selection.proxy import pixels
from selection.proxy.images import LabelConfig, LabelledImages, labelled

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Chunk:
    """Outer iterations start .. stop - 1 as they were: mean loss of a class, F(s) (n,) averaged over classes and
    steps, the subset that had a loss of its own, and how many images were frozen."""

    start: int
    stop: int
    loss: float
    distances: list[float]
    first: int
    frozen: int


@dataclass(frozen=True)
class Condensed:
    """images: float32 (n, C, 3, H, W) in [0, 1], rank by rank. chunks: how they came about. seconds: of the work
    itself, summed over the workers."""

    images: torch.Tensor
    chunks: list[Chunk]
    seconds: float


@dataclass(frozen=True)
class GroupTask:
    """One group of the real images in the folder `images` through one chunk; `before` is None at the start."""

    images: str
    names: tuple[str, ...]
    config: CondenseConfig
    group: int
    classes: tuple[int, ...]
    start: int
    stop: int
    subset: Subset
    before: str | None
    after: str

    def __str__(self) -> str:
        return f"class group {self.group}, outer iterations {self.start} to {self.stop}"


@dataclass(frozen=True)
class GroupReport:
    loss: float
    distances: list[float]
    seconds: float


class GroupWorker:
    """The Ray actor: the real images, mapped, and one group at a time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # groups are what runs in parallel: bits do not depend on the threads
        keep_memory()
        self.device = cluster.worker_device()
        self.open: tuple[Any, ClassGroup] | None = None

    def run(self, task: GroupTask) -> GroupReport:
        started = time.monotonic()
        if storage.exists(task.after):  # committed before an interruption
            state = GroupState.from_bytes(storage.read_bytes(task.after))
        else:
            group = self._group(task)
            before = GroupState.from_bytes(storage.read_bytes(task.before)) if task.before else group.start()
            state = group.run(before, task.subset, task.start, task.stop)
            storage.write_bytes(task.after, state.to_bytes())
        return GroupReport(state.loss, state.distances.tolist(), time.monotonic() - started)

    def _group(self, task: GroupTask) -> ClassGroup:
        key = (task.images, task.classes, task.config)
        if self.open is None or self.open[0] != key:
            real = open_images(task.images, task.names)
            self.open = key, ClassGroup(real, task.classes, task.config, self.device)
        return self.open[1]


@contextlib.contextmanager
def group_workers(config: ClusterConfig, groups: int) -> Iterator[cluster.ActorPool]:
    """Workers for `condense`, for one condensation or for several after each other."""
    cluster.connect()
    pool = cluster.ActorPool(cluster.plan_workers(config, groups), GroupWorker, [])
    try:
        yield pool
    finally:
        pool.close()


def keep_memory() -> None:
    """Keep freed memory in the process: activations of tens of megabytes come and go at every layer, and glibc
    would return each to the system and have it zeroed again."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):  # another C library
        return


def open_images(folder: str, classes: Sequence[str]) -> LabelledImages:
    """The real images that were kept in `folder`, their labels as places in `classes`."""
    found = pixels.kept(folder, _missing)
    return labelled(found, LabelConfig(classes=list(classes)), (), folder)


def _missing() -> pixels.Images:
    raise FileNotFoundError("the real images are gone; run the command again from the start")


def condense(
    images: str, work: str, classes: Sequence[str], config: CondenseConfig, pool: cluster.ActorPool
) -> Condensed:
    """Condense the real images kept in the folder `images`; goes on where `work` was left.

    The result is that of an undisturbed run, byte for byte, on any number of workers of the same kind. Raises
    ValueError when a class has too few images.
    """
    groups = [tuple(part) for part in _groups(len(classes), config)]
    done, seconds = _resume(work)
    chunks = list(config.chunks())
    if len(done) < len(chunks):
        ClassGroup(open_images(images, classes), range(len(classes)), config)  # has every class enough?
        first = GroupTask(images, tuple(classes), config, 0, (), 0, 0, Subset(1, 0), None, "")
        with Progress(config.method, config.outer, "network", chunks[len(done)][0]) as progress:
            for start, stop in chunks[len(done) :]:
                chunk, spent = _chunk(pool, work, groups, first, done, start, stop)
                done.append(chunk)
                seconds += spent
                told = {"chunks": [asdict(c) for c in done], "seconds": round(seconds, 3)}
                storage.write_json(storage.join(work, PROGRESS), told)
                for g in range(len(groups)) if start else ():
                    storage.remove_tree(_state(work, start, g))
                progress.step(units=stop - start, note=f"loss {chunk.loss:.4g}, subset {chunk.first}")
    states = [
        GroupState.from_bytes(storage.read_bytes(_state(work, config.outer, g))) for g in range(len(groups))
    ]
    return Condensed(torch.cat([s.images for s in states], 1), done, seconds)


def _groups(classes: int, config: CondenseConfig) -> list[range]:
    size = config.classes_per_group
    return [range(i, min(i + size, classes)) for i in range(0, classes, size)]


def _resume(work: str) -> tuple[list[Chunk], float]:
    path = storage.join(work, PROGRESS)
    told: dict[str, Any] = storage.read_json(path) if storage.exists(path) else {"chunks": [], "seconds": 0.0}
    return [Chunk(**c) for c in told["chunks"]], told["seconds"]


def _state(work: str, stop: int, group: int) -> str:
    return storage.join(work, f"{stop:06d}-{group:05d}.npz")


def _chunk(
    pool: cluster.ActorPool, work: str, groups: Sequence[tuple[int, ...]], like: GroupTask, done: list[Chunk],
    start: int, stop: int,
) -> tuple[Chunk, float]:  # fmt: skip
    config = like.config
    subset = subset_of(choices(done, config.interval))
    if config.method in ("idc", "single"):
        subset = Subset(config.images_per_class, 0)
    tasks = [
        replace(
            like, group=g, classes=classes, start=start, stop=stop, subset=subset,
            before=_state(work, start, g) if start else None, after=_state(work, stop, g),
        )
        for g, classes in enumerate(groups)
    ]  # fmt: skip
    reports: dict[int, GroupReport] = {t.group: r for t, r in pool.map("run", tasks)}
    shares = np.array([len(c) for c in groups]) / sum(map(len, groups))
    loss = sum(float(shares[g]) * reports[g].loss for g in range(len(groups)))
    distances = sum(shares[g] * np.asarray(reports[g].distances) for g in range(len(groups)))
    chunk = Chunk(start, stop, loss, np.asarray(distances).tolist(), subset.first, subset.frozen)
    return chunk, sum(r.seconds for r in reports.values())


def choices(done: Sequence[Chunk], interval: int) -> list[int]:
    """The most learnable subset at the end of each whole interval but the first, which has none before it."""
    whole = [f for i, f in interval_distances(done, interval) if (i + 1) * interval <= done[-1].stop]
    return [most_learnable(a, b) for a, b in itertools.pairwise(whole)]


def interval_distances(done: Sequence[Chunk], interval: int) -> list[tuple[int, np.ndarray]]:
    """(number of the interval, F(s) (n,) averaged over its outer iterations). The paper takes F on the last network
    alone; the mean over the interval's networks is less at the mercy of one draw."""
    sums: dict[int, tuple[np.ndarray, int]] = {}
    for c in done:
        total, count = sums.get(c.start // interval, (np.zeros(len(c.distances)), 0))
        weight = c.stop - c.start
        sums[c.start // interval] = (total + weight * np.asarray(c.distances), count + weight)
    return [(i, total / count) for i, (total, count) in sorted(sums.items())]

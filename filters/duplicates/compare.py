"""Which comparisons a run makes, in tasks of bounded size, and the task that makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from filters.duplicates.blocks import Shelf
from filters.duplicates.clusters import ClusterFiles, Codebook, HashBands
from filters.duplicates.config import VERIFY_SLICE
from filters.duplicates.near import NO_HASH, PAIR, HashTest, PairWriter, candidate_blocks, hamming, thin_out
from pipeline import storage

# Comparisons a task makes: about a quarter of a second, more when that would give too many tasks.
TASK_WORK, MOST_TASKS = 500_000_000, 20_000


@dataclass(frozen=True)
class Unit:
    """A rectangle of one cluster: rows of one section against rows of another, or a triangle within one."""

    cluster: int
    left: str
    right: str
    left_rows: tuple[int, int]
    right_rows: tuple[int, int]

    @property
    def triangle(self) -> bool:
        return self.left == self.right and self.left_rows == self.right_rows

    @property
    def work(self) -> int:
        area = (self.left_rows[1] - self.left_rows[0]) * (self.right_rows[1] - self.right_rows[0])
        return area // 2 if self.triangle else area


@dataclass(frozen=True)
class Sections:
    """Directories of placements: those of earlier generations and those entering now."""

    old: tuple[str, ...]
    new: tuple[str, ...]

    def open(self) -> dict[str, ClusterFiles]:
        return {
            "new homes": ClusterFiles(self.new, "home"),
            "old homes": ClusterFiles(self.old, "home"),
            "new visits": ClusterFiles(self.new, "visit"),
            "old visits": ClusterFiles(self.old, "visit"),
        }


# What meets what; old rows have met each other already.
MEETINGS = (
    ("new homes", "new homes"),
    ("new homes", "old homes"),
    ("new visits", "new homes"),
    ("old visits", "new homes"),
    ("new visits", "old homes"),
)


def plan_units(sizes: dict[str, np.ndarray], tile_rows: int) -> Iterator[Unit]:
    """Every comparison of a run, clusters in order; sections over ``tile_rows`` are split, losing no pair."""
    clusters = len(sizes["new homes"])
    none = np.zeros(clusters, dtype=int)
    for cluster in range(clusters):
        for left, right in MEETINGS:
            left_size = int((sizes[left] if len(sizes[left]) else none)[cluster])
            right_size = int((sizes[right] if len(sizes[right]) else none)[cluster])
            for i in range(0, left_size, tile_rows):
                left_rows = (i, min(i + tile_rows, left_size))
                for j in range(i if left == right else 0, right_size, tile_rows):
                    unit = Unit(cluster, left, right, left_rows, (j, min(j + tile_rows, right_size)))
                    if unit.work:
                        yield unit


def pack(units: list[Unit]) -> list[tuple[Unit, ...]]:
    """Consecutive units in tasks of about equal work; a pure function of the units, so a resume agrees."""
    room = max(TASK_WORK, sum(unit.work for unit in units) // MOST_TASKS)
    tasks: list[tuple[Unit, ...]] = []
    current: list[Unit] = []
    filled = 0
    for unit in units:
        if current and filled + unit.work > room:
            tasks.append(tuple(current))
            current, filled = [], 0
        current.append(unit)
        filled += unit.work
    return [*tasks, tuple(current)] if current else tasks


@dataclass(frozen=True)
class CompareTask:
    units: tuple[Unit, ...]
    target: str


@dataclass(frozen=True)
class Compare:
    """Task: make some comparisons and write near pairs (PAIR) to ``task.target``. Returns their number."""

    shelf: Shelf
    book: Codebook | HashBands
    sections: Sections
    similarity: float
    distance: int

    def __call__(self, task: CompareTask) -> int:
        target = Path(task.target)
        if target.exists():
            return target.stat().st_size // PAIR.itemsize
        files = self.sections.open()
        with storage.commit(str(target)) as temporary, open(temporary, "wb") as file:
            vectors = None if isinstance(self.book, HashBands) else self.shelf.vectors
            writer = PairWriter(file, vectors, self.similarity)
            for unit in task.units:
                self._compare(unit, files, writer)
            writer.flush()
            return writer.written

    def _compare(self, unit: Unit, files: dict[str, ClusterFiles], writer: PairWriter) -> None:
        left_ids, left = files[unit.left].rows(unit.cluster, *unit.left_rows)
        same = unit.triangle
        right_ids, right = (
            (left_ids, left) if same else files[unit.right].rows(unit.cluster, *unit.right_rows)
        )
        hashed = left.dtype == np.uint64
        test = HashTest(self.distance) if hashed else self.book.test
        sides = test.sides(left)[0], test.sides(right)[1]
        band = self.book.base(unit.cluster) if isinstance(self.book, HashBands) else 0
        for a, b in candidate_blocks(*sides, test.cut, triangle=same):
            if writer.vectors is not None:
                keep = thin_out(writer.vectors, left_ids, right_ids, a, b, self.similarity)
                a, b = a[keep], b[keep]
            for start in range(0, len(a), VERIFY_SLICE):
                some, other = a[start : start + VERIFY_SLICE], b[start : start + VERIFY_SLICE]
                passing = test.accept(left[some], right[other])
                if isinstance(self.book, HashBands):
                    # Bands overlap: a pair counts in the first band it agrees in.
                    passing &= self.book.first_band(left[some] ^ right[other]) == band
                some, other = some[passing], other[passing]
                bits = (
                    hamming(left[some], right[other])
                    if hashed
                    else np.full(len(some), NO_HASH, dtype=np.uint8)
                )
                writer.add(left_ids[some], right_ids[other], bits)

"""Training rows as shards that are read in blocks: the one way the influence code touches data.

A pass over the rows either sums something (`Rows.total`) or computes something for each row (`Rows.each`).
Both take a picklable function of one block, so a pass can be spread over processes or a cluster by giving
`Rows` an ordered parallel map; sums are added in shard order, so the result does not depend on who ran what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

BLOCK_VALUES = 1 << 21  # values of one block: 16 MiB in float64, small enough to stay near the cache
Sums = tuple[np.ndarray, ...]
OrderedMap = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


class Shard(Protocol):
    """Some rows that can be loaded on their own; it must pickle when `Rows` is given a parallel map."""

    @property
    def rows(self) -> int: ...

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        """Features (rows, d), any float dtype, memory-mapped if large; labels (rows,) integer."""
        ...


@dataclass(frozen=True)
class ArrayShard:
    """Rows held in memory (or in a memory map)."""

    x: np.ndarray
    y: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.y)

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        return self.x, self.y


@dataclass(frozen=True)
class NpyShard:
    """Features in a `.npy` file, memory-mapped; labels in memory. Only the path travels to a worker."""

    features: str
    y: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.y)

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        return np.load(self.features, mmap_mode="r"), self.y


class Rows:
    """n training rows in shards, of which `keep` takes part in sums.

    Args:
        shards: the rows, in order; row numbers count through them.
        keep: (n,) bool, rows that take part in `total`; None for all.
        ordered_map: `map`, or a parallel map that yields results in order.
    Raises:
        ValueError: no rows, or shards of different widths, or labels that do not match the features.
    """

    def __init__(
        self, shards: Sequence[Shard], *, keep: np.ndarray | None = None, ordered_map: OrderedMap = map
    ) -> None:
        self.shards = list(shards)
        self.ordered_map = ordered_map
        self.n = sum(shard.rows for shard in self.shards)
        if self.n == 0:
            raise ValueError("training rows: none given; influence needs at least one row")
        self.keep = np.ones(self.n, dtype=bool) if keep is None else np.asarray(keep, dtype=bool)
        if self.keep.shape != (self.n,):
            raise ValueError(f"keep: shape {self.keep.shape}, expected ({self.n},)")
        self.width = self.shards[0].load()[0].shape[1]

    @classmethod
    def from_arrays(cls, x: np.ndarray, y: np.ndarray, *, shards: int = 1) -> Rows:
        """Rows of plain arrays, x (n, d) float and y (n,) integer, cut into `shards` equal parts."""
        x, y = np.asarray(x), np.asarray(y)
        if x.ndim != 2 or y.shape != x.shape[:1]:
            raise ValueError(f"features {x.shape} and labels {y.shape}: expected (n, d) and (n,)")
        return cls([ArrayShard(a, b) for a, b in zip(np.array_split(x, shards), np.array_split(y, shards))])

    @property
    def kept(self) -> int:
        """How many rows take part in sums."""
        return int(self.keep.sum())

    def where(self, keep: np.ndarray) -> Rows:
        """The same shards with another set of rows taking part."""
        return Rows(self.shards, keep=keep, ordered_map=self.ordered_map)

    def total(self, function: Callable[[np.ndarray, np.ndarray], Sums]) -> Sums:
        """Sum over kept rows of `function(x (b, d) float64, y (b,) int64)`, a tuple of float64 arrays."""
        parts = self.ordered_map(partial(_shard_total, function, self.width), self._tasks())
        sums: list[np.ndarray] | None = None
        for part in parts:
            if part is not None:
                sums = _add(sums, part)
        if sums is None:
            raise ValueError("training rows: every row is removed; at least one must stay")
        return tuple(sums)

    def each(self, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """`function(x (b, d) as stored, y (b,) int64)` for every row, kept or not, joined in row order."""
        parts = self.ordered_map(partial(_shard_each, function, self.width), self._tasks())
        return np.concatenate(list(parts))

    def labels(self) -> np.ndarray:
        """(n,) int64 labels of every row."""
        return self.each(_labels)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """(len(rows), d) float64 features of a few rows, in the order asked for."""
        rows = np.asarray(rows)
        out = np.empty((len(rows), self.width))
        start = 0
        for shard in self.shards:
            inside = (rows >= start) & (rows < start + shard.rows)
            if inside.any():
                out[inside] = shard.load()[0][rows[inside] - start]
            start += shard.rows
        return out

    def _tasks(self) -> Iterable[tuple[Shard, np.ndarray]]:
        start = 0
        for shard in self.shards:
            yield shard, self.keep[start : start + shard.rows]
            start += shard.rows


def block_rows(width: int) -> int:
    """Rows of one block of `width` values each."""
    return max(64, BLOCK_VALUES // max(width, 1))


def _load(shard: Shard, width: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = shard.load()
    if x.ndim != 2 or x.shape != (shard.rows, width) or y.shape != (shard.rows,):
        raise ValueError(
            f"shard {shard!r:.80}: features {x.shape}, labels {y.shape}; expected ({shard.rows}, {width})"
        )
    return x, y


def _add(sums: list[np.ndarray] | None, part: Sums) -> list[np.ndarray]:
    if sums is None:
        return [np.array(value, dtype=np.float64) for value in part]
    for total, value in zip(sums, part):
        total += value
    return sums


def _shard_total(
    function: Callable[[np.ndarray, np.ndarray], Sums], width: int, task: tuple[Shard, np.ndarray]
) -> Sums | None:
    shard, keep = task
    x, y = _load(shard, width)
    sums: list[np.ndarray] | None = None
    step = block_rows(width)
    for start in range(0, shard.rows, step):
        mask = keep[start : start + step]
        if not mask.any():
            continue
        block, labels = x[start : start + step], y[start : start + step]
        if not mask.all():
            block, labels = block[mask], labels[mask]
        sums = _add(sums, function(np.asarray(block, dtype=np.float64), labels.astype(np.int64)))
    return None if sums is None else tuple(sums)


def _shard_each(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray], width: int, task: tuple[Shard, np.ndarray]
) -> np.ndarray:
    shard, _ = task
    x, y = _load(shard, width)
    step = block_rows(width)
    return np.concatenate(
        [
            function(x[start : start + step], y[start : start + step].astype(np.int64))
            for start in range(0, max(shard.rows, 1), step)
        ]
    )


def _labels(_: np.ndarray, y: np.ndarray) -> np.ndarray:
    return y

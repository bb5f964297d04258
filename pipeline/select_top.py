"""The exact k best of any number of rows, by streaming passes: no sort and no copy of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

COLLECT = 1 << 22  # candidates that are sorted in memory: 96 MiB
DIGIT = 16

Blocks = Callable[[], Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class Boundary:
    """The last row that is in: rows are ordered by (score descending, uid ascending)."""

    score: float
    uid_hi: int
    uid_lo: int

    def includes(self, score: pl.Expr) -> pl.Expr:
        """True for rows at or before the boundary; false for NaN and null."""
        value, hi, lo = score.cast(pl.Float64), pl.col("uid_hi"), pl.col("uid_lo")
        tie = (hi < self.uid_hi) | ((hi == self.uid_hi) & (lo <= self.uid_lo))
        above = (value > self.score) & value.is_not_nan()
        return (above | ((value == self.score) & tie)).fill_null(False)


def select_top(blocks: Blocks, count: int, k: int) -> Boundary:
    """The k-th of `count` rows given as (score float64, uid_hi, uid_lo) blocks; scores are finite.

    A radix selection: each pass over the rows counts one 16-bit digit of the composite key (score, uid)
    and keeps the digit that holds the k-th row, until the rows that share it fit in memory. The blocks
    are asked for once a pass; 4 passes settle a score, 12 the whole key.
    """
    if not 1 <= k <= count:
        raise ValueError(f"k={k}: must lie in [1, {count}]")
    prefix: list[int] = []
    while count > COLLECT and len(prefix) < 3 * 64 // DIGIT:
        histogram = np.zeros(1 << DIGIT, np.int64)
        for keys in _candidates(blocks, prefix):
            digit = _digit(keys, len(prefix))
            histogram += np.bincount(digit, minlength=1 << DIGIT)
        ends = np.cumsum(histogram)
        chosen = int(np.searchsorted(ends, k))
        k -= int(ends[chosen] - histogram[chosen])
        count = int(histogram[chosen])
        prefix.append(chosen)
    found = [np.concatenate(columns) for columns in zip(*_candidates(blocks, prefix))]
    order = np.lexsort((found[2], found[1], found[0]))
    key, hi, lo = (int(column[order[k - 1]]) for column in found)
    return Boundary(_score(key), hi, lo)


def _candidates(blocks: Blocks, prefix: list[int]) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for score, hi, lo in blocks():
        keys = (_descending(score), hi, lo)
        keep = np.ones(len(score), bool)
        for position, digit in enumerate(prefix):
            keep &= _digit(keys, position) == digit
        yield tuple(k[keep] for k in keys)  # type: ignore[misc]


def _digit(keys: tuple[np.ndarray, ...], position: int) -> np.ndarray:
    word, place = divmod(position, 64 // DIGIT)
    shift = np.uint64(64 - DIGIT * (place + 1))
    return ((keys[word] >> shift) & np.uint64((1 << DIGIT) - 1)).astype(np.int64)


def _descending(score: np.ndarray) -> np.ndarray:
    """uint64 keys that ascend as float64 scores descend (IEEE 754 order; -0.0 equals 0.0)."""
    bits = (np.asarray(score, np.float64) + 0.0).view(np.uint64)
    sign = np.uint64(1) << np.uint64(63)
    ascending = np.where(bits & sign, ~bits, bits | sign)
    return ~ascending


def _score(key: int) -> float:
    ascending = ~key & ((1 << 64) - 1)
    bits = ascending & ~(1 << 63) if ascending >> 63 else ~ascending & ((1 << 64) - 1)
    return float(np.array(bits, np.uint64).view(np.float64))

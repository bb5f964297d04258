"""The exact k best of any number of rows, by streaming passes: no sort and no copy of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """The k-th of `count` rows; see `select_tops`."""
    return select_tops(blocks, count, [k])[0]


@dataclass
class _Search:
    """Where the k-th row is known to be: among `count` rows that share `prefix`, of which it is number k."""

    prefix: tuple[int, ...]
    count: int
    k: int

    @property
    def done(self) -> bool:
        return self.count <= COLLECT or len(self.prefix) == 3 * 64 // DIGIT


def select_tops(blocks: Blocks, count: int, ks: Sequence[int]) -> list[Boundary]:
    """The k-th of `count` rows, for every k, given as (score float64, uid_hi, uid_lo) blocks; scores are finite.

    A radix selection: each pass over the rows counts one 16-bit digit of the composite key (score, uid)
    and keeps the digit that holds the k-th row, until the rows that share it fit in memory. The blocks
    are asked for once a pass, whatever the number of ks; 4 passes settle a score, 12 the whole key.
    """
    for k in ks:
        if not 1 <= k <= count:
            raise ValueError(f"k={k}: must lie in [1, {count}]")
    searches = [_Search((), count, k) for k in ks]
    while open_ := [s for s in searches if not s.done]:
        histograms = {s.prefix: np.zeros(1 << DIGIT, np.int64) for s in open_}
        for block in blocks():
            for prefix, histogram in histograms.items():
                digit = _digit(_candidates(block, prefix), len(prefix))
                histogram += np.bincount(digit, minlength=1 << DIGIT)
        for s in open_:
            histogram = histograms[s.prefix]
            ends = np.cumsum(histogram)
            chosen = int(np.searchsorted(ends, s.k))
            s.k -= int(ends[chosen] - histogram[chosen])
            s.count = int(histogram[chosen])
            s.prefix = (*s.prefix, chosen)
    return _settle(blocks, searches)


def _settle(blocks: Blocks, searches: list[_Search]) -> list[Boundary]:
    """The rows themselves, from those that share each search's prefix: one prefix in memory at a time."""
    found: dict[tuple[int, ...], dict[int, Boundary]] = {}
    for prefix in dict.fromkeys(s.prefix for s in searches):
        parts = [_candidates(block, prefix) for block in blocks()]
        keys = np.concatenate([part[0] for part in parts])
        wanted = sorted({s.k for s in searches if s.prefix == prefix})
        ordered = np.partition(keys, [k - 1 for k in wanted])
        found[prefix] = {}
        for k in wanted:
            key = ordered[k - 1]
            hi, lo = (np.concatenate([part[i][part[0] == key] for part in parts]) for i in (1, 2))
            row = np.lexsort((lo, hi))[k - 1 - int((keys < key).sum())]
            found[prefix][k] = Boundary(_score(int(key)), int(hi[row]), int(lo[row]))
    return [found[s.prefix][s.k] for s in searches]


def _candidates(
    block: tuple[np.ndarray, np.ndarray, np.ndarray], prefix: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys (descending score, uid_hi, uid_lo) of a block's rows that begin with `prefix`."""
    keys = (_descending(block[0]), block[1], block[2])
    if not prefix:
        return keys
    keep = np.ones(len(keys[0]), bool)
    for position, digit in enumerate(prefix):
        keep &= _digit(keys, position) == digit
    return keys[0][keep], keys[1][keep], keys[2][keep]


def _digit(keys: tuple[np.ndarray, ...], position: int) -> np.ndarray:
    word, place = divmod(position, 64 // DIGIT)
    shift = np.uint64(64 - DIGIT * (place + 1))
    return ((keys[word] >> shift) & np.uint64((1 << DIGIT) - 1)).astype(np.int64)


def _descending(score: np.ndarray) -> np.ndarray:
    """uint64 keys that ascend as float64 scores descend (IEEE 754 order; -0.0 equals 0.0)."""
    bits = (np.asarray(score, np.float64) + 0.0).view(np.uint64)
    negative = (bits.view(np.int64) >> 63).view(np.uint64)  # all ones, or none
    return ~(bits ^ (negative | np.uint64(1 << 63)))


def _score(key: int) -> float:
    ascending = ~key & ((1 << 64) - 1)
    bits = ascending & ~(1 << 63) if ascending >> 63 else ~ascending & ((1 << 64) - 1)
    return float(np.array(bits, np.uint64).view(np.float64))

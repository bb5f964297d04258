"""Samples of a pool that any pass over it draws alike: rows by a hash of their uid, the smallest ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uid_order(hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each uid (uint64 halves), as good as random and always the same: float64 (n,).

    splitmix64's finaliser (Steele et al., OOPSLA 2014) over both halves.
    """
    with np.errstate(over="ignore"):
        x = lo.astype(np.uint64) + _mixed(hi.astype(np.uint64)) + GOLDEN
    return (_mixed(x) >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _mixed(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Smallest:
    """The rows with the smallest `order` of each `group`, out of any number of frames in any order.

    With `uid_order` as the order that is a uniform random sample of each group. Frames hold the columns group,
    order, shard, row, and others; ties go by shard and row. sizes: rows to keep of a group, "" for those not named.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._held: pl.DataFrame | None = None

    def add(self, frame: pl.DataFrame) -> None:
        worked = frame if self._held is None else pl.concat([self._held, frame], how="vertical_relaxed")
        ranked = worked.sort("group", "order", "shard", "row").with_columns(
            rank=pl.int_range(pl.len()).over("group")
        )
        size = pl.col("group").replace_strict(self.sizes, default=self.sizes[""], return_dtype=pl.Int64)
        self._held = ranked.filter(pl.col("rank") < size).drop("rank")

    def rows(self) -> pl.DataFrame:
        """By group, then order."""
        return pl.DataFrame() if self._held is None else self._held

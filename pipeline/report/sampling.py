"""Samples of a pool that any pass over it draws alike: rows by a hash of their uid, the smallest ones."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl


class Smallest:
    """The rows with the smallest `order` of each `group`, out of any number of frames in any order.

    With `pipeline.uid_draw.uniform` as the order that is a uniform random sample of each group. Frames hold the columns group,
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

"""Sources that lose most of their samples as duplicates: a threshold too loose for what they hold, or a copy."""

from __future__ import annotations

import polars as pl

MOST, LEAST_ROWS = 0.5, 20
# Names counted at a time; past it, those of fewest rows are forgotten.
NAMES = 2_000_000


class SourceLosses:
    """Rows and losses by source, shard after shard: its shard, the domain of its url, its `source` column.

    Memory is bounded by NAMES: a domain of few rows may be forgotten and counted from then on, so that counts
    of a pool with more domains than that are lower bounds.
    """

    def __init__(self) -> None:
        self.counts = pl.DataFrame(
            schema={"kind": pl.String, "source": pl.String, "rows": pl.UInt64, "dropped": pl.UInt64}
        )

    def add(self, frame: pl.DataFrame, alive: pl.Series, gone: pl.Series) -> None:
        """Rows of one shard: the source columns that the pool has, which rows came in, which were dropped."""
        rows = frame.with_columns(gone=gone).filter(alive)
        parts = [
            rows.group_by(pl.col(kind).cast(pl.String).alias("source"))
            .agg(rows=pl.len(), dropped=pl.col("gone").sum())
            .select(pl.lit(kind).alias("kind"), "source", pl.col("rows", "dropped").cast(pl.UInt64))
            for kind in frame.columns
        ]
        self.counts = (
            pl.concat([self.counts, *parts])
            .drop_nulls("source")
            .group_by("kind", "source")
            .agg(pl.col("rows", "dropped").sum())
        )
        if len(self.counts) > NAMES:
            self.counts = self.counts.top_k(NAMES // 2, by=["rows", "kind", "source"])

    def worst(self) -> pl.DataFrame:
        """Sources of LEAST_ROWS or more that lose over MOST: kind, source, rows, dropped, share; worst first."""
        share = self.counts.with_columns(share=pl.col("dropped") / pl.col("rows"))
        losing = share.filter((pl.col("share") > MOST) & (pl.col("rows") >= LEAST_ROWS))
        return losing.sort("share", "rows", "kind", "source", descending=[True, True, False, False])


def source_columns(have: list[str]) -> dict[str, pl.Expr]:
    """How to tell the sources of a row, from the table columns there are."""
    exprs = {"shard": pl.col("shard").cast(pl.String)}
    if "url" in have:
        exprs["domain"] = pl.col("url").cast(pl.String).str.extract(r"^\w+://(?:[^/@]*@)?([^/:?#]+)", 1)
    if "source" in have:
        exprs["source"] = pl.col("source").cast(pl.String)
    return exprs

"""Exact duplicates: rows that share a key, over columns on disk, in passes of bounded size.

Two float32 copies of one vector have a similarity below 1 in a third of cases, so equality has its own pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipeline import storage

# Rows of one key grouped at a time; about 100 bytes each while they are.
PASS_ROWS = 50_000_000
UID = ["uid_hi", "uid_lo"]


@dataclass(frozen=True, kw_only=True)
class ExactConfig:
    """Keys that make two rows one, in the order they are tried: names of columns, or ``caption``.

    A caption is normalised first. Captions alone are shared by unrelated images, so they are not a key unless
    asked for.
    """

    keys: tuple[str, ...] = ("sha256", "pixel_hash", "url")
    pass_rows: int = PASS_ROWS

    def __post_init__(self) -> None:
        if len(set(self.keys)) != len(self.keys):
            raise ValueError(f"keys={list(self.keys)}: name each key once")
        if self.pass_rows < 1:
            raise ValueError(f"pass_rows={self.pass_rows}: at least 1")


def normalised_caption(column: str = "caption") -> pl.Expr:
    """Caption without differences of case, spacing or Unicode form (NFKC); empty becomes null."""
    text = pl.col(column).cast(pl.String).str.normalize("NFKC").str.to_lowercase()
    text = text.str.replace_all(r"\s+", " ").str.strip_chars()
    return pl.when(text != "").then(text)


def exact_duplicates(tables: Sequence[Path], target: Path, config: ExactConfig) -> Mapping[str, int]:
    """Find rows that share a key and write who is dropped for whom; rows dropped by each key.

    ``tables`` are parquet files with uid_hi, uid_lo (uint64), score (float), alive (bool) and key columns;
    keys that no table has are passed over, null and empty keys never match. Within a group the row of highest
    score stays, the lowest uid among equals. A row dropped by one key is gone before the next is tried.

    ``target`` gets parquet: uid_hi, uid_lo, kept_uid_hi, kept_uid_lo, how (the key), by uid. Each key is
    grouped in passes over its hash, so that one pass holds about ``pass_rows`` rows; what was dropped so far,
    16 bytes a row, is held throughout.
    """
    scan = pl.scan_parquet(list(tables), missing_columns="insert", extra_columns="ignore")
    have = scan.collect_schema().names()
    rows = scan.filter("alive").select(pl.len()).collect(engine="streaming").item()
    passes = max(1, math.ceil(rows / config.pass_rows))
    found: list[pl.DataFrame] = []
    counts: dict[str, int] = {}
    for name in config.keys:
        if name not in have:
            continue
        gone = pl.concat([part.select(UID) for part in found]) if found else None
        parts = [_one_pass(scan, name, number, passes, gone) for number in range(passes)]
        counts[name] = sum(len(part) for part in parts)
        found += parts
    empty = pl.DataFrame(schema={**dict.fromkeys([*UID, *_kept()], pl.UInt64), "how": pl.String})
    with storage.commit(str(target)) as temporary:
        pl.concat([empty, *found]).sort(UID).write_parquet(temporary)
    return counts


def _kept() -> list[str]:
    return [f"kept_{name}" for name in UID]


def _one_pass(
    scan: pl.LazyFrame, name: str, number: int, passes: int, gone: pl.DataFrame | None
) -> pl.DataFrame:
    """Dropped rows among those whose key falls into this pass."""
    text = pl.col(name).cast(pl.String)
    key = normalised_caption(name) if name == "caption" else pl.when(text != "").then(text)
    score = pl.col("score").cast(pl.Float64).fill_nan(None).fill_null(-math.inf)
    rows = scan.filter("alive").select(
        *UID, score.alias("score"), key.hash(0).alias("hash"), key.alias("key")
    )
    rows = rows.filter(pl.col("key").is_not_null() & (pl.col("hash") % passes == number))
    if gone is not None:
        rows = rows.join(gone.lazy(), on=UID, how="anti")
    shared = rows.filter(pl.len().over("key") > 1).collect(engine="streaming")
    ranked = shared.sort("key", "score", *UID, descending=[False, True, False, False])
    keeper = [pl.col(uid).first().over("key").alias(kept) for uid, kept in zip(UID, _kept())]
    first = pl.int_range(pl.len()).over("key") == 0
    return (
        ranked.with_columns(*keeper, first.alias("first"))
        .filter(~pl.col("first"))
        .select(*UID, *_kept(), pl.lit(name).alias("how"))
    )

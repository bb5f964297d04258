"""Captions of evaluation sets: what a pool should not hold word for word."""

from __future__ import annotations

import polars as pl
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.census.count import normalised
from pipeline.census.source import CAPTIONS, Shards
from pipeline.errors import Refused
from pipeline.samples import PoolConfig
from pipeline.shards import expand


def evaluation_captions(path: str) -> frozenset[str]:
    """Normalised captions of a parquet file (text, or lists of text), a text file with one a line, or shards."""
    if path.endswith(".parquet"):
        with storage.open_input(path, "parquet", "evaluation") as f:
            file = pq.ParquetFile(f)
            column = next((c for c in CAPTIONS if c in file.schema_arrow.names), None)
            if column is None:
                raise Refused(f"evaluation={path}: no caption column (looked for {', '.join(CAPTIONS)})")
            table = pl.from_arrow(file.read(columns=[column]))
        assert isinstance(table, pl.DataFrame)
        texts = table[column]
        while texts.dtype in (pl.List, pl.Array):
            texts = texts.explode()
    elif path.endswith(".txt"):
        texts = pl.Series(storage.read_bytes(path).decode("utf-8", "replace").splitlines(), dtype=pl.String)
    else:
        pool = PoolConfig(shards=path)
        found = [c["caption"] for c in Shards(expand(path), pool).chunks(["caption"])]
        texts = pl.concat(found)
    words = pl.DataFrame({"caption": texts}).drop_nulls().select(normalised(pl.col("caption")))["caption"]
    captions = frozenset(words.to_list()) - {""}
    if not captions:
        raise Refused(f"evaluation={path}: no caption there")
    return captions

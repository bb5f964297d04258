"""Exact phrase search over captions, by a scan of the caption column."""

from __future__ import annotations

import re
from collections.abc import Iterator

import polars as pl

from pipeline.census.source import Source

COLUMNS = ["uid_hi", "uid_lo", "shard", "key", "group", "caption"]


def find_phrase(source: Source, phrase: str) -> Iterator[pl.DataFrame]:
    """Samples whose caption holds the phrase: uid_hi, uid_lo, shard, key, group (its name), caption; in pool order.

    The phrase is taken literally, without regard to case, and starts and ends at the edge of a word.
    """
    start, end = (r"\b" if re.match(r"\w", c) else "" for c in (phrase[0], phrase[-1]))
    pattern = f"(?i){start}{_escaped(phrase)}{end}"
    names = pl.Series(source.groups)
    for chunk in source.chunks(COLUMNS):
        found = chunk.filter(pl.col("caption").str.contains(pattern))
        yield found.with_columns(group=names.gather(found["group"]))


def _escaped(phrase: str) -> str:
    """As a pattern of polars' engine, which has no other use for a backslash before punctuation."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~])", r"\\\1", phrase)

"""Feature tables as the near search and the leakage check read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from filters.duplicates.blocks import Block
from pipeline import storage
from pipeline.decisions import Decisions
from pipeline.tables import TableSet

TOWERS = {"image": ("image",), "text": ("text",), "both": ("image", "text")}


@dataclass(frozen=True)
class TableBlocks:
    """The rows of a run that `before` keeps, with the embeddings that `vectors` holds for them.

    towers: whose embeddings stand side by side; none where hashes decide alone. score: the column that ranks
    rows, None where all are equal. hashed: rows need a perceptual hash.
    """

    tables: TableSet
    ids: list[str]
    before: Decisions
    vectors: TableSet
    towers: Sequence[str]
    score: str | None
    hashed: bool

    @property
    def shards(self) -> Sequence[str]:
        return self.ids

    def load(self, shard: str) -> Block:
        hashes = ["phash"] if self.hashed else []
        frame = self.tables.read(shard, ["uid_hi", "uid_lo", *hashes, *([self.score] if self.score else [])])
        alive = self.before.read(shard, ["kept"])["kept"].to_numpy().copy()
        phash = None
        if self.hashed:
            alive &= frame["phash"].is_not_null().to_numpy()
            phash = frame["phash"].fill_null(0).to_numpy()
        return Block(
            shard=shard, embeddings=self.embeddings(shard), score=score_of(frame, self.score), alive=alive,
            uid_hi=frame["uid_hi"].to_numpy(), uid_lo=frame["uid_lo"].to_numpy(), phash=phash,
        )  # fmt: skip

    def embeddings(self, shard: str) -> list[str]:
        return embedding_files(self.vectors, shard, self.towers)

    def version(self, shard: str) -> str | None:
        report = self.vectors.report(shard)
        return report.digest if report else None


def embedding_files(tables: TableSet, shard: str, towers: Sequence[str]) -> list[str]:
    return [storage.resolve(tables.path(shard, f"{tower}.npy"))[1] for tower in towers]


def score_of(frame: pl.DataFrame, column: str | None) -> np.ndarray:
    """float32 (n,); samples of a pool without scores are all equal, so that the uid decides."""
    if column is None:
        return np.zeros(len(frame), np.float32)
    return frame[column].fill_null(np.nan).fill_nan(-np.inf).to_numpy()

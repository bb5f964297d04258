"""Before anything is placed: what each shard holds, rows drawn at random, and what those are near to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from filters.duplicates.blocks import BlockSource, open_embeddings, row_ids, unit_rows
from pipeline.errors import Refused


@dataclass(frozen=True)
class Survey:
    """One shard: rows its block holds, rows alive, rows alive that have not entered yet, embedding width."""

    shard: str
    version: str | None
    rows: int
    alive: int
    fresh: int
    width: int


@dataclass(frozen=True)
class SurveyShard:
    """Task: count one shard, after checking that its columns and vectors are of one length.

    A task is (shard, files of the rows of it that have entered).
    """

    source: BlockSource
    method: str

    def __call__(self, task: tuple[str, Sequence[str]]) -> Survey:
        shard, entered = task
        block = self.source.load(shard)
        embeddings = open_embeddings(block)
        if self.method != "embedding" and block.phash is None:
            raise Refused(f"{shard}: no perceptual hashes; scan them, or set dedup.method=embedding")
        fresh = block.alive & ~union(entered, block.rows)
        counts = (block.rows, int(block.alive.sum()), int(fresh.sum()))
        return Survey(shard, self.source.version(shard), *counts, embeddings.width)


def entered_files(directories: Sequence[str]) -> dict[int, list[str]]:
    """Files that say which rows have been placed, usable or not, by the ordinal of their shard."""
    found: dict[int, list[str]] = {}
    for directory in directories:
        for path in Path(directory).glob("entered-*.npy"):
            found.setdefault(int(path.stem.split("-")[1]), []).append(str(path))
    return found


def union(masks: Sequence[str], rows: int) -> np.ndarray:
    """Rows that any of these files marks: (rows,) bool."""
    seen = np.zeros(rows, dtype=bool)
    for mask in masks:
        seen |= np.load(mask)
    return seen


@dataclass(frozen=True)
class SampleRows:
    """Task: a seeded random share of the live rows of (ordinal, shard).

    Returns row ids (n,) int64, unit rows (n, d) float32 and hashes (n,) uint64 (zeros when there are none).
    """

    source: BlockSource
    share: float
    seed: int
    purpose: int

    def __call__(self, task: tuple[int, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ordinal, shard = task
        block = self.source.load(shard)
        rng = np.random.default_rng([self.seed, self.purpose, ordinal])
        rows = np.flatnonzero(block.alive)
        rows = rows[rng.random(len(rows)) < self.share]
        vectors, usable = unit_rows(open_embeddings(block)[rows])
        rows = rows[usable]
        hashes = np.zeros(len(rows), np.uint64) if block.phash is None else block.phash[rows]
        return row_ids(ordinal, rows), vectors[usable], hashes

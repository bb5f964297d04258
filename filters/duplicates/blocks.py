"""Blocks of rows: what the duplicate stage reads, one block a shard, never the pool at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# A row's number through the whole stage: shard ordinal in the high 32 bits, row of the block in the low 32.
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Block:
    """The rows of one shard.

    ``embeddings`` is the path of an (n, d) float16 or float32 ``.npy``; ``uid_hi``/``uid_lo`` (n,) uint64;
    ``score`` (n,) float, higher is better; ``alive`` (n,) bool, False for rows an earlier stage dropped;
    ``phash`` (n,) uint64 perceptual hashes, or None when the pool has none.
    """

    shard: str
    embeddings: str
    uid_hi: np.ndarray
    uid_lo: np.ndarray
    score: np.ndarray
    alive: np.ndarray
    phash: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.alive)
        columns = {"uid_hi": self.uid_hi, "uid_lo": self.uid_lo, "score": self.score, "phash": self.phash}
        for name, column in columns.items():
            if column is not None and len(column) != n:
                raise ValueError(f"{self.shard}: {name} has {len(column)} rows where alive has {n}")


class BlockSource(Protocol):
    """Where blocks come from. Picklable: it travels to the workers, which load the blocks they need."""

    @property
    def shards(self) -> Sequence[str]:
        """Names of the shards, each once."""

    def load(self, shard: str) -> Block:
        """The block of one shard."""


@dataclass(frozen=True)
class MemorySource:
    """Blocks already in memory, by shard name: small pools, evaluation sets and tests."""

    blocks: dict[str, Block]

    @property
    def shards(self) -> Sequence[str]:
        return list(self.blocks)

    def load(self, shard: str) -> Block:
        return self.blocks[shard]


def open_embeddings(path: str) -> np.ndarray:
    """Memory-map an (n, d) embedding file. Raises ValueError naming the file when it holds anything else."""
    array = np.load(path, mmap_mode="r")
    if array.ndim != 2 or array.dtype not in (np.float16, np.float32):
        raise ValueError(
            f"{path}: {array.dtype} of shape {array.shape}; embeddings are (n, d) float16 or float32"
        )
    return array


def unit_rows(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L2-normalise rows: ((n, d) float32, (n,) bool usable).

    A row that is not finite or has no direction is not usable and comes back as zeros. Every row is reduced
    on its own, so the result does not depend on which rows are read together.
    """
    rows = np.array(vectors, dtype=np.float32)
    norm = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    usable = np.isfinite(norm) & (norm > 0)
    if not usable.all():
        rows[~usable], norm[~usable] = 0.0, 1.0
    rows /= norm[:, None]
    return rows, usable


def row_ids(ordinal: int, rows: np.ndarray) -> np.ndarray:
    """Row numbers of the stage for rows of the shard with this ordinal: (n,) int64."""
    return (np.int64(ordinal) << ROW_BITS) | rows.astype(np.int64)


@dataclass(frozen=True)
class Shelf:
    """The shards of a run in the order they entered it: an ordinal for each, and where its vectors lie."""

    shards: list[str]
    paths: list[str]
    width: int

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """Unit vectors of the given rows: ids (n,) int64 ascending and distinct -> (n, d) float32."""
        out = np.empty((len(ids), self.width), dtype=np.float32)
        ordinals = ids >> ROW_BITS
        starts = np.flatnonzero(np.r_[True, ordinals[1:] != ordinals[:-1]]) if len(ids) else np.empty(0, int)
        for start, stop in zip(starts, [*starts[1:], len(ids)]):
            embeddings = open_embeddings(self.paths[int(ordinals[start])])
            out[start:stop] = unit_rows(embeddings[ids[start:stop] & ROW_MASK])[0]
        return out

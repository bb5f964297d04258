"""Blocks of rows: what the duplicate stage reads, one block a shard, never the pool at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipeline.errors import Refused

# A row's number through the whole stage: shard ordinal in the high 32 bits, row of the block in the low 32.
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Block:
    """The rows of one shard.

    ``embeddings`` are paths of (n, d) float16 or float32 ``.npy`` whose rows stand side by side (none: the
    rows have only hashes); ``uid_hi``/``uid_lo`` (n,) uint64;
    ``score`` (n,) float, higher is better; ``alive`` (n,) bool, False for rows an earlier stage dropped;
    ``phash`` (n,) uint64 perceptual hashes, or None when the pool has none.
    """

    shard: str
    embeddings: list[str]
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
                raise Refused(f"{self.shard}: {name} has {len(column)} rows where alive has {n}")

    @property
    def rows(self) -> int:
        return len(self.alive)


class BlockSource(Protocol):
    """Where blocks come from. Picklable: it travels to the workers, which load the blocks they need."""

    @property
    def shards(self) -> Sequence[str]:
        """Names of the shards of this run, each once."""

    def load(self, shard: str) -> Block:
        """The block of one shard of this run."""

    def embeddings(self, shard: str) -> list[str]:
        """Where the vectors of a shard lie, of this run or of an earlier one."""

    def version(self, shard: str) -> str | None:
        """What changes when the vectors of a shard, of this run or an earlier one, do; None when they are gone."""


@dataclass(frozen=True)
class MemorySource:
    """Blocks already in memory, by shard name: small pools, evaluation sets and tests."""

    blocks: dict[str, Block]

    @property
    def shards(self) -> Sequence[str]:
        return list(self.blocks)

    def load(self, shard: str) -> Block:
        return self.blocks[shard]

    def embeddings(self, shard: str) -> list[str]:
        return self.blocks[shard].embeddings

    def version(self, shard: str) -> str | None:
        block = self.blocks.get(shard)
        return None if block is None else f"{block.rows} {block.embeddings}"


class Embeddings:
    """Memory-mapped (n, d) files side by side; indexed by rows like one array. Without files, a constant column.

    Raises Refused naming the file that holds anything else, or another number of rows than the block.
    """

    def __init__(self, paths: Sequence[str], rows: int | None = None):
        self.parts = [np.load(path, mmap_mode="r") for path in paths]
        for path, part in zip(paths, self.parts):
            if part.ndim != 2 or part.dtype not in (np.float16, np.float32):
                raise Refused(
                    f"{path}: {part.dtype} of shape {part.shape}; embeddings are (n, d) float16 or float32"
                )
            if rows is not None and len(part) != rows:
                raise Refused(f"{path}: {len(part)} rows of embeddings where its table has {rows}")
        if not self.parts:
            self.parts = [np.broadcast_to(np.float16(1), (rows or 0, 1))]

    @property
    def width(self) -> int:
        return sum(part.shape[1] for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, rows: Any) -> np.ndarray:
        return np.concatenate([part[rows] for part in self.parts], axis=1)


def open_embeddings(block: Block) -> Embeddings:
    return Embeddings(block.embeddings, block.rows)


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
    paths: list[list[str]]
    width: int

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """Unit vectors of the given rows: ids (n,) int64 ascending and distinct -> (n, d) float32."""
        out = np.empty((len(ids), self.width), dtype=np.float32)
        ordinals = ids >> ROW_BITS
        starts = np.flatnonzero(np.r_[True, ordinals[1:] != ordinals[:-1]]) if len(ids) else np.empty(0, int)
        for start, stop in zip(starts, [*starts[1:], len(ids)]):
            embeddings = Embeddings(self.paths[int(ordinals[start])])
            out[start:stop] = unit_rows(embeddings[ids[start:stop] & ROW_MASK])[0]
        return out

"""Small pools of embedding blocks, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from filters.duplicates.blocks import Block, MemorySource


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def near_copies(rows: np.ndarray, cosine: float, rng: np.random.Generator) -> np.ndarray:
    """Rows at exactly that cosine from the given unit rows, in random directions."""
    noise = rng.standard_normal(rows.shape)
    noise -= (noise * rows).sum(1, keepdims=True) * rows
    return unit(cosine * rows + np.sqrt(1 - cosine**2) * unit(noise))


@pytest.fixture
def make_pool(tmp_path: Path) -> Callable[..., MemorySource]:
    """make_pool(vectors, score=, uid=, alive=, phash=, shard_rows=, name=): blocks of a few rows a shard."""

    def make(
        vectors, score=None, uid=None, alive=None, phash=None, shard_rows=500, name="pool"
    ) -> MemorySource:
        n = len(vectors)
        uid = np.arange(n) if uid is None else np.asarray(uid)
        score = np.zeros(n, np.float32) if score is None else np.asarray(score, np.float32)
        alive = np.ones(n, bool) if alive is None else np.asarray(alive)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        blocks = {}
        for start in range(0, n, shard_rows):
            rows = slice(start, min(start + shard_rows, n))
            path = folder / f"{start // shard_rows:05d}.npy"
            np.save(path, vectors[rows])
            blocks[path.stem] = Block(
                shard=path.stem,
                embeddings=str(path),
                uid_hi=np.zeros(rows.stop - rows.start, np.uint64),
                uid_lo=uid[rows].astype(np.uint64),
                score=score[rows],
                alive=alive[rows],
                phash=None if phash is None else phash[rows],
            )
        return MemorySource(blocks)

    return make

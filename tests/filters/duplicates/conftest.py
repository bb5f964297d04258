"""Small pools of embedding blocks, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from filters.duplicates.blocks import Block, MemorySource
from filters.duplicates.config import NearConfig
from filters.duplicates.result import DuplicateResult
from filters.duplicates.search import NearSearch
from filters.duplicates.tasks import LocalRunner


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
                embeddings=[str(path)],
                uid_hi=np.zeros(rows.stop - rows.start, np.uint64),
                uid_lo=uid[rows].astype(np.uint64),
                score=score[rows],
                alive=alive[rows],
                phash=None if phash is None else phash[rows],
            )
        return MemorySource(blocks)

    return make


def embedding(**settings) -> NearConfig:
    return NearConfig(**{"method": "embedding", "similarity": 0.9, **settings})


def search(source, directory: Path, config: NearConfig | None = None, runner=None) -> DuplicateResult:
    return NearSearch(source, directory, config or embedding(), runner or LocalRunner()).run()


def dropped(result: DuplicateResult) -> list[int]:
    return result.duplicates().collect()["uid_lo"].to_list()


def planted_pool(rows: int, width: int, rng, cosine: float = 0.95, clusters: int = 0):
    """Unit rows of which the last fifth are near copies of others, shuffled; and the (p, 2) planted pairs."""
    base = rng.standard_normal((rows - rows // 5, width))
    if clusters:
        base = (
            0.6 * unit(base)
            + 0.8 * unit(rng.standard_normal((clusters, width)))[rng.integers(0, clusters, len(base))]
        )
    base = unit(base)
    of = rng.choice(len(base), rows // 5, replace=False)
    order = rng.permutation(rows)
    place = np.argsort(order)
    vectors = np.concatenate([base, near_copies(base[of], cosine, rng)])[order]
    return vectors, np.stack([place[of], place[len(base) + np.arange(len(of))]], axis=1)

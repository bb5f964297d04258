"""Evaluation images in the pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from filters.duplicates.blocks import Block, MemorySource
from filters.duplicates.config import Closeness
from filters.duplicates.tasks import LocalRunner
from filters.leakage import EvaluationSet, find_leaks
from pipeline.errors import Refused


def block(folder: Path, name: str, vectors: np.ndarray, phash: np.ndarray | None = None) -> Block:
    n = len(vectors)
    np.save(folder / f"{name}.npy", vectors.astype(np.float16))
    return Block(
        shard=name,
        embeddings=[str(folder / f"{name}.npy")],
        uid_hi=np.ones(n, np.uint64),
        uid_lo=np.arange(n, dtype=np.uint64),
        score=np.zeros(n),
        alive=np.ones(n, bool),
        phash=phash,
    )


@pytest.mark.parametrize("method", ["agree", "embedding", "phash"])
def test_every_planted_copy_leaks_and_no_other(tmp_path, method):
    rng = np.random.default_rng(0)
    evaluation, pool = rng.standard_normal((300, 128)), rng.standard_normal((2000, 128))
    test_hash, pool_hash = (rng.integers(0, 2**64, n, dtype=np.uint64) for n in (300, 2000))
    evaluation[7] = np.nan
    planted = np.arange(0, 1000, 10)
    pool[planted], pool_hash[planted] = evaluation[100:200], test_hash[100:200] ^ np.uint64(5)
    source = MemorySource({"s": block(tmp_path, "s", pool, pool_hash)})
    sets = {"cifar": EvaluationSet.from_block("cifar", block(tmp_path, "e", evaluation, test_hash))}
    config = Closeness(method=method)
    assert find_leaks(source, sets, tmp_path / "out", config, LocalRunner()) == {"leaks_cifar": 100}
    pairs = pq.read_table(tmp_path / "out" / "cifar" / "s.parquet").to_pydict()
    assert pairs["uid_lo"] == planted.tolist()
    assert pairs["evaluation_row"] == list(range(100, 200))
    assert min(pairs["similarity"]) > (0.96 if method == "phash" else 0.999)


def test_another_model_is_refused_by_name(tmp_path):
    source = MemorySource({"s": block(tmp_path, "s", np.ones((3, 8)))})
    sets = {"e": EvaluationSet.from_block("e", block(tmp_path, "e", np.ones((3, 9))))}
    with pytest.raises(Refused, match=r"s holds embeddings of width 8, the evaluation set e of width 9"):
        find_leaks(source, sets, tmp_path / "out", Closeness(method="embedding"), LocalRunner())


def test_hashes_missing_is_an_error(tmp_path):
    source = MemorySource({"s": block(tmp_path, "s", np.ones((3, 8)))})
    sets = {"e": EvaluationSet.from_block("e", block(tmp_path, "e", np.ones((3, 8))))}
    with pytest.raises(Refused, match="no perceptual hashes"):
        find_leaks(source, sets, tmp_path / "out", Closeness(), LocalRunner())


@pytest.mark.parametrize(("field", "value"), [("method", "x"), ("similarity", 1.5), ("phash_distance", 40)])
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}: "):
        Closeness(**{field: value})

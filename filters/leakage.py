"""Leakage: pool rows too close to an evaluation set, named ``leaks_<set>``, with the pairs listed.

Every live row of the pool meets every evaluation row, by the sketches and exact checks of the near pass:
there are no clusters to miss a pair between, only the share ``near.MISS`` of pairs exactly at the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from filters.duplicates.blocks import Block, BlockSource, open_embeddings, unit_rows
from filters.duplicates.config import READ_ROWS, VERIFY_SLICE, Closeness
from filters.duplicates.near import (
    NO_HASH,
    PAIR,
    HashTest,
    SketchTest,
    candidate_blocks,
    decide,
    hamming,
    rotation,
    sketch_reach,
)
from filters.duplicates.tasks import Runner, run_all
from pipeline import storage
from pipeline.errors import Refused

SCHEMA = pa.schema(
    [
        ("uid_hi", pa.uint64()),
        ("uid_lo", pa.uint64()),
        ("evaluation_row", pa.int64()),
        ("similarity", pa.float64()),
        ("hamming", pa.uint8()),
    ]
)
SKETCH = 64


def leakage_reason(name: str) -> str:
    """The reason rows are dropped for: ``leaks_<name>``."""
    return f"leaks_{name}"


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation set: name, unit vectors (m, d) float32, hashes (m,) uint64 or None, which row each is."""

    name: str
    vectors: np.ndarray
    hashes: np.ndarray | None
    rows: np.ndarray

    @classmethod
    def from_block(cls, name: str, block: Block) -> EvaluationSet:
        """The usable rows of a block; rows keep their numbers."""
        vectors, usable = unit_rows(open_embeddings(block)[:])
        hashes = None if block.phash is None else block.phash[usable]
        return cls(name, vectors[usable], hashes, np.flatnonzero(usable))


@dataclass(frozen=True)
class LeakTask:
    shard: str
    target: str


@dataclass(frozen=True)
class FindLeaks:
    """Task: compare one shard with an evaluation set; writes the near pairs (SCHEMA) to ``task.target``.

    Returns the number of pool rows that leak. Raises Refused when the two have embeddings of different
    widths, or hashes are asked for and missing.
    """

    source: BlockSource
    evaluation: EvaluationSet
    config: Closeness

    def __call__(self, task: LeakTask) -> int:
        target = Path(task.target)
        if not target.exists():
            table = self._pairs(self.source.load(task.shard))
            with storage.commit(str(target)) as temporary:
                pq.write_table(table, temporary)
        uids = pq.read_table(target, columns=["uid_hi", "uid_lo"])
        return uids.group_by(["uid_hi", "uid_lo"]).aggregate([]).num_rows

    def _pairs(self, block: Block) -> pa.Table:
        embeddings = open_embeddings(block)
        width = self.evaluation.vectors.shape[1]
        if embeddings.width != width:
            raise Refused(
                f"{block.shard} holds embeddings of width {embeddings.width}, the evaluation set "
                f"{self.evaluation.name} of width {width}; embed both with one model"
            )
        if self.config.method != "embedding" and (block.phash is None or self.evaluation.hashes is None):
            raise Refused(
                f"{block.shard} or {self.evaluation.name}: no perceptual hashes; set method=embedding"
            )
        test, turned, mine = self._test(width)
        sides = test.sides(mine)[1]
        found = [np.empty(0, dtype=PAIR)]
        for start in range(0, len(embeddings), READ_ROWS):
            part = slice(start, start + READ_ROWS)
            vectors, usable = unit_rows(embeddings[part])
            rows = np.flatnonzero(usable & block.alive[part])
            if self.config.method == "embedding":
                payload = (vectors[rows] @ turned).astype(np.float16)
            else:
                assert block.phash is not None
                payload = block.phash[part][rows]
            for a, b in candidate_blocks(test.sides(payload)[0], sides, test.cut, triangle=False):
                for first in range(0, len(a), VERIFY_SLICE):
                    some = slice(first, first + VERIFY_SLICE)
                    found.append(
                        self._near(test, payload, mine, vectors[rows], rows + start, a[some], b[some])
                    )
        return self._table(block, np.concatenate(found))

    def _test(self, width: int) -> tuple[SketchTest | HashTest, np.ndarray, np.ndarray]:
        """Candidate test, rotation of the sketches, and the evaluation set's stand-ins."""
        turned = rotation(width, SKETCH, self.config.seed)
        if self.config.method == "embedding":
            reach = sketch_reach(self.config.cosine, SKETCH, width)
            return SketchTest(reach), turned, (self.evaluation.vectors @ turned).astype(np.float16)
        assert self.evaluation.hashes is not None
        return HashTest(self.config.phash_distance), turned, self.evaluation.hashes

    def _near(
        self,
        test: SketchTest | HashTest,
        payload: np.ndarray,
        mine: np.ndarray,
        vectors: np.ndarray,
        rows: np.ndarray,
        a: np.ndarray,
        b: np.ndarray,
    ) -> np.ndarray:
        """Verified pairs among candidates: PAIR records of (row of the block, row of the evaluation set)."""
        passing = test.accept(payload[a], mine[b])
        a, b = a[passing], b[passing]
        hashed = isinstance(test, HashTest)
        bits = hamming(payload[a], mine[b]) if hashed else np.full(len(a), NO_HASH, dtype=np.uint8)
        if self.config.method == "phash":
            similarity, near = 1 - bits / 64, np.ones(len(a), dtype=bool)
        else:
            both = np.concatenate([vectors[a], self.evaluation.vectors[b]])
            half = np.arange(len(a))
            similarity, near = decide(both, half, half + len(a), self.config.cosine)
        pairs = np.empty(int(near.sum()), dtype=PAIR)
        pairs["a"], pairs["b"] = rows[a[near]], self.evaluation.rows[b[near]]
        pairs["similarity"], pairs["hamming"] = similarity[near], bits[near]
        return pairs

    def _table(self, block: Block, pairs: np.ndarray) -> pa.Table:
        pairs = pairs[np.lexsort((pairs["b"], pairs["a"]))]
        columns = [pa.array(block.uid_hi[pairs["a"]]), pa.array(block.uid_lo[pairs["a"]])]
        columns += [
            pa.array(np.ascontiguousarray(pairs["b"])),
            pa.array(np.ascontiguousarray(pairs["similarity"])),
        ]
        bits = np.ascontiguousarray(pairs["hamming"])
        return pa.Table.from_arrays([*columns, pa.array(bits, mask=bits == NO_HASH)], schema=SCHEMA)


def find_leaks(
    source: BlockSource,
    sets: Mapping[str, EvaluationSet],
    directory: Path,
    config: Closeness,
    runner: Runner,
) -> dict[str, int]:
    """Compare the pool with every evaluation set: rows that leak, by reason ``leaks_<name>``.

    The pairs of shard s with set e are in ``<directory>/<e>/<s>.parquet`` (SCHEMA: uid, evaluation_row as
    numbered in the set, similarity, hamming). Files already there are not made again.
    """
    counts = {}
    for name, evaluation in sets.items():
        tasks = [LeakTask(shard, str(directory / name / f"{shard}.parquet")) for shard in source.shards]
        counts[leakage_reason(name)] = sum(run_all(runner, FindLeaks(source, evaluation, config), tasks))
    return counts

"""Near pairs on disk, the decision they lead to, and the questions a reader asks next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from filters.duplicates.blocks import ROW_BITS, ROW_MASK, BlockSource
from filters.duplicates.config import PARTITION_PAIRS, READ_PAIRS, NearConfig
from filters.duplicates.near import NO_HASH, ROUNDING
from filters.duplicates.recall import RecallEstimate, read_pairs
from filters.duplicates.rules import RULES, component_labels, keepers, rank_rows
from pipeline import storage

_NODE = np.dtype([("id", "<i8"), ("uid_hi", "<u8"), ("uid_lo", "<u8"), ("score", "<f8"), ("part", "<i4")])
_SCHEMA = pa.schema(
    [
        ("uid_hi", pa.uint64()),
        ("uid_lo", pa.uint64()),
        ("kept_uid_hi", pa.uint64()),
        ("kept_uid_lo", pa.uint64()),
        ("similarity", pa.float64()),
        ("hamming", pa.uint8()),
        ("how", pa.string()),
    ]
)


@dataclass(frozen=True)
class DuplicateResult:
    """Outcome of the near pass, kept in ``directory``: ``duplicates.parquet`` and the pairs behind it.

    ``pairs`` near pairs among live rows, ``rows`` rows compared, ``unusable`` rows that never entered (not
    finite, or zero), ``dropped`` rows dropped.
    """

    directory: Path
    config: NearConfig
    rows: int
    unusable: int
    pairs: int
    dropped: int
    recall: RecallEstimate

    @property
    def table(self) -> Path:
        """``duplicates.parquet``: uid_hi, uid_lo, kept_uid_hi, kept_uid_lo, similarity, hamming, how."""
        return self.directory / "duplicates.parquet"

    def duplicates(self) -> pl.LazyFrame:
        return pl.scan_parquet(self.table)

    def least_similar(self, n: int = 20) -> pl.DataFrame:
        """The n dropped rows that were least like what they were dropped for: the ones to look at first."""
        return (
            self.duplicates()
            .bottom_k(n, by=["similarity", "uid_hi", "uid_lo"])
            .collect()
            .sort("similarity", "uid_hi", "uid_lo")
        )

    def largest_groups(self, n: int = 20) -> pl.DataFrame:
        """The n kept rows that stand for most dropped ones: kept_uid_hi, kept_uid_lo, size (dropped + 1)."""
        groups = self.duplicates().group_by("kept_uid_hi", "kept_uid_lo").agg((pl.len() + 1).alias("size"))
        return (
            groups.collect()
            .sort("size", "kept_uid_hi", "kept_uid_lo", descending=[True, False, False])
            .head(n)
        )

    def rethreshold(self, similarity: float, directory: Path) -> DuplicateResult:
        """The decision at a higher similarity, from the pairs already found; written to ``directory``.

        For the hash alone similarity is the share of equal bits. Raises ValueError below what the pairs were
        searched at: those pairs were never looked for.
        """
        config = self.config.raised(similarity)
        pairs, dropped = decide_partitions(self.directory, directory, config)
        result = replace(self, directory=directory, config=config, pairs=pairs, dropped=dropped)
        result.save()
        return result

    def save(self) -> None:
        storage.write_json(str(self.directory / "result.json"), {**asdict(self), "directory": None})

    @classmethod
    def load(cls, directory: Path) -> DuplicateResult:
        fields = json.loads((directory / "result.json").read_text())
        fields |= {"directory": directory, "config": NearConfig(**fields["config"])}
        return cls(**{**fields, "recall": RecallEstimate(**fields["recall"])})


def partition_pairs(
    files: Sequence[str], source: BlockSource, shards: Sequence[str], directory: Path
) -> None:
    """Write the live near pairs in parts that can be decided apart: ``nodes.npy`` and ``part-*.bin``.

    Connected components are whole within a part. Components are joined in memory, 28 bytes a row that has any
    near pair; pairs are only streamed.
    """
    nodes = _nodes(files, source, shards)
    labels = np.arange(len(nodes), dtype=np.int32)
    total = 0
    for _, earlier, later in _live_pairs(files, nodes):
        joined = component_labels(len(nodes), labels[earlier], labels[later])
        labels = joined[labels]
        total += len(earlier)
    parts = max(1, -(-total // PARTITION_PAIRS))
    nodes["part"] = labels % parts
    with storage.commit_folder(str(directory / "partitions")) as folder:
        np.save(Path(folder) / "nodes.npy", nodes)
        outputs = [open(Path(folder) / f"part-{part:05d}.bin", "wb") for part in range(parts)]
        for pairs, earlier, _ in _live_pairs(files, nodes):
            part = nodes["part"][earlier]
            for number, output in enumerate(outputs):
                output.write(pairs[part == number].tobytes())
        for output in outputs:
            output.close()


def _nodes(files: Sequence[str], source: BlockSource, shards: Sequence[str]) -> np.ndarray:
    """Live rows with a near pair, by row id: _NODE records with their uid and score."""
    ids = np.empty(0, dtype=np.int64)
    for path in files:
        for start in range(0, len(pairs := read_pairs(path)), READ_PAIRS):
            part = pairs[start : start + READ_PAIRS]
            ids = np.union1d(ids, np.concatenate([part["a"], part["b"]]))
    nodes = np.zeros(len(ids), dtype=_NODE)
    nodes["id"] = ids
    alive = np.zeros(len(ids), dtype=bool)
    ordinals, present = ids >> ROW_BITS, set(source.shards)
    for ordinal in np.unique(ordinals).tolist():
        if shards[ordinal] not in present:
            continue  # of an earlier run over more shards: not alive in this one
        start, stop = np.searchsorted(ordinals, [ordinal, ordinal + 1])
        rows = ids[start:stop] & ROW_MASK
        block = source.load(shards[ordinal])
        alive[start:stop] = block.alive[rows]
        for name in ("uid_hi", "uid_lo", "score"):
            nodes[name][start:stop] = getattr(block, name)[rows]
    return nodes[alive]


def _live_pairs(
    files: Sequence[str], nodes: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Pairs whose rows are both live, with the positions of the two among the nodes."""
    ids = nodes["id"]
    for path in files:
        stored = read_pairs(path)
        for start in range(0, len(stored), READ_PAIRS):
            pairs = np.array(stored[start : start + READ_PAIRS])
            spots = [
                np.minimum(np.searchsorted(ids, pairs[side]), max(len(ids) - 1, 0)) for side in ("a", "b")
            ]
            if not len(ids):
                return
            live = (ids[spots[0]] == pairs["a"]) & (ids[spots[1]] == pairs["b"])
            yield pairs[live], spots[0][live], spots[1][live]


def decide_partitions(work: Path, target: Path, config: NearConfig) -> tuple[int, int]:
    """Apply the rule to every part and write ``target/duplicates.parquet``: (near pairs, rows dropped)."""
    nodes = np.load(work / "partitions" / "nodes.npy")
    order = np.argsort(nodes["part"], kind="stable")
    bounds = np.searchsorted(nodes["part"][order], np.arange(int(nodes["part"].max(initial=0)) + 2))
    target.mkdir(parents=True, exist_ok=True)
    parts, near = [], 0
    for number, path in enumerate(sorted((work / "partitions").glob("part-*.bin"))):
        members = nodes[order[bounds[number] : bounds[number + 1]]] if number + 1 < len(bounds) else nodes[:0]
        pairs = np.array(read_pairs(str(path)))
        pairs = _once(pairs[pairs["similarity"] >= config.least - ROUNDING])
        near += len(pairs)
        parts.append(_decide(members, pairs, config))
    table = pa.concat_tables([*parts, _SCHEMA.empty_table()]).sort_by(
        [("uid_hi", "ascending"), ("uid_lo", "ascending")]
    )
    with storage.commit(str(target / "duplicates.parquet")) as temporary:
        pq.write_table(table, temporary)
    if work != target:
        _share_partitions(work, target)
    return near, table.num_rows


def _once(pairs: np.ndarray) -> np.ndarray:
    """Pairs by (a, b), each once; two clusters may both have found one."""
    pairs = pairs[np.lexsort((pairs["b"], pairs["a"]))]
    if not len(pairs):
        return pairs
    return pairs[np.r_[True, (pairs["a"][1:] != pairs["a"][:-1]) | (pairs["b"][1:] != pairs["b"][:-1])]]


def _share_partitions(work: Path, target: Path) -> None:
    """Let a re-decided result be re-decided again: its pairs are those of the first run."""
    link = target / "partitions"
    if not link.exists():
        link.symlink_to((work / "partitions").resolve(), target_is_directory=True)


def _decide(members: np.ndarray, pairs: np.ndarray, config: NearConfig) -> pa.Table:
    """Rows of one part that the rule drops, as rows of duplicates.parquet."""
    ranked = members[rank_rows(members["score"], members["uid_hi"], members["uid_lo"])]
    by_id = np.argsort(ranked["id"])
    ends = [by_id[np.searchsorted(ranked["id"][by_id], pairs[side])] for side in ("a", "b")]
    earlier, later = np.minimum(*ends), np.maximum(*ends)
    kept = RULES[config.rule](len(ranked), earlier, later)
    dropped, keeper, similarity = keepers(config.rule, kept, earlier, later, pairs["similarity"])
    bits = _bits_of(len(ranked), earlier, later, pairs["hamming"], dropped, keeper)
    columns = [ranked["uid_hi"][dropped], ranked["uid_lo"][dropped]]
    columns += [ranked["uid_hi"][keeper], ranked["uid_lo"][keeper], similarity]
    arrays = [pa.array(np.ascontiguousarray(column)) for column in columns]
    arrays.append(pa.array(bits, mask=bits == NO_HASH))
    arrays.append(pa.array([config.method] * len(dropped), pa.string()))
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _bits_of(
    rows: int,
    earlier: np.ndarray,
    later: np.ndarray,
    bits: np.ndarray,
    dropped: np.ndarray,
    keeper: np.ndarray,
) -> np.ndarray:
    """Hamming distance of each (dropped, keeper) pair, NO_HASH where the two were never compared."""
    if not len(bits):
        return np.full(len(dropped), NO_HASH, dtype=np.uint8)
    keys = earlier.astype(np.int64) * rows + later
    order = np.argsort(keys)
    wanted = np.minimum(dropped, keeper).astype(np.int64) * rows + np.maximum(dropped, keeper)
    spot = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    found = keys[order][spot] == wanted
    return np.where(found, bits[order[spot]], NO_HASH).astype(np.uint8)

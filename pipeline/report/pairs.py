"""Duplicates and leakage as pairs and groups of uids, from what the stages left; memory is what is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from pipeline import storage
from pipeline.manifest import Run
from pipeline.report.pictures import Place
from pipeline.report.survey import Uid
from pipeline.shards import SHARD_SUFFIXES
from pipeline.tables import TableSet, shard_id

GROUPS, MEMBERS = 12, 6
PAIRS = 12
BUCKETS = 1 << 20  # counters over which kept uids are spread to find the largest groups
EVALUATION = re.compile(rf"(.*?(?:{'|'.join(map(re.escape, SHARD_SUFFIXES))}))/(.*)", re.DOTALL)


@dataclass(frozen=True)
class Pair:
    """Two samples taken for one: `left` is the one that stays, or the evaluation image."""

    left: Uid | Place
    right: Uid
    similarity: float
    hamming: int | None


@dataclass(frozen=True)
class Group:
    """A kept sample and samples dropped for it: `size` counts all of them, the kept one too."""

    kept: Uid
    size: int
    dropped: list[Pair]


@dataclass
class Duplicates:
    groups: list[Group] = field(default_factory=list)
    least: list[Pair] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)  # duplicates.json: exact, near, losing_sources

    def uids(self) -> set[Uid]:
        pairs = [*self.least, *(p for g in self.groups for p in g.dropped)]
        return {u for p in pairs for u in (p.left, p.right) if not isinstance(u, Place)} | {
            g.kept for g in self.groups
        }


@dataclass
class Leaks:
    """One evaluation set: pool rows with a pair, pairs, the closest and the least close ones."""

    name: str
    rows: int
    pairs: int
    closest: list[Pair]
    least: list[Pair]

    def uids(self) -> set[Uid]:
        return {p.right for p in [*self.closest, *self.least]}

    def places(self) -> list[Place]:
        return [p.left for p in [*self.closest, *self.least] if isinstance(p.left, Place)]


def stage_folder(run: Run, name: str) -> str | None:
    """The folder of the run's stage `name`, None when the run had no such stage."""
    for folder in storage.listdir(run.path("stages")):
        if folder.partition("-")[2] == name:
            return run.path("stages", folder)
    return None


def duplicates(run: Run) -> Duplicates | None:
    """The largest groups, whatever made them one, and the least similar near pairs that were accepted."""
    folder = stage_folder(run, "dedup")
    path = storage.join(folder, "duplicates.parquet") if folder else ""
    if not folder or not storage.exists(path):
        return None
    summary = storage.join(folder, "duplicates.json")
    found = Duplicates(told=storage.read_json(summary) if storage.exists(summary) else {})
    table = pl.scan_parquet(storage.resolve(path)[1])
    for hi, lo, size in largest_groups(table, GROUPS):
        members = table.filter(pl.col("kept_uid_hi") == hi, pl.col("kept_uid_lo") == lo)
        shown = members.bottom_k(MEMBERS, by=["similarity", "uid_hi", "uid_lo"]).collect()
        found.groups.append(Group((hi, lo), size, list(_pairs(shown))))
    near_pairs = table.filter(pl.col("reason") == "near_duplicate")
    found.least = list(_pairs(near_pairs.bottom_k(PAIRS, by=["similarity", "uid_hi", "uid_lo"]).collect()))
    return found


def largest_groups(table: pl.LazyFrame, n: int) -> list[tuple[int, int, int]]:
    """(kept uid_hi, kept uid_lo, size with the kept one) of the n largest groups, exact, in bounded memory.

    Kept uids are counted in BUCKETS counters; only groups in the fullest of them are counted one by one, more
    of them until no group elsewhere can be as large as the smallest found.
    """
    bucket = (pl.col("kept_uid_hi") ^ pl.col("kept_uid_lo")) % BUCKETS
    kept = table.select("kept_uid_hi", "kept_uid_lo", bucket=bucket.cast(pl.UInt32))
    counts = np.zeros(BUCKETS, np.int64)
    totals = kept.group_by("bucket").len().collect(engine="streaming")
    counts[totals["bucket"].to_numpy()] = totals["len"].to_numpy()
    fullest = np.argsort(-counts, kind="stable")
    taken = max(4 * n, 64)
    while True:
        chosen = pl.Series("bucket", fullest[:taken].astype(np.uint32))
        groups = (
            kept.filter(pl.col("bucket").is_in(chosen.implode()))
            .group_by("kept_uid_hi", "kept_uid_lo")
            .agg(size=pl.len() + 1)
            .sort("size", "kept_uid_hi", "kept_uid_lo", descending=[True, False, False])
            .head(n)
            .collect(engine="streaming")
        )
        rest = int(counts[fullest[taken]]) if taken < BUCKETS else 0
        if rest == 0 or (len(groups) == n and int(groups["size"][-1]) > rest):
            return [(int(hi), int(lo), int(size)) for hi, lo, size in groups.iter_rows()]
        taken *= 4


def _pairs(rows: pl.DataFrame) -> Iterator[Pair]:
    """Pairs of a part of duplicates.parquet, the least similar first."""
    for r in rows.sort("similarity", "uid_hi", "uid_lo").to_dicts():
        yield Pair(
            (r["kept_uid_hi"], r["kept_uid_lo"]),
            (r["uid_hi"], r["uid_lo"]),
            r["similarity"],
            r.get("hamming"),
        )


def leaks(run: Run) -> list[Leaks]:
    """For each evaluation set of the run, with the places of its images in their own tables."""
    folder = stage_folder(run, "leakage")
    path = storage.join(folder, "leaks.parquet") if folder else ""
    if not folder or not storage.exists(path):
        return []
    table = pl.scan_parquet(storage.resolve(path)[1])
    finder = EvaluationFinder(run)
    counts = table.group_by("set").agg(pairs=pl.len(), rows=pl.struct("uid_hi", "uid_lo").n_unique())
    found = []
    for name, pairs, rows in counts.sort("set").collect(engine="streaming").iter_rows():
        mine = table.filter(pl.col("set") == name)
        by = ["similarity", "uid_hi", "uid_lo", "evaluation"]
        closest = mine.top_k(PAIRS // 2, by=by).collect().sort(by, descending=True)
        least = mine.bottom_k(PAIRS, by=by).collect().sort(by)
        found.append(Leaks(name, rows, pairs, finder.pairs(closest), finder.pairs(least)))
    return found


@dataclass
class EvaluationFinder:
    """Where evaluation images lie: in the feature tables that the leakage stage had made of their shards."""

    run: Run
    _tables: dict[str, TableSet | None] = field(default_factory=dict)

    def pairs(self, rows: pl.DataFrame) -> list[Pair]:
        found = []
        for r in rows.to_dicts():
            place = self.place(r["evaluation"])
            if place:
                found.append(Pair(place, (r["uid_hi"], r["uid_lo"]), r["similarity"], r.get("hamming")))
        return found

    def place(self, name: str) -> Place | None:
        """The place of `<shard>/<key>`, None when its tables are gone."""
        matched = EVALUATION.fullmatch(name)
        if not matched:
            return None
        shard = shard_id(matched[1])
        if shard not in self._tables:
            self._tables[shard] = self._find(shard)
        tables = self._tables[shard]
        if tables is None:
            return None
        keys = tables.read(shard, ["key"])["key"]
        row = (keys == matched[2]).arg_max()
        return Place(tables.folder, shard, int(row)) if row is not None and keys[row] == matched[2] else None

    def _find(self, shard: str) -> TableSet | None:
        root = storage.join(self.run.out, "features")
        for name in storage.listdir(root):
            tables = TableSet(storage.join(root, name))
            if storage.exists(tables.path(shard, "parquet")):
                return tables
        return None

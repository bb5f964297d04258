"""How the entries of a manifest are cut into training shards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.reshard import manifest_of_subset, plan
from pipeline.tables import TableSet
from pipeline.uids import SUBSET
from tests.build import halves, make_shard, sample, scan_shard, uid


def manifest(path: Path, groups: list[list[int]]) -> str:
    with pq.ParquetWriter(path, pl.DataFrame(schema={"copies": pl.UInt32}).to_arrow().schema) as writer:
        for copies in groups:
            writer.write_table(pl.DataFrame({"copies": copies}, schema={"copies": pl.UInt32}).to_arrow())
    return str(path)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=9), min_size=1, max_size=4), st.integers(1, 7)
)
def test_every_copy_once_and_first_copies_before_second(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], size: int
) -> None:
    shards = plan(manifest(tmp_path_factory.mktemp("plan") / "m.parquet", groups), size)
    entries = []
    for shard in shards:
        for part in shard.slices:
            rows = [r for r, c in enumerate(groups[part.group]) if c > part.copy][part.start : part.stop]
            entries += [(part.copy, part.group, r) for r in rows]
    assert entries == sorted(entries)
    assert Counter(e[1:] for e in entries) == Counter(
        {(g, r): c for g, rows in enumerate(groups) for r, c in enumerate(rows)}
    )
    assert [s.number for s in shards] == list(range(len(shards)))
    assert all(s.samples == size for s in shards[:-1])
    assert 1 <= shards[-1].samples <= size


def test_nothing_chosen_is_no_shard(tmp_path: Path) -> None:
    assert plan(manifest(tmp_path / "m.parquet", []), 10) == []


def test_manifest_of_a_subset_takes_the_first_readable_sample_of_a_uid(tmp_path: Path) -> None:
    first = make_shard(tmp_path / "a.tar", [sample(0, jpg=b"junk"), sample(1), sample(2)])
    twice = {"uid": uid(1)}
    second = make_shard(tmp_path / "b.tar", [sample(0), sample(7, record=twice), sample(8, record=twice)])
    ids = [scan_shard(s, tmp_path / "out")[0].id for s in (first, second)]
    subset = np.sort(np.array([halves(uid(n)) for n in (0, 1, 1, 55)], SUBSET))
    path = str(tmp_path / "m.parquet")
    missing = manifest_of_subset(subset, TableSet(str(tmp_path / "out")), ids, path)
    assert missing.tolist() == [halves(uid(55))]
    rows = pl.read_parquet(path)
    assert rows.select("shard", "row", "copies", "order").rows() == [(first, 1, 2, 0), (second, 0, 1, 1)]


def test_uids_that_share_their_high_half(tmp_path: Path) -> None:
    names = [f"{7:016x}{n:016x}" for n in (5, 1, 9)]
    shard = make_shard(
        tmp_path / "a.tar",
        [sample(n, record={"uid": u}) for n, u in enumerate([*names, f"{7:016x}{3:016x}"])],
    )
    ids = [scan_shard(shard, tmp_path / "out")[0].id]
    subset = np.sort(np.array([halves(u) for u in [*names, f"{7:016x}{4:016x}"]], SUBSET))
    missing = manifest_of_subset(subset, TableSet(str(tmp_path / "out")), ids, str(tmp_path / "m.parquet"))
    assert missing.tolist() == [(7, 4)]
    assert pl.read_parquet(tmp_path / "m.parquet")["row"].to_list() == [0, 1, 2]

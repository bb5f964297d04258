"""Sorting uids in bounded memory; repeated uids; subset files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import uids
from pipeline.tables import TableSet, shard_id
from pipeline.uids import SUBSET, UidSorter, load_subset, repeated_uids
from tests.build import make_shard, sample, scan_shard, uid

SMALL = st.integers(0, 6) | st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("in_memory", [1 << 24, 64])
def test_sorted_by_uid_then_shard_then_row(in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uids, "IN_MEMORY", in_memory)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.lists(st.tuples(SMALL, SMALL), max_size=120), max_size=4))
    def check(pool: list[list[tuple[int, int]]]) -> None:
        sorter = UidSorter()
        expected = []
        for number, shard in enumerate(pool):
            hi, lo = (np.array([u[i] for u in shard], np.uint64) for i in (0, 1))
            sorter.add(hi, lo, number, np.arange(len(shard)))
            expected += [(*u, number, row) for row, u in enumerate(shard)]
        found = [tuple(int(x) for x in r) for block in sorter.sorted_ranges() for r in block]
        assert found == sorted(expected)

    check()


@pytest.mark.parametrize("in_memory", [1 << 24, 8])
def test_repeated_uids_are_those_after_the_first_readable(
    tmp_path: Path, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uids, "IN_MEMORY", in_memory)
    same = {"uid": uid(1)}
    first = make_shard(tmp_path / "b.tar", [sample(0), sample(1, jpg=b"junk"), sample(2, record=same)])
    second = make_shard(tmp_path / "a.tar", [sample(3, record=same), sample(4), sample(5, record=same)])
    reports = [scan_shard(s, tmp_path / "out")[0] for s in (first, second)]
    tables = TableSet(str(tmp_path / "out"))
    found = repeated_uids(tables.stream([r.id for r in reports], ["uid_hi", "uid_lo", "status"]))
    assert {k: v.tolist() for k, v in found.items()} == {shard_id(second): [0, 2]}


def test_subset_is_sorted_on_load(tmp_path: Path) -> None:
    mixed = np.array([(2, 1), (1, 9), (2, 0), (1, 9)], SUBSET)
    np.save(tmp_path / "s.npy", mixed)
    assert load_subset(str(tmp_path / "s.npy")).tolist() == [(1, 9), (1, 9), (2, 0), (2, 1)]
    np.save(tmp_path / "none.npy", mixed[:0])
    assert len(load_subset(str(tmp_path / "none.npy"))) == 0


@pytest.mark.parametrize("value", [np.arange(4), np.zeros((2, 2), SUBSET), np.array([{}], object)])
def test_other_arrays_are_no_subset(tmp_path: Path, value: np.ndarray) -> None:
    np.save(tmp_path / "s.npy", value, allow_pickle=True)
    with pytest.raises(ValueError, match=r"s\.npy|Python objects"):
        load_subset(str(tmp_path / "s.npy"))


@pytest.mark.parametrize("content", [b"", b"uid\nabc\n", b"PK\x03\x04" + bytes(100)])
def test_other_files_are_no_subset(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r".+"):
        load_subset(str(tmp_path / "s.npy"))

"""Sorting uids at any size: bounded memory, spilled to local disk, the same order on every machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np
import polars as pl

SUBSET = np.dtype("u8,u8")
RECORD = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("shard", "<u4"), ("row", "<u4")])
IN_MEMORY = 1 << 24  # records sorted at a time: 384 MiB, and as much again while sorting


class UidSorter:
    """Collects (uid, shard number, row) and gives them back sorted by uid, then shard, then row.

    Up to IN_MEMORY records stay in one piece; more are split on disk into ranges of uids, at quantiles of
    a sample, so that memory holds one range however uids are distributed (equal uids stay together).
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="winnow-uids-")
        self._file = open(os.path.join(self._folder.name, "all"), "wb")
        self._held: list[tuple[np.ndarray, np.ndarray, int, np.ndarray]] = []
        self._spilled = 0
        self.count = 0

    def add(self, hi: np.ndarray, lo: np.ndarray, shard: int, rows: np.ndarray) -> None:
        self._held.append((hi, lo, shard, rows))
        self.count += len(hi)
        if self.count - self._spilled > IN_MEMORY:
            self._spill()

    def _spill(self) -> None:
        for part in self._held:
            _records(*part).tofile(self._file)
        self._held, self._spilled = [], self.count

    def sorted_ranges(self) -> Iterator[np.ndarray]:
        """Record arrays, each sorted, each wholly before the next. Ends the sorter."""
        for records in self._unsorted_ranges():
            yield _sorted(records)

    def repeats(self) -> Iterator[np.ndarray]:
        """Record arrays of all but the first of the records that share a uid. Ends the sorter."""
        if self._held and not self._spilled and not len(_shared(np.concatenate([h[0] for h in self._held]))):
            return
        for records in self._unsorted_ranges():
            if len(shared := _shared(records["hi"])):
                records = _sorted(records[np.isin(records["hi"], shared)])
                same = (records["hi"][1:] == records["hi"][:-1]) & (records["lo"][1:] == records["lo"][:-1])
                yield records[1:][same]

    def _unsorted_ranges(self) -> Iterator[np.ndarray]:
        """Record arrays whose uids are each wholly before the next one's."""
        if self._spilled:
            self._spill()
        self._file.close()
        with self._folder:
            if self._spilled:
                yield from self._ranges(np.memmap(self._file.name, RECORD, "r"))
            elif self.count:
                yield np.concatenate([_records(*part) for part in self._held])

    def _ranges(self, records: np.ndarray) -> Iterator[np.ndarray]:
        parts = -(-self.count * 2 // IN_MEMORY)
        sample = np.sort(np.array(records["hi"][:: max(1, self.count // (1 << 20))]))
        splits = sample[np.arange(1, parts) * len(sample) // parts]
        files = [open(os.path.join(self._folder.name, f"part{i}"), "wb") for i in range(parts)]
        for start in range(0, self.count, IN_MEMORY // 4):
            block = np.array(records[start : start + IN_MEMORY // 4])
            part = np.searchsorted(splits, block["hi"], side="right")
            for i in np.unique(part):
                block[part == i].tofile(files[i])
        for f in files:
            f.close()
            yield np.fromfile(f.name, RECORD)
            os.unlink(f.name)


def _records(hi: np.ndarray, lo: np.ndarray, shard: int, rows: np.ndarray) -> np.ndarray:
    records = np.empty(len(hi), RECORD)
    records["hi"], records["lo"], records["shard"], records["row"] = hi, lo, shard, rows
    return records


def _shared(hi: np.ndarray) -> np.ndarray:
    """High halves that more than one uid has: none in nearly every pool, and then no uid is repeated."""
    hi = np.sort(hi)
    return hi[1:][hi[1:] == hi[:-1]]


def _sorted(records: np.ndarray) -> np.ndarray:
    order = np.argsort(
        records["hi"]
    )  # settles all but uids that share their high half: ten times a full sort's speed
    hi = records["hi"][order]
    if (hi[1:] == hi[:-1]).any():  # as in every subset with copies
        order = np.lexsort((records["row"], records["shard"], records["lo"], records["hi"]))
    return records[order]


def repeated_uids(frames: Iterable[tuple[str, pl.DataFrame]]) -> dict[str, np.ndarray]:
    """Rows (int64, ascending) by shard id whose uid an earlier readable row of the pool already has.

    frames: (shard id, its uid_hi, uid_lo and status) in the pool's order. Earlier is by (shard, position in
    it); rows that could not be read do not count.
    """
    sorter = UidSorter()
    ids = []
    for number, (shard, frame) in enumerate(frames):
        ids.append(shard)
        rows = np.flatnonzero((frame["status"] == "ok").to_numpy())
        hi, lo = frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy()
        if len(rows) < len(hi):
            hi, lo = hi[rows], lo[rows]
        sorter.add(hi, lo, number, rows)
    found: dict[str, list[int]] = {}
    for records in sorter.repeats():
        for record in records:
            found.setdefault(ids[record["shard"]], []).append(int(record["row"]))
    return {shard: np.sort(np.array(rows, np.int64)) for shard, rows in found.items()}


def load_subset(path: str) -> np.ndarray:
    """A subset file as a sorted `u8,u8` array, whatever its order on disk. Raises ValueError for any other file."""
    subset = np.lib.format.open_memmap(path, mode="r")
    if subset.ndim != 1 or subset.dtype != SUBSET:
        raise ValueError(f"{path}: dtype {subset.dtype} {subset.shape}, a subset file is 1-D u8,u8")
    order = np.lexsort((subset["f1"], subset["f0"]))
    return np.asarray(subset)[order]


def find_uids(hi: np.ndarray, lo: np.ndarray, want_hi: np.ndarray, want_lo: np.ndarray) -> np.ndarray:
    """Index in the sorted unique uids (hi, lo) of each wanted uid, -1 where absent. int64 (n,)."""
    at = np.searchsorted(hi, want_hi)
    found = np.full(len(want_hi), -1, np.int64)
    live = np.arange(len(want_hi))
    while len(live):  # walk through the uids that share a high half; all but a few end in one step
        inside = live[at[live] < len(hi)]
        inside = inside[hi[at[inside]] == want_hi[inside]]
        hit = lo[at[inside]] == want_lo[inside]
        found[inside[hit]] = at[inside[hit]]
        live = inside[~hit]
        at[live] += 1
    return found

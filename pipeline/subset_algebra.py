"""Algebra of subset files as multisets of uids: union, intersection, difference, by one merge of sorted files.

A uid that stands m times in A and n times in B stands max(m, n) times in their union, min(m, n) times in their
intersection, and max(m - n, 0) times in A minus B. Memory is two blocks, whatever the size of the files.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeline import storage
from pipeline.errors import Refused
from pipeline.uids import SUBSET, UidSorter

BLOCK = 1 << 20  # uids of each file that are merged at a time
Counts = np.ndarray
OPERATIONS: dict[str, Callable[[Counts, Counts], Counts]] = {
    "union": np.maximum,
    "intersect": np.minimum,
    "minus": lambda a, b: np.maximum(a - b, 0),
}


@dataclass(frozen=True)
class Overlap:
    """Entries (uids with their copies) and different uids of A, of B, of both, and of the result."""

    entries: dict[str, int]
    unique: dict[str, int]

    @property
    def jaccard(self) -> float:
        """Share of the different uids of either file that are in both; 1 for two empty files."""
        either = self.unique["a"] + self.unique["b"] - self.unique["both"]
        return self.unique["both"] / either if either else 1.0


@contextlib.contextmanager
def sorted_subset(path: str) -> Iterator[np.ndarray]:
    """A subset file, memory-mapped and sorted: itself if it is, else a sorted temporary copy.

    Raises Refused for a file that is no subset file.
    """
    with contextlib.ExitStack() as stack:
        try:
            local = stack.enter_context(storage.local_copy(path))
            subset: np.ndarray = np.lib.format.open_memmap(local, mode="r")
        except (OSError, ValueError) as e:
            raise Refused(f"{path}: no subset file: {e}") from None
        if subset.ndim != 1 or subset.dtype != SUBSET:
            raise Refused(f"{path}: dtype {subset.dtype} {subset.shape}; a subset file is 1-D u8,u8")
        if not _is_sorted(subset):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="winnow-subset-"))
            subset = _sorted_copy(subset, os.path.join(folder, "sorted.npy"))
        yield subset


def _is_sorted(subset: np.ndarray) -> bool:
    for start in range(0, len(subset), BLOCK):
        block = subset[start : start + BLOCK + 1]  # one more: blocks are compared with their successor
        hi, lo = block["f0"], block["f1"]
        if not ((hi[1:] > hi[:-1]) | ((hi[1:] == hi[:-1]) & (lo[1:] >= lo[:-1]))).all():
            return False
    return True


def _sorted_copy(subset: np.ndarray, path: str) -> np.ndarray:
    sorter = UidSorter()
    for start in range(0, len(subset), BLOCK):
        block = np.array(subset[start : start + BLOCK])
        sorter.add(block["f0"], block["f1"], 0, np.zeros(len(block), np.uint32))
    out = np.lib.format.open_memmap(path, mode="w+", dtype=SUBSET, shape=subset.shape)
    at = 0
    for records in sorter.sorted_ranges():
        part = out[at : at + len(records)]
        part["f0"], part["f1"] = records["hi"], records["lo"]
        at += len(records)
    return out


def merged(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, Counts, Counts]]:
    """(uids, copies in A, copies in B) of two sorted subsets, in blocks: each uid once, in order.

    uids: `u8,u8` (n,); copies: int64 (n,).
    """
    at = [0, 0]
    while at[0] < len(a) or at[1] < len(b):
        blocks = [np.array(x[i : i + BLOCK]) for x, i in zip((a, b), at)]
        ends = [block[-1] for block, x, i in zip(blocks, (a, b), at) if i + len(block) < len(x)]
        if (
            ends
        ):  # nothing beyond the first end may be merged yet; what equals it, only with all of its copies
            bound = min(ends, key=_pair)
            cut = [_before(block, bound) for block in blocks]
            if not any(cut):  # one uid fills a block: take all of it
                yield _one(a, b, at, bound)
                continue
            blocks = [block[:n] for block, n in zip(blocks, cut)]
        at = [i + len(block) for i, block in zip(at, blocks)]
        yield _count(*blocks)


def _pair(uid: np.void) -> tuple[int, int]:
    return int(uid["f0"]), int(uid["f1"])


def _before(block: np.ndarray, bound: np.void) -> int:
    """How many uids of a sorted block are below `bound`."""
    start, stop = (int(np.searchsorted(block["f0"], bound["f0"], side)) for side in ("left", "right"))
    return start + int(np.searchsorted(block["f1"][start:stop], bound["f1"], "left"))


def _one(a: np.ndarray, b: np.ndarray, at: list[int], uid: np.void) -> tuple[np.ndarray, Counts, Counts]:
    """The uid at the front of the files, with all of its copies; moves `at` past it."""
    counts = []
    for n, x in enumerate((a, b)):
        start = at[n]
        while at[n] < len(x):
            block = x[at[n] : at[n] + BLOCK]
            same = int(np.count_nonzero(block == uid))
            at[n] += same
            if same < len(block):
                break
        counts.append(np.array([at[n] - start], np.int64))
    return np.array([uid], SUBSET), counts[0], counts[1]


def _count(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Counts, Counts]:
    joined = np.concatenate([a, b])
    order = np.lexsort((joined["f1"], joined["f0"]))
    joined, from_a = joined[order], order < len(a)
    new = np.ones(len(joined), bool)
    new[1:] = (joined["f0"][1:] != joined["f0"][:-1]) | (joined["f1"][1:] != joined["f1"][:-1])
    first = np.flatnonzero(new)
    mine = np.add.reduceat(from_a.astype(np.int64), first) if len(first) else np.zeros(0, np.int64)
    total = np.diff(np.append(first, len(joined)))
    return joined[first], mine, total - mine


def combine(a: np.ndarray, b: np.ndarray, operation: str | None = None, to: str | None = None) -> Overlap:
    """Count the overlap of two sorted subsets, and write the result of an operation to the subset file `to`."""
    entries, unique = (
        dict.fromkeys(("a", "b", "both", "result"), 0),
        dict.fromkeys(("a", "b", "both", "result"), 0),
    )
    with contextlib.ExitStack() as stack:
        out = None
        if to is not None:
            out = stack.enter_context(open(stack.enter_context(storage.commit(to)), "wb"))
            _header(out, 0)
        for uids, in_a, in_b in merged(a, b):
            copies = OPERATIONS[operation](in_a, in_b) if operation else np.zeros(len(uids), np.int64)
            for key, counts in (
                ("a", in_a),
                ("b", in_b),
                ("both", np.minimum(in_a, in_b)),
                ("result", copies),
            ):
                entries[key] += int(counts.sum())
                unique[key] += int(np.count_nonzero(counts))
            if out:
                out.write(np.repeat(uids, copies).tobytes())
        if out:
            out.seek(0)
            _header(out, entries["result"])
    return Overlap(entries, unique)


def _header(f: object, count: int) -> None:
    descr = np.lib.format.dtype_to_descr(SUBSET)  # numpy pads this header so that the count can grow in place
    np.lib.format.write_array_header_1_0(f, {"descr": descr, "fortran_order": False, "shape": (count,)})  # type: ignore[arg-type]

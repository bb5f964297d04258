"""Which rows a network is shown, and when: streams of row numbers, cut into batches of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from selection.draws import Ints, derive, seed_key, shuffled
from selection.rounds import Rounds

_EPOCH, _WITHIN = 103, 104


def epochs(rows: Ints, seed: int) -> Iterator[Ints]:
    """Pass after pass over `rows` (int64 (n,), a row may stand twice) without end, each in a fresh order."""
    for t in range(1 << 32):
        yield rows[shuffled(derive(seed_key(seed), _EPOCH, t), 0, np.asarray([len(rows)]))]


def rounds_order(rounds: Rounds, rows: Ints, seed: int) -> Iterator[Ints]:
    """RS2: round after round without end, each shuffled within.

    rows: int64 (rounds.entries,), the row number of each entry, shard after shard.
    """
    first = np.cumsum(rounds.counts) - rounds.counts
    for t in range(1 << 32):
        entries = np.concatenate([first[shard] + members for shard, members in rounds.all_members(t)])
        yield rows[entries[shuffled(derive(seed_key(seed), _WITHIN, t), 0, np.asarray([len(entries)]))]]


def batches(stream: Iterable[Ints], batch_size: int) -> Iterator[Ints]:
    """Batches of exactly `batch_size` rows from a stream of arrays joined end to end.

    A batch may hold the end of one epoch or round and the head of the next: every step sees as many samples,
    whatever the size of a round. What is left when the stream ends is not given.
    """
    left = np.empty(0, np.int64)
    for part in stream:
        left = np.concatenate([left, part])
        whole = len(left) // batch_size * batch_size
        yield from left[:whole].reshape(-1, batch_size)
        left = left[whole:]

"""Nested random subsets of a pool, counted by shard without touching an entry.

A uniform subset of c of N entries falls on the two halves of the shards as a hypergeometric draw, and so on
down to the single shard: that is the multivariate hypergeometric distribution, taken apart along a binary
tree. Each node's draw is a function of (key, node), so the count of one shard needs the log2(shards) draws on
its path, and a pass over all shards makes the same draws level by level. Subsets may nest or exclude each
other: each is drawn from a *universe*, whose count at a node follows from the subsets drawn before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from selection.draws import Ints, Key, hypergeometric, uniforms

Counts = dict[str, Ints]
"""Entries at some nodes by name: "all" and one name a Subset; int64, shape (nodes, strata)."""


@dataclass(frozen=True, kw_only=True)
class Subset:
    """One uniform random subset in each stratum.

    name: what `universe` functions of later subsets call it; key: arrays of shape (strata,) ; total: int64
    (strata,), how many entries it holds; universe: from the counts of "all" and of the earlier subsets at
    some nodes to the count of the entries it is drawn from, at those nodes. Linear, so that it may be applied
    to a node and to its half.
    """

    name: str
    key: Key
    total: Ints
    universe: Callable[[Counts], Ints]


# Levels whose counts `leaf` keeps: the widest draws, in at most 2^9 nodes.
_KEPT_LEVELS = 8


class ShardTree:
    """A binary tree over shards. counts: int64 (shards, strata), entries of each stratum in each shard."""

    def __init__(self, counts: Ints) -> None:
        self.shards, self.strata = counts.shape
        self.levels = max(0, (self.shards - 1).bit_length())
        self._before = np.zeros((self.shards + 1, self.strata), np.int64)
        np.cumsum(counts, axis=0, out=self._before[1:])

    def leaf(self, subsets: Sequence[Subset], shard: int, known: dict[int, Counts]) -> Counts:
        """Counts of each subset in one shard, arrays of shape (1, strata): O(levels x subsets) draws.

        known: counts of the upper nodes met so far with these subsets, empty at first.
        """
        path = [(1 << self.levels | shard) >> (self.levels - level) for level in range(self.levels + 1)]
        nodes = np.asarray(path[:-1], np.int64)
        draws = self._uniforms(subsets, nodes)
        counts = self._root(subsets)
        for level, child in enumerate(path[1:]):
            if child not in known:
                pair = self._halves(
                    subsets, counts, level, nodes[level : level + 1], draws[:, level : level + 1]
                )
                if level >= _KEPT_LEVELS:
                    counts = pair[child & 1]
                    continue
                known[child & ~1], known[child | 1] = pair
            counts = known[child]
        return counts

    def leaves(self, subsets: Sequence[Subset]) -> Counts:
        """Counts of each subset in every shard, arrays of shape (shards, strata); row i is `leaf` of i."""
        counts = self._root(subsets)
        for level in range(self.levels):
            nodes = np.arange(1 << level, 2 << level)
            left, right = self._halves(subsets, counts, level, nodes, self._uniforms(subsets, nodes))
            counts = {
                name: np.stack((left[name], right[name]), axis=1).reshape(-1, self.strata) for name in left
            }
        return {name: array[: self.shards] for name, array in counts.items()}

    def _root(self, subsets: Sequence[Subset]) -> Counts:
        return {"all": self._before[-1:]} | {subset.name: subset.total[None] for subset in subsets}

    def _uniforms(self, subsets: Sequence[Subset], nodes: Ints) -> np.ndarray:
        """float64 (subsets, nodes, strata)."""
        if not subsets:
            return np.empty((0, len(nodes), self.strata))
        keys = [
            np.stack([np.broadcast_to(subset.key[part], self.strata) for subset in subsets])
            for part in (0, 1)
        ]
        return uniforms((keys[0][:, None], keys[1][:, None]), nodes[:, None])

    def _halves(
        self, subsets: Sequence[Subset], counts: Counts, level: int, nodes: Ints, draws: np.ndarray
    ) -> tuple[Counts, Counts]:
        """Counts of the left and the right children of one level's nodes, numbered as in a heap."""
        width = 1 << (self.levels - level)
        first = (nodes - (1 << level)) * width
        start, middle = (np.minimum(edge, self.shards) for edge in (first, first + width // 2))
        left = {"all": self._before[middle] - self._before[start]}
        for subset, draw in zip(subsets, draws):
            good = subset.universe(left)
            bad = subset.universe(counts) - good
            left[subset.name] = hypergeometric(draw, good, bad, counts[subset.name])
        return left, {name: counts[name] - left[name] for name in left}

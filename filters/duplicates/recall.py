"""Recall: what a random sample is near to, checked exactly; the margin that asks for; what was found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from filters.duplicates.blocks import BlockSource, open_embeddings, row_ids, unit_rows
from filters.duplicates.clusters import similarities
from filters.duplicates.config import READ_ROWS
from filters.duplicates.near import PAIR, RECHECK, HashTest, candidate_blocks, decide

# Pairs that set the margin; planted ones are added when the pool has fewer.
LEAST_PAIRS = 400
# Rows that make up the noise of a planted pair.
MIXED_ROWS = 32
# Exact pairs kept in all; a pool that is near to itself everywhere would give millions a row.
MOST_PAIRS = 1_000_000


@dataclass(frozen=True)
class RecallEstimate:
    """Share of the near pairs that the search found, from pairs of randomly drawn rows checked exactly.

    ``found`` of ``checked`` pairs, of ``rows`` drawn; ``low``..``high`` the 95 % interval.
    """

    found: int
    checked: int
    rows: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The estimate; NaN when the drawn rows have no near pair."""
        return self.found / self.checked if self.checked else float("nan")

    def __str__(self) -> str:
        if not self.checked:
            return f"recall unknown: no near pair among {self.rows} rows drawn"
        interval = f"95 % {self.low:.4f} to {self.high:.4f}"
        return f"recall {self.value:.4f} ({interval}; {self.checked} pairs, {self.rows} rows)"


def estimate_recall(found: np.ndarray, owner: np.ndarray, rows: int, level: float = 0.95) -> RecallEstimate:
    """Recall from pairs drawn row by row: found (p,) bool, owner (p,) the drawn row each pair belongs to.

    Clopper-Pearson interval on the effective number of pairs: pairs of one row are lost together, so their
    number is divided by the design effect of drawing rows (Kish 1965, section 5.4), or taken as the number of
    rows with pairs when nothing is lost and that effect cannot be seen.
    """
    checked = len(found)
    if checked == 0:
        return RecallEstimate(0, 0, rows, 0.0, 1.0)
    hits = int(found.sum())
    share = hits / checked
    _, group = np.unique(owner, return_inverse=True)
    groups = int(group.max()) + 1
    if hits in (0, checked) or groups == 1:
        effective = float(groups)
    else:
        residual = np.bincount(group, weights=found - share)
        variance = groups / (groups - 1) * float((residual**2).sum()) / checked**2
        effective = checked / max(1.0, variance * checked / (share * (1 - share)))
    tail = (1 - level) / 2
    hit, miss = share * effective, (1 - share) * effective
    low = float(stats.beta.ppf(tail, hit, miss + 1)) if hits else 0.0
    high = float(stats.beta.ppf(1 - tail, hit + 1, miss)) if hits < checked else 1.0
    return RecallEstimate(hits, checked, rows, low, high)


@dataclass(frozen=True)
class ExactNeighbours:
    """Task: every live row of (ordinal, shard) near to a sampled row, by comparing all of them.

    Returns PAIR records with ``a`` the sampled row's id, at most ``most`` of them, drawn at random.
    """

    source: BlockSource
    method: str
    similarity: float
    distance: int
    ids: np.ndarray
    vectors: np.ndarray
    hashes: np.ndarray
    most: int
    seed: int

    def __call__(self, task: tuple[int, str]) -> np.ndarray:
        ordinal, shard = task
        block = self.source.load(shard)
        embeddings = open_embeddings(block)
        found = [np.empty(0, dtype=PAIR)]
        for start in range(0, len(embeddings), READ_ROWS):
            part = slice(start, start + READ_ROWS)
            vectors, usable = unit_rows(embeddings[part])
            rows = np.flatnonzero(usable & block.alive[part])
            hashes = None if block.phash is None else block.phash[part][rows]
            found.append(self._compare(vectors[rows], hashes, row_ids(ordinal, rows + start)))
        pairs = np.concatenate(found)
        if len(pairs) > self.most:
            chosen = np.random.default_rng([self.seed, 4, ordinal]).choice(
                len(pairs), self.most, replace=False
            )
            pairs = pairs[np.sort(chosen)]
        return pairs

    def _compare(self, vectors: np.ndarray, hashes: np.ndarray | None, ids: np.ndarray) -> np.ndarray:
        if self.method == "embedding" or hashes is None:
            left, right, cut = (
                torch.from_numpy(self.vectors),
                torch.from_numpy(vectors),
                self.similarity - RECHECK,
            )
        else:
            test = HashTest(self.distance)
            left, right, cut = test.sides(self.hashes)[0], test.sides(hashes)[1], test.cut
        found = [np.empty(0, dtype=PAIR)]
        for a, b in candidate_blocks(left, right, cut, triangle=False):
            other = self.ids[a] != ids[b]
            a, b = a[other], b[other]
            pairs = np.empty(len(a), dtype=PAIR)
            near = np.ones(len(a), dtype=bool)
            pairs["a"], pairs["b"], pairs["hamming"] = self.ids[a], ids[b], 0
            for first in range(0, len(a), READ_ROWS):
                some = slice(first, first + READ_ROWS)
                both = np.concatenate([self.vectors[a[some]], vectors[b[some]]])
                half = np.arange(len(both) // 2)
                pairs["similarity"][some], near[some] = decide(both, half, half + len(half), self.similarity)
            found.append(pairs[near])
        return np.concatenate(found)


def crossing_gaps(x: np.ndarray, y: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Margin each near pair needs to meet: (p,) float32, 0 when both rows have one home.

    x and y are (p, d) unit rows. The smaller of what x needs to visit y's home and y to visit x's.
    """
    of_x, of_y = similarities(x, centroids), similarities(y, centroids)
    row = np.arange(len(x))
    x_gap = of_x.max(1) - of_x[row, of_y.argmax(1)]
    y_gap = of_y.max(1) - of_y[row, of_x.argmax(1)]
    return np.minimum(x_gap, y_gap)


def plant_pairs(vectors: np.ndarray, similarity: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows at exactly that cosine from ``vectors[i % n]``: (count, d) float32.

    They differ from it by a random mix of pool rows: noise of the pool's covariance, which crosses cluster
    borders as often as differences between its images do, where noise in all directions alike would not.
    """
    base = vectors[np.arange(count) % len(vectors)]
    mixed = rng.integers(0, len(vectors), (count, MIXED_ROWS))
    away = np.einsum("pm,pmd->pd", rng.standard_normal(mixed.shape), vectors[mixed])
    away += 1e-6 * rng.standard_normal(away.shape)  # a pool of one direction has no noise of its own
    away, _ = unit_rows(away - np.einsum("ij,ij->i", away, base)[:, None] * base)
    return unit_rows(similarity * base + np.sqrt(1 - similarity**2) * away)[0]


def choose_margin(gaps: np.ndarray, recall: float) -> float:
    """Smallest margin under which pairs reach the recall with 90 % confidence (one-sided Clopper-Pearson).

    When there are too few pairs to be that sure, the largest gap is carried on along the tail of a normal
    distribution, to a third of the loss allowed and by a tenth at least.
    """
    ordered = np.sort(gaps)
    covered = np.arange(1, len(ordered) + 1)
    low = stats.beta.ppf(0.1, covered, len(ordered) - covered + 1)
    enough = np.flatnonzero(low >= recall)
    if len(enough):
        return float(ordered[enough[0]])
    beyond = stats.norm.isf((1 - recall) / 3) / stats.norm.isf(1 / max(len(ordered), 3))
    return float(ordered[-1] * max(1.1, beyond))


def was_found(truth: np.ndarray, files: Sequence[str]) -> np.ndarray:
    """Which exact pairs (PAIR records) stand in the pair files: (p,) bool. Streams the files."""
    keys = np.empty(len(truth), dtype=[("a", "<i8"), ("b", "<i8")])
    keys["a"], keys["b"] = np.minimum(truth["a"], truth["b"]), np.maximum(truth["a"], truth["b"])
    wanted, place = np.unique(keys, return_inverse=True)
    seen = np.zeros(len(wanted), dtype=bool)
    starts = np.unique(wanted["a"])
    for path in files:
        pairs = read_pairs(path)
        for start in range(0, len(pairs), 1 << 20):
            part = pairs[start : start + (1 << 20)]
            part = part[np.isin(part["a"], starts)]
            have = np.empty(len(part), dtype=keys.dtype)
            have["a"], have["b"] = part["a"], part["b"]
            spot = np.searchsorted(wanted, have)
            spot[spot == len(wanted)] = 0
            seen[spot[wanted[spot] == have]] = True
    return seen[place]


def read_pairs(path: str) -> np.ndarray:
    """Memory-map a pair file: (p,) PAIR records."""

    if os.path.getsize(path) == 0:
        return np.empty(0, dtype=PAIR)
    return np.memmap(path, dtype=PAIR, mode="r")

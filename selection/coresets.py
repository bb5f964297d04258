"""Nested coresets of real samples: orders of which every prefix is a good small set.

Each function takes the features of one class (or of a pool without classes), float (n, d), and returns the
first k rows of its order, int64 (k,). Ties go to the smaller row number. Distances are squared Euclidean ones;
on unit vectors they rank as cosines do.
"""

from __future__ import annotations

import numpy as np

CORESETS = ("random", "kmeans", "herding", "prototypes_easy", "prototypes_hard")
TRIALS = 1024  # rows that one step of `nested_kmeans` tries as the next centre, at most
PRODUCTS = 1 << 24  # distances held at a time


def order(method: str, features: np.ndarray, k: int, seed: int) -> np.ndarray:
    """The first k rows by `method`, one of CORESETS. Raises ValueError when k > n."""
    n = len(features)
    if k > n:
        raise ValueError(f"{n} samples, {k} are wanted")
    rng = np.random.default_rng(seed)
    if method == "random":
        return rng.permutation(n)[:k]
    x = np.asarray(features, np.float32)
    x = x - x.mean(0, dtype=np.float64).astype(np.float32)
    if method == "kmeans":
        return nested_kmeans(x, k, rng)
    if method == "herding":
        return herding(x, k)
    distance = np.einsum("nd,nd->n", x, x)
    return np.argsort(distance if method == "prototypes_easy" else -distance, kind="stable")[:k]


def herding(x: np.ndarray, k: int) -> np.ndarray:
    """Greedy matching of the mean (Welling 2009; Rebuffi et al., CVPR 2017, algorithm 4), without repetition.

    x: float32 (n, d), its mean taken off. Row s is the one that brings the mean of the first s rows closest to
    0. O(n d k).
    """
    norms = np.einsum("nd,nd->n", x, x)
    total = np.zeros(x.shape[1], np.float32)
    chosen = np.empty(k, np.int64)
    for s in range(k):
        distance = norms + 2 * (x @ total)  # |total + x|^2 less a constant
        distance[chosen[:s]] = np.inf
        chosen[s] = distance.argmin()
        total += x[chosen[s]]
    return chosen


def nested_kmeans(x: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """Greedy minimisation of the k-means objective over centres that are rows: each next row is the one that
    lowers the sum of squared distances to the nearest centre most.

    The reduction is submodular, so every prefix comes within 1 - 1/e of the best set of its size (Nemhauser,
    Wolsey and Fisher 1978) where every row is tried. Of more than TRIALS rows each step tries a random TRIALS
    (Mirzasoleiman et al., AAAI 2015), so that the next centre is among the best 0.1 % on average. x: float32
    (n, d), its mean taken off. O(n d TRIALS k).
    """
    n = len(x)
    norms = np.einsum("nd,nd->n", x, x)
    nearest = norms.copy()  # against the mean itself, which the first centre replaces
    trials = min(n, TRIALS)
    chosen = np.empty(k, np.int64)
    for s in range(k):
        tried = np.sort(rng.choice(n, trials, replace=False))
        tried = tried[~np.isin(tried, chosen[:s])]
        if not len(tried):
            tried = np.setdiff1d(np.arange(n), chosen[:s])
        potential = _potentials(x, norms, nearest if s else np.full(n, np.inf, np.float32), tried)
        chosen[s] = tried[potential.argmin()]
        distance = _distances(x, norms, chosen[s : s + 1])[:, 0]
        nearest = np.minimum(nearest, distance) if s else distance
    return chosen


def _potentials(x: np.ndarray, norms: np.ndarray, nearest: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """The objective with each of the rows `tried` as one more centre, float64 (len(tried),)."""
    total = np.zeros(len(tried))
    step = max(1, PRODUCTS // len(tried))
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        distance = norms[part, None] + norms[tried] - 2 * (x[part] @ x[tried].T)
        total += np.minimum(distance, nearest[part, None]).sum(0, dtype=np.float64)
    return total


def _distances(x: np.ndarray, norms: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.maximum(norms[:, None] + norms[rows] - 2 * (x @ x[rows].T), 0)

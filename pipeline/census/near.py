"""Near-duplicate captions: MinHash with banding (Broder 1997; Leskovec et al., Mining of Massive Datasets, 3.4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl
import rensa
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

PERMUTATIONS, BANDS = 64, 16  # a pair at Jaccard .8 shares a band with probability .9998
WORDS = r"\w+(?:'\w+)*"
BATCH = 1 << 16


def near_captions(
    captions: Iterable[tuple[list[str], list[int]]], distinct: int, limit: int, similarity: float, top: int
) -> dict[str, Any]:
    """Groups of distinct captions whose word sets have a Jaccard similarity of at least `similarity`.

    captions: batches of (distinct captions, occurrences). Past `limit` captions one in so many is looked at,
    chosen by its first MinHash value, which a pair at Jaccard J shares with probability J: near captions are
    sampled together. Candidates come from shared bands and are checked exactly.
    """
    every = max(1, -(-distinct // limit))
    texts: list[str] = []
    counts: list[int] = []
    signatures = [np.empty((0, PERMUTATIONS), np.uint32)]
    for some, occurrences in captions:
        words = tokens(some)
        matrix = rensa.RMinHash.digest_matrix_from_token_sets(words.to_list(), PERMUTATIONS, 0)
        rows = np.array(matrix.to_rows(), np.uint32).reshape(len(some), PERMUTATIONS)
        take = np.flatnonzero((rows[:, 0] % every == 0) & (words.list.len() > 0).to_numpy())
        signatures.append(rows[take])
        texts += [some[i] for i in take]
        counts += [occurrences[i] for i in take]
    a, b = _candidates(np.concatenate(signatures))
    near = _jaccard(texts, a, b) >= similarity
    a, b = a[near], b[near]
    graph = coo_array((np.ones(len(a), bool), (a, b)), shape=(len(texts), len(texts)))
    _, label = connected_components(graph, directed=False)
    sizes = np.bincount(label, minlength=1)
    groups = np.flatnonzero(sizes > 1)
    largest = groups[np.lexsort((groups, -sizes[groups]))][:top]
    return {
        "similarity": similarity,
        "looked_at": len(texts),
        "one_in": every,
        "groups": len(groups),
        "captions": int(sizes[groups].sum()),
        "largest": [_group(np.flatnonzero(label == g), texts, counts) for g in largest],
    }


def tokens(captions: list[str]) -> pl.Series:
    """Lower-case words of each caption."""
    return pl.Series(captions, dtype=pl.String).str.to_lowercase().str.extract_all(WORDS)


def _candidates(signatures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of rows that share a band: each row with the first of its bucket and with its neighbour there."""
    width = PERMUTATIONS // BANDS
    found = [np.empty(0, np.uint64)]
    for band in range(BANDS):
        part = np.ascontiguousarray(signatures[:, band * width : (band + 1) * width])
        key = part.view(np.dtype((np.void, part.dtype.itemsize * width))).ravel()
        order = np.argsort(key, kind="stable")
        same = np.r_[False, key[order][1:] == key[order][:-1]] if len(order) else np.zeros(0, bool)
        first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
        at = np.flatnonzero(same)
        for other in (order[first[at]], order[at - 1]):
            low, high = np.minimum(order[at], other), np.maximum(order[at], other)
            found.append(low.astype(np.uint64) << np.uint64(32) | high.astype(np.uint64))
    pairs = np.unique(np.concatenate(found))
    return (pairs >> np.uint64(32)).astype(np.int64), (pairs & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _jaccard(texts: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Jaccard similarity of the word sets of each pair, by products of rows of a 0/1 matrix."""
    words = tokens(texts).list.unique()
    row = np.repeat(np.arange(len(texts)), words.list.len().to_numpy())
    column = words.explode().rank("dense").to_numpy().astype(np.int64) - 1
    ones = np.ones(len(row), np.int32)
    sets = coo_array((ones, (row, column)), shape=(len(texts), int(column.max(initial=0)) + 1)).tocsr()
    sizes = np.diff(sets.indptr)
    found = [np.empty(0)]
    for start in range(0, len(a), BATCH):
        some, other = a[start : start + BATCH], b[start : start + BATCH]
        both = sets[some].multiply(sets[other]).sum(axis=1)
        found.append(both / (sizes[some] + sizes[other] - both))
    return np.concatenate(found)


def _group(rows: np.ndarray, texts: list[str], counts: list[int]) -> dict[str, Any]:
    return {
        "captions": len(rows),
        "samples": int(sum(counts[i] for i in rows)),
        "examples": [texts[i] for i in rows[:3]],
    }

"""Which rows of the near pairs stay. Rows are numbered by rank: row 0 ranks first and always stays.

Rank is (score descending, uid ascending); pairs are (earlier, later) with earlier < later. All rules are
pure functions of the pairs, whatever their order, and each connected component can be decided on its own.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

# Rounds of deciding all rows at once; what a longer chain of dependencies leaves is decided row by row.
ROUNDS = 40


def rank_rows(score: np.ndarray, uid_hi: np.ndarray, uid_lo: np.ndarray) -> np.ndarray:
    """Order of rows by (score descending, uid ascending), rows without a score last: (n,) int64 indices."""
    return np.lexsort((uid_lo, uid_hi, np.where(np.isnan(score), np.inf, -score.astype(np.float64))))


def greedy(rows: int, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Keep a row unless a kept row of earlier rank is near it: (rows,) bool kept."""
    undecided, kept, dropped = 0, 1, 2
    state = np.zeros(rows, dtype=np.int8)
    for _ in range(ROUNDS):
        if not len(earlier):
            break
        waiting = np.zeros(rows, dtype=bool)
        waiting[later] = True
        state[earlier[~waiting[earlier]]] = kept
        state[later[state[earlier] == kept]] = dropped
        open_pairs = (state[earlier] != dropped) & (state[later] == undecided)
        earlier, later = earlier[open_pairs], later[open_pairs]
    order = np.argsort(later, kind="stable")
    for first, second in zip(earlier[order].tolist(), later[order].tolist()):
        # Pairs come by later row, so the earlier one is final: dropped, or kept.
        if state[first] != dropped:
            state[second] = dropped
    return state != dropped


def semdedup(rows: int, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Drop a row whenever any row of earlier rank is near it, dropped or not: (rows,) bool kept.

    Abbas et al., "SemDeDup" (2023), section 3.2.
    """
    kept = np.ones(rows, dtype=bool)
    kept[later] = False
    return kept


def components(rows: int, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Keep the first row of each connected component: (rows,) bool kept."""
    kept = np.zeros(rows, dtype=bool)
    kept[np.unique(component_labels(rows, earlier, later), return_index=True)[1]] = True
    return kept


def component_labels(rows: int, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Connected component of each row: (rows,) int32."""
    graph = coo_matrix((np.ones(len(earlier), dtype=np.int8), (earlier, later)), shape=(rows, rows))
    return connected_components(graph, directed=False)[1]


RULES = {"greedy": greedy, "semdedup": semdedup, "components": components}


def keepers(
    rule: str, kept: np.ndarray, earlier: np.ndarray, later: np.ndarray, similarity: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each dropped row, what it was dropped for: (dropped, keeper, similarity of the two).

    greedy: the most similar kept row. semdedup: the most similar row of earlier rank, kept or not.
    components: the first row of its component, with the similarity of the pair that ties it in most closely.
    Ties go to the earlier rank.
    """
    counts = ~kept[later]
    if rule == "greedy":
        counts &= kept[earlier]
    if rule == "components":
        labels = component_labels(len(kept), earlier, later)
        first = np.unique(labels, return_index=True)[1]
        ends = np.concatenate([earlier, later])
        strength = np.full(len(kept), -np.inf)
        np.maximum.at(strength, ends, np.tile(similarity, 2))
        dropped = np.flatnonzero(~kept)
        return dropped, first[labels[dropped]], strength[dropped]
    a, b, s = earlier[counts], later[counts], similarity[counts]
    order = np.lexsort((a, -s, b))
    a, b, s = a[order], b[order], s[order]
    best = np.r_[True, b[1:] != b[:-1]] if len(b) else np.empty(0, dtype=bool)
    return b[best], a[best], s[best]

"""Active learning: which unlabelled rows to label next."""

from __future__ import annotations

import numpy as np
from sklearn.tree import DecisionTreeRegressor

DEPTH, LEAF = 5, 10


def predicted_influence(
    x: np.ndarray, delta: np.ndarray, unlabelled: np.ndarray, seed: int = 0
) -> np.ndarray:
    """(u,) influence that unlabelled rows are predicted to have; label the largest (most helpful) first.

    A regression tree from the features of the labelled rows to their influence, asked about the others
    (Chhabra et al., ICLR 2024). It lowers the objective it was given, which need not be the error rate: on
    the Adult data it lowered the log-loss below random choice while accuracy stayed below.

    Args:
        x: (n, d) features of the labelled rows. delta: (n,) their delta_if_removed, positive = helpful.
        unlabelled: (u, d).
    Raises:
        ValueError: fewer than 20 labelled rows.
    """
    if len(delta) < 2 * LEAF:
        raise ValueError(f"{len(delta)} labelled rows: the tree needs at least {2 * LEAF}")
    tree = DecisionTreeRegressor(max_depth=DEPTH, min_samples_leaf=LEAF, random_state=seed)
    return tree.fit(x, delta).predict(unlabelled)

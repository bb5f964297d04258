"""Active learning: which unlabelled rows to label next."""

from __future__ import annotations

import numpy as np

from selection.influence.head import Head
from selection.influence.logistic import class_probabilities
from selection.influence.objectives import Objective
from selection.influence.rows import Rows
from selection.influence.solve import Curvature


def expected_influence(rows: Rows, head: Head, objective: Objective, x: np.ndarray) -> np.ndarray:
    """(b,) expected size of the change of the objective if row i is labelled and added; label the largest.

    Adding row i with label c changes the objective by about u_c - p . u, u = V x. Under the head's own
    probabilities the mean of that is zero, so what a label is worth is its spread: sum_c p_c |u_c - p . u|,
    with two classes 2 p (1 - p) |u|. It is large where the head is unsure *and* the objective depends on the
    answer; margin sampling knows only the first.

    Args:
        rows: the labelled rows that `head` was fitted to.
        x: (b, d) unlabelled rows.
    Returns: in the objective's unit, never negative.
    """
    v = Curvature(rows, head.weights, head.l2).solve(objective.gradient(head)[None]).v[0]
    p = class_probabilities(head.logits(x))
    u = np.asarray(x, dtype=np.float64) @ v.T
    if p.shape[1] == 1:
        return (2 * p * (1 - p) * np.abs(u))[:, 0]
    return (p * np.abs(u - (p * u).sum(axis=1, keepdims=True))).sum(axis=1)

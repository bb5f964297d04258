"""Rows whose label is probably wrong, by what they do to the held-out loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from selection.influence.head import Head
from selection.influence.rows import Rows


@dataclass(frozen=True)
class LabelErrors:
    """Candidates, most suspicious first; all arrays (k,).

    Attributes:
        row: row number. given: its label. suggested: the head's label, different from the given one.
        delta_if_removed: of `utility`, negative = harmful.
    """

    row: np.ndarray
    given: np.ndarray
    suggested: np.ndarray
    delta_if_removed: np.ndarray


def label_errors(rows: Rows, head: Head, delta: np.ndarray) -> LabelErrors:
    """Harmful rows on which the head disagrees with the label, most harmful first.

    A harmful row with which the head agrees is unusual rather than mislabelled; it is left out.

    Args:
        delta: (n,) delta_if_removed of `utility` under `head`, the held-out labels being trusted.
    """
    given = rows.labels()
    suggested = rows.each(partial(_predictions, head))
    order = np.argsort(delta, kind="stable")
    order = order[(delta < 0)[order] & (given != suggested)[order]]
    return LabelErrors(order, given[order], suggested[order], delta[order])


def _predictions(head: Head, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return head.predict(x)

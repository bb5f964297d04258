"""Rows whose label is probably wrong: the label that all other rows predict, without cross-validation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from selection.influence.head import Head
from selection.influence.logistic import class_probabilities, residuals
from selection.influence.rows import Rows
from selection.influence.score import check_leverage
from selection.influence.solve import Curvature, Leverage

# No array of rows by classes is ever held: at a hundred classes it would be a hundred times as large.
TOLD = np.dtype([("given", "i4"), ("suggested", "i4"), ("confidence", "f8")])


@dataclass(frozen=True)
class LabelErrors:
    """Candidates, most suspicious first; all arrays (k,).

    Attributes:
        row: row number. given: its label. suggested: the label that the other rows predict.
        confidence: leave-one-out probability of the given label, 0..1.
    """

    row: np.ndarray
    given: np.ndarray
    suggested: np.ndarray
    confidence: np.ndarray


def label_errors(rows: Rows, head: Head, *, curvature: Curvature | None = None) -> LabelErrors:
    """Rows whose label the head fitted to all *other* rows would not give, least probable label first.

    The influence of a row on its own logits, z_i + S_i (I - R_i S_i)^-1 r_i, is the one-step leave-one-out
    prediction: confident learning's out-of-sample probability from a single fit. It needs no trusted
    held-out labels. Ranking by `delta_if_removed` of `utility` instead finds rows that hurt the held-out
    loss, many of them rightly labelled.

    Args:
        rows: training rows; `head` must be the fit of the kept ones.
        curvature: reuse one made for this head.
    Raises:
        ValueError: more than 100 classes.
    """
    check_leverage(head)
    curvature = curvature or Curvature(rows, head.weights, head.l2)
    told = rows.each(partial(_without_itself, head, curvature.leverage))
    found = np.flatnonzero(told["suggested"] != told["given"])
    order = found[np.argsort(told["confidence"][found], kind="stable")]
    return LabelErrors(order, told["given"][order], told["suggested"][order], told["confidence"][order])


def _without_itself(head: Head, leverage: Leverage, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(b,) TOLD records: what the head of all rows but it says of each row."""
    z = head.logits(x)
    p = class_probabilities(leverage.leave_one_out(x, z, residuals(z, y)))
    p = np.hstack([1 - p, p]) if head.classes == 2 else p
    told = np.empty(len(y), TOLD)
    told["given"], told["suggested"] = y, p.argmax(axis=1)
    told["confidence"] = p[np.arange(len(y)), y]
    return told

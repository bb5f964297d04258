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
    p = rows.each(partial(_without_itself, head, curvature.leverage))
    given = rows.labels()
    confidence, suggested = p[np.arange(rows.n), given], p.argmax(axis=1)
    order = np.argsort(confidence, kind="stable")
    order = order[(suggested != given)[order]]
    return LabelErrors(order, given[order], suggested[order], confidence[order])


def _without_itself(head: Head, leverage: Leverage, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(b, classes) probabilities of each row under the head of all rows but it."""
    z = head.logits(x)
    p = class_probabilities(leverage.leave_one_out(x, z, residuals(z, y)))
    return np.hstack([1 - p, p]) if head.classes == 2 else p

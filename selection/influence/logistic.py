"""Logistic and softmax arithmetic on logits: one place for the binary and the many-class form.

A head with two classes keeps one column of logits (logistic regression), a head with C > 2 classes keeps C
(softmax regression). `columns` is that width: 1 or C.
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit, logsumexp, softmax


def columns_for(classes: int) -> int:
    """Columns of logits that a head for `classes` classes keeps: 1 for two classes, else one a class."""
    if classes < 2:
        raise ValueError(f"classes={classes}: a head needs at least 2 classes")
    return 1 if classes == 2 else classes


def class_probabilities(logits: np.ndarray) -> np.ndarray:
    """(b, columns) probabilities in the dtype of `logits`: of class 1 with one column, else of each class."""
    return expit(logits) if logits.shape[1] == 1 else softmax(logits, axis=1)


def residuals(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(b, columns) gradient of each row's loss in its logits, p - onehot(y)."""
    r = class_probabilities(logits)
    if r.shape[1] == 1:
        r[:, 0] -= y
    else:
        r[np.arange(len(y)), y] -= 1
    return r


def row_losses(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(b,) log-loss of each row in nats."""
    if logits.shape[1] == 1:
        z = logits[:, 0]
        return np.logaddexp(0, z) - y * z
    return logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]


def curvature_times(p: np.ndarray, t: np.ndarray) -> np.ndarray:
    """R_i t_i for each row, R_i = diag(p_i) - p_i p_i' (softmax) or p_i (1 - p_i) (logistic).

    `p` is (b, columns); `t` is (b, ..., columns). Returns the shape of `t`.
    """
    p = p.reshape(len(p), *[1] * (t.ndim - 2), p.shape[1])
    if p.shape[-1] == 1:
        return p * (1 - p) * t
    pt = p * t
    return pt - p * pt.sum(axis=-1, keepdims=True)

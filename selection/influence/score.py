"""The influence of every row on K objectives in one GEMM: X [W; V_1 .. V_K]' and a row sum.

`delta_if_removed[i, k]` estimates f_k(head without row i) - f_k(head). **Negative: removing the row lowers
f_k, a loss or a gap, so the row is harmful. Positive: the row helps.** The unit is the objective's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from selection.influence.head import Head
from selection.influence.logistic import class_probabilities, residuals
from selection.influence.objectives import Objective
from selection.influence.rows import Rows
from selection.influence.solve import Curvature, Leverage, Solution

LEVERAGE_CLASSES = 100  # the correction solves a C x C system a row


@dataclass(frozen=True)
class Influence:
    """Influence of n rows on K objectives.

    Attributes:
        names, units: of the K objectives.
        delta_if_removed: (n, K) float64; negative = harmful. Removed rows are scored too.
        base: (K,) float64 value of each objective at the head.
        solution: the solves behind it, with residuals.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    delta_if_removed: np.ndarray
    base: np.ndarray
    solution: Solution

    def column(self, name: str) -> np.ndarray:
        """(n,) delta_if_removed of one objective."""
        return self.delta_if_removed[:, self.names.index(name)]

    @property
    def utility(self) -> np.ndarray | None:
        """(n,) delta_if_removed of `utility`, or None when it is not among the objectives."""
        return self.column("utility") if "utility" in self.names else None

    def most_harmful(self, name: str, count: int = 10) -> np.ndarray:
        """Row numbers whose removal lowers the objective most, worst first (harmful rows only)."""
        order = np.argsort(self.column(name), kind="stable")[:count]
        return order[self.column(name)[order] < 0]

    def most_helpful(self, name: str, count: int = 10) -> np.ndarray:
        """Row numbers whose removal raises the objective most, best first (helpful rows only)."""
        order = np.argsort(-self.column(name), kind="stable")[:count]
        return order[self.column(name)[order] > 0]


def influence(
    rows: Rows,
    head: Head,
    objectives: Sequence[Objective],
    *,
    leverage: bool = True,
    curvature: Curvature | None = None,
) -> Influence:
    """Score every row for several objectives at once.

    Args:
        rows: training rows; `head` must be the fit of the kept ones.
        leverage: divide by 1 - h_i, which makes single-row estimates exact to second order. With two classes
            it costs one more GEMM of n*d^2; with more, a C x C solve a row (at most 100 classes).
        curvature: reuse one made for this head.
    Raises:
        ValueError: `leverage` with more than 100 classes.
    """
    if leverage:
        check_leverage(head)
    curvature = curvature or Curvature(rows, head.weights, head.l2)
    solution = curvature.solve(np.stack([objective.gradient(head) for objective in objectives]))
    return Influence(
        names=tuple(objective.name for objective in objectives),
        units=tuple(objective.unit for objective in objectives),
        delta_if_removed=score_rows(rows, head, solution.v, curvature.leverage if leverage else None),
        base=np.array([objective.value(head) for objective in objectives]),
        solution=solution,
    )


def check_leverage(head: Head) -> None:
    """Raise ValueError when the head has too many classes for a C x C solve a row."""
    if head.weights.shape[0] > LEVERAGE_CLASSES:
        raise ValueError(
            f"leverage=true: {head.classes} classes, at most {LEVERAGE_CLASSES}; set leverage=false"
        )


def score_rows(rows: Rows, head: Head, v: np.ndarray, leverage: Leverage | None = None) -> np.ndarray:
    """(n, K) float64 delta_if_removed of every row for solved directions v (K, columns, d).

    Computed in the rows' own precision (float16 rows in float32), corrected when `leverage` is given.
    """
    stacked = np.concatenate([head.weights[None], v]).reshape(-1, v.shape[2])
    return rows.each(partial(_block_scores, stacked, len(v), leverage))


def _block_scores(
    stacked: np.ndarray, objectives: int, leverage: Leverage | None, x: np.ndarray, y: np.ndarray
) -> np.ndarray:
    columns = len(stacked) // (objectives + 1)
    dtype = np.result_type(x.dtype, np.float32)
    z = np.asarray(x, dtype=dtype) @ stacked.astype(dtype).T
    r = residuals(z[:, :columns], y)
    if leverage is not None:
        r = leverage.correct(x, class_probabilities(z[:, :columns]), r)
    u = z[:, columns:].reshape(len(z), objectives, columns)
    return (u @ r[:, :, None])[..., 0].astype(np.float64) if columns > 1 else (u[..., 0] * r).astype(float)


@dataclass(frozen=True)
class ScoringCost:
    """What a pass of scoring costs: floating-point operations, and bytes of features read."""

    flops: float
    bytes: float


def scoring_cost(
    *, n: int, d: int, classes: int, objectives: int, itemsize: int = 2, leverage: bool = False
) -> ScoringCost:
    """Cost of scoring n rows of width d for K objectives, features stored at `itemsize` bytes a value."""
    columns = 1 if classes == 2 else classes
    flops = 2.0 * n * d * columns * (objectives + 1) + 4.0 * n * columns * (objectives + 2)
    if leverage:
        flops += 2.0 * n * d * d + (0 if columns == 1 else n * (2.0 * d * columns + 4.0 * columns**3))
    return ScoringCost(flops, float(n) * d * itemsize)

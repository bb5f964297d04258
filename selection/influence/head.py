"""The convex head: L2 logistic or softmax regression on fixed features, fitted to a tight gradient norm.

Objective: sum of row log-losses + (l2/2)||W||^2, no intercept (append a column of ones to have one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipeline.errors import WinnowError
from selection.influence.logistic import class_probabilities, columns_for, residuals, row_losses
from selection.influence.rows import Rows, Sums
from selection.influence.solve import KroneckerFactors, conjugate_gradient, dense_hessian, hessian_products

# Newton steps factor the dense Hessian up to this columns*d; beyond it, a dozen Hessian products are cheaper.
DENSE_STEP_LIMIT = 2_048


class FitError(WinnowError):
    """The head did not reach the gradient norm asked for; its influence would be wrong in silence."""


@dataclass(frozen=True)
class Head:
    """A fitted head.

    Attributes:
        weights: (columns, d) float64; columns is 1 with two classes, else the number of classes.
        l2: penalty on (1/2)||W||^2 beside the *sum* of losses.
        classes: number of classes C.
        gradient_norm: norm of the objective's gradient at `weights`.
        iterations: Newton steps taken.
    """

    weights: np.ndarray
    l2: float
    classes: int
    gradient_norm: float = 0.0
    iterations: int = 0

    def logits(self, x: np.ndarray) -> np.ndarray:
        """(b, columns) float64 logits of x (b, d)."""
        return np.asarray(x, dtype=np.float64) @ self.weights.T

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """(b, classes) float64 class probabilities of x (b, d)."""
        p = class_probabilities(self.logits(x))
        return np.hstack([1 - p, p]) if self.classes == 2 else p

    def predict(self, x: np.ndarray) -> np.ndarray:
        """(b,) int64 most probable class of x (b, d)."""
        z = self.logits(x)
        return (z[:, 0] > 0).astype(np.int64) if self.classes == 2 else z.argmax(axis=1)


def fit_head(
    rows: Rows,
    *,
    l2: float,
    classes: int,
    start: Head | None = None,
    tolerance: float = 1e-9,
    max_iterations: int = 100,
    on_step: Callable[[np.ndarray], None] | None = None,
) -> Head:
    """Fit the head on the kept rows by damped Newton steps; float64 throughout.

    Args:
        rows: training rows, labels in 0..classes-1.
        l2: penalty, greater than 0.
        start: a head to start from (the refit after a removal takes two or three steps).
        tolerance: stop when ||gradient|| <= tolerance * ||gradient at W = 0||.
        on_step: given the weights after each step. A fit that starts from them takes the same further steps.
    Raises:
        ValueError: labels outside 0..classes-1, features or losses that are not finite, l2 not positive.
        FitError: not converged within `max_iterations`.
    """
    if not l2 > 0:
        raise ValueError(f"l2={l2}: must be greater than 0")
    zero = np.zeros((columns_for(classes), rows.width))
    value, gradient = _objective(rows, zero, l2, classes)
    goal = tolerance * max(float(np.linalg.norm(gradient)), 1e-300)
    weights = zero
    if start is not None:
        started, started_gradient = _objective(rows, start.weights, l2, classes)
        if started < value:
            weights, value, gradient = start.weights, started, started_gradient
    for iteration in range(max_iterations):
        norm = float(np.linalg.norm(gradient))
        if norm <= goal:
            return Head(weights, l2, classes, norm, iteration)
        step = _newton_step(rows, weights, l2, gradient, inner=min(0.1, np.sqrt(norm * tolerance / goal)))
        weights, value, gradient = _line_search(rows, weights, step, l2, classes, value, gradient)
        if on_step is not None:
            on_step(weights)
    raise FitError(
        f"head: gradient norm {norm:.3g} after {max_iterations} Newton steps, wanted {goal:.3g}; "
        "raise l2, standardise the features, or look for huge feature values"
    )


def _newton_step(
    rows: Rows, weights: np.ndarray, l2: float, gradient: np.ndarray, inner: float
) -> np.ndarray:
    if weights.size <= DENSE_STEP_LIMIT:
        h = dense_hessian(rows, weights, l2)
        return -np.linalg.solve(h, gradient.ravel()).reshape(weights.shape)
    product = partial(hessian_products, rows, weights, l2)
    factors = KroneckerFactors.of(rows, weights, l2)
    return -conjugate_gradient(product, gradient[None], factors, inner, 200)[0][0]


def _line_search(
    rows: Rows,
    weights: np.ndarray,
    step: np.ndarray,
    l2: float,
    classes: int,
    value: float,
    gradient: np.ndarray,
) -> tuple[np.ndarray, float, np.ndarray]:
    """Halve the step until the objective falls (Armijo), or, at rounding level, until the gradient does."""
    slope = float((gradient * step).sum())
    norm = np.linalg.norm(gradient)
    scale = 1.0
    while True:
        new = weights + scale * step
        new_value, new_gradient = _objective(rows, new, l2, classes)
        falls = new_value <= value + 1e-4 * scale * slope
        level = abs(new_value - value) <= 1e-12 * abs(value) and np.linalg.norm(new_gradient) < norm
        if falls or level:
            return new, new_value, new_gradient
        scale /= 2
        if scale < 1e-10:
            raise FitError(f"head: no step lowers the objective at gradient norm {norm:.3g}; raise l2")


def _objective(rows: Rows, weights: np.ndarray, l2: float, classes: int) -> tuple[float, np.ndarray]:
    loss, gradient = rows.total(partial(_block_objective, weights, classes))
    value = float(loss[0]) + l2 / 2 * float((weights**2).sum())
    if not np.isfinite(value):
        raise ValueError("features: NaN or infinite values among the training rows; drop those rows first")
    return value, gradient + l2 * weights


def _block_objective(weights: np.ndarray, classes: int, x: np.ndarray, y: np.ndarray) -> Sums:
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(f"labels: {y.min()}..{y.max()}, expected 0..{classes - 1}")
    z = x @ weights.T
    return np.array([row_losses(z, y).sum()]), residuals(z, y).T @ x

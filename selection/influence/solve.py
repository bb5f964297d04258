"""Products with the inverse Hessian of the head's objective, exact or by conjugate gradient.

The objective is the *sum* of row losses plus (l2/2)||W||^2, so its Hessian is

    H = sum_i R_i (x) x_i x_i'  +  l2 I,      R_i = diag(p_i) - p_i p_i'   (p_i (1 - p_i) with two classes).

Over shards the Hessian (or its products) is summed in float64 and the system solved once; inverses of parts
are never added or averaged, because the mean of inverses is not the inverse of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from selection.influence.logistic import class_probabilities, curvature_times
from selection.influence.rows import Rows, Sums

EXACT_LIMIT = 8_000  # largest columns * d factored exactly: 512 MB of float64
MAX_LEVERAGE = 0.9999  # only rounding, or the approximate factors, can bring a leverage to 1


@dataclass(frozen=True)
class Solution:
    """V = H^-1 G for K right-hand sides.

    Attributes:
        v: (K, columns, d) float64.
        residual: (K,) ||H v - g|| / ||g||, 0 where g is 0.
        iterations: conjugate-gradient iterations, 0 when solved exactly.
        method: "cholesky" or "conjugate_gradient".
    """

    v: np.ndarray
    residual: np.ndarray
    iterations: int
    method: str


def hessian_products(rows: Rows, weights: np.ndarray, l2: float, u: np.ndarray) -> np.ndarray:
    """H u_k for each of K directions, u (K, columns, d), in two GEMMs a block; (K, columns, d) float64."""
    (sums,) = rows.total(partial(_block_products, weights, u))
    return sums + l2 * u


def dense_hessian(rows: Rows, weights: np.ndarray, l2: float) -> np.ndarray:
    """(columns*d, columns*d) float64 Hessian, class-major."""
    (h,) = rows.total(partial(_block_hessian, weights))
    h[np.diag_indices_from(h)] += l2
    return h


class KroneckerFactors:
    """H ~ A (x) B + l2 I: A the sum of R_i, B the mean of x_i x_i' weighted by tr R_i.

    After K-FAC (Martens & Grosse 2015). With these weights the sum of H's diagonal blocks over the classes is
    exact, and with two classes all of H is.

    Diagonalised once, so that products with the inverse cost two small rotations.
    """

    def __init__(self, a: np.ndarray, b: np.ndarray, l2: float) -> None:
        eigen_a, self.rotate_a = np.linalg.eigh(a)
        eigen_b, self.rotate_b = np.linalg.eigh(b)
        self.eigenvalues = np.outer(eigen_a.clip(0), eigen_b.clip(0)) + l2

    @classmethod
    def of(cls, rows: Rows, weights: np.ndarray, l2: float) -> KroneckerFactors:
        """The factors at `weights`, by one pass over the rows."""
        a, b = rows.total(partial(_block_factors, weights))
        return cls(a, b / np.trace(a), l2)

    def solve(self, g: np.ndarray) -> np.ndarray:
        """Approximate H^-1 g for g (K, columns, d)."""
        rotated = self.rotate_a.T @ g @ self.rotate_b / self.eigenvalues
        return self.rotate_a @ rotated @ self.rotate_b.T

    def row_blocks(self, x: np.ndarray) -> np.ndarray:
        """(b, columns, columns) approximate S_i = (I (x) x_i)' H^-1 (I (x) x_i) for rows x (b, d)."""
        t = np.square(x @ self.rotate_b) @ (1 / self.eigenvalues).T
        return np.einsum("cj,bj,ej->bce", self.rotate_a, t, self.rotate_a, optimize=True)


class Curvature:
    """The Hessian of a fitted head at its kept rows, ready to be solved with.

    Args:
        rows: the training rows; only kept ones count.
        weights: (columns, d) float64 weights of the fitted head.
        l2: the penalty of the objective, greater than 0.
        exact_limit: factor H exactly when columns*d is at most this, else use conjugate gradient.
    """

    def __init__(self, rows: Rows, weights: np.ndarray, l2: float, *, exact_limit: int = EXACT_LIMIT) -> None:
        if not l2 > 0:
            raise ValueError(f"l2={l2}: must be greater than 0, or the Hessian may have no inverse")
        self.rows, self.weights, self.l2 = rows, weights, l2
        self.exact = weights.size <= exact_limit

    @cached_property
    def hessian(self) -> np.ndarray:
        return dense_hessian(self.rows, self.weights, self.l2)

    @cached_property
    def factor(self) -> np.ndarray:
        """(columns*d, columns*d) lower Cholesky factor L of H = L L'."""
        return np.tril(cho_factor(self.hessian, lower=True)[0])

    @cached_property
    def kronecker(self) -> KroneckerFactors:
        return KroneckerFactors.of(self.rows, self.weights, self.l2)

    @cached_property
    def whitening(self) -> np.ndarray:
        """(d, d) L^-1 of a two-class head: ||L^-1 x||^2 = x' H^-1 x."""
        return solve_triangular(self.factor, np.eye(len(self.factor)), lower=True)

    def solve(self, g: np.ndarray, *, tolerance: float = 1e-8, max_iterations: int = 1_000) -> Solution:
        """H^-1 g_k for g (K, columns, d); conjugate gradient stops at the relative residual `tolerance`."""
        if self.exact:
            flat = g.reshape(len(g), -1)
            v = cho_solve((self.factor, True), flat.T).T
            return Solution(v.reshape(g.shape), _relative(v @ self.hessian - flat, flat), 0, "cholesky")
        v, iterations = conjugate_gradient(
            partial(hessian_products, self.rows, self.weights, self.l2),
            g,
            self.kronecker,
            tolerance,
            max_iterations,
        )
        error = hessian_products(self.rows, self.weights, self.l2, v) - g
        return Solution(v, _relative(error, g), iterations, "conjugate_gradient")

    @property
    def leverage(self) -> Leverage:
        """What corrects single-row estimates of this head, small enough to travel to workers."""
        if self.exact and len(self.weights) == 1:
            return Leverage(whitening=self.whitening)
        return Leverage(kronecker=self.kronecker)


@dataclass(frozen=True)
class Leverage:
    """Turns residuals r_i into (I - R_i S_i)^-1 r_i, S_i = (I (x) x_i)' H^-1 (I (x) x_i).

    With two classes this is r_i / (1 - h_i), h_i = p_i (1 - p_i) x_i' H^-1 x_i the leverage: the Woodbury
    identity applied to (H - J_i R_i J_i')^-1, one exact Newton step of the leave-one-out refit. Exact with
    `whitening`; with `kronecker` S_i comes from the Kronecker factors.
    """

    whitening: np.ndarray | None = None
    kronecker: KroneckerFactors | None = None

    def correct(self, x: np.ndarray, p: np.ndarray, r: np.ndarray) -> np.ndarray:
        """Corrected residuals (b, columns) float64; x (b, d) rows, p and r (b, columns) as of the head."""
        return self._corrected(self._blocks(x), p, r)

    def leave_one_out(self, x: np.ndarray, z: np.ndarray, r: np.ndarray) -> np.ndarray:
        """(b, columns) logits of each row under the head fitted without it; z and r (b, columns)."""
        s = self._blocks(x)
        return z + (s @ self._corrected(s, class_probabilities(z), r)[..., None])[..., 0]

    def _blocks(self, x: np.ndarray) -> np.ndarray:
        """(b, columns, columns) float64 S_i."""
        x = np.asarray(x, dtype=np.float64)
        if self.whitening is not None:
            return np.square(x @ self.whitening.T).sum(axis=1)[:, None, None]
        assert self.kronecker is not None
        return self.kronecker.row_blocks(x)

    def _corrected(self, s: np.ndarray, p: np.ndarray, r: np.ndarray) -> np.ndarray:
        if r.shape[1] == 1:
            return r / (1 - (p * (1 - p) * s[:, 0]).clip(0, MAX_LEVERAGE))
        rs = curvature_times(p, s.swapaxes(1, 2)).swapaxes(1, 2)
        return np.linalg.solve(np.eye(r.shape[1]) - rs, r[..., None].astype(np.float64))[..., 0]


def conjugate_gradient(
    product, g: np.ndarray, preconditioner: KroneckerFactors, tolerance: float, max_iterations: int
) -> tuple[np.ndarray, int]:
    """Preconditioned conjugate gradient for K independent systems that share each pass over the data.

    Args:
        product: (K, columns, d) -> H times it.
        g: (K, columns, d) right-hand sides.
        tolerance: stop when every ||residual|| <= tolerance * ||g||.
    Returns: v (K, columns, d), iterations used.
    """
    v, r = np.zeros_like(g), g.astype(np.float64)
    target = tolerance * _norms(g)
    z = preconditioner.solve(r)
    direction, rz = z, _dots(r, z)
    for iteration in range(max_iterations):
        if (_norms(r) <= target).all():
            return v, iteration
        hd = product(direction)
        alpha = _ratio(rz, _dots(direction, hd))
        v = v + alpha * direction
        r = r - alpha * hd
        z = preconditioner.solve(r)
        rz, previous = _dots(r, z), rz
        direction = z + _ratio(rz, previous) * direction
    return v, max_iterations


def _norms(a: np.ndarray) -> np.ndarray:
    return np.sqrt(_dots(a, a))


def _dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("kcd,kcd->k", a, b)


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # A system that is solved exactly has 0/0 here; it must stay where it is while the others go on.
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)[:, None, None]


def _relative(error: np.ndarray, g: np.ndarray) -> np.ndarray:
    error, g = error.reshape(len(error), -1), g.reshape(len(g), -1)
    size = np.linalg.norm(g, axis=1)
    return np.divide(np.linalg.norm(error, axis=1), size, out=np.zeros(len(g)), where=size > 0)


def _block_products(weights: np.ndarray, u: np.ndarray, x: np.ndarray, y: np.ndarray) -> Sums:
    p = class_probabilities(x @ weights.T)
    t = (x @ u.reshape(-1, u.shape[2]).T).reshape(len(x), *u.shape[:2])
    s = curvature_times(p, t)
    return ((s.reshape(len(x), -1).T @ x).reshape(u.shape),)


def _block_factors(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> Sums:
    p = class_probabilities(x @ weights.T)
    binary = p.shape[1] == 1
    a = (p * (1 - p)).sum(keepdims=True) if binary else np.diag(p.sum(axis=0)) - p.T @ p
    trace = p * (1 - p) if binary else 1 - (p**2).sum(axis=1, keepdims=True)
    return a, (x * trace).T @ x


def _block_hessian(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> Sums:
    p = class_probabilities(x @ weights.T)
    columns, d = weights.shape
    if columns == 1:
        scaled = x * np.sqrt(p * (1 - p))
        return (scaled.T @ scaled,)
    h = np.zeros((columns * d, columns * d))
    # The outer product p (x) x is columns times wider than x: cut the block so that it stays small.
    step = max(1, len(x) // columns)
    for start in range(0, len(x), step):
        wide = (p[start : start + step, :, None] * x[start : start + step, None, :]).reshape(-1, columns * d)
        h -= wide.T @ wide
    for c in range(columns):
        scaled = x * np.sqrt(p[:, c, None])
        h[c * d : (c + 1) * d, c * d : (c + 1) * d] += scaled.T @ scaled
    return (h,)

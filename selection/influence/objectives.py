"""What influence is measured on: functions of the head on a held-out set, with their gradients.

Every objective is a quantity to be *lowered*: a loss or a gap. So `delta_if_removed` < 0 means that removing
the row lowers it, and the row is harmful. Sources: Chhabra et al., "What Data Benefits My Classifier?"
(ICLR 2024); the gaps are those of fairlearn's `demographic_parity_difference`,
`equal_opportunity_difference` and `equalized_odds_difference` (largest less smallest group), softened so that
they have a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from selection.influence.head import Head
from selection.influence.logistic import class_probabilities, curvature_times, residuals, row_losses

OBJECTIVES = ("utility", "demographic_parity", "equal_opportunity", "equalized_odds", "robustness")
FAIRNESS = ("demographic_parity", "equal_opportunity", "equalized_odds")
ATTACK_STRENGTH = 1.3


@dataclass(frozen=True)
class HeldOut:
    """A held-out set, in memory: x (m, d) float, y (m,) integer, s (m,) sensitive groups or None."""

    x: np.ndarray
    y: np.ndarray
    s: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != self.x.shape[:1] or not len(self.y):
            raise ValueError(f"held-out features {self.x.shape}, labels {self.y.shape}: want (m, d), (m,)")
        if self.s is not None and self.s.shape != self.y.shape:
            raise ValueError(f"held-out groups {self.s.shape}: expected {self.y.shape}")

    def take(self, rows: np.ndarray) -> HeldOut:
        """The set of the rows that an index or mask names."""
        return HeldOut(self.x[rows], self.y[rows], None if self.s is None else self.s[rows])


class Objective(Protocol):
    """A quantity to be lowered, bound to a held-out set."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str: ...

    def value(self, head: Head) -> float: ...

    def gradient(self, head: Head) -> np.ndarray:
        """(columns, d) float64 gradient in the weights."""
        ...

    def on(self, held: HeldOut) -> Objective:
        """The same quantity on another held-out set."""
        ...


@dataclass(frozen=True)
class SummedLoss:
    """Sum of log-losses (nats). `attacked_by` is the head whose adversarial shift the features get, if any.

    The shift belongs to that head and stays put while the head is refitted: an attack of strength above 1
    that followed every refit would turn each decision round, so that robust accuracy were 1 - accuracy.
    """

    name: str
    held: HeldOut
    attacked_by: Head | None = None
    unit: str = "nats, summed over the held-out rows"

    def value(self, head: Head) -> float:
        return float(row_losses(head.logits(self._x()), self.held.y).sum())

    def gradient(self, head: Head) -> np.ndarray:
        x = self._x()
        return residuals(head.logits(x), self.held.y).T @ x

    def on(self, held: HeldOut) -> SummedLoss:
        return replace(self, held=held)

    def _x(self) -> np.ndarray:
        x = np.asarray(self.held.x, dtype=np.float64)
        return x if self.attacked_by is None else attacked(self.attacked_by, x)


@dataclass(frozen=True)
class Gap:
    """The widest gap between two groups: which condition, which groups, and by how much (>= 0)."""

    condition: str
    high: object
    low: object
    size: float


@dataclass(frozen=True)
class GroupGap:
    """Largest less smallest group mean of a row statistic, the largest over `conditions`; 0 is fair.

    `rate` (demographic parity): the mean probability of the positive class. `loss` (equal opportunity,
    equalized odds): the mean log-loss among rows of one true label, as in Chhabra et al.'s code: a group
    whose positives lose more is a group whose true positive rate is lower.

    conditions: "all", "positive" (y is the positive class) or "negative".
    """

    name: str
    held: HeldOut
    statistic: str
    conditions: tuple[str, ...]
    positive: int = 1

    @property
    def unit(self) -> str:
        return "probability" if self.statistic == "rate" else "nats, mean of a group"

    def value(self, head: Head) -> float:
        return self.widest(head).size

    def widest(self, head: Head) -> Gap:
        """The gap that `value` is the size of."""
        gaps = []
        for condition in self.conditions:
            means = self.means(head, condition)
            high, low = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
            gaps.append(Gap(condition, high, low, means[high] - means[low]))
        return max(gaps, key=lambda gap: gap.size)

    def size_of(self, gap: Gap, head: Head) -> float:
        """The size under `head` of a gap found under another: negative once the two groups changed places."""
        means = self.means(head, gap.condition)
        return means[gap.high] - means[gap.low]

    def means(self, head: Head, condition: str) -> dict:
        """Mean of the statistic in each group."""
        values = self._statistic(head)
        return {group: float(values[mask].mean()) for group, mask in self._groups(condition).items()}

    def gradient(self, head: Head) -> np.ndarray:
        gap = self.widest(head)
        groups = self._groups(gap.condition)
        x = np.asarray(self.held.x, dtype=np.float64)
        share = groups[gap.high] / groups[gap.high].sum() - groups[gap.low] / groups[gap.low].sum()
        return (self._slopes(head, x) * share[:, None]).T @ x

    def on(self, held: HeldOut) -> GroupGap:
        return replace(self, held=held)

    def _statistic(self, head: Head) -> np.ndarray:
        if self.statistic == "loss":
            return row_losses(head.logits(self.held.x), self.held.y)
        return head.probabilities(self.held.x)[:, self.positive]

    def _slopes(self, head: Head, x: np.ndarray) -> np.ndarray:
        """(m, columns) derivative of each row's statistic in its logits."""
        z = head.logits(x)
        if self.statistic == "loss":
            return residuals(z, self.held.y)
        unit = np.zeros_like(z)
        unit[:, 0 if z.shape[1] == 1 else self.positive] = 1
        return curvature_times(class_probabilities(z), unit)

    def _groups(self, condition: str) -> dict:
        assert self.held.s is not None
        return group_masks(self.held.y, self.held.s, condition, self.positive)


def group_masks(y: np.ndarray, s: np.ndarray, condition: str, positive: int) -> dict:
    """Rows of each group under a condition ("all", "positive", "negative"), groups in ascending order.

    Raises:
        ValueError: fewer than two groups, or a group without rows under the condition: its rate is undefined.
    """
    inside = {"all": np.ones(len(y), bool), "positive": y == positive, "negative": y != positive}[condition]
    masks = {group.item(): inside & (s == group) for group in np.unique(s)}
    if len(masks) < 2:
        raise ValueError(f"groups: {list(masks)}; a fairness objective needs at least two")
    for group, mask in masks.items():
        if not mask.any():
            raise ValueError(f"group {group}: no {condition} rows in this held-out set, so it has no rate")
    return masks


def attacked(head: Head, x: np.ndarray, strength: float = ATTACK_STRENGTH) -> np.ndarray:
    """x' = x - strength * (w . x) w / ||w||^2: the smallest shift onto the boundary, times `strength`.

    With more than two classes w is the difference between the weights of the two most probable classes.
    x (m, d) float64; returns the same shape.
    """
    if head.classes == 2:
        w = head.weights[0]
        return x - strength * np.outer(head.logits(x)[:, 0], w) / max(w @ w, 1e-300)
    z = head.logits(x)
    second, first = np.argsort(z, axis=1)[:, -2:].T
    w = head.weights[first] - head.weights[second]
    rows = np.arange(len(x))
    margin = z[rows, first] - z[rows, second]
    return x - strength * w * (margin / np.maximum((w**2).sum(axis=1), 1e-300))[:, None]


def objective(name: str, held: HeldOut, base: Head, *, positive: int = 1) -> SummedLoss | GroupGap:
    """An objective by name on a held-out set.

    Args:
        name: one of `OBJECTIVES`.
        base: the head before any removal; `robustness` attacks this one.
        positive: the class whose rate the gaps compare; must be 1 with two classes.
    Raises:
        ValueError: unknown name, a fairness objective without groups, `positive` out of range.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective={name}: one of {', '.join(OBJECTIVES)}")
    if name in ("utility", "robustness"):
        return SummedLoss(name, held, base if name == "robustness" else None)
    if held.s is None:
        raise ValueError(f"objective={name}: the held-out set has no sensitive groups (s)")
    if not 0 <= positive < base.classes or (base.classes == 2 and positive != 1):
        raise ValueError(f"positive={positive}: 1 with two classes, else 0..{base.classes - 1}")
    conditions = {
        "demographic_parity": ("all",),
        "equal_opportunity": ("positive",),
        "equalized_odds": ("positive", "negative"),
    }[name]
    statistic = "rate" if name == "demographic_parity" else "loss"
    return GroupGap(name, held, statistic, conditions, positive)

"""What a head does on a held-out set, by decisions rather than probabilities: the numbers of the reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selection.influence.head import Head
from selection.influence.logistic import row_losses
from selection.influence.objectives import FAIRNESS, HeldOut, attacked, group_masks


@dataclass(frozen=True)
class Metrics:
    """Decisions of a head on a held-out set.

    Attributes:
        accuracy: share of rows decided rightly.
        log_loss: mean, nats.
        robust_accuracy: accuracy on features shifted against the *base* head, strength 1.3.
        gaps: for each fairness objective the difference of fairlearn, largest less smallest group, in 0..1
            (equalized odds: the larger of the true and false positive rate gaps). Empty without groups, and
            a gap is None where a group has no rows of the class it is about.
        signed_gaps: with exactly two groups, rate of the group coded higher less that coded lower, for
            demographic parity and equal opportunity; its sign changing means the groups changed places.
    """

    accuracy: float
    log_loss: float
    robust_accuracy: float
    gaps: dict[str, float | None]
    signed_gaps: dict[str, float | None]


def measure(head: Head, held: HeldOut, base: Head, *, positive: int = 1) -> Metrics:
    """Measure `head` on `held`; `base` is the head that robust accuracy is attacked through."""
    x = np.asarray(held.x, dtype=np.float64)
    decided = head.predict(x)
    gaps: dict[str, float | None] = {}
    signed: dict[str, float | None] = {}
    if held.s is not None:
        rates = {
            condition: _rates(decided == positive, held, condition, positive)
            for condition in ("all", "positive", "negative")
        }
        spreads = {k: None if r is None else max(r) - min(r) for k, r in rates.items()}
        odds = [spreads["positive"], spreads["negative"]]
        gaps = dict(zip(FAIRNESS, (spreads["all"], spreads["positive"], None if None in odds else max(odds))))  # type: ignore[type-var]
        for name, condition in (("demographic_parity", "all"), ("equal_opportunity", "positive")):
            r = rates[condition]
            signed[name] = r[1] - r[0] if r is not None and len(r) == 2 else None
    return Metrics(
        accuracy=float((decided == held.y).mean()),
        log_loss=float(row_losses(head.logits(x), held.y).mean()),
        robust_accuracy=float((head.predict(attacked(base, x)) == held.y).mean()),
        gaps=gaps,
        signed_gaps=signed,
    )


def _rates(
    positive_decisions: np.ndarray, held: HeldOut, condition: str, positive: int
) -> list[float] | None:
    assert held.s is not None
    try:
        masks = group_masks(held.y, held.s, condition, positive)
    except ValueError:
        return None
    return [float(positive_decisions[mask].mean()) for mask in masks.values()]

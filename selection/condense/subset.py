"""The most learnable subset and what is frozen (MDC: He et al., ICLR 2024, section 3.3 and 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Subset:
    """The first `first` stored images get a loss of their own; the pixels of the first `frozen` stay as they are."""

    first: int
    frozen: int


def most_learnable(before: np.ndarray, now: np.ndarray) -> int:
    """m = argmax over s of |F_now(s) - F_before(s)|, the smallest s of equals. F: float (n,) for s = 1 .. n."""
    return int(np.abs(now - before).argmax()) + 1


def subset_of(chosen: Sequence[int]) -> Subset:
    """The subset after a history of choices, oldest first; it starts at 1.

    Frozen is the largest earlier subset that is smaller than the present one.
    """
    history = [1, *chosen]
    return Subset(history[-1], max((m for m in history[:-1] if m < history[-1]), default=0))

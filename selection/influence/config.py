"""How rows are removed: the settings that the library, the command and the stage of a run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from selection.influence.objectives import OBJECTIVES


@dataclass(kw_only=True)
class SelectionConfig:
    """How rows are removed.

    Attributes:
        objective: a name from `OBJECTIVES`, or a list of them; several are combined as the sum of
            weight * delta / base value, that is, by relative change.
        weights: one an objective, empty for 1 each.
        budget: most rows to remove: a share below 1, or a whole count.
        rounds: the budget is spent over this many rounds, the head refitted and rows rescored after each.
        guard: remove harmful rows only, stop before a gap changes sign, and remove less, down to nothing,
            when accuracy on the guard set would fall below the base or the objective there would get worse.
        leverage: correct estimates by 1/(1 - h); None means as `guard` (published runs do not).
        class_floor: least share of each class's rows that stays.
        group_floor: least share of each training group's rows that stays.
        positive: the class whose rate the fairness gaps compare.
    """

    objective: Any = "utility"
    weights: list[float] = field(default_factory=list)
    budget: float = 0.05
    rounds: int = 1
    guard: bool = True
    leverage: bool | None = None
    class_floor: float = 0.0
    group_floor: float = 0.0
    positive: int = 1

    def __post_init__(self) -> None:
        names = self.objectives
        if set(names) - set(OBJECTIVES) or not names or len(set(names)) < len(names):
            raise ValueError(f"objective={self.objective}: one or more of {', '.join(OBJECTIVES)}")
        if self.weights and (len(self.weights) != len(names) or min(self.weights) <= 0):
            raise ValueError(f"weights={list(self.weights)}: one positive number for each objective, or none")
        if not self.budget > 0 or (self.budget >= 1 and self.budget != int(self.budget)):
            raise ValueError(f"budget={self.budget}: a share in (0, 1), or a whole number of rows")
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds}: at least 1")
        for name in ("class_floor", "group_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share in 0..1")

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names in `objective`."""
        return (self.objective,) if isinstance(self.objective, str) else tuple(self.objective)

    def budget_rows(self, n: int) -> int:
        """The budget as a count of n rows; a share is rounded down."""
        count = int(self.budget * n + 1e-9) if self.budget < 1 else int(self.budget)
        if count >= n and self.budget >= 1:
            raise ValueError(f"budget={self.budget}: {count} of {n} rows; at least one must stay")
        return count

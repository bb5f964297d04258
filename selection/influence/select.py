"""Removing harmful rows: a budget, rounds with refits, and a guard that may say "remove nothing".

Sums of single-row estimates overstate what a group does, so the selection never trusts them alone: each round
removes a few rows, refits, and with the guard on keeps the removal only if it holds on rows it was not chosen
on. With `guard=False` exactly the budget goes, lowest estimates first, as in the published one-shot runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from selection.influence.head import Head, fit_head
from selection.influence.metrics import Metrics, measure
from selection.influence.objectives import OBJECTIVES, GroupGap, HeldOut, Objective, objective
from selection.influence.rows import Rows
from selection.influence.score import Influence, influence


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


@dataclass(frozen=True)
class Round:
    """One round: what was asked for, what was removed, and why it was less.

    `predicted` and `realised` hold the change of each objective on the influence set in this round, by the
    sum of delta_if_removed and by the refit. `refused` lists (rows, reason) of the removals tried in vain.
    """

    asked: int
    removed: int
    predicted: dict[str, float]
    realised: dict[str, float]
    refused: list[tuple[int, str]] = field(default_factory=list)
    limit: str = ""


@dataclass(frozen=True)
class Selection:
    """What was removed, and what that did.

    Attributes:
        removed: (n,) bool.
        influence: scores of every row under the base head (all rows present).
        decided_by: (n,) float64 `combine`d score: of a removed row in the round that removed it, of the others
            under the base head; negative = harmful.
        base, after: the head before and after.
        rounds: one record a round.
        metrics: set name ("influence", "guard", "test") -> (before, after).
        predicted, realised: change of each objective on the influence set: the sum of the estimates of what
            was removed, and the refit.
    """

    removed: np.ndarray
    influence: Influence
    decided_by: np.ndarray
    base: Head
    after: Head
    rounds: list[Round]
    metrics: dict[str, tuple[Metrics, Metrics]]
    predicted: dict[str, float]
    realised: dict[str, float]

    @property
    def kept(self) -> np.ndarray:
        """(n,) bool."""
        return ~self.removed

    @property
    def verdict(self) -> str:
        """One line for a person: how many rows went, and what stopped it."""
        count, n = int(self.removed.sum()), len(self.removed)
        last = self.rounds[-1]
        why = last.limit
        if last.refused:
            rows, reason = last.refused[-1]
            why = f"removing {rows} more was refused, as {reason}"
        if count == 0:
            return f"remove nothing: {why or 'the budget comes to no row'}"
        return f"removed {count} of {n} rows" + (f" ({why})" if why else "")


def select(
    rows: Rows,
    held: HeldOut,
    config: SelectionConfig,
    *,
    l2: float,
    guard: HeldOut | None = None,
    groups: np.ndarray | None = None,
    others: Mapping[str, HeldOut] | None = None,
    classes: int | None = None,
    removable: np.ndarray | None = None,
    start: Head | None = None,
    on_step: Callable[[np.ndarray], None] | None = None,
) -> Selection:
    """Remove the rows that harm the objectives on `held`.

    Args:
        rows: training rows, none masked.
        held: the influence set, which gradients are taken on.
        l2: the head's penalty beside summed losses.
        guard: the guard set; required with `config.guard`, and never used to choose rows.
        groups: (n,) group of each training row, for `group_floor`.
        others: further sets to measure before and after, such as "test".
        classes: number of classes; None for the largest label plus one.
        removable: (n,) bool, rows that may be removed; a budget that is a share is a share of these.
        start: a head near the base's, to fit from. on_step: as for `fit_head`, in the fit of the base.
    Raises:
        ValueError: masked rows, the guard on without a guard set, a floor without groups, a budget of every
            row, or what `fit_head` and `objective` refuse.
    """
    if config.guard and guard is None:
        raise ValueError("guard=true: needs a guard set, separate from the influence set")
    if not rows.keep.all():
        raise ValueError(f"rows: {rows.n - rows.kept} are masked; pass `removable` to protect rows instead")
    if config.group_floor and groups is None:
        raise ValueError(f"group_floor={config.group_floor}: needs the groups of the training rows")
    labels = rows.labels()
    classes = max(int(labels.max()) + 1, 2) if classes is None else classes
    base = fit_head(rows, l2=l2, classes=classes, start=start, on_step=on_step)
    terms = [objective(name, held, base, positive=config.positive) for name in config.objectives]
    may_go = np.ones(rows.n, dtype=bool) if removable is None else removable
    run = _Run(rows, config, terms, guard, base, may_go, _allowances(config, labels, groups))
    run.go(config.budget_rows(int(may_go.sum())))
    sets = {"influence": held, **({"guard": guard} if guard is not None else {}), **(others or {})}
    return Selection(
        removed=~run.keep,
        influence=run.first,
        decided_by=run.decided_by,
        base=base,
        after=run.head,
        rounds=run.rounds,
        metrics={
            name: tuple(measure(h, part, base, positive=config.positive) for h in (base, run.head))  # type: ignore[misc]
            for name, part in sets.items()
        },
        predicted={t.name: float(sum(r.predicted[t.name] for r in run.rounds)) for t in terms},
        realised={t.name: t.value(run.head) - t.value(base) for t in terms},
    )


@dataclass
class _Allowance:
    """How many rows of each part (class or group) may still go."""

    part: np.ndarray
    left: np.ndarray


def _allowances(config: SelectionConfig, labels: np.ndarray, groups: np.ndarray | None) -> list[_Allowance]:
    allowances = []
    for floor, values in ((config.class_floor, labels), (config.group_floor, groups)):
        if floor and values is not None:
            _, part = np.unique(values, return_inverse=True)
            count = np.bincount(part)
            allowances.append(_Allowance(part, count - np.ceil(floor * count - 1e-9).astype(int)))
    return allowances


class _Run:
    """The state of one selection: which rows remain, the head fitted to them, and the record."""

    def __init__(
        self,
        rows: Rows,
        config: SelectionConfig,
        terms: Sequence[Objective],
        guard: HeldOut | None,
        base: Head,
        removable: np.ndarray,
        allowances: list[_Allowance],
    ) -> None:
        self.all_rows, self.config, self.terms = rows, config, terms
        self.removable, self.allowances = removable, allowances
        self.keep = np.ones(rows.n, dtype=bool)
        self.base = self.head = base
        self.guard = guard
        self.guard_terms = [] if guard is None else [term.on(guard) for term in terms]
        self.leverage = config.guard if config.leverage is None else config.leverage
        self.first = self._influence()
        self.decided_by = combine(self.first, config.weights).copy()
        self.rounds: list[Round] = []

    def go(self, budget: int) -> None:
        for number in range(1, self.config.rounds + 1):
            # What a guarded round left unspent may go in a later one, when the estimates are fresh.
            asked = budget * number // self.config.rounds - int((~self.keep).sum())
            scores = self.first if number == 1 else self._influence()
            chosen, limit = self._candidates(scores, asked)
            self.rounds.append(self._remove(scores, chosen, asked, limit))
            if asked and self.rounds[-1].removed == 0:
                break  # the next round would see the same rows and refuse them again

    def _influence(self) -> Influence:
        return influence(self.all_rows.where(self.keep), self.head, self.terms, leverage=self.leverage)

    def _candidates(self, scores: Influence, asked: int) -> tuple[np.ndarray, str]:
        """Rows to remove, worst first, and what made them fewer than asked."""
        combined = combine(scores, self.config.weights)
        allowed = self.keep & self.removable
        if self.config.guard:
            allowed &= combined < 0
        rows = np.flatnonzero(allowed)
        order = rows[np.argsort(combined[rows], kind="stable")]
        limit = "no harmful row is left" if self.config.guard and len(order) < asked else ""
        if self.allowances:
            order = self._within_floors(order, asked)
            limit = limit or ("the class or group floor is reached" if len(order) < asked else "")
        order = order[:asked]
        if self.config.guard:
            fair = [k for k, term in enumerate(self.terms) if isinstance(term, GroupGap)]
            for k in fair:
                left = scores.base[k] + np.cumsum(scores.delta_if_removed[order, k])
                if (left < 0).any():
                    order = order[: int((left < 0).argmax())]
                    limit = f"{self.terms[k].name} is predicted to change sign"
        return order, limit

    def _within_floors(self, order: np.ndarray, asked: int) -> np.ndarray:
        left = [allowance.left.copy() for allowance in self.allowances]
        taken: list[int] = []
        for row in order:
            parts = [allowance.part[row] for allowance in self.allowances]
            if all(counts[part] > 0 for counts, part in zip(left, parts)):
                taken.append(row)
                for counts, part in zip(left, parts):
                    counts[part] -= 1
                if len(taken) == asked:
                    break
        return np.array(taken, dtype=np.int64)

    def _remove(self, scores: Influence, chosen: np.ndarray, asked: int, limit: str) -> Round:
        """Refit without the chosen rows; with the guard on, halve them until the guard has no objection."""
        refused: list[tuple[int, str]] = []
        count = len(chosen)
        while count:
            keep = self.keep.copy()
            keep[chosen[:count]] = False
            head = fit_head(
                self.all_rows.where(keep), l2=self.base.l2, classes=self.base.classes, start=self.head
            )
            objection = self._objection(head) if self.config.guard else ""
            if not objection:
                break
            refused.append((count, objection))
            count //= 2
        taken = chosen[:count]
        predicted = scores.delta_if_removed[taken].sum(axis=0)
        before = [term.value(self.head) for term in self.terms]
        if count:
            self.keep, self.head = keep, head
            self.decided_by[taken] = combine(scores, self.config.weights)[taken]
            for allowance in self.allowances:
                np.subtract.at(allowance.left, allowance.part[taken], 1)
        names = scores.names
        return Round(
            asked=asked,
            removed=count,
            predicted=dict(zip(names, predicted.tolist())),
            realised={t.name: t.value(self.head) - b for t, b in zip(self.terms, before)},
            refused=refused,
            limit=limit if count == len(chosen) else "",
        )

    def _objection(self, head: Head) -> str:
        """Why the guard refuses a head, or an empty string."""
        assert self.guard is not None
        before, after = (self._measure(h, self.guard) for h in (self.base, head))
        if after.accuracy < before.accuracy:
            return f"accuracy on the guard set would fall from {before.accuracy:.4f} to {after.accuracy:.4f}"
        change = self._relative_change(head)
        if change > 0:
            return f"the objective on the guard set would get worse by {change:.2%}"
        for term in self.terms:
            if isinstance(term, GroupGap):
                if term.size_of(term.widest(self.head), head) < 0:
                    return f"{term.name} would change sign on the influence set"
                if self._decided_gap_flips(term, head):
                    return f"{term.name} of the decisions would change sign on the influence set"
        return ""

    def _relative_change(self, head: Head) -> float:
        """Weighted relative change of the objectives on the guard set since the last accepted head."""
        weights = self.config.weights or (1.0,) * len(self.terms)
        change = 0.0
        for weight, term in zip(weights, self.guard_terms):
            before = term.value(self.head)
            change += weight * (term.value(head) - before) / max(abs(before), 1e-12)
        return change

    def _decided_gap_flips(self, term: GroupGap, head: Head) -> bool:
        before, after = (self._measure(h, term.held).signed_gaps.get(term.name) for h in (self.base, head))
        return before is not None and after is not None and before * after < 0

    def _measure(self, head: Head, held: HeldOut) -> Metrics:
        return measure(head, held, self.base, positive=self.config.positive)


def combine(scores: Influence, weights: Sequence[float] = ()) -> np.ndarray:
    """(n,) one score a row: sum over objectives of weight * delta_if_removed / base; negative = harmful.

    With one objective it is that objective's delta_if_removed unscaled.
    """
    if len(scores.names) == 1:
        return scores.delta_if_removed[:, 0]
    scale = np.array(weights or [1.0] * len(scores.names)) / np.maximum(np.abs(scores.base), 1e-12)
    return scores.delta_if_removed @ scale

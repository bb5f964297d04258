"""Influence-based selection: which rows help, which harm, and by how much (Chhabra et al., ICLR 2024).

from selection.influence import HeldOut, Rows, SelectionConfig, select

rows = Rows.from_arrays(x_train, y_train)              # (n, d) float, (n,) integer labels
result = select(rows, HeldOut(x_val, y_val), SelectionConfig(budget=0.05), l2=1.0,
                guard=HeldOut(x_guard, y_guard))
result.verdict                                         # what was removed, or why nothing was
result.influence.column("utility")                     # delta_if_removed: negative = harmful
"""

from selection.influence.config import SelectionConfig
from selection.influence.cost import SelectionCost, selection_cost
from selection.influence.head import FitError, Head, fit_head
from selection.influence.metrics import Metrics, measure
from selection.influence.objectives import FAIRNESS, OBJECTIVES, HeldOut, attacked, objective
from selection.influence.rows import ArrayShard, NpyShard, Rows, Shard
from selection.influence.score import Influence, influence, score_rows, scoring_cost
from selection.influence.select import Selection, combine, select
from selection.influence.solve import Curvature, Leverage, Solution

__all__ = [
    "FAIRNESS",
    "OBJECTIVES",
    "ArrayShard",
    "Curvature",
    "FitError",
    "Head",
    "HeldOut",
    "Influence",
    "Leverage",
    "Metrics",
    "NpyShard",
    "Rows",
    "Selection",
    "SelectionConfig",
    "SelectionCost",
    "Shard",
    "Solution",
    "attacked",
    "combine",
    "fit_head",
    "influence",
    "measure",
    "objective",
    "score_rows",
    "scoring_cost",
    "select",
    "selection_cost",
]

"""A selection as plain data: what `result.json` and `influence.parquet` hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from selection.influence.head import Head
from selection.influence.metrics import measure
from selection.influence.objectives import HeldOut
from selection.influence.online import OnlineStep
from selection.influence.score import Influence
from selection.influence.select import Selection

SIGN = "delta_if_removed estimates f(without the row) - f; negative: removing the row lowers f, it is harmful"
LISTED = 20


def score_table(scores: Influence, removed: np.ndarray) -> pl.DataFrame:
    """One row a training row: `row`, `delta_if_removed_<objective>` (negative = harmful), `removed`."""
    columns: dict[str, np.ndarray] = {"row": np.arange(len(removed))}
    for name in scores.names:
        columns[f"delta_if_removed_{name}"] = scores.column(name)
    return pl.DataFrame(columns | {"removed": removed})


def selection_report(selection: Selection) -> dict[str, Any]:
    """Before and after on every set, predicted and realised change, rounds, and the extreme rows."""
    scores, base = selection.influence, selection.base
    return {
        "verdict": selection.verdict,
        "sign": SIGN,
        "rows": len(selection.removed),
        "removed": int(selection.removed.sum()),
        "objectives": {
            name: {
                "unit": scores.units[k],
                "base": float(scores.base[k]),
                "predicted_change": selection.predicted[name],
                "realised_change": selection.realised[name],
                "harmful_rows": int((scores.column(name) < 0).sum()),
                "most_harmful": scores.most_harmful(name, LISTED).tolist(),
                "most_helpful": scores.most_helpful(name, LISTED).tolist(),
                "solve_residual": float(scores.solution.residual[k]),
            }
            for k, name in enumerate(scores.names)
        },
        "sets": {
            name: {"before": asdict(before), "after": asdict(after)}
            for name, (before, after) in selection.metrics.items()
        },
        "rounds": [asdict(entry) for entry in selection.rounds],
        "head": {
            "classes": base.classes,
            "width": base.weights.shape[1],
            "l2": base.l2,
            "gradient_norm": base.gradient_norm,
            "solver": scores.solution.method,
            "iterations": scores.solution.iterations,
        },
    }


def online_report(
    steps: Sequence[OnlineStep], untrimmed: Head, sets: dict[str, HeldOut], positive: int
) -> dict[str, Any]:
    """The stream in all, against `untrimmed`, the head of the same rows with nothing removed."""
    removed = sum(int((~step.kept).sum()) for step in steps)
    total = sum(len(step.kept) for step in steps)
    after = steps[-1].selection.after
    return {
        "verdict": f"removed {removed} of {total} rows in {len(steps)} batches"
        if removed
        else f"remove nothing: no batch of {len(steps)} had a removal that the settings allow",
        "sign": SIGN,
        "rows": total,
        "removed": removed,
        "sets": {
            name: {
                "before": asdict(measure(untrimmed, held, untrimmed, positive=positive)),
                "after": asdict(measure(after, held, untrimmed, positive=positive)),
            }
            for name, held in sets.items()
        },
        "batches": [
            {
                "verdict": step.selection.verdict,
                "removed": int((~step.kept).sum()),
                "predicted_change": step.selection.predicted,
                "realised_change": step.selection.realised,
            }
            for step in steps
        ],
    }

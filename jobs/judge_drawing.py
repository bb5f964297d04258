"""The plot of jobs.judge_filter."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

LINES = {
    "precision": ("precision of what is kept", "tab:blue", "o"),
    "accuracy": ("accuracy of the small model", "tab:green", "s"),
    "own_accuracy": ("the filter's own zero-shot accuracy", "tab:orange", "^"),
}


def draw(rows: Sequence[dict[str, Any]]) -> bytes:
    """PNG. Left: every figure by filter, in their order. Right: quality against the filter's own accuracy."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [r["filter"] for r in rows]
    for key, (label, colour, mark) in LINES.items():
        known = [i for i, r in enumerate(rows) if r[key] is not None]
        if known:
            left.errorbar(
                known, [rows[i][key] for i in known], [rows[i][f"{key}_sd"] or 0.0 for i in known], fmt=f"{mark}-",
                color=colour, label=label, capsize=3,
            )  # fmt: skip
    left.set_xticks(range(len(names)), names, rotation=30, ha="right")
    left.set(ylabel="share")
    left.legend(fontsize="small")
    for key in ("precision", "accuracy"):
        label, colour, mark = LINES[key]
        for r in rows:
            if r[key] is None:
                continue
            if r["own_accuracy"] is None:
                right.axhline(r[key], color=colour, linestyle=":", linewidth=1)
                right.annotate(r["filter"], (0.01, r[key]), xycoords=("axes fraction", "data"), fontsize=7)
            else:
                right.plot(r["own_accuracy"], r[key], mark, color=colour)
                right.annotate(
                    r["filter"], (r["own_accuracy"], r[key]), xytext=(4, 3), textcoords="offset points", fontsize=7
                )  # fmt: skip
        right.plot([], [], mark, color=colour, label=label)
    right.set(xlabel="the filter's own zero-shot accuracy", ylabel="share")
    right.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()

"""Shapes for inline SVG: numbers in, path data and ticks out. The page draws them; nothing here knows colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

BAR = 4  # bins of an axis that one bar of its histogram stands for


def bars(heights: Sequence[float], edges: Sequence[float], base: Sequence[float] | None = None) -> str:
    """Path data of bars between `edges`, on `base` (zeros when None); y grows upwards and has to be flipped."""
    parts = []
    for i, height in enumerate(heights):
        if height <= 0:
            continue
        low = base[i] if base is not None else 0
        left, right = edges[i], edges[i + 1]
        parts.append(f"M{left:g} {low:.4g}V{low + height:.4g}H{right:g}V{low:.4g}Z")
    return "".join(parts)


def histogram(explorer: Any) -> dict[str, Any]:
    """Two stacked layers of bars over the axis of an explorer, in bins by shares of the tallest bar.

    A bar ends at the run's cut, and heights are counts by width: the bins beside the cut are of other widths.
    """
    edges, size = explorer.edges, len(explorer.edges) + 1
    first = explorer.at % BAR
    bounds = [0, *range(first or BAR, size, BAR), size]
    inner = np.diff(edges) if len(edges) > 1 else np.array([1.0])
    step = float(np.median(inner))
    widths = np.concatenate([[step], np.diff(edges), [step]]) if len(edges) > 1 else np.full(size, step)
    layers = []
    for counts in (explorer.stays, explorer.others):
        layers.append([counts[a:b].sum() * BAR * step / widths[a:b].sum() for a, b in pairwise(bounds)])
    tallest = max(a + b for a, b in zip(*layers)) or 1
    stays, others = ([h / tallest * 100 for h in layer] for layer in layers)
    return {
        "size": size,
        "stays": bars(stays, bounds),
        "others": bars(others, bounds, stays),
        "ticks": axis_ticks(edges),
        "tallest": round(tallest),
    }


def axis_ticks(edges: np.ndarray, wanted: int = 6) -> list[dict[str, Any]]:
    """Round values along an axis of bins: `at` as a share of its length, and the value's text."""
    if len(edges) < 2:
        return [{"at": 0.5, "text": f"{edges[0]:g}"}]
    low, high = float(edges[0]), float(edges[-1])
    values = nice_values(low, high, wanted)
    positions = np.interp(values, edges, np.arange(1, len(edges) + 1)) / (len(edges) + 1)
    return [{"at": float(p), "text": f"{v:g}"} for p, v in zip(positions, values)]


def nice_values(low: float, high: float, wanted: int) -> list[float]:
    """At most `wanted` + 1 round numbers between low and high."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(k * step, digits) for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Times that people name, between low and high seconds (both above 0); about six at most."""
    named = [m * 10.0**p for p in range(-3, 2) for m in (1, 2, 5)]
    named += [60 * m for m in (1, 2, 5, 10, 20, 30)] + [3600 * m for m in (1, 2, 5, 10, 24, 48, 100, 240)]
    named = sorted(t for t in named if low <= t <= high and t not in (50.0,))
    step = -(-len(named) // 6) or 1
    return named[::step]

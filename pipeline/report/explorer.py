"""The second pass: exact counts along each score's axis, and pictures all along it, dense around the cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import polars as pl

from pipeline.report.pictures import Place
from pipeline.report.sampling import Smallest
from pipeline.report.survey import KEPT, Range, Score, Source, finite

BINS = 400
STRATA, EACH = 40, 4  # pictures along the axis: so many quantiles, so many in each
CLOSE = 16  # and so many next to the cut of the run, on either side
PICTURES = 480  # of all scores together
TAIL = 0.0005  # beyond these quantiles an axis stops where values lie far out


@dataclass
class Explorer:
    """One score: `edges` are the cuts a reader can choose; bin i holds edges[i-1] <= value < edges[i].

    stays, goes: rows of each bin that have no reason but this cut (kept, or dropped by it); others: rows with
    a score that another reason took. Rows equal to the run's cut lie on the side where its tie-break put them.
    at: the position of the run's cut: bins from there on stay. 0 keeps all, len(edges) + 1 nothing.
    """

    score: Score
    cut: float | None
    edges: np.ndarray
    at: int
    stays: np.ndarray = field(init=False)
    others: np.ndarray = field(init=False)
    places: list[tuple[Place, float, int]] = field(default_factory=list)  # with value and bin, ascending

    def __post_init__(self) -> None:
        self.stays, self.others = (np.zeros(len(self.edges) + 1, np.int64) for _ in range(2))

    @property
    def total(self) -> int:
        return int(self.stays.sum())

    def above(self) -> list[int]:
        """Rows that stay for each position of the cut: len(edges) + 2."""
        return [*list(accumulate(self.stays[::-1].tolist()))[::-1], 0]

    def bins(self, value: np.ndarray, dropped: np.ndarray, single: bool) -> np.ndarray:
        """Bin of each finite value; `dropped` are the rows that the run's cut dropped.

        single: the column is float32, and so a threshold is rounded before values are held against it.
        """
        edges = self.edges.astype(np.float32).astype(np.float64) if single else self.edges
        found = np.searchsorted(edges, value, side="right")
        if self.cut is not None:
            found[dropped & (value == edges[self.at - 1])] = self.at - 1
        return found

    def levels(self) -> list[dict[str, Any]]:
        """Cuts that keep about a given share of the rows with no other reason: share, cut, rows that stay."""
        above = self.above()
        found = []
        for share in (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 0.9):
            i = min(range(1, len(self.edges) + 1), key=lambda k: abs(above[k] - share * self.total))
            found.append({"share": share, "cut": float(self.edges[i - 1]), "stay": above[i]})
        return found


def explore(source: Source, scores: Sequence[Score], ranges: dict[str, Range]) -> list[Explorer]:
    """Explorers of the scores that have any finite value."""
    made = [_explorer(s, ranges[s.column]) for s in scores if len(ranges[s.column].values)]
    if not made:
        return []
    each = max(1, min(EACH, PICTURES // (STRATA * len(made))))
    sizes = {"below": CLOSE, "above": CLOSE, "": each}
    samples = [Smallest(sizes) for _ in made]
    strata = [
        np.unique(np.quantile(ranges[e.score.column].values, np.linspace(0, 1, STRATA + 1)[1:-1]))
        for e in made
    ]
    for _, frame in source.frames("report, scores", [e.score.column for e in made]):
        for explorer, sample, quantiles in zip(made, samples, strata):
            _add(explorer, sample, quantiles, frame)
    for explorer, sample in zip(made, samples):
        rows = sample.rows().unique(["shard", "row"]).sort("value", "shard", "row")
        explorer.places = [
            (Place(source.tables.folder, shard, row), value, position)
            for shard, row, value, position in rows.select("shard", "row", "value", "bin").iter_rows()
        ]
    return made


def _add(explorer: Explorer, sample: Smallest, quantiles: np.ndarray, frame: pl.DataFrame) -> None:
    value = finite(frame, explorer.score.column)
    single = frame[explorer.score.column].dtype == pl.Float32
    frame = frame.with_columns(value=pl.Series(value)).filter(pl.col("value").is_not_nan())
    value = frame["value"].to_numpy()
    group = frame["group"]
    dropped = (group == (explorer.score.reason or "")).to_numpy()
    mine = dropped | (group == KEPT).to_numpy()
    position = explorer.bins(value, dropped, single)
    size = len(explorer.edges) + 1
    explorer.stays += np.bincount(position[mine], minlength=size)
    explorer.others += np.bincount(position[~mine], minlength=size)
    stratum = np.searchsorted(quantiles, value, side="right")
    rows = frame.select(
        "order", "shard", "row", "value", bin=pl.Series(position), group=pl.Series(stratum).cast(pl.String)
    ).filter(pl.Series(mine))
    sample.add(rows)
    if explorer.cut is not None and math.isfinite(explorer.cut):
        side = pl.when(pl.col("bin") >= explorer.at).then(pl.lit("above")).otherwise(pl.lit("below"))
        sample.add(rows.with_columns(group=side, order=(pl.col("value") - explorer.cut).abs()))


def _explorer(score: Score, found: Range) -> Explorer:
    edges = _axis(found)
    cut = found.cut if found.cut is not None else score.limits.get("threshold")
    if cut is None:
        return Explorer(score, None, edges, 0)
    if not math.isfinite(cut):
        return Explorer(score, None, edges, len(edges) + 1)
    nearest = int(np.abs(edges - cut).argmin())
    step = np.diff(edges).max() if len(edges) > 1 else 1.0
    if abs(edges[nearest] - cut) <= step / 2:
        edges[nearest] = cut
    else:
        nearest = int(np.searchsorted(edges, cut))
        edges = np.insert(edges, nearest, cut)
    return Explorer(score, float(cut), edges, nearest + 1)


def _axis(found: Range) -> np.ndarray:
    """About BINS round numbers over the range; a far tail is left to the outermost bins."""
    low, high = found.low, found.high
    inner_low, inner_high = np.quantile(found.values, [TAIL, 1 - TAIL])
    if high - low > 3 * (inner_high - inner_low) > 0:
        low, high = inner_low, inner_high
    if not high > low:
        return np.array([low])
    rough = (high - low) / BINS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    digits = max(0, 2 - math.floor(math.log10(step)))
    numbers = np.arange(math.floor(low / step) + 1, math.ceil(high / step))
    edges = np.round(numbers * step, min(digits, 15))
    return edges if len(edges) else np.array([low])

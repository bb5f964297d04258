"""The first pass over a run: random samples by fate, where wanted uids lie, and the range of each score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from pipeline import storage
from pipeline.manifest import Run
from pipeline.progress import Progress
from pipeline.report.pictures import Place, places
from pipeline.report.sampling import Smallest
from pipeline.tables import TableSet
from pipeline.uid_draw import uniform
from pipeline.uids import find_uids

KEPT = "kept"  # the group of the samples without a reason
GRID = {KEPT: 24, "": 12}  # pictures of a grid; "": of each reason
VALUES = 1 << 14  # values of a score by which its axis is laid out

Uid = tuple[int, int]


@dataclass(frozen=True)
class Source:
    """A finished run as a stream: `frames` yields shard by shard, memory is a few shards' columns."""

    run: Run
    tables: TableSet
    ids: list[str]

    @classmethod
    def of(cls, run: Run) -> Source:
        accounting = pl.read_parquet(storage.read_bytes(run.path("accounting.parquet")), columns=["id"])
        return cls(run, run.tables(), accounting["id"].to_list())

    def frames(self, title: str, columns: Sequence[str]) -> Iterator[tuple[str, pl.DataFrame]]:
        """(shard id, uid_hi, uid_lo, `columns`, and of the decision: group, cut; then row and order)."""
        wanted = list(dict.fromkeys(["uid_hi", "uid_lo", *columns]))
        with Progress(title, len(self.ids)) as progress:
            for shard, table in self.tables.stream(self.ids, wanted):
                decided = self.run.decisions.read(shard, ["reason", "cut"])
                order = uniform(table["uid_hi"].to_numpy(), table["uid_lo"].to_numpy(), seed=0)
                yield (
                    shard,
                    table.with_columns(
                        group=decided["reason"].fill_null(KEPT), cut=decided["cut"], order=pl.Series(order),
                        shard=pl.lit(shard), row=pl.int_range(len(table), dtype=pl.Int64),
                    ),
                )  # fmt: skip
                progress.step(len(table))


@dataclass(frozen=True, kw_only=True)
class Score:
    """A column to explore. reason: that of the cut on it, None when no filter of the run cuts there.

    filter: the filter's name; limits: its threshold and top_fraction as configured.
    """

    column: str
    reason: str | None = None
    filter: str | None = None
    limits: dict[str, Any] = field(default_factory=dict)


@dataclass
class Range:
    """What the survey finds of a score: the cut of the run, and a random sample of its finite values."""

    cut: float | None = None
    low: float = np.inf
    high: float = -np.inf
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    _order: np.ndarray = field(default_factory=lambda: np.empty(0))

    def add(self, value: np.ndarray, order: np.ndarray) -> None:
        if len(value):
            self.low, self.high = min(self.low, value.min()), max(self.high, value.max())
        values, orders = np.concatenate([self.values, value]), np.concatenate([self._order, order])
        smallest = np.argsort(orders, kind="stable")[:VALUES]
        self.values, self._order = values[smallest], orders[smallest]


@dataclass
class Survey:
    """grid: places of random samples by reason (`kept` for those without one); found: where wanted uids lie."""

    grid: dict[str, list[Place]]
    found: dict[Uid, Place]
    ranges: dict[str, Range]


def scores_of(receipt: Mapping[str, Any]) -> list[Score]:
    """Score columns of a run: those its filters cut, in their order, then its scorer's own."""
    found = {}
    for name, node in (receipt["config"].get("filters") or {}).items():
        if node.get("column"):
            limits = {k: node.get(k) for k in ("threshold", "top_fraction")}
            found[node["column"]] = Score(
                column=node["column"], reason=f"{name}_below_cut", filter=name, limits=limits
            )
    own = receipt["scorer"]["column"]
    if own and own not in found:
        found[own] = Score(column=own)
    return list(found.values())


def finite(frame: pl.DataFrame, column: str) -> np.ndarray:
    """A column as float64, NaN where it is missing or not finite."""
    value = frame[column].cast(pl.Float64).fill_null(np.nan).to_numpy()
    return np.where(np.isfinite(value), value, np.nan)


def survey(source: Source, scores: Sequence[Score], wanted: set[Uid]) -> Survey:
    grid = Smallest(GRID)
    ranges = {s.column: Range() for s in scores}
    uids = np.array(sorted(wanted), np.uint64).reshape(-1, 2)
    found: dict[Uid, Place] = {}
    for shard, frame in source.frames("report", [s.column for s in scores]):
        grid.add(frame.select("group", "order", "shard", "row"))
        for score in scores:
            value = finite(frame, score.column)
            known = ~np.isnan(value)
            here = ranges[score.column]
            here.add(value[known], frame["order"].to_numpy()[known])
            if here.cut is None and score.reason:
                here.cut = frame.filter(group=score.reason).select(pl.col("cut").drop_nulls().first()).item()
        at = find_uids(uids[:, 0], uids[:, 1], frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy())
        for row in np.flatnonzero(at >= 0):
            hi, lo = uids[at[row]].tolist()
            found.setdefault((hi, lo), Place(source.tables.folder, shard, int(row)))
    by_group = {str(g): places(source.tables.folder, rows) for (g,), rows in grid.rows().group_by("group")}
    return Survey(by_group, found, ranges)

"""The filter stage: every filter's verdicts into one decision a sample; the first that fails names the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from filters.base import Filter, Verdict
from pipeline import reasons
from pipeline.cluster import ClusterConfig
from pipeline.decisions import DECISION, Chain
from pipeline.errors import Refused
from pipeline.tables import Passes
from pipeline.uids import repeated_uids


@dataclass(frozen=True)
class FilterStage:
    """First stage of a run: rejected samples and repeated uids are out, the rest is for the filters."""

    filters: Sequence[Filter]
    workers: ClusterConfig = field(default_factory=ClusterConfig)
    name: str = "filters"

    def __post_init__(self) -> None:
        for f in self.filters:
            for reason, explanation in f.reasons().items():
                reasons.register(reason, explanation)

    def identity(self) -> dict[str, Any]:
        return {"filters": [f.identity() for f in self.filters]}

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        self._check_columns(chain)
        prepared = [f.prepare(chain.tables, chain.ids, self.workers) for f in self.filters]
        passes = Passes(chain.tables, chain.ids)
        repeated = repeated_uids(passes.stream(["uid_hi", "uid_lo", "status"]))

        def pool(columns: Sequence[str]) -> Iterator[pl.DataFrame]:
            wanted = list(dict.fromkeys([*columns, "status"]))
            for shard, frame in passes.stream(wanted):
                out = frame["status"] != "ok"
                if (rows := repeated.get(shard)) is not None:
                    out = out.scatter(rows, True)
                yield frame.filter(~out) if out.any() else frame

        fitted = [f.fit(pool) for f in prepared]
        verdicts = [v for f in fitted for v in f.verdicts()]
        needed = dict.fromkeys(c for f in fitted for c in f.columns())
        columns = list(dict.fromkeys(["uid_hi", "uid_lo", "status", *needed]))
        for shard, frame in passes.stream(columns):
            yield shard, decide(frame, verdicts, repeated.get(shard))

    def _check_columns(self, chain: Chain) -> None:
        """Refuse a column that no table has or that is no number, before any work; where a table lacks it, it is null."""
        have: dict[str, pa.DataType] = {}
        for shard in chain.ids[:: max(1, len(chain.ids) // 64)]:
            have |= {f.name: f.type for f in chain.tables.schema(shard)}
        sizes = {"width", "height"}, {"original_width", "original_height"}
        optional = sizes[1] if sizes[0] <= have.keys() else sizes[0] if sizes[1] <= have.keys() else set()
        for f in self.filters:
            for column in f.columns():
                if column not in have.keys() | optional | set(f.makes()):
                    known = ", ".join(sorted(have))
                    raise Refused(f"filters.{f.name}: the pool has no column {column!r}; it has: {known}")
            for column in f.numbers():
                if not (pa.types.is_integer(have[column]) or pa.types.is_floating(have[column])):
                    raise Refused(
                        f"filters.{f.name}: column {column!r} is {have[column]}, it must be numeric"
                    )


def decide(frame: pl.DataFrame, verdicts: Sequence[Verdict], repeated: np.ndarray | None) -> pl.DataFrame:
    """Row-aligned decisions (see `DECISION`) for one shard.

    A kept row carries the value and cut of the last verdict that has them.
    """
    out = [
        Verdict("", pl.col("status") != "ok"),  # the status itself is the reason
        Verdict("duplicate_uid", _mask(len(frame), repeated)),
        *verdicts,
    ]
    fails = [pl.when(v.fails.fill_null(True)).then(pl.lit(i, pl.Int32)) for i, v in enumerate(out)]
    first = frame.select(pl.coalesce(*fails, pl.lit(None, pl.Int32)).alias("first"))["first"]
    reason = pl.Series("reason", [v.reason for v in out], pl.String).gather(first)
    unread = (first == 0).fill_null(False)
    if unread.any():
        reason = reason.zip_with(~unread, frame["status"].cast(pl.String))
    decided = [i for i, v in enumerate(out) if v.value is not None]
    deciding = first.fill_null(decided[-1]) if decided else first
    cuts = pl.Series("cut", [v.cut for v in out], pl.Float64)
    kept = first.is_null()
    return pl.DataFrame(
        {
            "uid_hi": frame["uid_hi"],
            "uid_lo": frame["uid_lo"],
            "kept": kept,
            "reason": reason,
            "value": _values(frame, out, decided, deciding),
            "cut": cuts.gather(deciding),
            "copies": kept.cast(pl.UInt32),
        },
        schema=DECISION,
    )


def _values(
    frame: pl.DataFrame, verdicts: Sequence[Verdict], decided: Sequence[int], deciding: pl.Series
) -> pl.Series:
    """Of each row, the number that its deciding verdict looked at; asked for where it decided and nowhere else."""
    found, rows = [], []
    for i in decided:
        own = (deciding == i).fill_null(False)
        if own.any():
            value = verdicts[i].value
            assert value is not None
            looked_at = frame.select(*dict.fromkeys(value.meta.root_names())).filter(own)
            found.append(looked_at.select(value.cast(pl.Float64).alias("value"))["value"])
            rows.append(own.arg_true())
    values = pl.Series("value", [], pl.Float64).extend_constant(None, len(frame))
    return values.scatter(pl.concat(rows), pl.concat(found)) if rows else values


def _mask(n: int, rows: np.ndarray | None) -> pl.Expr:
    """A boolean column of n rows, true at `rows`."""
    mask = np.zeros(n, bool)
    if rows is not None:
        mask[rows] = True
    return pl.lit(pl.Series("repeated", mask))

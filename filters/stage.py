"""The filter stage: every filter's verdicts into one decision a sample; the first that fails names the reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from filters.base import Filter, Verdict
from pipeline import reasons
from pipeline.decisions import DECISION, Chain
from pipeline.errors import Refused
from pipeline.tables import EMBEDDINGS, TableSet
from pipeline.uids import repeated_uids


@dataclass(frozen=True)
class _Pool:
    """Every readable sample once, for filters whose cut depends on the pool."""

    tables: TableSet
    ids: Sequence[str]
    repeated: dict[str, np.ndarray]

    def __call__(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        wanted = list(dict.fromkeys([*columns, "status"]))
        for shard, frame in self.tables.stream(self.ids, wanted):
            yield frame.filter((pl.col("status") == "ok") & ~_mask(len(frame), self.repeated.get(shard)))


@dataclass(frozen=True)
class FilterStage:
    """First stage of a run: rejected samples and repeated uids are out, the rest is for the filters."""

    filters: Sequence[Filter]
    name: str = "filters"

    def __post_init__(self) -> None:
        for f in self.filters:
            for reason, explanation in f.reasons().items():
                reasons.register(reason, explanation)

    def identity(self) -> dict[str, Any]:
        return {"filters": [f.identity() for f in self.filters]}

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        self._check_columns(chain)
        repeated = repeated_uids(chain.tables, chain.ids)
        pool = _Pool(chain.tables, chain.ids, repeated)
        fitted = [f.fit(pool) for f in self.filters]
        verdicts = [v for f in fitted for v in f.verdicts()]
        needed = dict.fromkeys(c for f in fitted for c in f.columns())
        columns = list(dict.fromkeys(["uid_hi", "uid_lo", "status", *needed]))
        for shard, frame in chain.tables.stream(chain.ids, columns):
            yield shard, decide(frame, verdicts, repeated.get(shard))

    def _check_columns(self, chain: Chain) -> None:
        """Refuse a column that no table has or that is no number, before any work; where a table lacks it, it is null."""
        have: dict[str, pa.DataType] = {}
        for shard in chain.ids[:: max(1, len(chain.ids) // 64)]:
            have |= {f.name: f.type for f in chain.tables.schema(shard)}
        optional = {"original_width", "original_height"}
        if any(c in EMBEDDINGS for f in self.filters for c in f.columns()):
            optional |= EMBEDDINGS.keys() if chain.tables.identity()["scorer"] else set()
        for f in self.filters:
            for column in f.columns():
                if column not in have.keys() | optional:
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
    fails = [v.fails.fill_null(True).alias(f"fails{i}") for i, v in enumerate(out)]
    values = [_number(v).alias(f"value{i}") for i, v in enumerate(out)]
    worked = frame.with_columns(*fails, *values)
    reason = pl.coalesce(
        pl.when(pl.col("fails0")).then(pl.col("status").cast(pl.String)),
        *(pl.when(pl.col(f"fails{i}")).then(pl.lit(v.reason)) for i, v in enumerate(out) if i),
    )
    decided = [i for i, v in enumerate(out) if v.value is not None]
    last = decided[-1] if decided else None
    kept = pl.all_horizontal(~pl.col(f"fails{i}") for i in range(len(out)))

    def where(number: list[pl.Expr]) -> pl.Expr:
        chosen: Any = (
            pl.when(kept).then(number[last]) if last is not None else pl.when(kept).then(pl.lit(None))
        )
        for i in range(len(out)):
            chosen = chosen.when(pl.col(f"fails{i}")).then(number[i])
        return chosen.otherwise(None).cast(pl.Float64)

    return worked.select(
        "uid_hi",
        "uid_lo",
        kept=kept,
        reason=reason,
        value=where([pl.col(f"value{i}") for i in range(len(out))]),
        cut=where([pl.lit(v.cut, pl.Float64) for v in out]),
        copies=kept.cast(pl.UInt32),
    ).cast(DECISION)  # type: ignore[arg-type]


def _number(verdict: Verdict) -> pl.Expr:
    return (verdict.value if verdict.value is not None else pl.lit(None)).cast(pl.Float64)


def _mask(n: int, rows: np.ndarray | None) -> pl.Expr:
    """A boolean column of n rows, true at `rows`."""
    mask = np.zeros(n, bool)
    if rows is not None:
        mask[rows] = True
    return pl.lit(pl.Series("repeated", mask))

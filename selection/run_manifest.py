"""A run's manifest.parquet and feature tables as what rounds and their loader read: one shard at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.tables import shard_id
from selection.draws import Ints
from selection.manifest_rows import ShardRows

TABLE_COLUMNS = ("offset", "size", "caption")
STRATA_TYPES = (
    pa.types.is_dictionary,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_integer,
    pa.types.is_boolean,
)
MOST_CELLS = 1 << 27
"""Shards times strata that may be counted: 1 GiB."""


class RunManifest:
    """The manifest of a finished run; a `selection.manifest_rows.Manifest`, picklable.

    stratify: a column of the manifest or else of the feature tables. values: its values in the order of the
    strata, None among them where it is empty; needed by `rows` when stratified (see `count`). members: whether
    `rows` also reads where image and caption lie; without, it gives uids, keys, copies and strata alone.

    Raises Refused when the run is not finished, keeps nothing, or has no such column.
    """

    def __init__(
        self, run: Run, stratify: str | None = None, values: Sequence[Any] = (), *, members: bool = True
    ) -> None:
        self.path, self.stratify, self._members = run.path("manifest.parquet"), stratify, members
        self._values = {value: number for number, value in enumerate(values)}
        self.digest = _digest(run)
        self._tables = run.tables()
        with storage.open_file(self.path) as f:
            parquet = pq.ParquetFile(f)
            self._groups = _groups(parquet)
            columns = parquet.schema_arrow
        self.shards: list[str] = list(self._groups)
        if not self.shards:
            raise Refused(f"{self.path}: the run kept nothing; there is nothing to draw rounds from")
        self._in_manifest = stratify is None or stratify in columns.names
        if stratify is not None:
            self._check(stratify, columns if self._in_manifest else self._tables.schema(self._id(0)))

    def _id(self, shard: int) -> str:
        return shard_id(self.shards[shard])

    def _check(self, column: str, schema: pa.Schema) -> None:
        if column not in schema.names:
            known = [f.name for f in schema if any(test(f.type) for test in STRATA_TYPES)]
            raise Refused(
                f"stratify={column}: there is no such column; columns that serve: {', '.join(known)}"
            )
        kind = schema.field(column).type
        if not any(test(kind) for test in STRATA_TYPES):
            raise Refused(f"stratify={column}: holds {kind}; a column of names or whole numbers is needed")

    def count(self) -> tuple[Ints, Ints | None, list[Any]]:
        """(entries of each shard, of each stratum in each shard or None, the strata's values), in one pass.

        Values come sorted, None first. Raises Refused when shards x strata are too many to count.
        """
        totals = np.zeros(len(self.shards), np.int64)
        by_value: list[Counter[Any]] = []
        for shard, frame in self._frames(["copies"]):
            totals[shard] = int(frame["copies"].sum())
            if self.stratify is not None:
                sums = frame.group_by(self.stratify).agg(pl.col("copies").sum().alias("entries in all"))
                by_value.append(Counter(dict(sums.iter_rows())))
        if self.stratify is None:
            return totals, None, []
        values = sorted(set().union(*by_value), key=lambda v: (v is not None, v))
        if len(values) * len(totals) > MOST_CELLS:
            raise Refused(
                f"stratify={self.stratify}: {len(values):,} values in {len(totals):,} shards are too many strata"
            )
        places = {value: number for number, value in enumerate(values)}
        strata = np.zeros((len(totals), len(values)), np.int64)
        for shard, counts in enumerate(by_value):
            for value, entries in counts.items():
                strata[shard, places[value]] = entries
        return totals, strata, values

    def rows(self, shard: int) -> ShardRows:
        frame = self._frame(shard, ["uid_hi", "uid_lo", "key", "copies"])
        extra: dict[str, Any] = {}
        if self.stratify is not None:
            extra["stratum"] = np.asarray([self._values[v] for v in frame[self.stratify]], np.int64)
        if self._members:
            table = self._tables.read(self._id(shard), TABLE_COLUMNS)[frame["row"].to_list()]
            extra |= {
                "image_offset": table["offset"].to_numpy(),
                "image_size": table["size"].to_numpy(),
                "caption": table["caption"].to_list(),
            }
        return ShardRows(
            uid_hi=frame["uid_hi"].to_numpy(),
            uid_lo=frame["uid_lo"].to_numpy(),
            key=frame["key"].to_list(),
            copies=frame["copies"].to_numpy().astype(np.int64),
            **extra,
        )

    def _frames(self, columns: Sequence[str]) -> Iterator[tuple[int, pl.DataFrame]]:
        for shard in range(len(self.shards)):
            yield shard, self._frame(shard, columns)

    def _frame(self, shard: int, columns: Sequence[str]) -> pl.DataFrame:
        """Manifest columns of one shard's rows, with `row` and the strata's column."""
        path = self.shards[shard]
        wanted = list(dict.fromkeys([*columns, "shard", "row"]))
        if self.stratify is not None and self._in_manifest:
            wanted = list(dict.fromkeys([*wanted, self.stratify]))
        with storage.open_file(self.path) as f:
            read = pl.from_arrow(pq.ParquetFile(f).read_row_groups(self._groups[path], columns=wanted))
        assert isinstance(read, pl.DataFrame)
        frame = read.filter(pl.col("shard") == path)
        if self.stratify is not None and not self._in_manifest:
            column = self._tables.read(self._id(shard), [self.stratify])[frame["row"].to_list()]
            frame = frame.hstack(column)
        return frame


def _groups(parquet: pq.ParquetFile) -> dict[str, list[int]]:
    """The row groups of each shard, in the order of the manifest; told by the column's statistics if they can."""
    number = parquet.schema_arrow.names.index("shard")
    found: dict[str, list[int]] = {}
    for group in range(parquet.num_row_groups):
        told = parquet.metadata.row_group(group).column(number).statistics
        if told is not None and told.has_min_max and told.min == told.max:
            names = [told.min]
        else:
            names = parquet.read_row_group(group, ["shard"])["shard"].unique().to_pylist()
        for name in names:
            found.setdefault(name, []).append(group)
    return found


def _digest(run: Run) -> str:
    """What the manifest was made from and how: the same digest, the same rows."""
    return run.receipt()["stages"][-1]["digest"]

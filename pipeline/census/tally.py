"""Exact counts of any number of values in bounded memory: counted by chunk in polars, merged by DuckDB.

Each chunk's counts become a parquet file; DuckDB sums them under a memory limit and spills to disk. Measured on a
million captions and one core, polars cuts and counts n-grams 2 to 4 times as fast as DuckDB does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

LEAST_SHARE = 1e-4  # of a kind's total that a value must have to be compared between groups


class Tally:
    """Counts of values of several kinds, told apart by group. Use as a context manager.

    groups: how many columns of counts there are. memory: bytes for DuckDB.
    """

    def __init__(self, groups: Sequence[str], memory: int) -> None:
        self.groups = list(groups)
        self._folder = tempfile.TemporaryDirectory(prefix="winnow-census-")
        self._parts: dict[str, int] = {}
        base = self._folder.name
        self.con = duckdb.connect(f"{base}/counts.duckdb")
        self.con.execute(f"SET memory_limit = '{memory >> 20}MiB'; SET temp_directory = '{base}/spill'")
        self.con.execute("SET preserve_insertion_order = false")
        if threads := os.environ.get("OMP_NUM_THREADS"):
            self.con.execute(f"SET threads = {int(threads)}")

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.con.close()
        self._folder.cleanup()

    def add(self, kind: str, values: pl.Expr, frame: pl.DataFrame) -> None:
        """Count a column of a chunk, which has the column `group`; nulls are left out."""
        counts = [(pl.col("group") == n).sum().cast(pl.Int64).alias(f"n{n}") for n in range(len(self.groups))]
        counted = frame.lazy().select("group", value=values).drop_nulls().group_by("value").agg(counts)
        number = self._parts[kind] = self._parts.get(kind, 0) + 1
        path = Path(self._folder.name) / kind / f"{number:06d}.parquet"
        path.parent.mkdir(exist_ok=True)
        counted.collect().write_parquet(path, compression="lz4")

    def merge(self, kind: str) -> None:
        """Sum the chunks of a kind into the table `kind` (value, n0, ..., n: all groups); its parts are gone then."""
        sums = ", ".join(f"sum(n{n})::BIGINT AS n{n}" for n in range(len(self.groups)))
        total = " + ".join(f"n{n}" for n in range(len(self.groups)))
        parts = Path(self._folder.name) / kind
        self.con.execute(
            f"CREATE TABLE {kind} AS SELECT *, {total} AS n FROM"
            f" (SELECT value, {sums} FROM read_parquet('{parts}/*.parquet') GROUP BY value)"
        )
        for part in parts.iterdir():
            part.unlink()

    def has(self, kind: str) -> bool:
        return kind in self._parts

    def distinct(self, kind: str) -> dict[str, int]:
        """Values, their occurrences, and how many values occur once."""
        row = self.con.execute(
            f"SELECT count(*), coalesce(sum(n), 0), count_if(n = 1) FROM {kind}"
        ).fetchone()
        assert row
        return {"distinct": row[0], "total": int(row[1]), "once": row[2]}

    def most(self, kind: str, k: int) -> list[dict[str, Any]]:
        """The k most common values with their counts by group; equal counts by value."""
        return self._rows(f"SELECT * FROM {kind} ORDER BY n DESC, value LIMIT {k}")

    def least(self, kind: str, k: int) -> list[dict[str, Any]]:
        return self._rows(f"SELECT * FROM {kind} ORDER BY n, value LIMIT {k}")

    def repeated(self, kind: str) -> dict[str, int]:
        """Values that occur more than once, and the occurrences beyond the first of each."""
        row = self.con.execute(f"SELECT count(*), coalesce(sum(n - 1), 0) FROM {kind} WHERE n > 1").fetchone()
        assert row
        return {"groups": row[0], "copies": int(row[1])}

    def telling(self, kind: str, k: int) -> dict[str, list[dict[str, Any]]]:
        """Values kept most, and least, beyond chance: by z of their kept share against that of the whole kind.

        z = (n0 / n - p) / sqrt(p (1 - p) / n), p the kept share of all; values with fewer than LEAST_SHARE of
        the total, or than 10, are left out.
        """
        row = self.con.execute(f"SELECT sum(n0), sum(n) FROM {kind}").fetchone()
        assert row
        kept, total = float(row[0] or 0), float(row[1] or 0)
        if not 0 < kept < total:
            return {"kept": [], "dropped": []}
        p = kept / total
        z = f"(n0 / n - {p!r}) / sqrt({p * (1 - p)!r} / n)"
        base = f"SELECT *, {z} AS z FROM {kind} WHERE n >= {max(10, round(LEAST_SHARE * total))} ORDER BY"
        return {
            "kept": [r for r in self._rows(f"{base} z DESC, value LIMIT {k}", ["z"]) if r["z"] > 0],
            "dropped": [r for r in self._rows(f"{base} z, value LIMIT {k}", ["z"]) if r["z"] < 0],
        }

    def _rows(self, query: str, more: Sequence[str] = ()) -> list[dict[str, Any]]:
        found = self.con.execute(query)
        assert found.description
        names = [d[0] for d in found.description]
        rows = [dict(zip(names, r)) for r in found.fetchall()]
        return [
            {"value": r["value"], "count": r["n"]}
            | ({g: r[f"n{i}"] for i, g in enumerate(self.groups)} if len(self.groups) > 1 else {})
            | {m: round(float(r[m]), 2) for m in more}
            for r in rows
        ]

"""What a data filtering network has to beat: chance, and a classifier of its own embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from filters.score import Cut, ScoreCut
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from pipeline.tables import TableSet, digest_json
from pipeline.uid_draw import uniform

TOWERS = {"image": ("image",), "text": ("text",), "both": ("image", "text")}
BLOCK = 4096


@dataclass(kw_only=True)
class RandomCut(Cut):
    """Keep samples at random, each by a number that its uid and `seed` give it: the same in every run."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be at least 0")

    def needs(self) -> list[str]:
        return ["uid_hi", "uid_lo"]

    def value(self) -> pl.Expr:
        def draw(uids: pl.Series) -> pl.Series:
            hi, lo = (uids.struct.field(c).to_numpy() for c in ("uid_hi", "uid_lo"))
            return pl.Series(uniform(hi, lo, self.seed))

        return pl.struct("uid_hi", "uid_lo").map_batches(draw, pl.Float64)


@dataclass(kw_only=True)
class TrustedOrNot(ScoreCut):
    """Keep what looks most like the trusted pairs: the binary filter of Fang et al., section 4.

    A logistic regression on frozen embeddings tells pairs of the trusted pool from pairs of this one; a
    sample's score, float32, is its log-odds of being trusted, and is kept with the pool's tables as a column.

    trusted: an output folder of jobs.curate whose pool were the trusted pairs, scanned with the scorer of
    this run. towers: image, text, or both. rows: pairs of either side, at most about, that it is fitted to.
    """

    trusted: str
    towers: str = "both"
    rows: int = 20_000
    seed: int = 0
    column: str = "trusted_or_not"  # `prepare` gives each classifier its own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.towers not in TOWERS:
            raise ValueError(f"towers={self.towers}: must be {', '.join(TOWERS)}")
        if self.rows < 100:
            raise ValueError(f"rows={self.rows}: must be at least 100")

    def numbers(self) -> list[str]:
        return []

    def makes(self) -> list[str]:
        return [self.column]

    def identity(self) -> dict[str, Any]:
        """With what the trusted tables hold, so that a stage made with others is made again."""
        return {
            **super().identity(),
            "trusted_tables": [_content(t, _ids(t)) for t in _table_sets(self.trusted)],
        }

    def prepare(self, tables: TableSet, ids: Sequence[str], workers: ClusterConfig) -> TrustedOrNot:
        """Fit the classifier and score the pool's shards, those that it has not scored before."""
        trusted = self._find(tables)
        about = [_content(trusted, _ids(trusted)), _content(tables, ids), self.towers, self.rows, self.seed]
        made = replace(self, column=f"{self.column}_{digest_json(about, 4)}")
        todo = tables.without_column(ids, made.column)
        if todo:
            weights, intercept = self._fitted(trusted, tables, ids)
            for shard in todo:
                scores = [_rowwise(x, weights) + intercept for x in self._blocks(tables, shard)]
                column = np.concatenate(scores) if scores else np.empty(0)
                tables.write_column(shard, made.column, pa.array(column.astype(np.float32)))
        return made

    def _find(self, tables: TableSet) -> TableSet:
        """The trusted pool's tables that were made with the scorer of `tables`."""
        scorer = tables.identity()["scorer"]
        for found in _table_sets(self.trusted) if scorer else []:
            if found.identity()["scorer"] == scorer and _ids(found):
                return found
        raise Refused(
            f"filters.{self.name}.trusted={self.trusted}: holds no tables made with this run's scorer; scan the"
            f" trusted pairs with it first: python -m jobs.curate pool.shards=... out={self.trusted} scorer..."
        )

    def _fitted(self, trusted: TableSet, tables: TableSet, ids: Sequence[str]) -> tuple[np.ndarray, float]:
        """Weights, float64 (d,), and intercept."""
        from sklearn.linear_model import LogisticRegression  # seconds to import
        from sklearn.preprocessing import StandardScaler

        sides = [self._sample(trusted, _ids(trusted)), self._sample(tables, ids)]
        if not all(len(side) for side in sides):
            raise Refused(
                f"filters.{self.name}.trusted={self.trusted}: no readable pairs there, or in the pool"
            )
        labels = np.repeat([1, 0], [len(side) for side in sides])
        x = np.concatenate(sides)
        scale = StandardScaler().fit(x)
        fitted = LogisticRegression(max_iter=1000, class_weight="balanced").fit(scale.transform(x), labels)
        weights = fitted.coef_[0] / scale.scale_
        return weights, float(fitted.intercept_[0] - weights @ scale.mean_)

    def _sample(self, tables: TableSet, ids: Sequence[str]) -> np.ndarray:
        """Embeddings of about `rows` readable samples, drawn by uid, float64 (n, d); rows that are NaN are left out."""
        columns = ["uid_hi", "uid_lo", "status"]
        total = sum(int((f["status"] == "ok").sum()) for _, f in tables.stream(ids, ["status"]))
        found = []
        for shard, frame in tables.stream(ids, columns):
            drawn = uniform(frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy(), self.seed)
            wanted = (drawn < self.rows / max(total, 1)) & (frame["status"] == "ok").to_numpy()
            start = 0
            for x in self._blocks(tables, shard):
                mine = x[wanted[start : start + len(x)]]
                found.append(mine[np.isfinite(mine).all(1)])
                start += len(x)
        return np.concatenate(found) if found else np.empty((0, 0))

    def _blocks(self, tables: TableSet, shard: str) -> Iterator[np.ndarray]:
        """The embeddings of a shard's rows, the towers side by side, float64 (n, d)."""
        towers = [tables.embedding_blocks(shard, tower, BLOCK) for tower in TOWERS[self.towers]]
        for parts in zip(*towers):
            yield np.concatenate(parts, axis=1).astype(np.float64)


def _rowwise(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x @ weights, with the same bits for a row whatever rows are around it."""
    return (x * weights).sum(1)


def _content(tables: TableSet, ids: Sequence[str]) -> str:
    """Changes with the scorer and the shards."""
    return digest_json([tables.identity(), [r.digest for i in ids if (r := tables.report(i))]])


def _table_sets(out: str) -> list[TableSet]:
    root = storage.join(out, "features")
    found = [TableSet(storage.join(root, name)) for name in storage.listdir(root)]
    return [tables for tables in found if storage.exists(tables.path("set", "json"))]


def _ids(tables: TableSet) -> list[str]:
    """Shards whose scan is complete: those with a table and a report."""
    names = set(storage.listdir(tables.folder))
    return sorted(i for n in names if n.endswith(".parquet") and f"{(i := n[:-8])}.json" in names)

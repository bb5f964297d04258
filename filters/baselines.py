"""What a data filtering network has to beat: chance, and a classifier of its own embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from filters.base import PoolColumns
from filters.hashing import uniform
from filters.score import Cut
from pipeline import storage
from pipeline.errors import Refused
from pipeline.tables import EMBEDDINGS, TableSet, digest_json


@dataclass(kw_only=True)
class RandomCut(Cut):
    """Keep samples at random, each by a number that its uid and `seed` give it: the same in every run."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be at least 0")

    def columns(self) -> list[str]:
        return ["uid_hi", "uid_lo"]

    def value(self) -> pl.Expr:
        def draw(uids: pl.Series) -> pl.Series:
            hi, lo = (uids.struct.field(c).to_numpy() for c in ("uid_hi", "uid_lo"))
            return pl.Series(uniform(hi, lo, self.seed))

        return pl.struct("uid_hi", "uid_lo").map_batches(draw, pl.Float64)

    def what(self) -> str:
        return "random number"


@dataclass(kw_only=True)
class TrustedOrNot(Cut):
    """Keep what looks most like the trusted pairs: the binary filter of Fang et al., section 4.

    A logistic regression on frozen embeddings tells pairs of the trusted pool from pairs of this one; a
    sample's value is its log-odds of being trusted.

    trusted: an output folder of jobs.curate whose pool were the trusted pairs, scanned with the scorer of
    this run. towers: image, text, or both. rows: pairs of either side, at most, that it is fitted to.
    """

    trusted: str
    towers: str = "both"
    rows: int = 20_000
    seed: int = 0
    model: Any = None  # found by `fit`: weights, float64 (d,), and the intercept

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.towers not in ("image", "text", "both"):
            raise ValueError(f"towers={self.towers}: must be image, text or both")
        if self.rows < 100:
            raise ValueError(f"rows={self.rows}: must be at least 100")

    def columns(self) -> list[str]:
        return ["uid_hi", "uid_lo", *self._embeddings()]

    def _embeddings(self) -> list[str]:
        return [name for name, tower in EMBEDDINGS.items() if self.towers in (tower, "both")]

    def identity(self) -> dict[str, Any]:
        """With what the trusted tables hold, so that a stage made with others is made again."""
        content = [
            [
                storage.name(tables.folder),
                [[i, report.digest] for i in _ids(tables) if (report := tables.report(i))],
            ]
            for tables in _table_sets(self.trusted)
        ]
        return {**super().identity(), "trusted_tables": digest_json(content)}

    def fit(self, pool: PoolColumns) -> Cut:
        from sklearn.linear_model import LogisticRegression  # seconds to import
        from sklearn.preprocessing import StandardScaler

        sides = [self._sample(_Readable(self._find(pool.tables))), self._sample(pool)]
        if not all(len(side) for side in sides):
            raise Refused(f"filters.{self.name}.trusted={self.trusted}: holds no readable pairs")
        scale = StandardScaler().fit(np.concatenate(sides))
        labels = np.repeat([1, 0], [len(side) for side in sides])
        fitted = LogisticRegression(max_iter=1000, class_weight="balanced")
        fitted.fit(scale.transform(np.concatenate(sides)), labels)
        weights = fitted.coef_[0] / scale.scale_
        model = (weights, float(fitted.intercept_[0] - weights @ scale.mean_))
        return super(TrustedOrNot, replace(self, model=model)).fit(pool)  # type: ignore[return-value]

    def _find(self, tables: TableSet) -> TableSet:
        """The trusted pool's tables that were made with the scorer of `tables`."""
        scorer = tables.identity()["scorer"]
        for found in _table_sets(self.trusted):
            if found.identity()["scorer"] == scorer and _ids(found):
                return found
        raise Refused(
            f"filters.{self.name}.trusted={self.trusted}: holds no tables made with this run's scorer; scan the"
            f" trusted pairs with it first: python -m jobs.curate pool.shards=... out={self.trusted} scorer..."
        )

    def _sample(self, pool: Any) -> np.ndarray:
        """Embeddings of at most about `rows` samples, drawn by uid, float64 (n, d); rows that are NaN are left out."""
        share = self.rows / max(1, sum(len(frame) for frame in pool(["uid_hi", "uid_lo"])))
        found = []
        for frame in pool(self.columns()):
            drawn = uniform(frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy(), self.seed) < share
            x = self._features(frame.filter(drawn).get_columns())
            found.append(x[np.isfinite(x).all(1)])
        return np.concatenate(found) if found else np.empty((0, 0))

    def _features(self, columns: Sequence[pl.Series]) -> np.ndarray:
        wanted = self._embeddings()
        parts = {c.name: c.to_numpy() for c in columns if c.name in wanted}
        return np.concatenate([parts[name] for name in wanted], axis=1).astype(np.float64)

    def value(self) -> pl.Expr:
        def log_odds(columns: pl.Series) -> pl.Series:
            weights, intercept = self.model
            x = self._features(columns.struct.unnest().get_columns())
            return pl.Series((x * weights).sum(1) + intercept)  # row by row: bits do not depend on the others

        return pl.struct(self._embeddings()).map_batches(log_odds, pl.Float64)

    def what(self) -> str:
        return "log-odds of being trusted"


@dataclass(frozen=True)
class _Readable:
    """All readable samples of a scanned pool."""

    tables: TableSet

    def __call__(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        for _, frame in self.tables.stream(_ids(self.tables), [*columns, "status"]):
            yield frame.filter(pl.col("status") == "ok")


def _table_sets(out: str) -> list[TableSet]:
    root = storage.join(out, "features")
    found = [TableSet(storage.join(root, name)) for name in storage.listdir(root)]
    return [tables for tables in found if storage.exists(tables.path("set", "json"))]


def _ids(tables: TableSet) -> list[str]:
    """Shards whose scan is complete: those with a table and a report."""
    names = set(storage.listdir(tables.folder))
    return sorted(i for n in names if n.endswith(".parquet") and f"{(i := n[:-8])}.json" in names)

"""Cuts by a score or any numeric column: a threshold, or an exact top fraction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import polars as pl

from filters.base import Filter, PoolColumns, Verdict
from pipeline.select_top import Boundary, select_top


@dataclass(kw_only=True)
class Cut(Filter):
    """Keep the samples whose value is high enough; what the value is, a subclass says. Give exactly one cut.

    threshold: keep value >= threshold. top_fraction: keep exactly round(top_fraction * n) samples, n those
    of the pool with a finite value, halves up; equal values by ascending uid. Values that are missing, NaN
    or infinite are apart: `non_finite_score`, whatever the cut.
    """

    threshold: float | None = None
    top_fraction: float | None = None
    boundary: Boundary | None = None  # found by `fit`

    def __post_init__(self) -> None:
        if self.top_fraction is not None and not 0 < self.top_fraction <= 1:
            raise ValueError(f"top_fraction={self.top_fraction}: must lie in (0, 1]")
        if self.threshold is not None and not np.isfinite(self.threshold):
            raise ValueError(f"threshold={self.threshold}: must be a finite number")
        if (self.threshold is None) == (self.top_fraction is None):
            raise ValueError(
                f"threshold={self.threshold}, top_fraction={self.top_fraction}: give one and set the other to null"
            )

    @abstractmethod
    def needs(self) -> list[str]:
        """The columns that `value` reads."""

    @abstractmethod
    def value(self) -> pl.Expr:
        """The value of each row; the same bits for a row whatever rows are around it."""

    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self.needs(), "uid_hi", "uid_lo"]))

    def reasons(self) -> dict[str, str]:
        return {f"{self.name}_below_cut": f"its score is below the cut of the filter {self.name!r}"}

    def fit(self, pool: PoolColumns) -> Filter:
        if self.top_fraction is None:
            return self
        count = sum(int(np.isfinite(self._values(frame)).sum()) for frame in pool(self.needs()))
        k = top_count(self.top_fraction, count)
        boundary = select_top(lambda: self._finite(pool), count, k) if k else Boundary(np.inf, 0, 0)
        return replace(self, boundary=boundary)

    def _values(self, frame: pl.DataFrame) -> np.ndarray:
        """float64 (n,), NaN where there is none."""
        return frame.select(self.value().cast(pl.Float64).fill_null(np.nan)).to_series().to_numpy()

    def _finite(self, pool: PoolColumns) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for frame in pool(self.columns()):
            value = self._values(frame)
            finite = np.isfinite(value)
            yield value[finite], frame["uid_hi"].to_numpy()[finite], frame["uid_lo"].to_numpy()[finite]

    def verdicts(self) -> list[Verdict]:
        own = self.value()  # a threshold is held against it in its own precision, as the reference does
        value = own.cast(pl.Float64)
        reason = f"{self.name}_below_cut"
        finite = Verdict("non_finite_score", ~value.is_finite(), value)
        if self.threshold is not None:
            return [finite, Verdict(reason, own < self.threshold, value, self.threshold)]
        if self.boundary is None:
            raise RuntimeError("fit the filter to its pool before asking for verdicts")
        return [finite, Verdict(reason, ~self.boundary.includes(value), value, self.boundary.score)]


@dataclass(kw_only=True)
class ScoreCut(Cut):
    """Keep the samples whose `column` is high enough; the cuts are those of `Cut`."""

    column: str

    def needs(self) -> list[str]:
        return [self.column]

    def numbers(self) -> list[str]:
        return [self.column]

    def value(self) -> pl.Expr:
        return pl.col(self.column)


def top_count(fraction: float, n: int) -> int:
    """round(fraction * n), halves up, on the decimal number the user wrote and not its binary neighbour."""
    return int(Fraction(str(fraction)) * n + Fraction(1, 2))

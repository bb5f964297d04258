"""What a filter is: the columns it needs, and its verdicts as polars expressions. Scores are never computed here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import polars as pl

from pipeline.cluster import ClusterConfig
from pipeline.tables import TableSet

PoolColumns = Callable[[Sequence[str]], Iterator[pl.DataFrame]]
F = TypeVar("F", bound="Filter")


@dataclass(frozen=True)
class Verdict:
    """One way to fail. `fails` is true for the rows it drops (null counts as true).

    value, cut: the number that decided and the one it was held against, null where the rule has none.
    """

    reason: str
    fails: pl.Expr
    value: pl.Expr | None = None
    cut: float | None = None


@dataclass(kw_only=True)
class Filter(ABC):
    """Decides from table columns whether a sample may train. Configured by name: `filters.<name>.<field>`.

    A filter looks at all readable samples of the pool, not at the survivors of others: filters commute,
    except for which of them is named as the reason.
    """

    name: str = ""

    @abstractmethod
    def columns(self) -> list[str]:
        """Table columns that `verdicts` reads."""

    def numbers(self) -> list[str]:
        """Those of `columns` that must hold numbers."""
        return []

    @abstractmethod
    def verdicts(self) -> list[Verdict]:
        """Ways to fail, in the order in which they are asked."""

    def reasons(self) -> dict[str, str]:
        """This filter's own reasons, each with its explanation."""
        return {}

    def makes(self) -> list[str]:
        """Those of `columns` that `prepare` makes where the tables do not have them."""
        return []

    def prepare(self: F, tables: TableSet, ids: Sequence[str], workers: ClusterConfig) -> F:
        """Columns that are costly are made here, on the cluster and once: they stay with the tables of `ids`."""
        return self

    def fit(self, pool: PoolColumns) -> Filter:
        """A filter whose cut depends on the pool finds it here, from columns of all readable samples."""
        return self

    def identity(self) -> dict[str, Any]:
        """What decides this filter's verdicts before it is fitted."""
        return {"filter": f"{type(self).__module__}.{type(self).__qualname__}", **asdict(self)}

    def named(self: F, name: str) -> F:
        return replace(self, name=name)

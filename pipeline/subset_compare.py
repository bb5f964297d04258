"""How two subsets of one pool differ in the columns of its feature tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from pipeline.tables import TableSet
from pipeline.uids import find_uids

SIDES = ("only A", "both", "only B")
SAMPLE = 100_000  # rows a side of which the median is taken
LANGUAGES = 5


@dataclass
class Side:
    """What one side holds: rows, sums of each number and of its square, a sample of it, languages."""

    rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    samples: dict[str, np.ndarray] = field(default_factory=dict)  # (draw, value) in two columns
    languages: Counter[str] = field(default_factory=Counter)

    def add(self, frame: pl.DataFrame, numbers: Sequence[str]) -> None:
        self.rows += len(frame)
        draw = frame[
            "uid_lo"
        ].to_numpy()  # uids are random: their lowest are a fair sample, and the same each time
        for name in numbers:
            values = frame[name].cast(pl.Float64).to_numpy()
            good = np.isfinite(values)
            self.counts[name] += int(good.sum())
            self.sums[name] += float(values[good].sum())  # type: ignore[assignment]
            pairs = np.stack([draw[good].astype(np.float64), values[good]], 1)
            both = np.concatenate([self.samples.get(name, np.empty((0, 2))), pairs])
            self.samples[name] = both[np.argsort(both[:, 0], kind="stable")[:SAMPLE]]
        self.languages.update(dict(frame["language"].cast(pl.String).drop_nulls().value_counts().iter_rows()))

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.counts[name] if self.counts[name] else None

    def median(self, name: str) -> float | None:
        return float(np.median(self.samples[name][:, 1])) if self.counts[name] else None


def compare_columns(a: np.ndarray, b: np.ndarray, tables: TableSet, ids: Sequence[str]) -> dict[str, Side]:
    """Numbers and languages of the samples in A alone, in both, and in B alone; copies count once.

    a, b: sorted subsets. Streams the tables once; membership is looked up in the (memory-mapped) subsets.
    """
    sides = {name: Side() for name in SIDES}
    column = tables.identity().get("column")
    scores = [column] if column else []
    own = ["uid_hi", "uid_lo", "status", "caption", "language", "width", "height", *scores]
    numbers = [*scores, "caption characters", "caption words", "short side", "long / short side"]
    for frame in _measured(tables, ids, own):
        hi, lo = frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy()
        in_a, in_b = (find_uids(s["f0"], s["f1"], hi, lo) >= 0 for s in (a, b))
        for name, mask in zip(SIDES, (in_a & ~in_b, in_a & in_b, in_b & ~in_a)):
            if mask.any():
                sides[name].add(frame.filter(pl.Series(mask)), numbers)
    return sides


def _measured(tables: TableSet, ids: Sequence[str], columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    short, long = pl.min_horizontal("width", "height"), pl.max_horizontal("width", "height")
    for _shard, frame in tables.stream(ids, columns):
        yield frame.filter(pl.col("status") == "ok").with_columns(
            short.alias("short side"), (long / short).alias("long / short side"),
            pl.col("caption").str.len_chars().alias("caption characters"),
            pl.col("caption").str.count_matches(r"\S+").alias("caption words"),
        )  # fmt: skip


def table(sides: dict[str, Side]) -> str:
    """Means (and medians) side by side, and the most frequent languages."""
    lines = [f"{'mean (median)':22}" + "".join(f"{name:>22}" for name in sides)]
    lines.append(f"{'samples':22}" + "".join(f"{s.rows:>22,}" for s in sides.values()))
    for name in dict.fromkeys(n for s in sides.values() for n in s.samples):
        cells = [
            f"{s.mean(name):,.4g} ({s.median(name):,.4g})" if s.counts[name] else "-" for s in sides.values()
        ]
        lines.append(f"{name:22}" + "".join(f"{c:>22}" for c in cells))
    frequent = sum((s.languages for s in sides.values()), Counter()).most_common(LANGUAGES)
    for language, _ in frequent:
        cells = [f"{s.languages[language] / s.rows:.2%}" if s.rows else "-" for s in sides.values()]
        lines.append(f"{f'language {language}':22}" + "".join(f"{c:>22}" for c in cells))
    return "\n".join(lines)

"""Choosing the cut: what each keep-rate would keep, from stored scores, in a few streaming passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from scipy.stats import binomtest

from filters.score import top_count
from pipeline import storage
from pipeline.errors import Refused
from pipeline.samples import parse_uid
from pipeline.select_top import select_tops
from pipeline.uids import SUBSET, find_uids

CONFIDENCE = 0.95
CHUNK = 1 << 20
TRUE_KINDS = (
    "clean",
    "exact_dup",
    "near_dup",
)  # of a pool whose truth.parquet names kinds of pairs: the right ones
Rows = Callable[[], Iterable[pl.DataFrame]]  # score, uid_hi, uid_lo of the rows that can be kept


@dataclass(frozen=True)
class Subset:
    """A subset file, sorted, looked up where it lies: memory does not grow with its size."""

    uids: np.ndarray  # u8,u8
    size: int  # uids, each once

    @classmethod
    def open(cls, path: str) -> Subset:
        """Raises Refused for a file that is not a sorted subset file."""
        try:
            uids = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError) as e:
            raise Refused(f"against={path}: {e}") from None
        if uids.ndim != 1 or uids.dtype != SUBSET:
            raise Refused(f"against={path}: {uids.dtype} {uids.shape}, a subset file is 1-D u8,u8")
        size, last = 0, None
        for start in range(0, len(uids), CHUNK):
            block = np.array(uids[start : start + CHUNK])
            hi, lo = block["f0"], block["f1"]
            after = (hi[1:] > hi[:-1]) | ((hi[1:] == hi[:-1]) & (lo[1:] > lo[:-1]))
            same = (hi[1:] == hi[:-1]) & (lo[1:] == lo[:-1])
            first = tuple(map(int, block[0]))
            if not (after | same).all() or (last is not None and first < last):
                raise Refused(f"against={path}: is not sorted; np.sort it first")
            size += int(after.sum()) + (last != first)
            last = tuple(map(int, block[-1]))
        return cls(uids, size)

    def has(self, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
        """bool (n,): which of the uids are in the subset. A bisection of all of them at once."""
        low, high = np.zeros(len(hi), np.int64), np.full(len(hi), len(self.uids), np.int64)
        while (open_ := low < high).any():
            middle = (low + high) // 2
            at = self.uids[np.where(open_, middle, 0)]
            before = (at["f0"] < hi) | ((at["f0"] == hi) & (at["f1"] < lo))
            low, high = np.where(open_ & before, middle + 1, low), np.where(open_ & ~before, middle, high)
        if not len(self.uids):
            return np.zeros(len(hi), bool)
        at = self.uids[np.minimum(low, len(self.uids) - 1)]
        return (at["f0"] == hi) & (at["f1"] == lo)


@dataclass(frozen=True)
class Truth:
    """A labelled sample of the pool: uids ascending, each once, and whether the pair is good."""

    hi: np.ndarray
    lo: np.ndarray
    good: np.ndarray

    @classmethod
    def open(cls, path: str) -> Truth:
        """From a parquet file with `uid` (32 hex digits) and `good` (true or false, 1 or 0).

        In place of `good`, `kind` may say it, as in the truth.parquet of the demo. Raises Refused for anything else, and when a uid is repeated.
        """
        with storage.open_input(path, "parquet", "truth") as f:
            frame = pl.read_parquet(f.read())
        if "good" not in frame.columns and "kind" in frame.columns:
            frame = frame.with_columns(good=pl.col("kind").is_in(TRUE_KINDS))
        if not {"uid", "good"} <= set(frame.columns):
            raise Refused(f"truth={path}: columns uid and good are needed; it has {', '.join(frame.columns)}")
        frame = frame.drop_nulls(["uid", "good"])
        try:
            halves = np.array([parse_uid(u) for u in frame["uid"]], np.uint64).reshape(-1, 2)
        except ValueError as e:
            raise Refused(f"truth={path}: {e}") from None
        order = np.lexsort((halves[:, 1], halves[:, 0]))
        halves, good = halves[order], frame["good"].cast(pl.Boolean).to_numpy()[order]
        if (halves[1:] == halves[:-1]).all(1).any():
            raise Refused(f"truth={path}: a uid stands in it more than once")
        return cls(np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1]), good)

    def labels(self, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
        """int (n,): 1 good, 0 not, -1 unlabelled."""
        at = find_uids(self.hi, self.lo, hi, lo)
        return np.where(at < 0, -1, self.good[at].astype(int)) if len(self.hi) else np.full(len(hi), -1)


def cut_table(
    rows: Rows, score: str, rates: Sequence[float], against: Subset | None, truth: Truth | None
) -> pl.DataFrame:
    """One row a keep-rate: threshold (the least score kept), count, and where asked for overlap and precision.

    rate: of the rows with a finite score. overlap: kept rows that the other subset keeps too; jaccard: overlap /
    (count + other - overlap); share: overlap / count. precision: good / labelled among kept rows, with its 95 %
    Wilson interval; recall: good kept / good in the pool. Both hold for the pool when the labelled rows are a
    random sample of it. Exact, by `select_tops`; memory is a block of rows and the labelled sample.
    """

    def finite() -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for frame in rows():
            keep = frame.filter(pl.col(score).cast(pl.Float64).is_finite())
            yield (
                keep[score].cast(pl.Float64).to_numpy(), keep["uid_hi"].to_numpy(), keep["uid_lo"].to_numpy()
            )  # fmt: skip

    total = sum(len(block[0]) for block in finite())
    counts = {rate: top_count(rate, total) for rate in sorted(rates)}
    kept_rates = [rate for rate, k in counts.items() if k]
    if not kept_rates:
        raise Refused(f"score={score}: {total} rows have a finite value, too few for any of these keep-rates")
    boundaries = select_tops(finite, total, [counts[r] for r in kept_rates])
    n = len(kept_rates)
    both, labelled, good = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    all_good = 0
    for frame in rows() if against or truth else ():
        hi, lo = frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy()
        other = against.has(hi, lo) if against else np.zeros(len(hi), bool)
        label = truth.labels(hi, lo) if truth else np.full(len(hi), -1)
        all_good += int((label == 1).sum())
        for i, boundary in enumerate(boundaries):
            kept = frame.select(boundary.includes(pl.col(score))).to_series().to_numpy()
            both[i] += (kept & other).sum()
            labelled[i] += (kept & (label >= 0)).sum()
            good[i] += (kept & (label == 1)).sum()
    found = []
    for i, (rate, boundary) in enumerate(zip(kept_rates, boundaries)):
        row: dict[str, Any] = {"rate": rate, "count": counts[rate], "threshold": boundary.score}
        if against:
            union = counts[rate] + against.size - int(both[i])
            row |= {"overlap": int(both[i]), "jaccard": both[i] / union, "share": both[i] / counts[rate]}
        if truth:
            row |= _precision(int(good[i]), int(labelled[i])) | {
                "recall": good[i] / all_good if all_good else None
            }
        found.append(row)
    return pl.DataFrame(found, infer_schema_length=None)


def _precision(good: int, labelled: int) -> dict[str, Any]:
    if not labelled:
        return {"labelled": 0, "precision": None, "precision_low": None, "precision_high": None}
    interval = binomtest(good, labelled).proportion_ci(CONFIDENCE, "wilson")
    return {
        "labelled": labelled, "precision": good / labelled,
        "precision_low": float(interval.low), "precision_high": float(interval.high),
    }  # fmt: skip


def draw(table: pl.DataFrame, score: str) -> Figure:
    """Threshold, and below it precision with its interval and overlap, over the keep-rate."""
    below = [c for c in ("precision", "recall", "jaccard", "share") if c in table.columns]
    figure = Figure(figsize=(7, 6 if below else 3.5), layout="constrained")
    axes = figure.subplots(2 if below else 1, 1, sharex=True, squeeze=False)[:, 0]
    rate = 100 * table["rate"].to_numpy()
    axes[0].plot(rate, table["threshold"], marker="o")
    axes[0].set_ylabel(f"threshold on {score}")
    for column in below:
        axes[1].plot(rate, table[column].cast(pl.Float64).to_numpy(), marker="o", label=column)
    if "precision" in below:
        low, high = (table[f"precision_{k}"].cast(pl.Float64).to_numpy() for k in ("low", "high"))
        axes[1].fill_between(rate, low, high, alpha=0.2)
    if below:
        axes[1].set_ylim(0, 1.02)
        axes[1].legend()
    axes[-1].set_xlabel("kept, % of the rows with a score")
    for ax in axes:
        ax.grid(alpha=0.3)
    return figure

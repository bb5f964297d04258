"""Cuts by a column: thresholds, and top fractions exact against a full sort."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from filters.score import ScoreCut, top_count
from filters.stage import decide

APART = (math.nan, math.inf, -math.inf, None)
SCORE = st.sampled_from([0.1, 0.25, 0.25, 0.5, *APART]) | st.floats(-1, 1, width=32)
UID = st.integers(0, 3) | st.integers(0, 2**64 - 1)
ROWS = st.lists(st.tuples(SCORE, UID, UID), max_size=60, unique_by=lambda r: r[1:])
FRACTION = st.sampled_from([0.15, 0.3, 0.5, 1.0, 0.001, 1e-05, 0.285, 0.145]) | st.floats(0.01, 1)


def table(rows: Sequence[tuple[float | None, int, int]]) -> pl.DataFrame:
    return pl.DataFrame(
        [(s, hi, lo, "ok") for s, hi, lo in rows],
        schema={"score_x": pl.Float32, "uid_hi": pl.UInt64, "uid_lo": pl.UInt64, "status": pl.String},
        orient="row",
    )


def decided(cut: ScoreCut, frame: pl.DataFrame, block: int = 7) -> pl.DataFrame:
    def pool(columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        for start in range(0, len(frame), block):
            yield frame[start : start + block].select(columns)

    return decide(frame, cut.named("x").fit(pool).verdicts(), None)


@settings(max_examples=150, deadline=None)
@given(ROWS, FRACTION)
@example([(0.5, i, 0) for i in range(10)], 0.15)
@example([(0.5, i, 0) for i in range(3)], 0.5)
@example([(math.nan, i, 0) for i in range(9)] + [(0.1, 9, 0)], 1.0)
def test_top_fraction_equals_a_full_sort(rows: list[tuple[float | None, int, int]], fraction: float) -> None:
    frame = table(rows)
    stored = frame.rows()
    finite = [r for r in stored if r[0] is not None and math.isfinite(r[0])]
    k = int(Fraction(str(fraction)) * len(finite) + Fraction(1, 2))
    best = {r[1:3] for r in sorted(finite, key=lambda r: (-r[0], r[1], r[2]))[:k]}
    out = decided(ScoreCut(column="score_x", top_fraction=fraction), frame)
    assert {(r["uid_hi"], r["uid_lo"]) for r in out.filter(pl.col("kept")).iter_rows(named=True)} == best
    below = {r[1:3] for r in finite} - best
    for row in out.iter_rows(named=True):
        key = (row["uid_hi"], row["uid_lo"])
        expected = None if key in best else "x_below_cut" if key in below else "non_finite_score"
        assert row["reason"] == expected


@pytest.mark.parametrize(
    ("fraction", "n", "count"),
    [
        (0.15, 10, 2),
        (0.15, 20, 3),
        (0.5, 3, 2),
        (0.5, 5, 3),
        (1.0, 7, 7),
        (0.1, 4, 0),
        (0.285, 100, 29),
        (1e-05, 50_000, 1),
    ],
)
def test_count_rounds_halves_up_on_the_decimal_as_written(fraction: float, n: int, count: int) -> None:
    assert top_count(fraction, n) == count


def test_threshold_keeps_equal_values_and_says_what_decided() -> None:
    frame = table([(0.25, 1, 0), (0.125, 2, 0), (math.nan, 3, 0), (math.inf, 4, 0), (None, 5, 0)])
    out = decided(ScoreCut(column="score_x", threshold=0.25), frame)
    assert out["reason"].to_list() == [None, "x_below_cut", *["non_finite_score"] * 3]
    assert out["value"].to_list()[:2] == [0.25, 0.125]
    assert out["cut"].to_list() == [0.25, 0.25, None, None, None]


def test_integer_columns_can_be_cut() -> None:
    frame = table([(0.1, n, 0) for n in range(4)]).with_columns(likes=pl.Series([5, 1, 9, None]))
    out = decided(ScoreCut(column="likes", threshold=5), frame)
    assert out["reason"].to_list() == [None, "x_below_cut", None, "non_finite_score"]


def test_verdicts_before_fitting_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="fit the filter"):
        ScoreCut(column="x", top_fraction=0.5).verdicts()

"""The exact k best, against a full sort."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import select_top as module
from pipeline.select_top import select_top

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCORE = st.sampled_from([-1.0, -0.0, 0.0, 0.25, 0.5, 1e-310, -1e300]) | FINITE
WORD = st.integers(0, 3) | st.integers(0, 2**64 - 1)
ROWS = st.lists(st.tuples(SCORE, WORD, WORD), min_size=1, max_size=80, unique_by=lambda r: r[1:])


def columns(rows: list[tuple[float, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    score, hi, lo = zip(*rows)
    return np.array(score), np.array(hi, np.uint64), np.array(lo, np.uint64)


@pytest.mark.parametrize("collect", [1 << 22, 4, 0])
def test_equals_a_full_sort(collect: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLLECT", collect)

    @settings(max_examples=30, deadline=None)
    @given(ROWS, st.data())
    def check(rows: list[tuple[float, int, int]], data: st.DataObject) -> None:
        k = data.draw(st.integers(1, len(rows)))
        size = data.draw(st.integers(1, len(rows)))

        def blocks() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
            for start in range(0, len(rows), size):
                yield columns(rows[start : start + size])

        boundary = select_top(blocks, len(rows), k)
        best = sorted(rows, key=lambda r: (-r[0], r[1], r[2]))[:k]
        score, hi, lo = columns(rows)
        table = pl.DataFrame({"score": score, "uid_hi": hi, "uid_lo": lo})
        kept = table.filter(boundary.includes(pl.col("score"))).rows()
        assert sorted(r[1:] for r in kept) == sorted(r[1:] for r in best)

    check()


@pytest.mark.parametrize("k", [0, 4])
def test_k_outside_the_rows_is_refused(k: int) -> None:
    block = columns([(0.1, 1, 1), (0.2, 2, 2), (0.3, 3, 3)])
    with pytest.raises(ValueError, match=r"k=\d: must lie in \[1, 3\]"):
        select_top(lambda: [block], 3, k)


def test_nan_and_null_are_never_in() -> None:
    boundary = select_top(lambda: [columns([(0.1, 1, 1)])], 1, 1)
    table = pl.DataFrame({"score": [0.2, None, float("nan"), 0.0], "uid_hi": [0] * 4, "uid_lo": [0] * 4})
    kept = table.cast({"uid_hi": pl.UInt64, "uid_lo": pl.UInt64}).select(boundary.includes(pl.col("score")))
    assert kept["score"].to_list() == [True, False, False, False]

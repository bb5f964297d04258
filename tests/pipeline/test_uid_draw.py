"""Numbers drawn by uid."""

from __future__ import annotations

import numpy as np

from pipeline.uid_draw import uniform


def test_uniform_whatever_the_uids() -> None:
    n = 20_000
    zero, count = np.zeros(n, np.uint64), np.arange(n, dtype=np.uint64)
    for hi, lo in ((zero, count), (zero, count << np.uint64(40)), (count, zero), (count, count)):
        draw = uniform(hi, lo, 0)
        assert len(np.unique(draw)) == n
        counts, _ = np.histogram(draw, 20, (0, 1))
        assert counts.min() > 0.85 * n / 20
        assert abs(np.corrcoef(draw[:-1], draw[1:])[0, 1]) < 0.03


def test_a_function_of_uid_and_seed_alone() -> None:
    hi, lo = (np.random.default_rng(s).integers(0, 2**64, 5_000, np.uint64) for s in (0, 1))
    draw = uniform(hi, lo, 0)
    np.testing.assert_array_equal(uniform(hi[::-1], lo[::-1], 0)[::-1], draw)
    assert abs(np.corrcoef(draw, uniform(hi, lo, 1))[0, 1]) < 0.03
    assert abs(np.corrcoef(draw, uniform(lo, hi, 0))[0, 1]) < 0.03


def test_draws_have_not_changed() -> None:
    draw = uniform(np.arange(3, dtype=np.uint64), np.full(3, 2**63, np.uint64), 7)
    assert draw.tolist() == [0.19583428774942457, 0.3720313967063894, 0.3832394791564979]

"""The draws under the rounds: the published generator, exact distributions, the same bits everywhere."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from selection.draws import derive, hypergeometric, philox, seed_key, shuffled, uniforms


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_answers_published_with_it(key, counter, answer):
    words = philox((np.asarray(key[0], np.uint64), np.asarray(key[1], np.uint64)), counter)
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match="seed=-1"):
        seed_key(-1)


def ints(*values):
    return [np.asarray(value, np.int64) for value in values]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.floats(0, 1), st.lists(st.floats(0, 1, exclude_max=True)))
def test_hypergeometric_inverts_the_distribution_function(good, bad, share, uniform):
    assume(good + bad > 0)
    sample = round(share * (good + bad))
    u = np.asarray(uniform, np.float64)
    drawn = hypergeometric(u, *(np.full(len(u), value) for value in ints(good, bad, sample)))
    exact = stats.hypergeom(good + bad, good, sample)
    assert (exact.cdf(drawn) >= u - 1e-9).all()
    assert (exact.cdf(drawn - 1) <= u + 1e-9).all()


@pytest.mark.parametrize(("good", "bad", "sample"), [(7, 5, 4), (5_000, 5_000, 1_000), (40, 10**9, 10**8)])
def test_hypergeometric_draws_follow_the_distribution(good, bad, sample):
    n = 40_000
    u = uniforms(derive(seed_key(3), 9), np.arange(n))
    drawn = hypergeometric(u, *(np.full(n, value) for value in ints(good, bad, sample)))
    exact = stats.hypergeom(good + bad, good, sample)
    edges = np.unique(exact.ppf(np.linspace(0, 1, 41)[1:-1]))
    observed = np.histogram(drawn, np.concatenate([[-np.inf], edges + 0.5, [np.inf]]))[0]
    expected = n * np.diff(np.concatenate([[0], exact.cdf(edges), [1]]))
    enough = expected > 5
    assert (
        stats.chisquare(
            observed[enough], expected[enough] * observed[enough].sum() / expected[enough].sum()
        ).pvalue
        > 1e-3
    )


def test_hypergeometric_holds_at_the_size_of_the_largest_pool():
    """Beyond numpy's limit of 10^9: 400 draws from 1.28 x 10^10 against the normal they are there."""
    n, total = 400, 12_800_000_000
    good, sample = total // 2, total // 10
    drawn = hypergeometric(
        uniforms(derive(seed_key(4), 9), np.arange(n)),
        *(np.full(n, v) for v in ints(good, total - good, sample)),
    )
    deviation = np.sqrt(sample * 0.5 * 0.5 * (total - sample) / (total - 1))
    scores = (drawn - sample / 2) / deviation
    observed = np.histogram(scores, stats.norm.ppf(np.linspace(0, 1, 17)))[0]
    assert stats.chisquare(observed).pvalue > 1e-3


def test_a_draw_is_the_same_alone_and_among_others():
    rng = np.random.default_rng(0)
    good, bad = rng.integers(0, 10_000_000, (2, 300)) // 10 ** rng.integers(0, 7, (2, 300))
    sample = (rng.random(300) * (good + bad)).astype(np.int64)
    u = rng.random(300)
    together = hypergeometric(u, good, bad, sample)
    alone = [hypergeometric(*(a[i : i + 1] for a in (u, good, bad, sample)))[0] for i in range(300)]
    assert together.tolist() == alone


def test_impossible_tails_neither_overflow_nor_escape_the_support():
    drawn = hypergeometric(
        np.asarray([0.0, 1 - 2**-53, 0.5, 0.5]), *ints([10**15, 10**15, 0, 5], [27, 27, 9, 0], [27, 27, 4, 3])
    )
    assert drawn.tolist()[2:] == [0, 3]
    assert ((drawn[:2] >= 0) & (drawn[:2] <= 27)).all()


def test_shuffled_segments_are_permutations_whoever_is_beside_them():
    sizes = np.asarray([5, 0, 1, 9])
    key = derive(seed_key(1), 2, np.arange(4))
    together = np.split(shuffled(key, 7, sizes), np.cumsum(sizes)[:-1])
    for i, part in enumerate(together):
        assert sorted(part.tolist()) == list(range(sizes[i]))
        assert part.tolist() == shuffled((key[0][i : i + 1], key[1][i : i + 1]), 7, sizes[i : i + 1]).tolist()


def test_all_orders_of_four_are_equally_likely():
    n = 24_000
    orders = shuffled(derive(seed_key(5), 2, np.arange(n)), 0, np.full(n, 4)).reshape(n, 4)
    observed = np.unique(orders @ [1000, 100, 10, 1], return_counts=True)[1]
    assert len(observed) == 24
    assert stats.chisquare(observed).pvalue > 1e-3

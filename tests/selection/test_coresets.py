"""Coresets: nested orders, and what each is after."""

import numpy as np
import pytest

from selection.coresets import CORESETS, herding, order


@pytest.fixture
def clusters():
    """Four tight clusters of 50 around the corners of a square, (200, 2)."""
    corners = np.array([[0, 0], [0, 10], [10, 0], [10, 10]])
    rng = np.random.default_rng(0)
    return (corners.repeat(50, 0) + rng.normal(0, 0.1, (200, 2))).astype(np.float32)


@pytest.mark.parametrize("method", CORESETS)
def test_orders_are_nested_distinct_and_repeatable(clusters, method):
    whole = order(method, clusters, 20, seed=1)
    assert len(set(whole.tolist())) == 20
    assert np.array_equal(order(method, clusters, 20, seed=1), whole)
    assert np.array_equal(order(method, clusters, 7, seed=1), whole[:7])


def test_the_first_rows_of_kmeans_cover_the_clusters(clusters):
    assert sorted(order("kmeans", clusters, 8, seed=0)[:4] // 50) == [0, 1, 2, 3]


def test_every_prefix_of_kmeans_is_close_to_the_best_of_its_size():
    x = np.random.default_rng(2).normal(size=(40, 2)).astype(np.float32)

    def objective(rows):
        return ((x[:, None] - x[rows]) ** 2).sum(2).min(1).sum()

    chosen = order("kmeans", x, 3, seed=0)
    start = ((x - x.mean(0)) ** 2).sum()
    pairs = [objective([a, b]) for a in range(40) for b in range(a)]
    assert start - objective(chosen[:2]) >= (1 - 1 / np.e) * (start - min(pairs))
    assert objective(chosen[:3]) < objective(chosen[:2]) < objective(chosen[:1])


def test_herding_keeps_the_mean_of_every_prefix_near_the_whole(clusters):
    x = clusters - clusters.mean(0)
    chosen = herding(x, 40)
    errors = [np.linalg.norm(x[chosen[:s]].mean(0)) for s in range(1, 41)]
    random = [np.linalg.norm(x[np.random.default_rng(s).permutation(200)[:s]].mean(0)) for s in range(1, 41)]
    assert np.mean(errors[3:]) < 0.3 * np.mean(random[3:])


def test_prototypes_are_nearest_to_the_mean_or_farthest():
    x = np.array([[0.0], [1.0], [2.0], [9.0]])  # mean 3
    assert order("prototypes_easy", x, 4, 0).tolist() == [2, 1, 0, 3]
    assert order("prototypes_hard", x, 4, 0).tolist() == [3, 0, 1, 2]


def test_more_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="3 samples, 4 are wanted"):
        order("random", np.zeros((3, 2)), 4, 0)

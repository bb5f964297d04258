import pickle

import numpy as np
import pytest

from selection.influence import Curvature, HeldOut, NpyShard, Rows, fit_head, influence, objective
from selection.influence.head import _objective
from selection.influence.solve import dense_hessian, hessian_products


def sample(n=240, d=5, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * np.linspace(0.2, 2, d)
    y = (x @ rng.normal(size=(d, classes)) + 2 * rng.gumbel(size=(n, classes))).argmax(axis=1)
    return x, y


@pytest.mark.parametrize("classes", [2, 3])
def test_hessian_is_the_derivative_of_the_gradient(classes):
    x, y = sample(classes=classes)
    rows = Rows.from_arrays(x, y)
    w = np.random.default_rng(1).normal(size=(1 if classes == 2 else classes, 5)) / 3
    h = dense_hessian(rows, w, 0.3)
    step = 1e-5
    for i in range(w.size):
        e = np.zeros(w.size)
        e[i] = step
        e = e.reshape(w.shape)
        difference = _objective(rows, w + e, 0.3, classes)[1] - _objective(rows, w - e, 0.3, classes)[1]
        assert np.abs(difference.ravel() / (2 * step) - h[i]).max() < 1e-5


@pytest.mark.parametrize("classes", [2, 3])
def test_products_equal_the_dense_hessian_on_kept_rows(classes):
    x, y = sample(classes=classes)
    keep = np.random.default_rng(2).random(240) < 0.7
    rng = np.random.default_rng(1)
    columns = 1 if classes == 2 else classes
    w, u = rng.normal(size=(columns, 5)), rng.normal(size=(4, columns, 5))
    h = dense_hessian(Rows.from_arrays(x[keep], y[keep]), w, 0.3)
    products = hessian_products(Rows.from_arrays(x, y).where(keep), w, 0.3, u)
    assert np.allclose(products.reshape(4, -1), u.reshape(4, -1) @ h, rtol=1e-12)


@pytest.mark.parametrize("classes", [2, 6])
def test_conjugate_gradient_agrees_with_cholesky_and_reports_its_residual(classes):
    x, y = sample(n=600, d=20, classes=classes)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=0.05, classes=classes)
    g = np.random.default_rng(3).normal(size=(3, *head.weights.shape))
    g[1] = 0
    exact = Curvature(rows, head.weights, 0.05).solve(g)
    iterated = Curvature(rows, head.weights, 0.05, exact_limit=0).solve(g, tolerance=1e-10)
    assert (exact.method, iterated.method) == ("cholesky", "conjugate_gradient")
    assert np.abs(exact.v - iterated.v).max() < 1e-8 * np.abs(exact.v).max()
    assert exact.residual.max() < 1e-12
    assert iterated.residual.max() < 1e-9
    assert 0 < iterated.iterations < 60
    if classes == 2:  # the preconditioner is the Hessian itself
        assert iterated.iterations == 1
        return
    short = Curvature(rows, head.weights, 0.05, exact_limit=0).solve(g, max_iterations=1)
    assert short.residual[0] > 1e-8


@pytest.mark.parametrize("exact_limit", [0, 8_000])
@pytest.mark.parametrize("classes", [2, 3])
def test_one_shard_and_twenty_give_the_same_influence(classes, exact_limit):
    x, y = sample(n=500, classes=classes)
    order = np.argsort(y, kind="stable")  # shards of one class: the case that averaged inverses get wrong
    x, y = x[order], y[order]
    held = HeldOut(*sample(n=80, classes=classes, seed=9))
    deltas = []
    for shards in (1, 20):
        rows = Rows.from_arrays(x, y, shards=shards)
        head = fit_head(rows, l2=0.1, classes=classes)
        curvature = Curvature(rows, head.weights, 0.1, exact_limit=exact_limit)
        terms = [objective("utility", held, head)]
        deltas.append(influence(rows, head, terms, curvature=curvature).delta_if_removed)
    assert np.abs(deltas[0] - deltas[1]).max() <= 1e-6 * np.abs(deltas[0]).max()


def test_passes_survive_the_trip_to_a_worker(tmp_path):
    x, y = sample(classes=3)
    np.save(tmp_path / "a.npy", x[:100].astype(np.float16))
    np.save(tmp_path / "b.npy", x[100:].astype(np.float16))
    shards = [NpyShard(str(tmp_path / "a.npy"), y[:100]), NpyShard(str(tmp_path / "b.npy"), y[100:])]

    def far_away(function, tasks):
        return [pickle.loads(pickle.dumps(function))(pickle.loads(pickle.dumps(task))) for task in tasks]

    held = HeldOut(*sample(n=60, classes=3, seed=4))
    results = []
    for ordered_map in (map, far_away):
        rows = Rows(shards, ordered_map=ordered_map)
        head = fit_head(rows, l2=1, classes=3)
        results.append(influence(rows, head, [objective("utility", held, head)]).delta_if_removed)
    assert (results[0] == results[1]).all()
    assert np.array_equal(rows.take(np.array([150, 3])), x[[150, 3]].astype(np.float16))


def test_shards_of_another_width_are_refused(tmp_path):
    x, y = sample()
    a, b = Rows.from_arrays(x, y).shards[0], Rows.from_arrays(x[:, :4], y).shards[0]
    with pytest.raises(ValueError, match=r"\(240, 4\).*expected \(240, 5\)"):
        fit_head(Rows([a, b]), l2=1, classes=2)

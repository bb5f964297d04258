import numpy as np
import pytest

from selection.influence import (
    Curvature,
    HeldOut,
    Rows,
    combine,
    fit_head,
    influence,
    objective,
    score_rows,
    scoring_cost,
)


def sample(n, d=5, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    truth = np.random.default_rng(99).normal(size=(d, classes))
    x = rng.normal(size=(n, d))
    y = (x @ truth + 1.5 * rng.gumbel(size=(n, classes))).argmax(axis=1)
    return x, y, rng.integers(0, 2, n)


def leave_one_out(rows, head, terms):
    base = [term.value(head) for term in terms]
    exact = []
    for row in range(rows.n):
        keep = np.arange(rows.n) != row
        refit = fit_head(rows.where(keep), l2=head.l2, classes=head.classes, start=head, tolerance=1e-11)
        exact.append([term.value(refit) - b for term, b in zip(terms, base)])
    return np.array(exact)


@pytest.mark.parametrize("classes", [2, 3])
def test_agrees_with_exact_leave_one_out(classes):
    x, y, _ = sample(300, classes=classes)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=0.2, classes=classes, tolerance=1e-11)
    held = HeldOut(*sample(200, classes=classes, seed=1))
    terms = [objective(name, held, head) for name in ("utility", "demographic_parity")]
    exact = leave_one_out(rows, head, terms)
    errors = {}
    for leverage in (False, True):
        estimate = influence(rows, head, terms, leverage=leverage).delta_if_removed
        errors[leverage] = np.abs(estimate - exact).sum()
        if leverage:
            for k in range(2):
                assert np.corrcoef(estimate[:, k], exact[:, k])[0, 1] > 0.99
                assert np.polyfit(estimate[:, k], exact[:, k], 1)[0] == pytest.approx(1, abs=0.06)
    assert errors[True] < errors[False]


def test_leverage_is_one_exact_newton_step():
    x, y, _ = sample(60)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=0.5, classes=2)
    held = HeldOut(*sample(50, seed=1))
    term = objective("utility", held, head)
    p = head.probabilities(x)[:, 1]
    delta = influence(rows, head, [term]).delta_if_removed[:, 0]
    for row in range(60):
        others = np.arange(60) != row
        h = (x[others] * (p * (1 - p))[others, None]).T @ x[others] + 0.5 * np.eye(5)
        step = np.linalg.solve(h, (p[row] - y[row]) * x[row])
        assert delta[row] == pytest.approx(float(term.gradient(head)[0] @ step), rel=1e-9)


def test_many_objectives_in_one_pass_equal_one_at_a_time():
    x, y, _ = sample(300, classes=3)
    rows = Rows.from_arrays(x, y, shards=3)
    head = fit_head(rows, l2=1, classes=3)
    held = HeldOut(*sample(100, classes=3, seed=1))
    terms = [objective(name, held, head) for name in ("utility", "robustness", "equalized_odds")]
    together = influence(rows, head, terms)
    for k, term in enumerate(terms):
        assert np.allclose(together.delta_if_removed[:, k], influence(rows, head, [term]).column(term.name))
    scale = 1 / np.abs(together.base)
    weighted = together.delta_if_removed @ (np.array([1, 2, 3]) * scale)
    assert np.allclose(combine(together, (1, 2, 3)), weighted)


def test_float32_and_float16_rows_are_scored_in_float32():
    x, y, _ = sample(400)
    held = HeldOut(*sample(100, seed=1))
    head = fit_head(Rows.from_arrays(x, y), l2=1, classes=2)
    v = (
        Curvature(Rows.from_arrays(x, y), head.weights, 1)
        .solve(objective("utility", held, head).gradient(head)[None])
        .v
    )
    exact = score_rows(Rows.from_arrays(x, y), head, v)
    for dtype, tolerance in ((np.float32, 1e-5), (np.float16, 5e-3)):
        scored = score_rows(Rows.from_arrays(x.astype(dtype), y), head, v)
        assert scored.dtype == np.float64
        assert np.abs(scored - exact).max() < tolerance * np.abs(exact).max()


def test_extreme_rows_are_of_their_sign_only():
    x, y, _ = sample(100)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=1, classes=2)
    scores = influence(rows, head, [objective("utility", HeldOut(*sample(50, seed=1)), head)])
    harmful, helpful = scores.most_harmful("utility", 100), scores.most_helpful("utility", 100)
    delta = scores.column("utility")
    assert (np.diff(delta[harmful]) >= 0).all()
    assert (delta[harmful] < 0).all()
    assert (delta[helpful] > 0).all()
    assert len(harmful) + len(helpful) == 100


def test_leverage_of_too_many_classes_is_refused():
    x, y, _ = sample(300, classes=120)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=5, classes=120)
    term = objective("utility", HeldOut(x, y), head)
    with pytest.raises(ValueError, match="leverage=true: 120 classes"):
        influence(rows, head, [term])


def test_cost_is_one_gemm():
    cost = scoring_cost(n=1_000_000, d=512, classes=2, objectives=4, itemsize=4)
    assert cost.flops == pytest.approx(2 * 1e6 * 512 * 5, rel=0.01)
    assert cost.bytes == 1e6 * 512 * 4

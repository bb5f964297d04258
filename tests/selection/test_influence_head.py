import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from selection.influence import FitError, Rows, fit_head
from selection.influence import head as head_module


def sample(n=200, d=6, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    y = (x @ rng.normal(size=(d, classes)) + 2 * rng.gumbel(size=(n, classes))).argmax(axis=1)
    return x, y


@pytest.mark.parametrize("classes", [2, 3])
def test_fit_is_the_minimum_that_sklearn_finds(classes):
    x, y = sample(classes=classes)
    head = fit_head(Rows.from_arrays(x, y), l2=0.7, classes=classes)
    peer = LogisticRegression(C=1 / 0.7, fit_intercept=False, tol=1e-10, max_iter=10_000).fit(x, y)
    assert np.abs(head.weights - peer.coef_).max() < 1e-5
    assert np.abs(head.probabilities(x) - peer.predict_proba(x)).max() < 1e-5
    assert (head.predict(x) == peer.predict(x)).all()
    assert head.gradient_norm < 1e-6


@pytest.mark.parametrize("classes", [2, 4])
def test_conjugate_gradient_steps_reach_the_same_head_as_dense_ones(classes, monkeypatch):
    rows = Rows.from_arrays(*sample(classes=classes))
    dense = fit_head(rows, l2=0.1, classes=classes)
    monkeypatch.setattr(head_module, "DENSE_STEP_LIMIT", 0)
    assert np.abs(fit_head(rows, l2=0.1, classes=classes).weights - dense.weights).max() < 1e-8


def test_badly_scaled_features_converge_because_steps_are_damped():
    x, y = sample()
    x[:, 0] *= 300
    x[0] *= 50
    assert fit_head(Rows.from_arrays(x, y), l2=1e-3, classes=2).gradient_norm < 1e-3


def test_refit_from_a_neighbour_is_the_same_head_in_fewer_steps():
    x, y = sample()
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=0.5, classes=2)
    keep = np.arange(200) != 7
    cold = fit_head(rows.where(keep), l2=0.5, classes=2)
    warm = fit_head(rows.where(keep), l2=0.5, classes=2, start=head)
    assert np.abs(cold.weights - warm.weights).max() < 1e-7
    assert warm.iterations < cold.iterations


@pytest.mark.filterwarnings("ignore:invalid value")
def test_refusals():
    x, y = sample()
    with pytest.raises(ValueError, match="l2=0"):
        fit_head(Rows.from_arrays(x, y), l2=0, classes=2)
    with pytest.raises(ValueError, match=r"labels: 0\.\.2"):
        fit_head(Rows.from_arrays(x, np.r_[y[:-1], 2]), l2=1, classes=2)
    with pytest.raises(ValueError, match="NaN"):
        fit_head(Rows.from_arrays(np.r_[x[:-1], np.full((1, 6), np.nan)], y), l2=1, classes=2)
    with pytest.raises(FitError, match="gradient norm"):
        fit_head(Rows.from_arrays(x, y), l2=1, classes=2, max_iterations=1)
    with pytest.raises(ValueError, match="every row is removed"):
        fit_head(Rows.from_arrays(x, y).where(np.zeros(200, bool)), l2=1, classes=2)

import numpy as np
import pytest

from selection.influence import (
    OBJECTIVES,
    Head,
    HeldOut,
    Rows,
    attacked,
    fit_head,
    influence,
    measure,
    objective,
)


def sample(n=300, d=5, classes=2, groups=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    s = rng.integers(0, groups, n)
    x[:, 0] += s
    y = (x @ rng.normal(size=(d, classes)) + rng.gumbel(size=(n, classes))).argmax(axis=1)
    return x, y, s


def some_head(classes, seed=1):
    shape = (1 if classes == 2 else classes, 5)
    return Head(np.random.default_rng(seed).normal(size=shape), 1.0, classes)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_is_the_derivative_of_the_value(name, classes, groups):
    head = some_head(classes)
    term = objective(name, HeldOut(*sample(classes=classes, groups=groups)), some_head(classes, seed=2))
    gradient = term.gradient(head)
    step = 1e-6
    for index in np.ndindex(*gradient.shape):
        values = []
        for sign in (1, -1):
            w = head.weights.copy()
            w[index] += sign * step
            values.append(term.value(Head(w, 1.0, classes)))
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient[index], abs=1e-4, rel=1e-5)


def test_gaps_are_fairlearns():
    # fairlearn.metrics: *_difference(method="between_groups") is the largest less the smallest group;
    # equalized odds with agg="worst_case" is the larger of the gaps in true and false positive rate.
    x, y, s = sample(groups=3)
    head = some_head(2)
    decided = (x @ head.weights[0] > 0).astype(int)
    selection = [decided[s == g].mean() for g in range(3)]
    true_positive = [decided[(s == g) & (y == 1)].mean() for g in range(3)]
    false_positive = [decided[(s == g) & (y == 0)].mean() for g in range(3)]
    gaps = measure(head, HeldOut(x, y, s), head).gaps
    spread = [max(rates) - min(rates) for rates in (selection, true_positive, false_positive)]
    assert gaps["demographic_parity"] == pytest.approx(spread[0])
    assert gaps["equal_opportunity"] == pytest.approx(spread[1])
    assert gaps["equalized_odds"] == pytest.approx(max(spread[1:]))


def test_signed_gaps_tell_who_is_ahead():
    x, y, s = sample()
    head = Head(np.array([[1.0, 0, 0, 0, 0]]), 1.0, 2)  # group 1 is shifted upwards in this feature
    ahead = measure(head, HeldOut(x, y, s), head)
    behind = measure(head, HeldOut(x, y, 1 - s), head)
    assert ahead.signed_gaps["demographic_parity"] == ahead.gaps["demographic_parity"] > 0
    assert behind.signed_gaps["demographic_parity"] == -behind.gaps["demographic_parity"]


def test_attack_of_strength_one_lands_on_the_boundary():
    x, y, _ = sample(classes=3)
    binary, many = some_head(2), some_head(3)
    assert np.abs(binary.logits(attacked(binary, x, strength=1.0))).max() < 1e-12
    top = np.sort(many.logits(attacked(many, x, strength=1.0)), axis=1)
    crossed = many.logits(attacked(many, x)).argmax(axis=1) != many.predict(x)
    assert np.isclose(top[:, -1], top[:, -2]).mean() > 0.5  # unless the third class is nearer by then
    assert crossed.all()
    assert measure(binary, HeldOut(x, (y > 0).astype(int)), binary).robust_accuracy == pytest.approx(
        1 - measure(binary, HeldOut(x, (y > 0).astype(int)), binary).accuracy
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_negative_delta_means_that_removing_the_row_lowers_the_objective(name):
    x, y, _s = sample(n=400, seed=3)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=1, classes=2)
    term = objective(name, HeldOut(*sample(n=200, seed=3)), head)
    scores = influence(rows, head, [term])
    for row, sign in ((scores.most_harmful(name, 1)[0], -1), (scores.most_helpful(name, 1)[0], 1)):
        refit = fit_head(rows.where(np.arange(400) != row), l2=1, classes=2)
        change = term.value(refit) - term.value(head)
        assert np.sign(scores.column(name)[row]) == np.sign(change) == sign


def test_refusals():
    x, y, s = sample()
    head = some_head(2)
    with pytest.raises(ValueError, match="objective=fairness: one of utility"):
        objective("fairness", HeldOut(x, y, s), head)
    with pytest.raises(ValueError, match="no sensitive groups"):
        objective("demographic_parity", HeldOut(x, y), head)
    with pytest.raises(ValueError, match="positive=0"):
        objective("demographic_parity", HeldOut(x, y, s), head, positive=0)
    with pytest.raises(ValueError, match="at least two"):
        objective("demographic_parity", HeldOut(x, y, np.zeros_like(s)), head).value(head)
    with pytest.raises(ValueError, match="group 1: no positive rows"):
        objective("equal_opportunity", HeldOut(x, np.where(s == 1, 0, y), s), head).value(head)
    with pytest.raises(ValueError, match="want"):
        HeldOut(x, y[:-1])
    assert measure(head, HeldOut(x, np.where(s == 1, 0, y), s), head).gaps["equalized_odds"] is None

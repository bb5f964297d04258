"""What is built on the scores: explanation, label errors, active learning, online selection."""

import numpy as np
import pytest

from selection.influence import (
    HeldOut,
    Rows,
    SelectionConfig,
    fit_head,
)
from selection.influence.active import predicted_influence
from selection.influence.explain import explain
from selection.influence.labels import label_errors
from selection.influence.online import select_online


def sample(n, seed, classes=3, d=6, flipped=0.0):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(5).normal(size=(classes, d)) * 2
    clean = rng.integers(0, classes, n)
    x = centres[clean] + rng.normal(size=(n, d))
    wrong = rng.random(n) < flipped
    return x, np.where(wrong, (clean + 1) % classes, clean), wrong


def test_tree_finds_a_planted_rule_and_names_it(tmp_path):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2000, 3))
    delta = np.where((features[:, 1] > 0.3) & (features[:, 2] < 0), -2e-4, 1e-4) + 1e-5 * rng.normal(
        size=2000
    )
    tree = explain("utility", features, delta, ["age", "hours", "gain"])
    assert tree.r2 > 0.9
    assert "explains 9" in tree.verdict
    assert "hours <= 0.3" in tree.text
    assert "gain" in tree.text
    assert "-0.0002" in tree.text
    tree.draw(tmp_path / "a")
    tree.draw(tmp_path / "b")
    assert (tmp_path / "a").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tree_says_when_it_explains_nothing():
    rng = np.random.default_rng(0)
    tree = explain("utility", rng.normal(size=(400, 3)), rng.normal(size=400), ["a", "b", "c"])
    assert tree.r2 < 0.1
    assert "explains nothing" in tree.verdict
    with pytest.raises(ValueError, match="at least 20"):
        explain("utility", np.zeros((10, 1)), np.zeros(10), ["a"])
    with pytest.raises(ValueError, match=r"expected \(400, 2\)"):
        explain("utility", np.zeros((400, 3)), np.zeros(400), ["a", "b"])


def test_label_errors_are_found_with_their_right_label():
    x, y, wrong = sample(900, 0, flipped=0.1)
    rows = Rows.from_arrays(x, y)
    found = label_errors(rows, fit_head(rows, l2=1, classes=3))
    first = found.row[: wrong.sum()]
    assert wrong[first].mean() > 0.9
    assert (found.given == y[found.row]).all()
    right = (y - 1) % 3
    hits = wrong[first]
    assert (found.suggested[: len(first)][hits] == right[first][hits]).mean() > 0.9
    assert (np.diff(found.confidence) >= 0).all()


def test_influence_on_trusted_rows_moves_label_errors_up_without_adding_any():
    x, y, _ = sample(900, 0, flipped=0.1)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=1, classes=3)
    alone = label_errors(rows, head)
    delta = np.zeros(900)
    delta[alone.row] = np.arange(len(alone.row))
    delta[alone.row[-1]] = -1  # the least improbable label hurts most
    both = label_errors(rows, head, delta=delta)
    assert set(both.row) == set(alone.row)
    assert list(both.row).index(alone.row[-1]) < len(alone.row) / 2 + 1
    assert both.row[0] == alone.row[0]


@pytest.mark.parametrize("classes", [2, 3])
def test_label_confidence_is_the_leave_one_out_probability(classes):
    x, y, _ = sample(90, 0, classes=classes, flipped=0.2)
    rows = Rows.from_arrays(x, y)
    head = fit_head(rows, l2=1, classes=classes)
    found = label_errors(rows, head)
    assert len(found.row) > 5
    for row, confidence in zip(found.row, found.confidence):
        refit = fit_head(rows.where(np.arange(90) != row), l2=1, classes=classes, start=head)
        exact = refit.probabilities(x[row : row + 1])[0, y[row]]
        fitted = head.probabilities(x[row : row + 1])[0, y[row]]
        assert abs(confidence - exact) < 0.5 * abs(fitted - exact) + 1e-4


def test_unlabelled_rows_like_the_helpful_ones_are_proposed_first():
    rng = np.random.default_rng(0)
    x, new = rng.normal(size=(400, 3)), rng.normal(size=(200, 3))
    delta = np.where(x[:, 1] > 0.5, 1e-3, -1e-4) + 1e-5 * rng.normal(size=400)
    value = predicted_influence(x, delta, new)
    first = np.argsort(-value, kind="stable")[:40]
    assert (new[first, 1] > 0.45).all()
    assert value[first].min() > 9e-4
    with pytest.raises(ValueError, match="at least 20"):
        predicted_influence(x[:5], delta[:5], new)


def test_online_trims_poisoned_batches_and_leaves_clean_ones():
    batches, wrongs = [], []
    for seed in range(4):
        x, y, wrong = sample(200, seed, flipped=0.3 if seed == 2 else 0.0)
        batches.append((x, y))
        wrongs.append(wrong)
    held, guard = HeldOut(*sample(300, 10)[:2]), HeldOut(*sample(300, 11)[:2])
    steps = list(select_online(batches, held, SelectionConfig(budget=0.2), l2=1, classes=3, guard=guard))
    assert [len(step.kept) for step in steps] == [200] * 4
    poisoned = ~steps[2].kept
    assert poisoned.sum() == 40
    assert wrongs[2][poisoned].mean() > 0.9
    kept = sum(int(step.kept.sum()) for step in steps)
    assert len(steps[3].selection.kept) == kept + int((~steps[3].kept).sum())

import numpy as np
import pytest

from selection.influence import HeldOut, Rows, SelectionConfig, fit_head, select
from selection.influence.select import combine


def truth(d):
    return np.random.default_rng(7).normal(size=d)


def sample(n, seed, d=8, flipped=0.0):
    """Rows of one linear rule; a share of labels flipped; feature 0 leans with the group."""
    rng = np.random.default_rng(seed)
    s = rng.integers(0, 2, n)
    x = rng.normal(size=(n, d))
    x[:, 0] += 0.8 * (2 * s - 1)
    y = (x @ truth(d) + x[:, 0] + 0.5 * rng.logistic(size=n) > 0).astype(int)
    wrong = rng.random(n) < flipped
    return x, np.where(wrong, 1 - y, y), s, wrong


@pytest.fixture(scope="module")
def task():
    x, y, s, wrong = sample(1500, 0, flipped=0.2)
    held, guard, test = (HeldOut(*sample(600, seed)[:3]) for seed in (1, 2, 3))
    return Rows.from_arrays(x, y, shards=3), held, guard, test, s, wrong


def test_harmful_rows_are_the_mislabelled_ones_and_removing_them_helps(task):
    rows, held, guard, test, _, wrong = task
    config = SelectionConfig(budget=0.1, rounds=3)
    result = select(rows, held, config, l2=1, guard=guard, others={"test": test})
    assert 50 < result.removed.sum() <= 150
    assert wrong[result.removed].mean() > 0.9
    before, after = result.metrics["test"]
    assert after.log_loss < before.log_loss
    assert result.realised["utility"] < 0
    assert result.verdict.startswith(f"removed {result.removed.sum()} of 1500 rows")


def test_rounds_predict_better_than_one_shot(task):
    rows, held, _guard, *_ = task
    gaps = []
    for rounds in (1, 8):
        config = SelectionConfig(budget=0.1, rounds=rounds, guard=False)
        result = select(rows, held, config, l2=1)
        gaps.append(abs(result.predicted["utility"] / result.realised["utility"] - 1))
        assert len(result.rounds) == rounds
        assert sum(r.removed for r in result.rounds) == 150
        assert sum(r.realised["utility"] for r in result.rounds) == pytest.approx(result.realised["utility"])
    assert gaps[1] < gaps[0] / 2


def test_without_guard_exactly_the_budget_goes_lowest_first(task):
    rows, held, *_ = task
    result = select(rows, held, SelectionConfig(budget=0.9, guard=False), l2=1)
    delta = result.influence.column("utility")
    assert result.removed.sum() == 1350
    assert delta[result.removed].max() <= delta[result.kept].min()
    assert (delta[result.removed] > 0).any()


def test_with_guard_only_harmful_rows_go(task):
    rows, held, guard, *_ = task
    result = select(rows, held, SelectionConfig(budget=0.9, objective="robustness"), l2=1, guard=guard)
    assert (result.influence.column("robustness")[result.removed] < 0).all()


@pytest.mark.parametrize("name", ["utility", "demographic_parity", "equalized_odds", "robustness"])
def test_guard_never_ends_below_the_base(task, name):
    rows, held, guard, *_ = task
    result = select(rows, held, SelectionConfig(objective=name, budget=0.3, rounds=4), l2=1, guard=guard)
    before, after = result.metrics["guard"]
    assert after.accuracy >= before.accuracy
    assert result.kept.sum() + sum(r.removed for r in result.rounds) == 1500


def test_parity_selection_narrows_the_gap_and_never_turns_it(task):
    rows, held, guard, _, s, _ = task
    # Labels that are unjust to one group: trimming them narrows the gap and serves accuracy as well.
    unjust = (s == 0) & (np.random.default_rng(0).random(1500) < 0.4)
    rows = Rows.from_arrays(rows.take(np.arange(1500)), np.where(unjust, 0, rows.labels()))
    config = SelectionConfig(objective="demographic_parity", budget=0.5, rounds=5)
    result = select(rows, held, config, l2=1, guard=guard)
    before, after = result.metrics["influence"]
    assert 0 <= after.signed_gaps["demographic_parity"] < before.signed_gaps["demographic_parity"]
    unguarded = SelectionConfig(objective="demographic_parity", budget=0.4, guard=False)
    _, after = select(rows, held, unguarded, l2=1).metrics["influence"]
    assert after.signed_gaps["demographic_parity"] < 0


def test_remove_nothing_is_said_plainly(task):
    rows, held, guard, *_ = task
    # A guard set with the opposite rule: whatever helps the influence set hurts there.
    opposite = HeldOut(guard.x, 1 - guard.y, guard.s)
    result = select(rows, held, SelectionConfig(budget=0.05), l2=1, guard=opposite)
    assert not result.removed.any()
    assert result.verdict.startswith("remove nothing: removing 1 more was refused, as ")
    assert result.after is result.base
    assert result.predicted == result.realised == {"utility": 0.0}
    clean = Rows.from_arrays(np.eye(4)[[0, 1]], np.array([0, 1]))
    result = select(
        clean,
        HeldOut(np.eye(4)[[0, 1]], np.array([0, 1])),
        SelectionConfig(budget=1),
        l2=1,
        guard=held_like(4),
    )
    assert result.verdict == "remove nothing: no harmful row is left"


def held_like(d):
    return HeldOut(np.eye(d)[[0, 1]], np.array([0, 1]))


def test_a_budget_smaller_than_the_rounds_is_spent_and_one_of_no_row_is_said(task):
    rows, held, *_ = task
    result = select(rows, held, SelectionConfig(budget=3, rounds=5, guard=False), l2=1)
    assert [r.asked for r in result.rounds] == [0, 1, 0, 1, 1]
    assert result.removed.sum() == 3
    result = select(rows, held, SelectionConfig(budget=1e-4, guard=False), l2=1)
    assert result.verdict == "remove nothing: the budget comes to no row"


def test_floors_hold(task):
    rows, held, _, _, s, _ = task
    labels = rows.labels()
    config = SelectionConfig(budget=0.6, guard=False, class_floor=0.55, group_floor=0.5, rounds=3)
    result = select(rows, held, config, l2=1, groups=s)
    for value in (0, 1):
        assert result.kept[labels == value].mean() >= 0.55
        assert result.kept[s == value].mean() >= 0.5
    assert result.removed.sum() < 900
    assert "floor is reached" in result.verdict
    full = SelectionConfig(budget=0.6, guard=False, class_floor=1.0)
    assert not select(rows, held, full, l2=1).removed.any()


def test_only_removable_rows_go_and_the_share_is_of_them(task):
    rows, held, *_ = task
    may = np.arange(1500) >= 1000
    result = select(rows, held, SelectionConfig(budget=0.1, guard=False), l2=1, removable=may)
    assert result.removed.sum() == 50
    assert not result.removed[:1000].any()


def test_several_objectives_trade_by_weight(task):
    rows, held, *_ = task
    narrowed = []
    for weights in ((1.0, 0.05), (0.05, 1.0)):
        config = SelectionConfig(
            objective=["utility", "demographic_parity"], weights=list(weights), budget=0.1, guard=False
        )
        result = select(rows, held, config, l2=1)
        order = np.argsort(combine(result.influence, weights), kind="stable")
        assert set(order[:150]) == set(np.flatnonzero(result.removed))
        narrowed.append((result.realised["utility"], result.realised["demographic_parity"]))
    assert narrowed[0][0] < narrowed[1][0]
    assert narrowed[1][1] < narrowed[0][1]


def test_final_head_is_the_fit_of_the_kept_rows(task):
    rows, held, *_ = task
    result = select(rows, held, SelectionConfig(budget=37, rounds=2, guard=False), l2=1)
    assert result.removed.sum() == 37
    refit = fit_head(rows.where(result.kept), l2=1, classes=2)
    assert np.abs(refit.weights - result.after.weights).max() < 1e-8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": ["utility", "nope"]}, "objective="),
        ({"objective": []}, "objective="),
        ({"objective": ["utility", "utility"]}, "objective="),
        ({"weights": (1.0, 2.0)}, "weights="),
        ({"weights": (-1.0,)}, "weights="),
        ({"budget": 0}, "budget=0"),
        ({"budget": 2.5}, r"budget=2\.5"),
        ({"budget": float("nan")}, "budget=nan"),
        ({"rounds": 0}, "rounds=0"),
        ({"class_floor": 1.5}, r"class_floor=1\.5"),
        ({"group_floor": -0.1}, r"group_floor=-0\.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SelectionConfig(**settings)


def test_what_the_settings_need_must_be_there(task):
    rows, held, *_ = task
    with pytest.raises(ValueError, match="needs a guard set"):
        select(rows, held, SelectionConfig(), l2=1)
    with pytest.raises(ValueError, match="1 are masked"):
        select(rows.where(np.arange(1500) > 0), held, SelectionConfig(guard=False), l2=1)
    with pytest.raises(ValueError, match="needs the groups"):
        select(rows, held, SelectionConfig(guard=False, group_floor=0.1), l2=1)
    with pytest.raises(ValueError, match="budget=1500"):
        select(rows, held, SelectionConfig(guard=False, budget=1500), l2=1)

"""The cost that is told beforehand, against the passes that a selection makes."""

import numpy as np
import pytest

from selection.influence import HeldOut, Rows, SelectionConfig, select, selection_cost


@pytest.mark.parametrize(("classes", "width", "rounds"), [(2, 20, 1), (3, 20, 3), (30, 80, 1)])
def test_passes_are_foretold_within_a_factor_of_three(classes: int, width: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, width))
    y = (x @ rng.normal(size=(width, classes)) + rng.gumbel(size=(600, classes))).argmax(axis=1)
    passes = []

    def counted(function, tasks):
        passes.append(1)
        return map(function, tasks)

    rows = Rows(Rows.from_arrays(x, y).shards, ordered_map=counted)
    config = SelectionConfig(budget=0.1, rounds=rounds, guard=False)
    select(rows, HeldOut(x[:100], y[:100]), config, l2=1.0, classes=classes)
    cost = selection_cost(rows=600, d=width, classes=classes, rounds=rounds, leverage=False)
    assert len(passes) / 3 < cost.passes < 3 * len(passes)


def test_parts_add_up_and_are_told_in_one_line() -> None:
    cost = selection_cost(rows=10_000_000, d=768, classes=1_000, objectives=4, leverage=False)
    assert cost.flops == cost.fit_flops + cost.solve_flops + cost.score_flops
    assert cost.score_flops == pytest.approx(2 * 1e7 * 768 * 5_000, rel=0.05)
    assert cost.read_bytes == cost.passes * 1e7 * 768 * 2
    assert cost.driver_bytes == 1e7 * 72
    assert "FLOPs" in cost.describe()
    assert "\n" not in cost.describe()
    again = selection_cost(rows=10_000_000, d=768, classes=1_000, objectives=4, leverage=False, iterations=60)
    assert again.solve_flops > 1.8 * cost.solve_flops

"""The proof: what each arm is shown and for how long, what is counted, what the verdict says."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from selection.proof.arms import ARMS, ProofConfig, order
from selection.proof.result import Costs, summarise
from selection.proof.trainings import train_all
from selection.proxy import Point

FREE = Costs(selection={}, image=0.0)


def shown(arm, samples, ratio=0.1, pool=100, subset=(), seed=0):
    stream = order(arm, ratio, pool, np.asarray(subset, np.int64), seed)
    rows: list[int] = []
    while len(rows) < samples:
        rows += next(stream).tolist()
    return rows[:samples]


def test_arms_show_what_they_say():
    assert (
        Counter(shown("all", 200))
        == Counter(shown("full_short", 200))
        == Counter(dict.fromkeys(range(100), 2))
    )
    static = Counter(shown("static", 100))
    assert len(static) == 10
    assert set(static.values()) == {10}
    assert Counter(shown("rs2", 200)) == Counter(dict.fromkeys(range(100), 2))
    assert len(set(shown("rs2_replacement", 100))) < 90
    assert all(len(set(part)) == 10 for part in np.reshape(shown("rs2_replacement", 100), (10, 10)).tolist())
    subset = [3, 3, 7, 50]
    assert Counter(shown("subset", 8, subset=subset)) == Counter({3: 4, 7: 2, 50: 2})
    assert Counter(shown("subset_rs2", 8, ratio=0.5, subset=subset)) == Counter({3: 4, 7: 2, 50: 2})


@pytest.mark.parametrize("arm", ARMS)
def test_arms_repeat_by_seed_and_differ_between_seeds(arm):
    runs = [shown(arm, 40, subset=range(0, 100, 3), seed=seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_a_pool_of_many_blocks_is_drawn_from_as_one():
    rows = shown("rs2", 25_000, ratio=0.2, pool=25_000)
    assert sorted(rows) == list(range(25_000))
    assert len(set(shown("static", 5_000, ratio=0.2, pool=25_000))) == 5_000


def test_steps_are_equal_but_for_the_whole_training():
    config = ProofConfig(ratio=0.1, epochs=30)
    steps = {arm: config.steps(arm, 1000, 50) for arm in ARMS}
    assert steps.pop("all") == 600
    assert set(steps.values()) == {60}
    assert ProofConfig(ratio=0.001, epochs=1).steps("rs2", 1000, 50) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 0},
        {"ratio": 2},
        {"epochs": 0},
        {"seeds": 0},
        {"arms": ["best"]},
        {"arms": []},
        {"target": 3},
    ],
)
def test_config_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        ProofConfig(**wrong)


class Fake:
    """Accuracy is the share of the pool seen; it dies when told to."""

    pool, batch_size, metric = 40, 4, "accuracy"

    def __init__(self, subset=(1, 2), dies_at=None):
        self.subset, self.dies_at, self.trained = np.asarray(subset), dies_at, 0

    def identity(self, chosen):
        return {"subset": self.subset.tolist()} if chosen else {}

    def train(self, rows, steps, seed, evaluations, on_step):
        self.trained += 1
        if self.trained == self.dies_at:
            raise RuntimeError("killed")
        seen = np.concatenate(list(islice(rows, steps)))
        for step in range(steps):
            on_step(step + 1)
        unique = len(np.unique(seen))
        return [Point(steps, len(seen), unique, float(steps), 0.5, unique / self.pool)]


def test_a_crash_loses_no_finished_training(tmp_path):
    config = ProofConfig(ratio=0.5, epochs=2, seeds=2)
    whole = train_all(Fake(), config, str(tmp_path / "whole"))
    folder = str(tmp_path / "crashed")
    with pytest.raises(RuntimeError, match="killed"):
        train_all(Fake(dies_at=10), config, folder)
    again = Fake()
    assert train_all(again, config, folder) == whole
    assert again.trained == 14 - 9
    other = Fake(subset=(5, 6))
    train_all(other, config, folder)
    assert other.trained == 2 * 2, "another choice trains the arms of the run alone"
    ratio = Fake()
    train_all(ratio, ProofConfig(ratio=0.25, epochs=4, seeds=2), folder)
    assert ratio.trained == 2 * 5, (
        "the short arms that do not depend on the ratio are the same at equal steps"
    )


def curve(*points):
    """(seconds, unique, accuracy), one evaluation each."""
    return [
        Point(i + 1, 10 * (i + 1), unique, seconds, 0.0, acc)
        for i, (seconds, unique, acc) in enumerate(points)
    ]


TRAININGS = {
    "all": [curve((50, 50, 0.5), (100, 90, 0.7)), curve((50, 50, 0.6), (100, 90, 0.9))],
    "full_short": [curve((5, 10, 0.3), (10, 20, 0.4)), curve((5, 10, 0.3), (10, 20, 0.4))],
    "subset": [curve((5, 10, 0.6), (10, 20, 0.8)), curve((5, 10, 0.6), (10, 20, 0.9))],
}


def test_the_target_is_what_all_data_reach_and_everything_counts():
    proof = summarise(TRAININGS, Costs(selection={"scan": 20.0, "filters": 1.0}, image=0.1), "accuracy", None)
    assert proof.target == pytest.approx(0.8)
    whole, short, subset = proof.curves
    assert whole.seconds == pytest.approx([55, 109])
    assert whole.accuracy == pytest.approx([0.55, 0.8])
    assert whole.deviation == pytest.approx([0.05 * 2**0.5, 0.1 * 2**0.5])
    assert whole.reached == pytest.approx(109)
    assert short.reached is None
    assert subset.seconds == pytest.approx([27, 33])
    assert subset.reached == pytest.approx(33)
    assert subset.unique == [10, 20]
    assert proof.verdict == (
        "The selection paid for itself: subset reached accuracy 80.0% after 33 s, 21 s of them scoring and "
        "selecting; all (the whole pool, in full) after 109 s."
    )
    assert "never" in proof.table().splitlines()[2]


@pytest.mark.parametrize(
    ("selection", "target", "expected"),
    [
        (500.0, None, "did not pay for itself: subset reached accuracy 80.0% after 510 s, 500 s of them"),
        (0.0, 0.4, "paid for itself: subset reached accuracy 40.0% after 5 s"),
        (9.0, 0.4, "did not pay for itself: subset reached accuracy 40.0% after 14 s, 9 s of them scoring and "
         "selecting; without it, full_short"),
        (0.0, 0.82, "paid for itself: subset reached accuracy 82.0% after 10 s, 0 s of them scoring and selecting; "
         "without it no arm got there"),
        (0.0, 0.99, "did not pay for itself: it never reached accuracy 99.0%; its best arm (subset) ended at 85.0%"),
    ],
)  # fmt: skip
def test_the_verdict_is_one_line_that_holds_either_way(selection, target, expected):
    proof = summarise(TRAININGS, Costs(selection={"scan": selection}, image=0.0), "accuracy", target)
    assert expected in proof.verdict
    assert "\n" not in proof.verdict


def test_without_an_arm_of_the_run_nothing_is_claimed():
    proof = summarise({"full_short": TRAININGS["full_short"]}, FREE, "accuracy", None)
    assert "nothing is said" in proof.verdict
    assert proof.target_is == "the mean end of full_short"

"""Training every arm with every seed, each once: what is finished is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

from pipeline import storage
from pipeline.progress import Progress
from pipeline.tables import digest_json
from selection.draws import Ints
from selection.proof.arms import SELECTED, ProofConfig, order
from selection.proxy.order import batches
from selection.proxy.train import Point


class Judge(Protocol):
    """A network that can be trained on rows of the pool, and is then judged.

    pool: rows in it. subset: int64, the row of each entry that the run chose. batch_size: rows a step.
    metric: what `Point.accuracy` is, in words. identity: all that decides a training beside its arm, ratio and
    steps; of what the run chose only for the arms that are trained on it.
    """

    pool: int
    subset: Ints
    batch_size: int
    metric: str

    def identity(self, chosen: bool) -> dict[str, Any]: ...

    def train(
        self, rows: Iterator[Ints], steps: int, seed: int, evaluations: int, on_step: Callable[[int], None]
    ) -> list[Point]: ...


def train_all(judge: Judge, config: ProofConfig, folder: str) -> dict[str, list[list[Point]]]:
    """The curves of each arm, one a seed; finished ones are read from `folder`, new ones written there."""
    jobs = [(arm, seed) for seed in range(config.seeds) for arm in config.arms]
    steps = {arm: config.steps(arm, judge.pool, judge.batch_size) for arm in config.arms}
    paths = {job: _path(folder, judge, config, *job, steps[job[0]]) for job in jobs}
    curves: dict[tuple[str, int], list[Point]] = {
        job: _read(path) for job, path in paths.items() if storage.exists(path)
    }
    total, done = sum(steps[arm] for arm, _ in jobs), sum(steps[arm] for arm, _ in curves)
    with Progress("prove", total, "step", done) as progress:
        for job in jobs:
            if job not in curves:
                curves[job] = _train(judge, config, *job, steps[job[0]], progress)
                storage.write_json(paths[job], [asdict(point) for point in curves[job]])
    return {arm: [curves[arm, seed] for seed in range(config.seeds)] for arm in config.arms}


def _train(
    judge: Judge, config: ProofConfig, arm: str, seed: int, steps: int, progress: Progress
) -> list[Point]:
    rows = batches(order(arm, config.ratio, judge.pool, judge.subset, seed), judge.batch_size)
    return judge.train(
        rows,
        steps,
        seed,
        min(config.evaluations, steps),
        lambda _step: progress.step(judge.batch_size, note=f"{arm}, seed {seed}"),
    )


def _path(folder: str, judge: Judge, config: ProofConfig, arm: str, seed: int, steps: int) -> str:
    ratio = None if arm in ("all", "full_short", "subset") else config.ratio
    decided = digest_json([judge.identity(arm in SELECTED), ratio, steps, config.evaluations])
    return storage.join(folder, f"{arm}-{seed}-{decided}.json")


def _read(path: str) -> list[Point]:
    return [Point(**point) for point in storage.read_json(path)]

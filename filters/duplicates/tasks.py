"""Running many independent tasks, here or on Ray. A task returns paths and counts, never rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from filters.duplicates import near
from pipeline import cluster

Task = TypeVar("Task")
Result = TypeVar("Result")


class Runner(Protocol):
    """Applies a function to tasks; yields (index of the task, result) as they finish, in any order."""

    def map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]: ...


@dataclass(frozen=True)
class LocalRunner:
    """One task after another in this process."""

    threads: int = 1

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            for index, task in enumerate(tasks):
                yield index, function(task)
        finally:
            torch.set_num_threads(before)


class TaskWorker:
    """The Ray actor: applies functions with its own threads, on its own GPU when it has one."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        near.use_device(cluster.worker_device())

    def apply(self, function: Callable[[Any], Any], numbered: tuple[int, Any]) -> Any:
        return function(numbered[1])


@dataclass(frozen=True)
class RayRunner:
    """Tasks on the actors of a pool of TaskWorkers."""

    pool: cluster.ActorPool

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        for (index, _), result in self.pool.map("apply", list(enumerate(tasks)), function):
            yield index, result


@contextlib.contextmanager
def ray_runner(config: cluster.ClusterConfig, units: int) -> Iterator[RayRunner]:
    """A runner on as many workers as `config` comes to for this many units of work, for as long as it is used."""
    cluster.connect()
    workers = cluster.plan_workers(config, units)
    pool = cluster.ActorPool(workers, TaskWorker, [workers.cpus])
    try:
        yield RayRunner(pool)
    finally:
        pool.close()


def run_all(runner: Runner, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Results of every task, in the order of the tasks."""
    results: dict[int, Result] = dict(runner.map(function, tasks))
    return [results[index] for index in range(len(tasks))]

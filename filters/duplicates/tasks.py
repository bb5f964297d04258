"""Running many independent tasks, here or on Ray. A task returns paths and counts, never rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

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


@dataclass(frozen=True)
class RayRunner:
    """Core tasks on a running Ray cluster: about twice as many in flight as fit, one awaited at a time.

    ``cpus`` and ``memory`` (bytes) are what one task reserves; Ray sets the task's threads to ``cpus``.
    """

    cpus: int = 1
    memory: int = 0

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[int, Result]]:
        import ray

        options: dict[str, Any] = {"num_cpus": self.cpus, "memory": self.memory or None}
        remote: Any = ray.remote(_with_threads).options(**options)
        shared = ray.put(function)
        window = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)) // self.cpus)
        flying: dict[Any, int] = {}
        for index, task in enumerate(tasks):
            if len(flying) >= window:
                yield _next_done(ray, flying)
            flying[remote.remote(shared, task, self.cpus)] = index
        while flying:
            yield _next_done(ray, flying)


def _with_threads(function: Callable[[Task], Result], task: Task, threads: int) -> Result:
    torch.set_num_threads(threads)
    return function(task)


def _next_done(ray: Any, flying: dict[Any, int]) -> tuple[int, Any]:
    done, _ = ray.wait(list(flying), num_returns=1)
    return flying.pop(done[0]), ray.get(done[0])


def run_all(runner: Runner, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Results of every task, in the order of the tasks."""
    results: dict[int, Result] = dict(runner.map(function, tasks))
    return [results[index] for index in range(len(tasks))]


class Commit:
    """Write under a temporary name, then rename: ``with Commit(path) as temporary``.

    What stands under ``path`` is complete; a task killed midway leaves only a temporary that the next try
    removes. Works for a file or a directory.
    """

    def __init__(self, path: Path, *, directory: bool = False):
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self.directory = directory

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for stale in self.path.parent.glob(f".{self.path.name}.*.partial"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        if self.directory:
            self.temporary.mkdir()
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.temporary.rename(self.path)

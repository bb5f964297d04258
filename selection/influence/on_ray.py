"""Passes over shards as Ray tasks: the ordered map that `Rows` takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayTaskError

from pipeline import cluster
from pipeline.cluster import ClusterConfig
from selection.influence.rows import OrderedMap


def ordered_map_on_ray(ahead: int = 8) -> OrderedMap:
    """An ordered map that runs each shard as one Ray task, at most `ahead` in flight or waiting their turn.

    Results come in shard order, so sums do not depend on which task ends first. The function of a pass (the
    weights and solved directions) goes to the object store once. What a task raises is raised here as it was.
    Ray must be running.

        Rows(shards, ordered_map=ordered_map_on_ray())
    """
    if ahead < 1:
        raise ValueError(f"ahead={ahead}: at least 1")
    return partial(_map, ahead)


def shard_map(workers: ClusterConfig) -> OrderedMap:
    """The ordered map of a run: on its cluster, with as many tasks as it has workers, or twice its cores."""
    cluster.connect()
    return ordered_map_on_ray(workers.workers or 2 * max(1, int(ray.cluster_resources().get("CPU", 1))))


def _map(ahead: int, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
    shared = ray.put(function)
    waiting: deque[Any] = deque()
    for task in tasks:
        waiting.append(_call.remote(shared, task))
        if len(waiting) >= ahead:
            yield _result(waiting.popleft())
    while waiting:
        yield _result(waiting.popleft())


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None


@ray.remote
def _call(function: Callable[[Any], Any], task: Any) -> Any:
    return function(task)

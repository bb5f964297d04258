"""Ray, for stages that hand out whole units of work: actors that keep state, results by reference to files."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from pipeline.errors import Refused, WinnowError

RESTARTS = 3


@dataclass(kw_only=True)
class ClusterConfig:
    """How many workers, and what each may use. Zero means: chosen from what the cluster has.

    On GPUs: a worker a GPU, its share of the cores for decoding. On CPUs: a worker a core.
    gpus_per_worker may be a fraction (several workers on one GPU); 0.0 keeps workers off the GPUs.
    """

    workers: int = 0
    cpus_per_worker: int = 0
    gpus_per_worker: float | None = None

    def __post_init__(self) -> None:
        for key in ("workers", "cpus_per_worker"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}={getattr(self, key)}: must be 0 (automatic) or more")
        gpus = self.gpus_per_worker
        if gpus is not None and not (0 <= gpus <= 1 or (gpus > 1 and float(gpus).is_integer())):
            raise ValueError(
                f"gpus_per_worker={gpus}: must be null, a fraction of one GPU, or a whole number"
            )


@dataclass(frozen=True)
class Workers:
    """The numbers that a ClusterConfig comes to on a given cluster."""

    count: int
    cpus: int
    gpus: float


def connect() -> None:
    """Join the cluster of this job or machine, or start a local one."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(logging_level=logging.ERROR, log_to_driver=False)


def plan_workers(config: ClusterConfig, units: int) -> Workers:
    """Fill in what the configuration leaves open. Raises Refused when no node can hold one worker."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    total = {r: sum(n.get(r, 0.0) for n in nodes) for r in ("CPU", "GPU")}
    gpus = config.gpus_per_worker if config.gpus_per_worker is not None else float(total["GPU"] > 0)
    if gpus:
        fits = int(total["GPU"] / gpus) if total["GPU"] else 0
        cpus = config.cpus_per_worker or max(1, int(total["CPU"] // max(fits, 1)))
    else:
        cpus = config.cpus_per_worker or 1
        fits = int(total["CPU"] // cpus)
    if not any(n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= gpus for n in nodes):
        raise Refused(
            f"cluster: no node has {cpus} CPUs and {gpus:g} GPUs for a worker (all nodes: {total['CPU']:g} CPUs,"
            f" {total['GPU']:g} GPUs); lower cluster.cpus_per_worker or cluster.gpus_per_worker"
        )
    count = config.workers or max(fits, 1)
    return Workers(max(1, min(count, fits, units)), cpus, gpus)


def largest_node(resource: str) -> float:
    """The most CPUs or GPUs that one node of the cluster has."""
    return max((n["Resources"].get(resource, 0.0) for n in ray.nodes() if n["Alive"]), default=0.0)


class Actors:
    """Workers of one kind that live through several maps; see `actors`."""

    def __init__(self, pool: Sequence[Any]) -> None:
        self.pool = pool

    def map(self, method: str, tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result) in the order of completion, each worker holding at most two tasks.

        A task that raises ends the map with that error.
        """
        waiting: dict[Any, tuple[Any, Any]] = {}
        queue = iter(tasks)

        def submit(worker: Any) -> None:
            task = next(queue, None)
            if task is not None:
                call = getattr(worker, method).options(retry_exceptions=[OSError])
                waiting[call.remote(task)] = (task, worker)

        for _ in range(2):
            for worker in self.pool:
                submit(worker)
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1)
            task, worker = waiting.pop(ready[0])
            yield task, _result(ready[0], task)
            submit(worker)


@contextlib.contextmanager
def actors(workers: Workers, actor: type, args: Sequence[Any]) -> Iterator[Actors]:
    """As many workers as `workers` says, each `actor(*args)`, built once.

    A worker that dies is restarted and its tasks are given out again.
    """
    remote: Any = ray.remote(
        num_cpus=workers.cpus, num_gpus=workers.gpus, max_restarts=RESTARTS, max_task_retries=RESTARTS
    )(actor)
    pool: list[Any] = [remote.remote(*args) for _ in range(workers.count)]
    try:
        yield Actors(pool)
    finally:
        for worker in pool:
            ray.kill(worker)


def map_actors(
    workers: Workers, actor: type, args: Sequence[Any], method: str, tasks: Sequence[Any]
) -> Iterator[tuple[Any, Any]]:
    """One map over workers that are built for it; see `Actors.map`."""
    workers = replace(workers, count=min(workers.count, len(tasks)))
    with actors(workers, actor, args) as pool:
        yield from pool.map(method, tasks)


def _result(ref: Any, task: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as e:
        cause = e.cause if isinstance(e.cause, Exception) else e
        if isinstance(cause, WinnowError):
            raise cause from None
        last = (str(cause).strip().splitlines() or ["no message"])[-1]
        raise WinnowError(f"{_name(task)}: {type(cause).__name__}: {last}") from e
    except RayActorError as e:
        lines = str(e).strip().splitlines()  # the last one is what an actor's own constructor raised
        raise WinnowError(
            f"{_name(task)}: its worker died {RESTARTS + 1} times: {lines[0]} {lines[-1]}"
        ) from e


def _name(task: Any) -> str:
    return str(getattr(task, "shard", task))


def worker_device() -> str:
    """The device of the calling Ray worker: its GPU when it was given one, else the CPU."""
    return "cuda" if ray.get_gpu_ids() else "cpu"

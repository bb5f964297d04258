"""One training on many workers, by Ray Train: it places them, joins them in a process group, and when one dies
starts all of them again, which go on from the last checkpoint."""

from __future__ import annotations

import contextlib
import queue as queues
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from filters.network import result
from filters.network.config import TrainSpec
from filters.network.loop import Loop, Told
from filters.network.result import TrainResult
from filters.network.world import World
from pipeline import cluster, storage
from pipeline.cluster import RESTARTS, ClusterConfig, Workers
from pipeline.errors import Refused, WinnowError

ANY = 1 << 30
SCRATCH = ".ray"  # Ray Train's own files, in the result folder while it trains


def plan(config: ClusterConfig) -> Workers | None:
    """The workers to train on; None for this process alone."""
    if config.workers == 1:
        return None
    cluster.connect()
    planned = cluster.plan_workers(config, ANY)
    if planned.gpus == 0 and config.workers == 0:
        return None  # one worker with all cores is faster than several that wait for each other
    alone = planned.count == 1 and torch.cuda.is_available() == (planned.gpus > 0)
    return None if alone else planned


def train(spec: TrainSpec, workers: Workers, show: Callable[[Told], None]) -> TrainResult:
    """Train on `workers` and return the result. Raises what a worker raised, WinnowError when they keep dying."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # seconds to import
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    filesystem, scratch = storage.resolve(storage.join(spec.out, SCRATCH))
    told = Queue(actor_options={"num_cpus": 0})
    trainer = TorchTrainer(
        _work,
        train_loop_config={"spec": spec, "told": told, "threads": workers.cpus},
        scaling_config=ScalingConfig(
            num_workers=workers.count, use_gpu=workers.gpus > 0,
            resources_per_worker={"CPU": workers.cpus, "GPU": workers.gpus},
        ),
        torch_config=TorchConfig(backend="nccl" if workers.gpus else "gloo"),
        run_config=RunConfig(
            name="train", storage_path=scratch, storage_filesystem=_arrow(filesystem),
            failure_config=FailureConfig(max_failures=RESTARTS),
        ),
    )  # fmt: skip
    storage.remove_tree(storage.join(spec.out, SCRATCH))  # of a driver that was killed
    storage.makedirs(storage.join(spec.out, SCRATCH))
    try:
        with _listening(told, show):
            metrics = trainer.fit().metrics or {}
    except Exception as e:  # Ray Train wraps what workers died of in types of its own
        last = (str(e).strip().splitlines() or [type(e).__name__])[-1]
        raise WinnowError(f"the training's workers failed {RESTARTS + 1} times: {last}") from e
    finally:
        told.shutdown(force=True)
        storage.remove_tree(storage.join(spec.out, SCRATCH))
    if "error" in metrics:
        raise (Refused if metrics["refused"] else WinnowError)(metrics["error"])
    done = result.read_summary(spec.out)
    if done is None:
        raise Refused(
            f"out={spec.out}: the workers do not write where this machine reads; use shared storage"
        )
    return done


def _work(config: dict[str, Any]) -> None:
    """A worker's life. What ends it for good is reported; any other death has Ray Train start all again."""
    import ray.train
    from ray.train.torch import get_device

    torch.set_num_threads(config["threads"])
    world = World(get_device())
    try:
        Loop(config["spec"], world).run(config["told"].put if world.rank == 0 else _silent)
    except WinnowError as e:
        ray.train.report({"error": str(e), "refused": isinstance(e, Refused)})


def _silent(_told: Told) -> None:
    pass


@contextlib.contextmanager
def _listening(told: Any, show: Callable[[Told], None]) -> Iterator[None]:
    """Pass on what the first worker tells while the body runs."""
    ended = threading.Event()

    def listen() -> None:
        while not ended.is_set():
            with contextlib.suppress(queues.Empty):
                show(told.get(timeout=1))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _arrow(filesystem: Any) -> Any:
    """An fsspec filesystem as Ray Train takes it."""
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    return PyFileSystem(FSSpecHandler(filesystem))

"""Training a data filtering network (Fang et al., ICLR 2024, section 3): a CLIP model on trusted pairs."""

from __future__ import annotations

from dataclasses import replace

import torch

from filters.network import on_ray, result
from filters.network.config import TrainSpec
from filters.network.loop import Loop, Told
from filters.network.result import TrainResult
from filters.network.world import World
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.progress import Progress

HERE = ClusterConfig(workers=1)


def absolute(spec: TrainSpec) -> TrainSpec:
    """With paths that mean the same on every worker."""
    shards = [spec.pool.shards] if isinstance(spec.pool.shards, str) else spec.pool.shards
    pool = replace(spec.pool, shards=[storage.absolute(p, "pool.shards") for p in shards])
    return replace(spec, out=storage.absolute(spec.out, "out"), pool=pool)


def train_network(spec: TrainSpec, workers: ClusterConfig = HERE) -> TrainResult:
    """Train on trusted pairs and leave the network in the folder `spec.out` (see `result`).

    The result are the weights of the evaluation with the best held-out AUC, since a small trusted set is
    soon known by heart; those of the last step where no pairs are held out.

    workers: one GPU each where the cluster has any; without, one worker with all cores of this machine unless
    more are asked for. `workers.workers=1` trains in this process, more on Ray.

    A folder that is already complete is returned as it is; one with a checkpoint is gone on with. Raises
    Refused when either belongs to other settings, when shards are missing or the model cannot be had;
    WinnowError when the loss diverges or nothing can be read. Seeds torch's global generator.
    """
    spec = absolute(spec)
    if done := result.read_summary(spec.out):
        spec.check(done.request)
        return done
    with storage.lock(spec.out), _Shown() as shown:
        planned = on_ray.plan(workers)
        if planned is not None:
            return on_ray.train(spec, planned, shown)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return Loop(spec, World(device)).run(shown)


class _Shown:
    """The progress of a training, shown from its first word on."""

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.progress:
            self.progress.__exit__()

    def __call__(self, told: Told) -> None:
        if self.progress is None:
            self.progress = Progress("train", told.steps, "step", told.step)
        behind = max(0, told.step - self.progress.done)  # a training that was set back counts steps once
        self.progress.step(told.samples if behind else 0, behind, told.note)

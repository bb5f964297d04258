"""The paper's recipe: pre-train on many trusted pairs, fine-tune on few of the best, average the two networks.

<out>/pretrained/, <out>/finetuned/   the networks of the stages, each a result folder of its own
<out>/                                their average, and recipe.json with the figures of all three
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.modules.batchnorm import _BatchNorm

from filters.network import result
from filters.network.config import TrainSpec
from filters.network.loop import Loop
from filters.network.result import TrainResult
from filters.network.train import HERE, absolute, train_network
from filters.network.world import World
from pipeline import storage
from pipeline.cluster import ClusterConfig

RESTATE_BATCHES = 50


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """spec: the second stage's pool and training; its `out`, `model` and `init` are set by the recipe.

    average: share of the fine-tuned weights in the result, w = (1 - average) pretrained + average finetuned
    (Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022); 1 takes the fine-tuned network.
    """

    spec: TrainSpec
    average: float


def train_recipe(
    spec: TrainSpec, finetune: Finetune | None = None, workers: ClusterConfig = HERE
) -> TrainResult:
    """Train `spec`, and what follows it, into the folder `spec.out`; finished stages are not trained again.

    The errors are those of `filters.network.train.train_network`.
    """
    if finetune is None:
        return train_network(spec, workers)
    spec, second = absolute(spec), absolute(replace(finetune.spec, out=spec.out))
    first = replace(spec, out=storage.join(spec.out, "pretrained"))
    second = replace(second, out=storage.join(spec.out, "finetuned"), model=spec.model, init=first.out)
    request = {
        "pretrain": first.request(), "finetune": second.request(), "average": finetune.average,
    }  # fmt: skip
    if done := result.read_summary(spec.out):
        spec.check(done.request, request)
        return done
    stages = [train_network(first, workers), train_network(second, workers)]
    with storage.lock(spec.out):
        return _average(spec, second, stages, finetune.average, request)


def _average(
    spec: TrainSpec, second: TrainSpec, stages: list[TrainResult], share: float, request: dict[str, Any]
) -> TrainResult:
    """Write the average of both stages' networks to `spec.out`, with its figures on the second one's held-out pairs."""
    loop = Loop(second, World("cuda" if torch.cuda.is_available() else "cpu"))  # holds the pretrained weights
    try:
        before = loop.evaluate()
        weights = [_weights(second.init or ""), _weights(second.out)]
        mixed = {
            k: torch.lerp(v.float(), weights[1][k].float(), share).to(v.dtype) if v.is_floating_point() else v
            for k, v in weights[0].items()
        }
        loop.model.load_state_dict(mixed)
        restate(loop)
        after = loop.evaluate()
        summary = replace(
            stages[1], request=request, steps=sum(s.steps for s in stages),
            samples_seen=sum(s.samples_seen for s in stages), seconds=sum(s.seconds for s in stages),
            weights_of_step=sum(s.weights_of_step for s in stages), held_out=after,
        )  # fmt: skip
        result.write_model(spec.out, loop.model, loop.architecture, loop.tokenizer)
    finally:
        loop.pairs.close()
    figures = {"pretrained": before, "finetuned": stages[1].held_out, "average": after}
    storage.write_json(
        storage.join(spec.out, "recipe.json"),
        {"held_out_of_finetuning": {k: asdict(v) if v else None for k, v in figures.items()}},
    )
    result.write_summary(spec.out, summary)
    return summary


def _weights(folder: str) -> dict[str, torch.Tensor]:
    with storage.local_copy(storage.join(folder, result.WEIGHTS)) as path:
        return load_file(path)


def restate(loop: Loop) -> None:
    """Measure a network's batch norm statistics again: those of an average are not the average of those."""
    norms = [m for m in loop.model.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return
    usual = [m.momentum for m in norms]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # a plain mean over the batches
    loop.model.train()
    batches = loop.pairs.batches(loop.config.batch_size, loop.position)
    for _ in range(RESTATE_BATCHES):
        images = loop.images(next(batches)[0])
        loop.towers.encode_image(images)
    batches.close()
    for m, momentum in zip(norms, usual):
        m.momentum = momentum

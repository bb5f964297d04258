"""Train a data filtering network on trusted pairs.

python -m jobs.train_filter pool.shards='/data/trusted/*.tar' out=/data/filter model=small
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig

from filters.network.captions import CaptionsConfig
from filters.network.config import TrainConfig, TrainSpec
from filters.network.recipe import Finetune, train_recipe
from jobs.launch import build, launch, register
from pipeline.cluster import ClusterConfig
from pipeline.decode import DecodeConfig
from pipeline.samples import PoolConfig


@dataclass(kw_only=True)
class FinetuneConfig:
    """The second stage, when `pool.shards` is given: on which pairs, how, and how much of it the result takes.

    average: w = (1 - average) pretrained + average finetuned.
    """

    pool: Any = None
    captions: Any = None
    train: TrainConfig = field(default_factory=TrainConfig)
    average: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.average <= 1:
            raise ValueError(f"average={self.average}: must be between 0 and 1")


@dataclass(kw_only=True)
class TrainFilterConfig:
    """pool: shards of trusted pairs. out: the folder that `scorer.weights` can then name.

    model: an open_clip model name; `small` is a convolutional one at 32 px that two cores train in minutes.
    init: null for random weights, a tag of the model, a file, a folder or `hf-hub:org/repo` (the last two
    bring their own architecture). captions: sentences for samples that have a label and no caption, see
    `filters.network.captions`. cluster: the workers, see `filters.network.train`.
    """

    pool: PoolConfig = MISSING
    out: str = MISSING
    model: str = "small"
    init: str | None = None
    captions: Any = None
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def run(node: DictConfig) -> None:
    config = build(node, "", TrainFilterConfig)

    def spec(pool: PoolConfig, captions: DictConfig, key: str, train: TrainConfig) -> TrainSpec:
        wanted = captions.class_names is not None
        return TrainSpec(
            out=config.out, pool=pool, decode=config.decode, model=config.model, init=config.init, config=train,
            captions=build(captions, key, CaptionsConfig) if wanted else None,
        )  # fmt: skip

    second = None
    if node.finetune.pool.shards:
        pool = build(node.finetune.pool, "finetune.pool", PoolConfig)
        stage = spec(pool, node.finetune.captions, "finetune.captions", config.finetune.train)
        second = Finetune(spec=stage, average=config.finetune.average)
    first = spec(config.pool, node.captions, "captions", config.train)
    result = train_recipe(first, second, config.cluster)
    print(f"{result.describe()}\n{config.out}/ holds the network; scorer.weights={config.out} scores with it")


register("train_filter", TrainFilterConfig)

if __name__ == "__main__":
    launch("train_filter", run)

"""Train a data filtering network on trusted pairs.

python -m jobs.train_filter pool.shards='/data/trusted/*.tar' out=/data/filter model=small
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING, DictConfig

from filters.network.config import TrainConfig
from filters.network.train import train_network
from jobs.launch import build, launch, register
from pipeline.decode import DecodeConfig
from pipeline.samples import PoolConfig


@dataclass(kw_only=True)
class TrainFilterConfig:
    """pool: shards of trusted pairs. out: the folder that `scorer.weights` can then name.

    model: an open_clip model name; `small` is a convolutional one at 32 px that two cores train in minutes.
    init: null for random weights, a tag of the model, a file, a folder or `hf-hub:org/repo` (the last two
    bring their own architecture).
    """

    pool: PoolConfig = MISSING
    out: str = MISSING
    model: str = "small"
    init: str | None = None
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def run(node: DictConfig) -> None:
    config = build(node, "", TrainFilterConfig)
    result = train_network(
        config.out,
        pool=config.pool,
        decode=config.decode,
        model=config.model,
        init=config.init,
        config=config.train,
    )
    print(f"{result.describe()}\n{config.out}/ holds the network; scorer.weights={config.out} scores with it")


register("train_filter", TrainFilterConfig)

if __name__ == "__main__":
    launch("train_filter", run)

"""Train a filter network: python -m jobs.train_filter pool.shards=TRUSTED out=DIR model=small"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from filters.network.result import TrainResult
from filters.network.train import TrainConfig, train_network
from pipeline.decode import DecodeConfig
from pipeline.samples import PoolConfig


@dataclass(kw_only=True)
class TrainFilterConfig:
    """pool: shards of trusted pairs. out: folder that `scorer.weights` can then name. model: an open_clip
    model name. init: null for random weights, a tag of the model, a file, a folder or `hf-hub:org/repo`
    (the last two bring their own architecture)."""

    out: str = MISSING
    pool: PoolConfig = MISSING
    model: str = "small"
    init: str | None = None
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def run(config: TrainFilterConfig) -> TrainResult:
    return train_network(
        config.out,
        pool=config.pool,
        decode=config.decode,
        model=config.model,
        init=config.init,
        config=config.train,
    )


ConfigStore.instance().store("train_filter_schema", TrainFilterConfig)


@hydra.main(config_path="../conf", config_name="train_filter", version_base="1.3")
def main(config: DictConfig) -> None:
    result = run(cast(TrainFilterConfig, OmegaConf.to_object(config)))
    print(f"{config.out}: {result.describe()}")


if __name__ == "__main__":
    main()

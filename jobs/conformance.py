"""How far can a stored score column be trusted? Scores a sample of the pool anew and compares.

python -m jobs.conformance pool.shards='/data/pool/*.tar' column=clip_b32_similarity_score out=/data/trust \\
    scorer.weights=openai
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, plain, register
from pipeline import storage
from pipeline.conformance import compare, draw, rescore
from pipeline.decode import DecodeConfig
from pipeline.samples import PoolConfig
from pipeline.scorer import Scorer, ScorerConfig


@dataclass(kw_only=True)
class ConformanceConfig:
    """column: the stored scores, of the parquet files beside the shards or of the json members.

    metadata: parquet files elsewhere that hold the column, matched by uid. out: a folder for the report.
    sample: samples to score anew, from at most 20 shards, drawn by `seed`. fractions: top fractions at which
    the two columns' decisions are compared. scorer: the network; the GPU is used when there is one.
    """

    out: str = MISSING
    column: str = MISSING
    pool: PoolConfig = MISSING
    metadata: Any = None
    sample: int = 2000
    fractions: list[float] = field(default_factory=lambda: [0.1, 0.15, 0.3, 0.5])
    seed: int = 0
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    scorer: ScorerConfig = MISSING

    def __post_init__(self) -> None:
        if self.sample < 3:
            raise ValueError(f"sample={self.sample}: must be at least 3")
        if not all(0 < f < 1 for f in self.fractions):
            raise ValueError(f"fractions={self.fractions}: each must lie in (0, 1)")


def run(node: DictConfig) -> None:
    config = build(node, "", ConformanceConfig)
    out = storage.absolute(config.out, "out")
    scorer = Scorer(config.scorer, "cuda" if torch.cuda.is_available() else "cpu")
    found = rescore(
        config.pool, config.metadata, config.column, scorer, config.decode, config.sample, config.seed
    )
    rows = found.rows
    result = compare(rows["stored"].to_numpy(), rows["computed"].to_numpy(), config.fractions)
    base = storage.join(out, config.column)
    with storage.commit(f"{base}.parquet") as tmp:
        rows.write_parquet(tmp)
    with storage.commit(f"{base}.png") as tmp:
        figure = draw(rows, config.column, config.scorer.name)
        figure.savefig(tmp, format="png", dpi=120, metadata={"Software": None})
    storage.write_json(
        f"{base}.json",
        {
            **result.to_json(), "left_out": found.left_out, "config": plain(node),
            "scorer": {"fingerprint": scorer.fingerprint, **scorer.identity},
        },
    )  # fmt: skip
    print(result.describe())
    for reason, n in found.left_out.items():
        print(f"{n:,} samples left out: {reason}")
    print(f"{base}.json, .parquet (each sample) and .png (stored against computed)")


register("conformance", ConformanceConfig)

if __name__ == "__main__":
    launch("conformance", run)

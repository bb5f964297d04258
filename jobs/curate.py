"""Curate a pool: scan it, decide on every sample, write the subset.

python -m jobs.curate pool.shards='/data/pool/*.tar' out=/data/winnow scorer.weights=/data/filter
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from filters.duplicates.stage import DedupConfig
from filters.leakage_stage import LeakageConfig
from filters.rules import Rules
from filters.score import ScoreCut
from jobs.launch import build, launch, plain, register
from jobs.stages import build_stages
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import run_chain
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.manifest import Run, write_outputs
from pipeline.metadata_scan import scan_metadata
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, scan
from pipeline.scorer import ScorerConfig
from selection.influence.stage_config import InfluenceStageConfig
from selection.run_rounds import RoundsConfig, describe, write_rounds


@dataclass(kw_only=True)
class CurateConfig:
    """out: the folder that holds tables and runs. run: this selection's name in it.

    stages: the order of the links after the scan; those whose config group is `none` are passed over.
    rounds: RS2 rounds over what is kept, written last; `rounds.rounds=200` for so many of them.
    """

    out: str = MISSING
    run: str = "default"
    seed: int = 0
    pool: PoolConfig = MISSING
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    errors: ErrorBudget = field(default_factory=ErrorBudget)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    scorer: Any = None
    filters: dict[str, Any] = field(default_factory=dict)
    leakage: LeakageConfig = field(default_factory=LeakageConfig)
    dedup: Any = None
    selection: Any = None
    stages: list[str] = field(default_factory=lambda: ["filters", "leakage", "dedup", "selection"])
    rounds: RoundsConfig = field(default_factory=lambda: RoundsConfig(rounds=0))


def run(config: DictConfig) -> None:
    pool = build(config.pool, "pool", PoolConfig)
    scorer = None
    if config.scorer and not pool.metadata:
        scorer = build(config.scorer, "scorer", ScorerConfig)
    elif config.scorer and not OmegaConf.is_missing(config.scorer, "weights"):
        raise Refused("scorer.weights: pool.metadata has no images to score; leave the scorer out")
    decode = build(config.decode, "decode", DecodeConfig)
    errors = build(config.errors, "errors", ErrorBudget)
    cluster = build(config.cluster, "cluster", ClusterConfig)
    stages = build_stages(config)
    rounds = build(config.rounds, "rounds", RoundsConfig)
    if "/" in config.run or config.run in ("", ".", ".."):
        raise Refused(f"run={config.run}: must be a plain name")
    here = Run(storage.absolute(config.out, "out"), config.run)
    seconds: dict[str, float] = {}
    with storage.lock(here.out):
        started = time.monotonic()
        if pool.metadata:
            scanned = scan_metadata(here.out, pool, cluster, errors)
        else:
            scanned = scan(here.out, pool, scorer, decode, cluster, errors)
        seconds["scan"] = round(time.monotonic() - started, 3)
        last, results = run_chain(scanned, stages, here.path("stages"))
        seconds |= {r.name: r.seconds for r in results}
        started = time.monotonic()
        about = {
            "config": plain(config),
            "seed": config.seed,
            "seconds": seconds,
            "scanned_shards": scanned.scanned,
        }
        receipt = write_outputs(here, scanned, last, results, about)
        drawn = write_rounds(here, rounds, cluster) if rounds.rounds else None
    _print(here, receipt)
    if drawn:
        print(describe(here, drawn))


def _print(run_: Run, receipt: dict[str, Any]) -> None:
    """The funnel, as a person reads it."""
    total = receipt["pool"]["samples"]
    print(f"{total:>12,} samples in {receipt['pool']['shards']:,} shards")
    for kind in ("rejected", "dropped"):
        for reason, n in sorted(receipt[kind].items(), key=lambda x: -x[1]):
            print(f"{n:>12,} {kind}: {reason} ({receipt['reasons'][reason]})")
    print(f"{receipt['kept']:>12,} kept ({receipt['kept'] / max(total, 1):.1%})")
    for damaged in receipt["pool"]["damaged_shards"]:
        print(f"damaged: {damaged['shard']}: {damaged['detail']}; {damaged['lost']} samples known to be lost")
    print(f"\n{run_.folder}/ holds subset.npy, manifest.parquet, decisions/ and receipt.json")


FILLED = {  # by config groups
    "scorer": ScorerConfig,
    "filters.dfn": ScoreCut,
    "filters.basic": Rules,
    "dedup": DedupConfig,
    "selection": InfluenceStageConfig,
}
register("curate", CurateConfig, FILLED)

if __name__ == "__main__":
    launch("curate", run)

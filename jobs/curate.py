"""Curate a pool: scan it, decide on every sample, write the subset.

python -m jobs.curate pool.shards='/data/pool/*.tar' out=/data/winnow scorer.weights=/data/filter
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from omegaconf import MISSING, DictConfig

from filters.base import Filter
from filters.duplicates.stage import DedupConfig, DedupStage
from filters.leakage_stage import LeakageStage, LeakageStageConfig
from filters.stage import FilterStage
from jobs.launch import build, build_target, launch, plain, register
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import Stage, run_chain
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.evaluation import as_shards
from pipeline.manifest import Run, write_outputs
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, Scan, scan
from pipeline.scorer import Scorer, ScorerConfig
from pipeline.tables import digest_json
from selection.influence.stage import InfluenceStage, InfluenceStageConfig


@dataclass(kw_only=True)
class CurateConfig:
    """out: the folder that holds tables and runs. run: this selection's name in it.

    stages: the order of the links after the scan; those whose config group is `none` are passed over.
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
    leakage: LeakageStageConfig = field(default_factory=LeakageStageConfig)
    dedup: Any = None
    selection: Any = None
    stages: list[str] = field(default_factory=lambda: ["filters", "leakage", "dedup", "selection"])


def build_stages(config: DictConfig) -> list[Stage]:
    """The links of the chain, in the order in which the configuration names them."""
    makers = {
        "filters": filter_stage,
        "leakage": _leakage_stage,
        "dedup": _dedup_stage,
        "selection": _selection_stage,
    }
    for name in config.stages:
        if name not in makers:
            raise Refused(f"stages: {name!r} is not a stage; known: {', '.join(makers)}")
    stages = [makers[name](config) for name in config.stages if _wanted(config, name)]
    if not stages:
        raise Refused("stages: name at least one")
    return stages


def _wanted(config: DictConfig, name: str) -> bool:
    """A stage whose config group is `none`, or that has nothing to look for, is passed over."""
    return name == "filters" or bool(config[name].sets if name == "leakage" else config[name])


def _leakage_stage(config: DictConfig) -> Stage:
    scan_set = partial(_scan_set, config, "leakage.sets")
    return LeakageStage(build(config.leakage, "leakage", LeakageStageConfig), scan_set)


def _scan_set(config: DictConfig, key: str, name: str, path: str) -> Scan:
    """The tables of the evaluation set that `<key>.<name>` gives the path of, made as the pool's are."""
    out, where = storage.absolute(config.out, "out"), storage.absolute(path, f"{key}.{name}")
    if not storage.exists(where):
        raise Refused(f"{key}.{name}={path}: there is no such file or folder")
    folder = storage.join(out, "evaluation", name, digest_json(storage.signature(where)))
    pool = PoolConfig(
        **{**plain(config.pool), "shards": as_shards(where, folder), "default_caption": "an image"}
    )
    scorer = build(config.scorer, "scorer", ScorerConfig)
    decode = build(config.decode, "decode", DecodeConfig)
    return scan(out, pool, scorer, decode, build(config.cluster, "cluster", ClusterConfig), ErrorBudget())


def _selection_stage(config: DictConfig) -> Stage:
    def embed_text(captions: Sequence[str]) -> np.ndarray:
        return Scorer(build(config.scorer, "scorer", ScorerConfig)).embed_text(captions)

    settings = build(config.selection, "selection", InfluenceStageConfig)
    workers = build(config.cluster, "cluster", ClusterConfig)
    return InfluenceStage(settings, partial(_scan_set, config, "selection"), embed_text, workers)


def _dedup_stage(config: DictConfig) -> Stage:
    home = storage.join(storage.absolute(config.out, "out"), "duplicates")
    return DedupStage(build(config.dedup, "dedup", DedupConfig), home)


def filter_stage(config: DictConfig) -> Stage:
    built = [
        build_target(node, f"filters.{name}", Filter).named(str(name))
        for name, node in config.filters.items()
    ]
    return FilterStage(built)


def run(config: DictConfig) -> None:
    pool = build(config.pool, "pool", PoolConfig)
    scorer = build(config.scorer, "scorer", ScorerConfig) if config.scorer else None
    decode = build(config.decode, "decode", DecodeConfig)
    errors = build(config.errors, "errors", ErrorBudget)
    cluster = build(config.cluster, "cluster", ClusterConfig)
    stages = build_stages(config)
    if "/" in config.run or config.run in ("", ".", ".."):
        raise Refused(f"run={config.run}: must be a plain name")
    here = Run(storage.absolute(config.out, "out"), config.run)
    seconds: dict[str, float] = {}
    with storage.lock(here.out):
        started = time.monotonic()
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
    _print(here, receipt)


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


register("curate", CurateConfig)

if __name__ == "__main__":
    launch("curate", run)

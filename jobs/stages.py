"""The links of `jobs.curate`'s chain, built from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from omegaconf import DictConfig

from filters.base import Filter
from filters.duplicates.stage import DedupConfig, DedupStage
from filters.leakage_stage import LeakageConfig, LeakageStage
from filters.stage import FilterStage
from jobs.launch import build, build_target, plain
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import Stage
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.evaluation import as_shards, fingerprint
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, Scan, scan
from pipeline.scorer import Scorer, ScorerConfig
from selection.influence.stage import InfluenceStage
from selection.influence.stage_config import InfluenceStageConfig


def build_stages(config: DictConfig) -> list[Stage]:
    """The links of the chain, in the order in which the configuration names them."""
    for name in config.stages:
        if name not in MAKERS:
            raise Refused(f"stages: {name!r} is not a stage; known: {', '.join(MAKERS)}")
    stages = [MAKERS[name](config) for name in config.stages if _wanted(config, name)]
    if not stages:
        raise Refused("stages: name at least one")
    return stages


def _wanted(config: DictConfig, name: str) -> bool:
    """A stage whose config group is `none`, or that has nothing to look for, is passed over."""
    return name == "filters" or bool(config[name].sets if name == "leakage" else config[name])


def filter_stage(config: DictConfig) -> Stage:
    built = [
        build_target(node, f"filters.{name}", Filter).named(str(name))
        for name, node in config.filters.items()
    ]
    return FilterStage(built, build(config.cluster, "cluster", ClusterConfig))


def leakage_stage(config: DictConfig) -> Stage:
    workers = build(config.cluster, "cluster", ClusterConfig)
    leakage = build(config.leakage, "leakage", LeakageConfig)
    for name, path in leakage.sets.items():
        fingerprint(path, f"leakage.sets.{name}")  # refused now, not after the scan
    return LeakageStage(leakage, workers, partial(_scan_set, config, "leakage.sets"))


def dedup_stage(config: DictConfig) -> Stage:
    out = storage.absolute(config.out, "out")
    pool, decode = build(config.pool, "pool", PoolConfig), build(config.decode, "decode", DecodeConfig)
    workers = build(config.cluster, "cluster", ClusterConfig)
    errors = build(config.errors, "errors", ErrorBudget)

    def scan_own(scorer: ScorerConfig) -> Scan:
        return scan(out, pool, scorer, decode, workers, errors)

    dedup = build(config.dedup, "dedup", DedupConfig)
    return DedupStage(dedup, storage.join(out, "duplicates"), workers, scan_own)


def selection_stage(config: DictConfig) -> Stage:
    def embed_text(captions: Sequence[str]) -> np.ndarray:
        return Scorer(build(config.scorer, "scorer", ScorerConfig)).embed_text(captions)

    settings = build(config.selection, "selection", InfluenceStageConfig)
    if settings.target:
        fingerprint(settings.target, "selection.target")  # refused now, not after the scan
    workers = build(config.cluster, "cluster", ClusterConfig)
    return InfluenceStage(settings, partial(_scan_set, config, "selection"), embed_text, workers)


MAKERS: dict[str, Callable[[DictConfig], Stage]] = {
    "filters": filter_stage,
    "leakage": leakage_stage,
    "dedup": dedup_stage,
    "selection": selection_stage,
}


def _scan_set(config: DictConfig, key: str, name: str, path: str) -> Scan:
    """The tables of the evaluation set that `<key>.<name>` gives the path of, made as the pool's are."""
    out, where = storage.absolute(config.out, "out"), storage.absolute(path, f"{key}.{name}")
    folder = storage.join(out, "evaluation", name, fingerprint(path, f"{key}.{name}"))
    pool = PoolConfig(
        **{**plain(config.pool), "shards": as_shards(where, folder), "default_caption": "an image"}
    )
    scorer = build(config.scorer, "scorer", ScorerConfig) if config.scorer else None
    decode = build(config.decode, "decode", DecodeConfig)
    return scan(out, pool, scorer, decode, build(config.cluster, "cluster", ClusterConfig), ErrorBudget())

"""All that can be wrong with a configuration of jobs.curate, found at once and before any work."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import hydra
from omegaconf import DictConfig, OmegaConf

from filters.duplicates.stage import DedupConfig
from filters.leakage_stage import LeakageConfig
from jobs.launch import build, plain
from jobs.stages import build_stages
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused, WinnowError
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, Survey, survey
from pipeline.scorer import ScorerConfig
from selection.influence.stage_config import InfluenceStageConfig
from selection.run_rounds import RoundsConfig

SECTIONS: dict[str, type] = {
    "pool": PoolConfig,
    "decode": DecodeConfig,
    "errors": ErrorBudget,
    "cluster": ClusterConfig,
    "scorer": ScorerConfig,
    "leakage": LeakageConfig,
    "dedup": DedupConfig,
    "selection": InfluenceStageConfig,
    "rounds": RoundsConfig,
}
READ_AHEAD = 16  # shards of which the first bytes are read
T = TypeVar("T")


@dataclass
class Problems:
    """What is wrong, gathered instead of raised."""

    lines: list[str] = field(default_factory=list)

    def tried(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None when it refuses, and then its reason is noted."""
        try:
            return work()
        except (WinnowError, OSError) as e:
            if str(e) not in self.lines:
                self.lines.append(str(e))
            return None

    def stop(self) -> None:
        """Raise Refused if there are any, after listing them."""
        if not self.lines:
            return
        for line in self.lines:
            print(f"problem: {line}", file=sys.stderr, flush=True)
        raise Refused(f"{len(self.lines)} to mend before jobs.curate can run; nothing was written")


@dataclass
class Plan:
    """The checked parts of a configuration, as they are found."""

    config: DictConfig
    problems: Problems = field(default_factory=Problems)
    parts: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Every section by itself: all of its wrong fields, then what only shows when they are put together."""
        for key, schema in SECTIONS.items():
            node = self.config[key].copy() if self.config[key] else None
            if key == "dedup" and node:
                node.scorer = node.scorer or None  # the choice `none` is empty
            if not node:  # scorer=none, dedup=none
                self.parts[key] = None
            else:
                wrong = every_problem(node, key, schema)
                self.problems.lines += wrong
                self.parts[key] = None if wrong else build(node, key, schema)
        for name, node in self.config.filters.items():
            cls = self.problems.tried(partial(_class_of, node))
            if cls is not None:
                self.problems.lines += every_problem(_fields(node), f"filters.{name}", cls)
        if "/" in self.config.run or self.config.run in ("", ".", ".."):
            self.problems.lines.append(f"run={self.config.run}: must be a plain name")
        self._paths()
        if not self.problems.lines:
            self.problems.tried(lambda: build_stages(self.config))

    def _paths(self) -> None:
        out = self.problems.tried(lambda: out_folder(self.config))
        if out and storage.is_local(out):
            self.problems.tried(lambda: _writable(out))
        for name, path in (self.parts["leakage"].sets if self.parts["leakage"] else {}).items():
            if not storage.exists(storage.absolute(path, f"leakage.sets.{name}")):
                self.problems.lines.append(f"leakage.sets.{name}={path}: nothing is there")
        leakage, dedup = self.parts["leakage"], self.parts["dedup"]
        if leakage and leakage.sets and leakage.method != "phash" and not self.config.scorer:
            self.problems.lines.append(
                f"leakage.method={leakage.method}: needs a scorer; set leakage.method=phash"
            )
        if dedup and dedup.near and dedup.method != "phash" and not (self.config.scorer or dedup.scorer):
            self.problems.lines.append(f"dedup.method={dedup.method}: needs a scorer; set dedup.method=phash")
        selection = self.parts["selection"]
        if selection:
            self.problems.tried(selection.class_names)
            target = selection.target
            if target and not storage.exists(storage.absolute(target, "selection.target")):
                self.problems.lines.append(f"selection.target={target}: nothing is there")
            if not self.config.scorer:
                self.problems.lines.append("selection=influence works on embeddings: it needs a scorer")

    def survey(self) -> Survey | None:
        """Pool and scorer; None when a part of them is wrong already."""
        parts = self.parts
        if any(parts[k] is None for k in ("pool", "decode", "cluster")):
            return None
        if parts["scorer"] is None and self.config.scorer:
            return None
        here = self.problems.tried(
            lambda: survey(
                out_folder(self.config), parts["pool"], parts["scorer"], parts["decode"], parts["cluster"]
            )
        )
        if here is not None:
            self.problems.tried(here.check)
            step = max(1, len(here.found) // READ_AHEAD)
            for shard in here.found[::step]:
                self.problems.tried(partial(_readable, shard))
        return here


def every_problem(node: DictConfig, key: str, schema: type) -> list[str]:
    """All wrong fields of one section: each is noted, put back to its default, and the rest tried again."""
    node = node.copy()
    defaults = OmegaConf.structured(schema)
    found: list[str] = []
    while len(found) < len(node):
        try:
            build(node, key, schema)
            break
        except Refused as e:
            if str(e) in found:
                break
            found.append(str(e))
            name = re.match(re.escape(key) + r"\.(\w+)", str(e))
            if not name or name[1] not in defaults or OmegaConf.is_missing(defaults, name[1]):
                break
            node[name[1]] = defaults[name[1]]
    return found


def _class_of(node: Any) -> type:
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise Refused("filters: each must be a mapping with a _target_, such as a file in conf/filters gives")
    try:
        return hydra.utils.get_class(node._target_)
    except Exception as e:  # import of a user's class can fail in any way
        raise Refused(f"filters._target_={node._target_}: {str(e).splitlines()[0]}") from None


def _fields(node: DictConfig) -> DictConfig:
    return OmegaConf.create({k: v for k, v in plain(node).items() if k != "_target_"})


def out_folder(config: DictConfig) -> str:
    if OmegaConf.is_missing(config, "out"):
        raise Refused("out: must be given")
    return storage.absolute(config.out, "out")


def _writable(out: str) -> None:
    there = existing(out)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise Refused(f"out={out}: {there} cannot be written to")


def existing(path: str) -> str:
    """The local `path`, or the nearest folder above it that exists."""
    there = storage.resolve(path)[1]
    while not os.path.exists(there):
        there = os.path.dirname(there)
    return there


def _readable(shard: str) -> None:
    with storage.open_file(shard) as f:
        f.read(1)

"""The influence stage of a run: pool rows that harm a head on held-out rows go, as `harmful_influence`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import polars as pl

from pipeline import reasons, storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import DECISION, Chain, Decisions
from pipeline.errors import Refused
from pipeline.evaluation import fingerprint
from pipeline.scan import Scan
from pipeline.tables import digest_json
from pipeline.uid_draw import uniform
from selection.influence.config import SelectionConfig
from selection.influence.head import Head
from selection.influence.objectives import HeldOut
from selection.influence.on_ray import shard_map
from selection.influence.pool import TOWERS, Features, PoolRows, Preparation
from selection.influence.pool_labels import (
    PSEUDO,
    Coder,
    ColumnLabels,
    LabelRule,
    TrueLabels,
    cluster_labels,
    prompt_labels,
)
from selection.influence.pool_report import write_report
from selection.influence.rows import Rows
from selection.influence.select import Selection, select
from selection.influence.stage_config import InfluenceStageConfig

HARMFUL = reasons.register(
    "harmful_influence", "removing it from training is estimated to help the objective on held-out rows"
)
HELD_SHARE = 0.2  # of the pool at most: a small pool is not spent on judging itself
PER_CLUSTER = 256  # rows that k-means sees for each cluster
WORK = "work-"


@dataclass(frozen=True)
class InfluenceStage:
    """`scan_set(name, path)` gives the tables of the target by the run's scorer, `embed_text` its text tower."""

    config: InfluenceStageConfig
    scan_set: Callable[[str, str], Scan]
    embed_text: Callable[[Sequence[str]], np.ndarray]
    workers: ClusterConfig = field(default_factory=ClusterConfig)
    name: str = "influence"

    def identity(self) -> dict[str, Any]:
        target = self.config.target
        return {
            **asdict(self.config),
            "classes": self.config.class_names(),
            "content": fingerprint(target, "selection.target") if target else None,
        }

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        if chain.before is None:
            raise Refused("stages: selection needs a stage before it; put filters first")
        if chain.tables.identity()["scorer"] is None:
            raise Refused("selection=influence works on embeddings: it needs a scorer")
        try:
            yield from _Work(self, chain, chain.before).run()
        except ValueError as error:  # the library's word for input that it cannot use
            raise Refused(f"selection: {error}") from error


def _say(line: str) -> None:
    """Progress of what has no shards to count."""
    print(line, file=sys.stderr, flush=True)


class _Work:
    """One run of the stage. What it writes on the way lies under a digest of all that decides it."""

    def __init__(self, stage: InfluenceStage, chain: Chain, before: Decisions) -> None:
        self.stage, self.chain, self.before, self.config = stage, chain, before, stage.config
        done = storage.read_json(storage.join(before.folder, "stage.json"))
        self.kept_before = int(done["kept"])
        self.work = storage.join(chain.folder, f"{WORK}{digest_json([done['digest'], stage.identity()])}")
        self.features = Features(chain.tables, TOWERS[self.config.embedding])
        self.ordered_map = shard_map(stage.workers)

    def run(self) -> Iterator[tuple[str, pl.DataFrame]]:
        rule = self._rule()
        preparation = Preparation(
            features=self.features, before=self.before, rule=rule, groups=self._groups(),
            held_share=0.0 if self.config.target else min(HELD_SHARE, self.config.held_out / max(self.kept_before, 1)),
            seed=self.config.seed, folder=storage.join(self.work, "rows"),
        )  # fmt: skip
        parts = preparation.parts(self.chain.ids, self.ordered_map)
        pool = PoolRows.of(self.features, parts)
        if not pool.parts:
            raise Refused(f"selection.labels={self.config.labels}: no kept row of the pool has a label")
        held = preparation.held_out(parts) if self.config.target is None else self._target(rule, preparation)
        rows = pool.rows(self.ordered_map)
        selection = self._select(pool, rows, _split(held, self.config), len(rule.names))
        counts = {"unlabelled": sum(p.unknown for p in parts), "held_out": sum(p.held for p in parts)}
        write_report(self.chain.folder, pool, rows, selection, rule.names, counts, self.config)
        print(f"influence: {selection.verdict}")
        yield from self._decisions(pool, selection)
        for name in storage.listdir(self.chain.folder):  # those of abandoned settings too
            if name.startswith(WORK):
                storage.remove_tree(storage.join(self.chain.folder, name))

    def _rule(self) -> LabelRule:
        config, names = self.config, self.config.class_names()
        if config.labels in ("prompts", "captions"):
            assert names is not None
            tower = "text" if config.labels == "captions" else "image"
            return prompt_labels(tower, names, config.templates, self.stage.embed_text)
        if config.labels == "clusters":
            tower = self.features.towers[0]
            sample = self._sample(tower, PER_CLUSTER * config.clusters)
            return cluster_labels(tower, sample, config.clusters, config.seed)
        coder = Coder(tuple(names)) if names else self._values("selection.labels", config.labels)
        return ColumnLabels(config.labels, coder)

    def _groups(self) -> tuple[str, Coder] | None:
        column = self.config.groups
        return None if column is None else (column, self._values("selection.groups", column))

    def _values(self, key: str, column: str) -> Coder:
        """The distinct values of a table column among the rows that earlier stages kept."""
        some = self.chain.ids[:: max(1, len(self.chain.ids) // 64)]
        have = {name for shard in some for name in self.chain.tables.columns(shard)}
        if column not in have:
            known = ", ".join([*PSEUDO, *sorted(have)])
            raise Refused(f"{key}={column}: the pool has no such column; choose from {known}")
        found: set[str] = set()
        for shard, frame in self.chain.tables.stream(self.chain.ids, [column]):
            kept = self.before.read(shard, ["kept"])["kept"]
            found |= set(frame[column].filter(kept).drop_nulls().cast(pl.String).unique().to_list())
        return Coder.of_values(f"{key}={column}", found)

    def _sample(self, tower: str, rows: int) -> np.ndarray:
        """About `rows` embeddings of kept rows, drawn by uid."""
        share, found = rows / max(self.kept_before, 1), []
        for shard in self.chain.ids:
            frame = self.before.read(shard, ["uid_hi", "uid_lo", "kept"])
            draw = uniform(frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy(), self.config.seed + 1)
            chosen = (draw < share) & frame["kept"].to_numpy()
            x = self.chain.tables.embeddings(shard, tower)[np.flatnonzero(chosen)]
            found.append(x[np.isfinite(x).all(axis=1)])
        return np.concatenate(found)

    def _target(self, rule: LabelRule, preparation: Preparation) -> HeldOut | None:
        """All rows of the target set that can be read and have a class, in memory."""
        assert self.config.target is not None
        scanned = self.stage.scan_set("target", self.config.target)
        clusters = self.config.labels == "clusters"
        whole = Preparation(
            features=Features(scanned.tables, self.features.towers), before=None,
            rule=rule if clusters else TrueLabels(rule, Coder(rule.names)), groups=preparation.groups,
            held_share=1.0, seed=0, folder=storage.join(self.work, "target"),
        )  # fmt: skip
        return whole.held_out(whole.parts(scanned.ids, self.ordered_map))

    def _select(self, pool: PoolRows, rows: Rows, sets: dict[str, HeldOut], classes: int) -> Selection:
        config = self.config
        embed_dim = (rows.width - 1) // len(self.features.towers)
        cost = config.cost(rows.n, embed_dim, classes)
        _say(f"influence: {rows.n:,} rows, {classes} classes: {cost.describe()}")
        checkpoint = storage.join(self.work, "head.npy")
        start = None
        if storage.exists(checkpoint):
            start = Head(np.load(io.BytesIO(storage.read_bytes(checkpoint))), config.l2, classes)

        def save(weights: np.ndarray) -> None:
            with storage.commit(checkpoint) as tmp, open(tmp, "wb") as f:
                np.save(f, weights)
            _say("influence: the head took another Newton step")

        library = {k: getattr(config, k) for k in SelectionConfig.__dataclass_fields__}
        return select(
            rows, sets["influence"], SelectionConfig(**library | {"leverage": config.corrects(classes)}),
            l2=config.l2, guard=sets["guard"] if config.guard else None,
            groups=pool.groups() if config.group_floor else None,
            others={"test": sets["test"]}, classes=classes, start=start, on_step=save,
        )  # fmt: skip

    def _decisions(self, pool: PoolRows, selection: Selection) -> Iterator[tuple[str, pl.DataFrame]]:
        places = {part.shard: (part, start) for part, start in zip(pool.parts, pool.starts)}
        for shard in self.chain.ids:
            frame = self.before.read(shard)
            if shard in places:
                part, start = places[shard]
                mine = slice(start, start + part.train)
                gone, value = np.zeros(len(frame), bool), np.zeros(len(frame))
                rows = part.read("rows")
                gone[rows], value[rows] = selection.removed[mine], selection.decided_by[mine]
                frame = _drop(frame, gone, value, 0.0 if self.config.guard else None)
            yield shard, frame


def _drop(frame: pl.DataFrame, gone: np.ndarray, value: np.ndarray, cut: float | None) -> pl.DataFrame:
    """`frame` without the rows `gone`. Their value is delta_if_removed, and with the guard on the cut is 0."""
    mask = pl.lit(pl.Series(gone))
    return frame.with_columns(
        kept=pl.col("kept") & ~mask,
        reason=pl.when(mask).then(pl.lit(HARMFUL)).otherwise("reason"),
        value=pl.when(mask).then(pl.lit(pl.Series(value))).otherwise("value"),
        cut=pl.when(mask).then(pl.lit(cut, pl.Float64)).otherwise("cut"),
        copies=pl.when(mask).then(0).otherwise("copies"),
    ).cast(DECISION)  # type: ignore[arg-type]


def _split(held: HeldOut | None, config: InfluenceStageConfig) -> dict[str, HeldOut]:
    """Disjoint sets "influence", "guard" and "test". Raises Refused when one would be empty."""
    n = 0 if held is None else len(held.y)
    guard, test = round(config.guard_share * n), round(config.test_share * n)
    if held is None or min(guard, test, n - guard - test) < 1:
        where, what = config.target or "the pool", "a label and a group" if config.groups else "a label"
        raise Refused(
            f"selection: {n} rows of {where} have {what}: too few for influence, guard and test sets"
        )
    order = np.random.default_rng(config.seed).permutation(n)
    cuts = {"guard": order[:guard], "test": order[guard : guard + test], "influence": order[guard + test :]}
    return {name: held.take(np.sort(rows)) for name, rows in cuts.items()}

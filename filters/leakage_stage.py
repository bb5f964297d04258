"""The leakage stage: samples too close to an image of an evaluation set are dropped as `leaks_<set>`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from filters.duplicates.blocks import open_embeddings, unit_rows
from filters.duplicates.stage import TableBlocks
from filters.duplicates.tasks import RayRunner
from filters.leakage import EvaluationSet, LeakageConfig, find_leaks, leakage_reason
from pipeline import cluster, storage
from pipeline.decisions import DECISION, Chain
from pipeline.errors import Refused
from pipeline.scan import Scan


@dataclass(kw_only=True)
class LeakageStageConfig:
    """sets: name of each evaluation set and where it lies (shards, a parquet file, or a folder of images).

    method: `agree` (embedding and perceptual hash both), `embedding` or `phash`. similarity: cosine, and
    phash_distance: differing bits of 64, from which a sample is taken for an evaluation image.
    """

    sets: dict[str, str] = field(default_factory=dict)
    method: str = "agree"
    similarity: float = 0.95
    phash_distance: int = 10

    def __post_init__(self) -> None:
        self.search()

    def search(self) -> LeakageConfig:
        return LeakageConfig(**{k: v for k, v in asdict(self).items() if k != "sets"})


@dataclass(frozen=True)
class LeakageStage:
    """`scan_set` gives the tables of an evaluation set, made by the run's own scorer."""

    config: LeakageStageConfig
    scan_set: Callable[[str, str], Scan]
    name: str = "leakage"

    def identity(self) -> dict[str, Any]:
        return asdict(self.config)

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        if chain.before is None:
            raise Refused("stages: leakage needs a stage before it; put filters first")
        if not storage.is_local(chain.folder):
            raise Refused(f"leakage works on files: {chain.folder} must be a folder that all workers mount")
        if self.config.method == "phash" or chain.tables.identity()["scorer"] is None:
            raise Refused(
                "leakage compares embeddings: it needs a scorer, and leakage.method=agree or embedding"
            )
        cluster.connect()
        folder = Path(storage.resolve(chain.folder)[1]) / "pairs"
        source = TableBlocks(chain.tables, chain.ids, chain.before, None, "image", None, True, None)
        rows = {
            name: self._rows(self.scan_set(name, path)) for name, path in sorted(self.config.sets.items())
        }
        sets = {name: evaluation for name, (evaluation, _) in rows.items()}
        find_leaks(source, sets, folder, self.config.search(), RayRunner())
        for shard in chain.ids:
            frame = chain.before.read(shard)
            for name, (_, keys) in rows.items():
                frame = self._drop(frame, folder / name / f"{shard}.parquet", name, keys)
            yield shard, frame
        self._list(chain, folder, {name: keys for name, (_, keys) in rows.items()})

    def _rows(self, scan: Scan) -> tuple[EvaluationSet, list[str]]:
        """Every readable image of an evaluation set, and the shard and key that each row has."""
        vectors, hashes, keys = [], [], []
        for shard, frame in scan.tables.stream(scan.ids, ["shard", "key", "status", "phash"]):
            path = storage.resolve(scan.tables.path(shard, "image.npy"))[1]
            unit, usable = unit_rows(open_embeddings(path))
            usable &= (frame["status"] == "ok").to_numpy()
            vectors.append(unit[usable])
            hashes.append(frame["phash"].fill_null(0).to_numpy()[usable])
            named = frame.filter(pl.Series(usable)).select(
                pl.col("shard").cast(pl.String) + "/" + pl.col("key")
            )
            keys += named.to_series().to_list()
        stacked = np.concatenate(vectors)
        return EvaluationSet("", stacked, np.concatenate(hashes), np.arange(len(stacked))), keys

    def _drop(self, frame: pl.DataFrame, pairs: Path, name: str, keys: list[str]) -> pl.DataFrame:
        near = (
            pl.read_parquet(pairs)
            .group_by("uid_hi", "uid_lo")
            .agg(leak=pl.col("similarity").max())
        )  # fmt: skip
        joined = frame.join(near, on=["uid_hi", "uid_lo"], how="left", maintain_order="left")
        gone = pl.col("leak").is_not_null() & pl.col("kept")
        return (
            joined.with_columns(
                reason=pl.when(gone).then(pl.lit(leakage_reason(name))).otherwise("reason"),
                value=pl.when(gone).then("leak").otherwise("value"),
                cut=pl.when(gone).then(pl.lit(self.config.similarity)).otherwise("cut"),
                copies=pl.when(gone).then(0).otherwise("copies"),
                kept=pl.col("kept") & ~gone,
            )
            .select(list(DECISION))
            .cast(DECISION)  # type: ignore[arg-type]
        )

    def _list(self, chain: Chain, folder: Path, keys: dict[str, list[str]]) -> None:
        """Every pair of all shards and sets in one table, with the evaluation image's name."""
        tables = []
        for name, named in keys.items():
            lookup = pl.DataFrame({"evaluation": named}).with_row_index("evaluation_row")
            for shard in chain.ids:
                pairs = pl.read_parquet(folder / name / f"{shard}.parquet")
                cast = lookup.with_columns(pl.col("evaluation_row").cast(pl.Int64))
                tables.append(pairs.join(cast, on="evaluation_row").with_columns(set=pl.lit(name)))
        with storage.commit(storage.join(chain.folder, "leaks.parquet")) as tmp:
            pl.concat(tables).drop("evaluation_row").sort(
                "set", "uid_hi", "uid_lo", "evaluation"
            ).write_parquet(tmp)

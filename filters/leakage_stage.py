"""The leakage stage: samples too close to an image of an evaluation set are dropped as `leaks_<set>`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from filters.duplicates.blocks import Embeddings, unit_rows
from filters.duplicates.config import Closeness
from filters.duplicates.table_blocks import TableBlocks, embedding_files
from filters.duplicates.tasks import ray_runner
from filters.leakage import EvaluationSet, find_leaks, leakage_reason
from pipeline import evaluation, storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import DECISION, Chain
from pipeline.errors import Refused
from pipeline.scan import Scan


@dataclass(kw_only=True)
class LeakageConfig(Closeness):
    """sets: name of each evaluation set and where it lies (shards, a parquet file, or a folder of images).

    The rest says what is too close: see Closeness.
    """

    sets: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.sets:
            if not name.isidentifier():
                raise ValueError(f"sets.{name}: must be letters, digits and underscores")


@dataclass(frozen=True)
class LeakageStage:
    """Every pair of a sample with an evaluation image that is too close goes to `leaks.parquet`.

    `scan_set` gives the tables of an evaluation set, made by the run's own scorer.
    """

    config: LeakageConfig
    workers: ClusterConfig
    scan_set: Callable[[str, str], Scan]
    name: str = "leakage"

    def identity(self) -> dict[str, Any]:
        sets = {
            name: evaluation.fingerprint(path, f"leakage.sets.{name}")
            for name, path in self.config.sets.items()
        }
        return asdict(self.config) | {"content": sets}

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        if chain.before is None:
            raise Refused("stages: leakage needs a stage before it; put filters first")
        if not storage.is_local(chain.folder):
            raise Refused(f"leakage works on files: {chain.folder} must be a folder that all workers mount")
        hash_alone = self.config.method == "phash"
        if not hash_alone and chain.tables.identity()["scorer"] is None:
            raise Refused(
                f"leakage.method={self.config.method}: scorer=none leaves no embeddings; set leakage.method=phash"
            )
        towers = () if hash_alone else ("image",)
        hashed = self.config.method != "embedding"
        rows = {
            name: self._rows(name, self.scan_set(name, path), towers)
            for name, path in sorted(self.config.sets.items())
        }
        sets = {name: evaluation_set for name, (evaluation_set, _) in rows.items()}
        folder = self._pairs_folder(chain)
        source = TableBlocks(chain.tables, chain.ids, chain.before, chain.tables, towers, None, hashed)
        with ray_runner(self.workers, len(chain.ids)) as runner:
            find_leaks(source, sets, folder, self.config, runner)
        self._list(chain, folder, {name: keys for name, (_, keys) in rows.items()})
        for shard in chain.ids:
            frame = chain.before.read(shard)
            for name in rows:
                frame = self._drop(frame, folder / name / f"{shard}.parquet", name)
            yield shard, frame

    def _pairs_folder(self, chain: Chain) -> Path:
        """Where pairs go that a killed run of the same settings and input will find again; others' are removed."""
        stage = Path(storage.resolve(chain.folder)[1])
        own = stage / f"pairs-{chain.digest}"
        for other in stage.glob("pairs-*"):
            if other != own:
                shutil.rmtree(other)
        return own

    def _rows(self, name: str, scan: Scan, towers: tuple[str, ...]) -> tuple[EvaluationSet, list[str]]:
        """Every readable image of an evaluation set, and the shard and key that each row has."""
        vectors, hashes, keys = [], [], []
        for shard, frame in scan.tables.stream(scan.ids, ["shard", "key", "status", "phash"]):
            unit, usable = unit_rows(Embeddings(embedding_files(scan.tables, shard, towers), len(frame))[:])
            usable &= (frame["status"] == "ok").to_numpy()
            vectors.append(unit[usable])
            hashes.append(frame["phash"].fill_null(0).to_numpy()[usable])
            named = frame.filter(pl.Series(usable)).select(
                pl.col("shard").cast(pl.String) + "/" + pl.col("key")
            )
            keys += named.to_series().to_list()
        stacked = np.concatenate(vectors)
        return EvaluationSet(name, stacked, np.concatenate(hashes), np.arange(len(stacked))), keys

    def _drop(self, frame: pl.DataFrame, pairs: Path, name: str) -> pl.DataFrame:
        near = pl.read_parquet(pairs).group_by("uid_hi", "uid_lo").agg(leak=pl.col("similarity").max())
        joined = frame.join(near, on=["uid_hi", "uid_lo"], how="left", maintain_order="left")
        gone = pl.col("leak").is_not_null() & pl.col("kept")
        return (
            joined.with_columns(
                reason=pl.when(gone).then(pl.lit(leakage_reason(name))).otherwise("reason"),
                value=pl.when(gone).then("leak").otherwise("value"),
                cut=pl.when(gone).then(pl.lit(self.config.least)).otherwise("cut"),
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
            lookup = pl.DataFrame({"evaluation": named}, schema={"evaluation": pl.String})
            lookup = lookup.with_row_index("evaluation_row").cast({"evaluation_row": pl.Int64})
            for shard in chain.ids:
                pairs = pl.read_parquet(folder / name / f"{shard}.parquet")
                tables.append(pairs.join(lookup, on="evaluation_row").with_columns(set=pl.lit(name)))
        with storage.commit(storage.join(chain.folder, "leaks.parquet")) as tmp:
            pl.concat(tables).drop("evaluation_row").sort(
                "set", "uid_hi", "uid_lo", "evaluation"
            ).write_parquet(tmp)

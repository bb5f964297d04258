"""The dedup stage: exact duplicates, then near ones, among the samples that are still in."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from filters.duplicates.config import NearConfig, memory_plan
from filters.duplicates.exact import ExactConfig, exact_duplicates
from filters.duplicates.losses import SourceLosses, source_columns
from filters.duplicates.result import DuplicateResult
from filters.duplicates.search import NearSearch
from filters.duplicates.table_blocks import TOWERS, TableBlocks, score_of
from filters.duplicates.tasks import ray_runner
from pipeline import reasons, storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import DECISION, Chain, Decisions
from pipeline.errors import Refused
from pipeline.scan import Scan
from pipeline.scorer import ScorerConfig
from pipeline.tables import TableSet, digest_json
from pipeline.uids import find_uids

log = logging.getLogger(__name__)
KEYS = ("sha256", "pixel_hash", "url", "caption")
EXACT = reasons.register("exact_duplicate", "a better sample has the same bytes, pixels, url or caption")
NEAR = reasons.register("near_duplicate", "a better sample that was kept is nearly the same image")
# Rows that are worth a worker of their own.
WORKER_ROWS = 2_000


@dataclass(kw_only=True)
class DedupConfig(NearConfig):
    """Which samples are one and the same, and which of them stays: that of the highest score, then lowest uid.

    exact: columns of which an equal value makes two samples one (sha256 of the bytes, pixel_hash of the
    decoded frame, url; caption, normalised, only when asked for). near: search near duplicates too.
    embedding: image, text, or both (the two side by side: their similarity is the mean of the two cosines).
    scorer: the network whose embeddings tell duplicates; null is that of the run. The rest as in NearConfig.
    """

    exact: list[str] = field(default_factory=lambda: ["sha256", "pixel_hash", "url"])
    near: bool = True
    embedding: str = "image"
    scorer: ScorerConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [k for k in self.exact if k not in KEYS]
        if unknown or len(set(self.exact)) != len(self.exact):
            raise ValueError(f"exact={self.exact}: each at most once of {', '.join(KEYS)}")
        if self.embedding not in TOWERS:
            raise ValueError(f"embedding={self.embedding}: one of {', '.join(TOWERS)}")

    def search(self) -> NearConfig:
        return NearConfig(**{f.name: getattr(self, f.name) for f in fields(NearConfig)})


@dataclass(frozen=True)
class DedupStage:
    """Drops duplicates as `exact_duplicate` and `near_duplicate`.

    Beside its decisions it leaves `duplicates.parquet` (dropped uid, kept uid, similarity, how) and
    `duplicates.json` (counts, recall, largest groups, least similar pairs, sources that lose most of their rows).

    The near search keeps its clusters and pairs under `home`, beside the tables, and a later run with more
    shards compares only what is new. It works on files, so `home` must be on a filesystem that all workers
    mount. `scan_own` gives the tables of the configuration's own scorer. Raises Refused for a pool whose tables
    lack what the method needs.
    """

    config: DedupConfig
    home: str
    workers: ClusterConfig
    scan_own: Callable[[ScorerConfig], Scan]
    name: str = "dedup"

    def identity(self) -> dict[str, Any]:
        scorer = self.config.scorer
        return asdict(self.config) | {"scorer": scorer and {**asdict(scorer), "source": scorer.source()}}

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        before = self._check(chain)
        score = _score_column(chain.tables)
        counts, exact = self._exact(chain, before, score)
        # What the exact pass leaves, for the near search to read.
        between = Decisions(storage.join(chain.folder, "exact"))
        for shard in chain.ids:
            between.write(shard, self._drop(before.read(shard), exact))
        found: dict[str, Any] = {"exact": dict(counts)}
        pairs = exact.rechunk()
        if self.config.near:
            result = self._near(chain, between, score)
            near = pl.read_parquet(result.table).with_columns(reason=pl.lit(NEAR))
            pairs = pl.concat([exact, near], how="diagonal_relaxed").sort("uid_hi", "uid_lo").rechunk()
            found["near"] = _summary(result)
        with storage.commit(storage.join(chain.folder, "duplicates.parquet")) as tmp:
            pairs.write_parquet(tmp)
        losses = SourceLosses()
        sources = source_columns(chain.tables.columns(chain.ids[0]))
        for shard in chain.ids:
            frame = before.read(shard)
            decided = self._drop(frame, pairs)
            told = chain.tables.read(shard, list(_roots(sources))).select(**sources)
            losses.add(told, frame["kept"], frame["kept"] & ~decided["kept"])
            yield shard, decided
        found["losing_sources"] = _warn(losses).to_dicts()
        storage.write_json(storage.join(chain.folder, "duplicates.json"), found)

    def _check(self, chain: Chain) -> Decisions:
        if chain.before is None:
            raise Refused("stages: dedup needs a stage before it; put filters first")
        if not storage.is_local(self.home):
            raise Refused(f"dedup works on files: out={self.home} must be a folder that all workers mount")
        scored = self.config.scorer or chain.tables.identity()["scorer"]
        if self.config.near and self.config.method != "phash" and not scored:
            raise Refused(
                f"dedup.method={self.config.method}: scorer=none leaves no embeddings; set dedup.method=phash,"
                " or give dedup.scorer"
            )
        return chain.before

    def _exact(
        self, chain: Chain, before: Decisions, score: str | None
    ) -> tuple[Mapping[str, int], pl.DataFrame]:
        """Rows dropped by each key, and the pairs."""
        folder = Path(storage.resolve(chain.folder)[1]) / "keys"
        keys = [self._keys(chain, before, shard, score, folder) for shard in chain.ids]
        target = folder / "exact.parquet"
        counts = exact_duplicates(keys, target, ExactConfig(keys=tuple(self.config.exact)))
        pairs = pl.read_parquet(target).with_columns(similarity=pl.lit(1.0), reason=pl.lit(EXACT))
        shutil.rmtree(folder)
        return counts, pairs

    def _keys(self, chain: Chain, before: Decisions, shard: str, score: str | None, folder: Path) -> Path:
        """The key columns of one shard, as the exact pass reads them."""
        columns = ["uid_hi", "uid_lo", *self.config.exact, *([score] if score else [])]
        frame = chain.tables.read(shard, columns)
        keys = [
            pl.col(c).bin.encode("hex") if frame.schema[c] == pl.Binary else pl.col(c).cast(pl.String)
            for c in self.config.exact
        ]
        alive = before.read(shard, ["kept"])["kept"]
        path = folder / f"{shard}.parquet"
        with storage.commit(str(path)) as tmp:
            frame.select(
                "uid_hi", "uid_lo", *keys, score=pl.Series(score_of(frame, score)), alive=alive
            ).write_parquet(tmp)  # fmt: skip
        return path

    def _near(self, chain: Chain, before: Decisions, score: str | None) -> DuplicateResult:
        config = self.config.search()
        vectors = self.scan_own(self.config.scorer).tables if self.config.scorer else chain.tables
        towers = TOWERS[self.config.embedding] if config.method != "phash" else ()
        settings = config.searched() | {"towers": list(towers)}
        name = f"{storage.name(vectors.folder)}-{digest_json(settings, 4)}"
        home = Path(storage.resolve(self.home)[1]) / name
        hashed = config.method != "embedding"
        source = TableBlocks(chain.tables, chain.ids, before, vectors, towers, score, hashed)
        rows = sum(int(before.read(shard, ["kept"])["kept"].sum()) for shard in chain.ids)
        width = vectors.identity()["scorer"]["architecture"]["embed_dim"] if towers else 1
        plan = memory_plan(config, rows, width * max(len(towers), 1))
        log.info("near search of %s rows: %s", f"{rows:,}", plan.describe(config.task_memory, self.home))
        with ray_runner(self.workers, rows // WORKER_ROWS + 1) as runner:
            return NearSearch(source, home, config, runner).run()

    def _drop(self, frame: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
        """`frame` without the rows that `pairs` (by uid) names as dropped."""
        hi, lo = ((pairs[c].to_numpy(), frame[c].to_numpy()) for c in ("uid_hi", "uid_lo"))
        at = find_uids(hi[0], lo[0], hi[1], lo[1])
        gone = (at >= 0) & frame["kept"].to_numpy()
        if not gone.any():
            return frame
        row = pairs[np.where(gone, at, 0)]
        cut = np.where(row["reason"] == EXACT, 1.0, self.config.least)
        mask = pl.lit(pl.Series(gone))
        return frame.with_columns(
            kept=pl.col("kept") & ~mask,
            reason=pl.when(mask).then(row["reason"]).otherwise("reason"),
            value=pl.when(mask).then(row["similarity"]).otherwise("value"),
            cut=pl.when(mask).then(pl.lit(pl.Series(cut))).otherwise("cut"),
            copies=pl.when(mask).then(0).otherwise("copies"),
        ).cast(DECISION)  # type: ignore[arg-type]


def _score_column(tables: TableSet) -> str | None:
    source = tables.identity().get("source")
    return f"score_{source['name']}" if source else None


def _roots(exprs: Mapping[str, pl.Expr]) -> set[str]:
    return {name for expr in exprs.values() for name in expr.meta.root_names()}


def _warn(losses: SourceLosses) -> pl.DataFrame:
    """The sources that lose most of their rows, the first of them said aloud."""
    worst = losses.worst()
    for kind, source, rows, dropped, share in worst.head(5).iter_rows():
        log.warning(
            "warning: %s %s loses %d of %d samples (%.0f %%) as duplicates; look at the least similar pairs"
            " before you trust that", kind, source, dropped, rows, 100 * share,
        )  # fmt: skip
    return worst.head(100)


def _summary(result: DuplicateResult) -> dict[str, Any]:
    return {
        "similarity": result.config.cosine,
        "rows": result.rows,
        "unusable": result.unusable,
        "pairs": result.pairs,
        "dropped": result.dropped,
        "recall": {**asdict(result.recall), "value": result.recall.value if result.recall.checked else None},
        "largest_groups": result.largest_groups(20).to_dicts(),
        "least_similar": result.least_similar(20).to_dicts(),
        "kept_in": result.directory.name,
    }

"""The dedup stage: exact duplicates, then near ones, among the samples that are still in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from filters.duplicates.blocks import Block
from filters.duplicates.config import NearConfig, memory_plan
from filters.duplicates.exact import ExactConfig, exact_duplicates
from filters.duplicates.result import DuplicateResult
from filters.duplicates.search import NearSearch
from filters.duplicates.tasks import RayRunner
from pipeline import cluster, reasons, storage
from pipeline.decisions import DECISION, Chain, Decisions
from pipeline.errors import Refused
from pipeline.tables import TableSet, digest_json
from pipeline.uids import find_uids

log = logging.getLogger(__name__)
GIB = 1 << 30
KEYS = ("sha256", "pixel_hash", "url", "caption")
EXACT = reasons.register("exact_duplicate", "a better sample has the same bytes, pixels, url or caption")
NEAR = reasons.register("near_duplicate", "a better sample that was kept is nearly the same image")
SEARCHED = ("method", "similarity", "phash_distance", "seed", "clusters", "embedding")


@dataclass(kw_only=True)
class DedupConfig:
    """Which samples are one and the same, and which of them stays: that of the highest score, then lowest uid.

    exact: columns of which an equal value makes two samples one (sha256 of the bytes, pixel_hash of the
    decoded frame, url; caption, normalised, only when asked for). near: search near duplicates too.
    method: `agree` (embedding and perceptual hash both), `embedding` or `phash`. embedding: image or text.
    similarity: cosine from which two embeddings are near. phash_distance: most differing bits of 64.
    rule: greedy, semdedup or components. recall: share of near pairs to find. sample_rows: rows compared with
    the whole pool to set and measure it. task_memory: bytes a task may use. clusters: null sizes them.
    """

    exact: list[str] = field(default_factory=lambda: ["sha256", "pixel_hash", "url"])
    near: bool = True
    method: str = "agree"
    embedding: str = "image"
    similarity: float = 0.95
    phash_distance: int = 10
    rule: str = "greedy"
    recall: float = 0.99
    clusters: int | None = None
    sample_rows: int = 2000
    task_memory: int = 1 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [k for k in self.exact if k not in KEYS]
        if unknown or len(set(self.exact)) != len(self.exact):
            raise ValueError(f"exact={self.exact}: each at most once of {', '.join(KEYS)}")
        if self.embedding not in ("image", "text"):
            raise ValueError(f"embedding={self.embedding}: must be image or text")
        self.search()

    def search(self) -> NearConfig:
        own = ("exact", "near", "embedding")
        return NearConfig(**{k: v for k, v in asdict(self).items() if k not in own})


@dataclass(frozen=True)
class TableBlocks:
    """The rows of a run as the near search reads them: what earlier stages kept, exact duplicates left out."""

    tables: TableSet
    ids: list[str]
    before: Decisions
    exact: str | None  # parquet of rows that the exact pass dropped
    tower: str
    score: str | None
    hashed: bool
    constant: str | None

    @property
    def shards(self) -> Sequence[str]:
        return self.ids

    def load(self, shard: str) -> Block:
        columns = [
            "uid_hi",
            "uid_lo",
            *(["phash"] if self.hashed else []),
            *([self.score] if self.score else []),
        ]
        frame = self.tables.read(shard, columns)
        alive = self.before.read(shard, ["kept"])["kept"].to_numpy().copy()
        hi, lo = frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy()
        if self.exact:
            gone = pl.read_parquet(self.exact, columns=["uid_hi", "uid_lo"])
            alive[find_uids(gone["uid_hi"].to_numpy(), gone["uid_lo"].to_numpy(), hi, lo) >= 0] = False
        hashes = None
        if self.hashed:
            alive &= frame["phash"].is_not_null().to_numpy()
            hashes = frame["phash"].fill_null(0).to_numpy()
        return Block(
            shard=shard, embeddings=self._vectors(shard, len(frame)),
            uid_hi=hi, uid_lo=lo, score=_score(frame, self.score), alive=alive, phash=hashes,
        )  # fmt: skip

    def _vectors(self, shard: str, rows: int) -> str:
        """The embeddings' file. Where the hash decides alone, one constant column stands in for them."""
        if self.constant is None:
            return storage.resolve(self.tables.path(shard, f"{self.tower}.npy"))[1]
        path = storage.join(self.constant, f"{shard}.npy")
        if not storage.exists(path):
            with storage.commit(path) as tmp, open(tmp, "wb") as f:
                np.save(f, np.ones((rows, 1), np.float16))
        return path


def _score(frame: pl.DataFrame, column: str | None) -> np.ndarray:
    """float32 (n,); samples of a pool without scores are all equal, so that the uid decides."""
    if column is None:
        return np.zeros(len(frame), np.float32)
    return frame[column].fill_null(np.nan).fill_nan(-np.inf).to_numpy()


@dataclass(frozen=True)
class DedupStage:
    """Drops duplicates as `exact_duplicate` and `near_duplicate`; pairs go to `duplicates.parquet`.

    The near search keeps its clusters and pairs under `home`, beside the tables, and a later run with more
    shards compares only what is new. It works on files, so `home` must be on a filesystem that all workers
    mount. Raises Refused for a pool whose tables lack what the method needs.
    """

    config: DedupConfig
    home: str
    name: str = "dedup"

    def identity(self) -> dict[str, Any]:
        return asdict(self.config)

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        before = self._check(chain)
        score = _score_column(chain.tables)
        folder = Path(storage.resolve(chain.folder)[1])
        exact = folder / "exact.parquet"
        keys = [self._keys(chain, before, shard, score, folder) for shard in chain.ids]
        exact_duplicates(keys, exact, ExactConfig(keys=tuple(self.config.exact)))
        found = [pl.read_parquet(exact).with_columns(similarity=pl.lit(1.0), reason=pl.lit(EXACT))]
        if self.config.near:
            result = self._near(chain, before, score, str(exact))
            near = pl.read_parquet(result.table).with_columns(reason=pl.lit(NEAR))
            found.append(near)
            storage.write_json(storage.join(chain.folder, "near.json"), _summary(result))
        pairs = pl.concat(found, how="diagonal_relaxed").sort("uid_hi", "uid_lo")
        with storage.commit(storage.join(chain.folder, "duplicates.parquet")) as tmp:
            pairs.write_parquet(tmp)
        hi, lo = pairs["uid_hi"].to_numpy(), pairs["uid_lo"].to_numpy()
        for shard in chain.ids:
            frame = before.read(shard)
            at = find_uids(hi, lo, frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy())
            yield shard, self._drop(frame, pairs, at)

    def _check(self, chain: Chain) -> Decisions:
        if chain.before is None:
            raise Refused("stages: dedup needs a stage before it; put filters first")
        if not storage.is_local(self.home):
            raise Refused(f"dedup works on files: out={self.home} must be a folder that all workers mount")
        if self.config.near and self.config.method != "phash" and chain.tables.identity()["scorer"] is None:
            raise Refused(
                f"dedup.method={self.config.method}: scorer=none leaves no embeddings; set dedup.method=phash"
            )
        return chain.before

    def _keys(self, chain: Chain, before: Decisions, shard: str, score: str | None, folder: Path) -> Path:
        """The key columns of one shard, as the exact pass reads them."""
        columns = ["uid_hi", "uid_lo", *self.config.exact, *([score] if score else [])]
        frame = chain.tables.read(shard, columns)
        keys = [
            pl.col(c).bin.encode("hex") if c in ("sha256", "pixel_hash") else pl.col(c).cast(pl.String)
            for c in self.config.exact
        ]
        alive = before.read(shard, ["kept"])["kept"]
        path = folder / "keys" / f"{shard}.parquet"
        with storage.commit(str(path)) as tmp:
            frame.select(
                "uid_hi", "uid_lo", *keys, score=pl.Series(_score(frame, score)), alive=alive
            ).write_parquet(tmp)  # fmt: skip
        return path

    def _near(self, chain: Chain, before: Decisions, score: str | None, exact: str) -> DuplicateResult:
        cluster.connect()
        config = self.config.search()
        hashed = self.config.method != "embedding"
        searched = {k: getattr(self.config, k) for k in SEARCHED}
        home = (
            Path(storage.resolve(self.home)[1])
            / f"{storage.name(chain.tables.folder)}-{digest_json(searched, 4)}"
        )
        constant = str(home / "constant") if self.config.method == "phash" else None
        source = TableBlocks(
            chain.tables, chain.ids, before, exact, self.config.embedding, score, hashed, constant
        )
        self._state_memory(chain, before, config)
        return NearSearch(source, home, config, RayRunner()).run()

    def _state_memory(self, chain: Chain, before: Decisions, config: NearConfig) -> None:
        """Say what the search will need before it starts."""
        rows = sum(int(before.read(shard, ["kept"])["kept"].sum()) for shard in chain.ids)
        scorer = chain.tables.identity()["scorer"]
        width = 1 if scorer is None or config.method == "phash" else scorer["architecture"]["embed_dim"]
        plan = memory_plan(config, rows, width)
        log.info(
            "near search of %s rows: at most %.1f GiB a task, %.1f GiB here to decide, %.1f GiB of disk,"
            " %d passes over the largest cluster",
            f"{rows:,}", plan.task_bytes / GIB, plan.driver_bytes / GIB, plan.disk / GIB, plan.passes,
        )  # fmt: skip

    def _drop(self, frame: pl.DataFrame, pairs: pl.DataFrame, at: np.ndarray) -> pl.DataFrame:
        """`frame` with the rows at `pairs[at]` dropped, where at >= 0 and the row was still in."""
        gone = (at >= 0) & frame["kept"].to_numpy()
        row = pairs[np.where(gone, at, 0)] if len(pairs) else pairs
        if not gone.any():
            return frame
        cut = np.where(row["reason"] == EXACT, 1.0, self.config.search().least)
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


def _summary(result: DuplicateResult) -> dict[str, Any]:
    return {
        "rows": result.rows,
        "unusable": result.unusable,
        "pairs": result.pairs,
        "dropped": result.dropped,
        "recall": {**asdict(result.recall), "value": result.recall.value if result.recall.checked else None},
        "largest_groups": result.largest_groups(20).to_dicts(),
        "least_similar": result.least_similar(20).to_dicts(),
    }

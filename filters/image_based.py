"""DataComp's image-based baseline (Gadre et al., NeurIPS 2023, section 4.1): images like those of a target set.

The pool's image embeddings are clustered; a sample stays when its nearest centroid is also the nearest one of
some target image. Nearest is by inner product with the centroids, as in the reference
(baselines/apply_filter.py, get_centroid_ids_gpu).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import faiss
import numpy as np
import polars as pl
import pyarrow as pa
import torch

from filters.base import Filter, Verdict
from filters.duplicates.blocks import unit_rows
from pipeline import cluster, storage
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from pipeline.progress import Progress
from pipeline.tables import TableSet, digest_json

BLOCK = 8192  # rows read at a time
PRODUCTS = 1 << 26  # floats of one block of similarities: 256 MiB
POINTS = 64  # rows a centroid is trained on
ITERATIONS = 20


@dataclass(kw_only=True)
class ImageBased(Filter):
    """Keep samples whose nearest of the pool's centroids is also the nearest of a target image.

    target: .npy of the target set's embeddings (m, d), or an .npz that holds `embedding`; by the model of the
    pool's. embedding: array of the npz files beside the metadata (`l14_img`), or `image` for scanned shards.
    clusters: centroids of k-means (spherical, seeded) on a sample of the pool's tables, 64 rows a centroid; that
    sample is in memory: 4 * 64 * clusters * d bytes, 20 GB for 100,000 of width 768. centroids: an .npy of
    (k, d) made elsewhere, such as DataComp's own, in place of training. A row without a finite, nonzero
    embedding is `non_finite_score`.
    """

    target: str
    embedding: str = "l14_img"
    clusters: int = 100_000
    centroids: str | None = None
    seed: int = 0
    column: str | None = None  # of the rows' nearest centroids, made by `prepare`
    wanted: tuple[int, ...] = ()  # the target images' nearest centroids, ascending

    def __post_init__(self) -> None:
        if self.clusters < 1:
            raise ValueError(f"clusters={self.clusters}: must be at least 1")

    def columns(self) -> list[str]:
        return [self.column] if self.column else []

    def reasons(self) -> dict[str, str]:
        return {"image_off_target": "no image of the target set shares the nearest of the pool's centroids"}

    def identity(self) -> dict[str, Any]:
        files = [f for f in (self.target, self.centroids) if f]
        marks = [storage.signature(f) for f in files if storage.exists(f)]
        return {**super().identity(), "files": marks, "column": None, "wanted": None}

    def prepare(self, tables: TableSet, ids: Sequence[str], workers: ClusterConfig) -> ImageBased:
        """Train or load the centroids, then find every row's nearest, on the cluster; both stay with the tables."""
        target = self._target()
        given = (
            storage.signature(self.centroids) if self.centroids and storage.exists(self.centroids) else None
        )
        pool = None if self.centroids else [[i, _digest(tables, i)] for i in ids]
        made_by = [self.embedding, self.centroids, given, self.clusters, self.seed, pool]
        column = f"cluster_{digest_json(made_by)}"
        path = storage.join(tables.folder, f"{column}.npy")
        if not storage.exists(path):
            centroids = self._given(target.shape[1]) if self.centroids else self._train(tables, ids)
            with storage.commit(path) as tmp, open(tmp, "wb") as f:
                np.save(f, centroids)
        with storage.open_file(path) as f:
            centroids = np.load(f)
        if centroids.shape[1] != target.shape[1]:
            raise Refused(
                f"filters.{self.name}.target={self.target}: embeddings are {target.shape[1]} wide, those of the"
                f" centroids {centroids.shape[1]}"
            )
        self._assign(tables, tables.without_column(ids, column), column, path, workers)
        nearest = Nearest(centroids, "cpu").of(target)
        return replace(self, column=column, wanted=tuple(sorted({int(c) for c in nearest if c >= 0})))

    def _target(self) -> np.ndarray:
        key = f"filters.{self.name}.target={self.target}"
        with storage.open_input(self.target, ".npy or .npz", f"filters.{self.name}.target") as f:
            loaded = np.load(f)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                if self.embedding not in loaded:
                    raise Refused(f"{key}: no array {self.embedding!r}; it holds {', '.join(loaded)}")
                loaded = loaded[self.embedding]
        if loaded.ndim != 2 or loaded.dtype.kind != "f" or not len(loaded):
            raise Refused(f"{key}: is {loaded.dtype} {loaded.shape}, embeddings are rows of floats")
        return loaded

    def _given(self, width: int) -> np.ndarray:
        assert self.centroids
        key = f"filters.{self.name}.centroids={self.centroids}"
        with storage.open_input(self.centroids, ".npy", f"filters.{self.name}.centroids") as f:
            centroids = np.load(f)
        if centroids.ndim != 2 or centroids.shape[1] != width or not np.isfinite(centroids).all():
            raise Refused(f"{key}: is {centroids.dtype} {centroids.shape}, finite rows of {width} are needed")
        return centroids.astype(np.float32)

    def _train(self, tables: TableSet, ids: Sequence[str]) -> np.ndarray:
        """Unit centroids float32 (clusters, d), from whole tables in a seeded order until there are rows enough."""
        wanted = self.clusters * POINTS
        parts: list[np.ndarray] = []
        count = 0
        for at in np.random.default_rng(self.seed).permutation(len(ids)):
            for block in tables.embedding_blocks(ids[at], self.embedding, BLOCK):
                unit, usable = unit_rows(block)
                parts.append(unit[usable][: wanted - count])
                if parts[-1].shape[1] != parts[0].shape[1]:
                    raise Refused(
                        f"{ids[at]}: {self.embedding} is {parts[-1].shape[1]} wide, {parts[0].shape[1]} before"
                    )
                count += len(parts[-1])
                if count >= wanted:
                    break
            if count >= wanted:
                break
        if count < self.clusters:
            raise Refused(
                f"filters.{self.name}.clusters={self.clusters}: the pool has only {count} rows with embeddings"
            )
        sample = np.concatenate(parts)
        means = faiss.Kmeans(
            sample.shape[1], self.clusters, niter=ITERATIONS, spherical=True, seed=self.seed + 1,
            min_points_per_centroid=1, max_points_per_centroid=POINTS, gpu=faiss.get_num_gpus() > 0,
        )  # fmt: skip
        means.train(sample)
        assert means.centroids is not None
        return means.centroids

    def _assign(
        self, tables: TableSet, left: list[str], column: str, centroids: str, workers: ClusterConfig
    ) -> None:
        if not left:
            return
        cluster.connect()
        with Progress(self.name or "clusters", len(left), unit="table") as progress:
            args = [tables.folder, self.embedding, column, centroids]
            plan = cluster.plan_workers(workers, len(left))
            for _, rows in cluster.map_actors(plan, AssignWorker, args, "assign", left):
                progress.step(rows)

    def verdicts(self) -> list[Verdict]:
        assert self.column is not None
        nearest = pl.col(self.column)
        return [
            Verdict("non_finite_score", nearest.is_null()),
            Verdict("image_off_target", ~nearest.is_in(pl.Series(self.wanted, dtype=pl.UInt32).implode())),
        ]


def _digest(tables: TableSet, shard: str) -> str:
    report = tables.report(shard)
    assert report is not None
    return report.digest


class AssignWorker:
    """The Ray actor: nearest centroids of the rows of whole tables, a column uint32, null without an embedding."""

    def __init__(self, folder: str, embedding: str, column: str, centroids: str) -> None:
        torch.set_num_threads(1)
        self.tables, self.embedding, self.column = TableSet(folder), embedding, column
        with storage.open_file(centroids) as f:
            self.nearest = Nearest(np.load(f), cluster.worker_device())

    def assign(self, shard: str) -> int:
        found = [self.nearest.of(b) for b in self.tables.embedding_blocks(shard, self.embedding, BLOCK)]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        values = pa.array(rows.clip(0).astype(np.uint32), mask=rows < 0)
        self.tables.write_column(shard, self.column, values)
        return len(rows)


class Nearest:
    """The centroid of the greatest inner product; equal ones by the lower number."""

    def __init__(self, centroids: np.ndarray, device: str) -> None:
        self.centroids = torch.from_numpy(centroids.astype(np.float32)).to(device)
        self.step = max(1, PRODUCTS // len(centroids))

    def of(self, rows: np.ndarray) -> np.ndarray:
        """int64 (n,) for rows (n, d); -1 where a row is zero or not finite. Raises Refused for another width."""
        if rows.shape[1] != self.centroids.shape[1]:
            raise Refused(
                f"embeddings are {rows.shape[1]} wide, those of the centroids {self.centroids.shape[1]}"
            )
        unit, usable = unit_rows(rows)
        products = (
            torch.from_numpy(unit[start : start + self.step]).to(self.centroids.device) @ self.centroids.T
            for start in range(0, len(unit), self.step)
        )
        found = [p.argmax(1).cpu().numpy() for p in products]
        return np.where(usable, np.concatenate(found), -1) if found else np.empty(0, np.int64)

"""Which clusters a row goes to, and the files that carry it there.

A row lives in one cluster (its nearest centroid) and *visits* every other whose centroid is nearly as close:
similarity within ``margin`` of the best. A visitor is compared with the residents only. A near pair is found
when either row visits the other's cluster. At equal recall the margin places rows in some 40 % fewer clusters
than a fixed number of probes does, since rows deep inside a cluster need none.

For the perceptual hash alone clusters are bands of bits: two hashes at most t bits apart agree in at least
one of t + 1 bands (Norouzi, Punjani & Fleet, "Fast exact search in Hamming space with multi-index hashing",
2014, section 3), so nothing is lost and all rows are residents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import torch

from filters.duplicates.blocks import BlockSource, open_embeddings, row_ids, unit_rows
from filters.duplicates.config import PLACE_PRODUCTS, READ_ROWS, NearConfig, band_edges
from filters.duplicates.near import HashTest, SketchTest, device
from filters.duplicates.survey import union
from pipeline import storage

# Centroid similarities closer than this are decided in float64, so that no blocking of a product does it.
TIE = 1e-5


@dataclass(frozen=True)
class Codebook:
    """Centroids (k, d) float32 unit rows, rotation (d, m) float32, visiting margin, sketch reach.

    ``placements`` is the mean number of clusters a row goes to, as estimated when the margin was set.
    """

    centroids: np.ndarray
    rotation: np.ndarray
    margin: float
    reach: float
    placements: float

    @property
    def clusters(self) -> int:
        return len(self.centroids)

    @property
    def test(self) -> SketchTest:
        return SketchTest(self.reach)

    def save(self, path: Path) -> None:
        with storage.commit(str(path)) as temporary, open(temporary, "wb") as file:
            np.savez(
                file,
                centroids=self.centroids,
                rotation=self.rotation,
                numbers=np.array([self.margin, self.reach, self.placements]),
            )

    @classmethod
    def load(cls, path: Path) -> Codebook:
        with np.load(path) as arrays:
            return cls(arrays["centroids"], arrays["rotation"], *map(float, arrays["numbers"]))

    def place(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Clusters of unit rows (n, d): home (n,) int64, and visits as (row, cluster) int64 arrays."""
        step = max(1, PLACE_PRODUCTS // self.clusters)
        parts = [self._place(vectors[start : start + step]) for start in range(0, len(vectors), step)]
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
        home, row, cluster = zip(*parts)
        row = [rows + number * step for number, rows in enumerate(row)]
        return np.concatenate(home), np.concatenate(row), np.concatenate(cluster)

    def _place(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        products = products_on_device(vectors, self.centroids)
        gap = products.amax(1, keepdim=True) - products
        # One line decides home and visits; what is within a rounding error of it is recomputed exactly.
        doubtful = (gap < TIE).sum(1) > 1
        doubtful |= ((gap - self.margin).abs() < TIE).any(1)
        rows = torch.nonzero(doubtful).squeeze(1)
        exact = exact_similarities(vectors[rows.cpu().numpy()], self.centroids)
        home = products.argmax(1)
        home[rows] = torch.from_numpy(exact.argmax(1)).to(home.device)
        visiting = gap <= self.margin
        visits = exact.max(1, initial=-1.0)[:, None] - exact <= self.margin
        visiting[rows] = torch.from_numpy(visits).to(home.device)
        visiting[torch.arange(len(home), device=home.device), home] = False
        row, cluster = torch.nonzero(visiting).cpu().numpy().T
        return home.cpu().numpy(), row, cluster

    def sketch(self, vectors: np.ndarray) -> np.ndarray:
        """Sketches of unit rows: (n, m) float16."""
        return products_on_device(vectors, self.rotation.T).to(torch.float16).cpu().numpy()


@dataclass(frozen=True)
class HashBands:
    """Clusters for the perceptual hash alone: (band, value of the band)."""

    distance: int

    @property
    def edges(self) -> list[int]:
        return band_edges(self.distance)

    @property
    def clusters(self) -> int:
        return sum(1 << (stop - start) for start, stop in zip(self.edges, self.edges[1:]))

    @property
    def test(self) -> HashTest:
        return HashTest(self.distance)

    def place(self, hashes: np.ndarray) -> np.ndarray:
        """Clusters of (n,) uint64 hashes, one a band: (n, bands) int64."""
        columns, base = [], 0
        for start, stop in zip(self.edges, self.edges[1:]):
            value = (hashes >> np.uint64(start)) & np.uint64((1 << (stop - start)) - 1)
            columns.append(value.astype(np.int64) + base)
            base += 1 << (stop - start)
        return np.stack(columns, axis=1)

    def first_band(self, differing: np.ndarray) -> np.ndarray:
        """First band in which two hashes agree, given their XOR (p,) uint64: (p,) int64, as base cluster."""
        found = np.full(len(differing), -1, dtype=np.int64)
        base = 0
        for start, stop in zip(self.edges, self.edges[1:]):
            mask = np.uint64(((1 << (stop - start)) - 1) << start)
            found = np.where((found < 0) & ((differing & mask) == 0), base, found)
            base += 1 << (stop - start)
        return found

    def base(self, cluster: int) -> int:
        """First cluster of the band this cluster belongs to."""
        base = 0
        for start, stop in zip(self.edges, self.edges[1:]):
            if cluster < base + (1 << (stop - start)):
                return base
            base += 1 << (stop - start)
        raise IndexError(cluster)


def products_on_device(rows: np.ndarray, others: np.ndarray) -> torch.Tensor:
    """Float32 products of rows (n, d) and others (k, d): (n, k), on the device of this process."""
    where = device()
    return torch.from_numpy(rows).to(where) @ torch.from_numpy(others).to(where).T


def similarities(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Float32 products of rows (n, d) and others (k, d): (n, k)."""
    return products_on_device(rows, others).cpu().numpy()


def exact_similarities(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Float64 products, each computed on its own whatever its neighbours: (n, k)."""
    wide = centroids.astype(np.float64)
    out = np.empty((len(vectors), len(centroids)))
    for row, vector in enumerate(vectors.astype(np.float64)):
        out[row] = np.einsum("kd,d->k", wide, vector)
    return out


def train_centroids(sample: np.ndarray, config: NearConfig, clusters: int) -> np.ndarray:
    """Spherical k-means on unit rows (n, d): (k, d) float32 unit centroids; on the GPU when FAISS has one."""
    if clusters == 1:
        return sample[:1].copy()
    kmeans = faiss.Kmeans(
        sample.shape[1],
        clusters,
        spherical=True,
        seed=config.seed,
        niter=10,
        gpu=faiss.get_num_gpus() > 0,
        # FAISS samples again, silently, above this many points a centroid; the sample here is drawn to size.
        max_points_per_centroid=len(sample) // clusters + 1,
    )
    kmeans.train(sample)
    assert kmeans.centroids is not None
    return np.ascontiguousarray(kmeans.centroids.reshape(clusters, -1), dtype=np.float32)


@dataclass(frozen=True)
class SpillTask:
    """Shards to place as (ordinal, shard, files of its rows that have entered), and the directory to write."""

    shards: tuple[tuple[int, str, tuple[str, ...]], ...]
    target: str


@dataclass(frozen=True)
class Spill:
    """Task: place the rows of some shards and write them sorted by cluster.

    Writes ``<target>/{home,visit}_{id,payload,offset}.npy`` (offset (k + 1,) int64) and for each shard
    ``entered-<ordinal>.npy``, the (n,) bool rows live and new. Returns (rows placed, not usable).
    """

    source: BlockSource
    book: Codebook | HashBands
    method: str

    def __call__(self, task: SpillTask) -> tuple[int, int]:
        target = Path(task.target)
        if target.exists():
            total, unusable = np.load(target / "counts.npy").tolist()
            return total, unusable
        sections: dict[str, list[list[np.ndarray]]] = {"home": [[], [], []], "visit": [[], [], []]}
        masks, total, unusable = {}, 0, 0
        for ordinal, shard, earlier in task.shards:
            block = self.source.load(shard)
            entered = block.alive & ~union(earlier, block.rows)
            masks[ordinal] = entered.copy()
            embeddings = open_embeddings(block)
            for start in range(0, len(entered), READ_ROWS):
                part = slice(start, start + READ_ROWS)
                vectors, usable = unit_rows(embeddings[part])
                unusable += int((entered[part] & ~usable).sum())
                entered[part] &= usable
                rows = np.flatnonzero(entered[part])
                hashes = None if block.phash is None else block.phash[part][rows]
                self._place(vectors[rows], hashes, row_ids(ordinal, rows + start), sections)
            total += int(entered.sum())
        with storage.commit_folder(str(target)) as folder:
            directory = Path(folder)
            for name, columns in sections.items():
                self._write(directory, name, columns)
            for ordinal, mask in masks.items():
                np.save(directory / f"entered-{ordinal}.npy", mask)
            np.save(directory / "counts.npy", np.array([total, unusable]))
        return total, unusable

    def _place(
        self,
        vectors: np.ndarray,
        hashes: np.ndarray | None,
        ids: np.ndarray,
        sections: dict[str, list[list[np.ndarray]]],
    ) -> None:
        if isinstance(self.book, HashBands):
            assert hashes is not None  # the survey has refused shards without them
            clusters = self.book.place(hashes)
            bands = clusters.shape[1]
            added = {"home": (clusters.ravel(), np.repeat(ids, bands), np.repeat(hashes, bands))}
        else:
            home, row, cluster = self.book.place(vectors)
            payload = self.book.sketch(vectors) if self.method == "embedding" else hashes
            assert payload is not None
            added = {"home": (home, ids, payload), "visit": (cluster, ids[row], payload[row])}
        for name, columns in added.items():
            for kept, column in zip(sections[name], columns):
                kept.append(column)

    def _write(self, directory: Path, name: str, columns: list[list[np.ndarray]]) -> None:
        if columns[0]:
            cluster, ids, payload = (np.concatenate(parts) for parts in columns)
        else:
            cluster, ids = np.empty(0, np.int64), np.empty(0, np.int64)
            payload = np.empty((0, 1), np.float16) if self.method == "embedding" else np.empty(0, np.uint64)
        order = np.argsort(cluster, kind="stable")
        offset = np.searchsorted(cluster[order], np.arange(self.book.clusters + 1))
        np.save(directory / f"{name}_id.npy", ids[order])
        np.save(directory / f"{name}_payload.npy", payload[order])
        np.save(directory / f"{name}_offset.npy", offset.astype(np.int64))


class ClusterFiles:
    """The placements written by several spill tasks, read back by cluster, a range of rows at a time."""

    def __init__(self, directories: Sequence[str], section: str):
        self.parts = [
            tuple(
                np.load(Path(d) / f"{section}_{name}.npy", mmap_mode="r")
                for name in ("id", "payload", "offset")
            )
            for d in directories
        ]

    def sizes(self) -> np.ndarray:
        """Rows of each cluster: (k,) int64; (0,) when there are no files."""
        return (
            np.sum([np.diff(offset) for _, _, offset in self.parts], axis=0)
            if self.parts
            else np.empty(0, int)
        )

    def rows(self, cluster: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows start..stop of a cluster, over all files in order: ids (n,) int64, payload (n, ...)."""
        ids, payloads, seen = [], [], 0
        for part_ids, part_payload, offset in self.parts:
            first, last = int(offset[cluster]), int(offset[cluster + 1])
            low, high = max(start - seen, 0), min(stop - seen, last - first)
            if low < high:
                ids.append(np.asarray(part_ids[first + low : first + high]))
                payloads.append(np.asarray(part_payload[first + low : first + high]))
            seen += last - first
        return np.concatenate(ids), np.concatenate(payloads)

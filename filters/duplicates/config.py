"""Settings of near-duplicate search, and what they cost in memory and disk before it starts."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

COSINES = {"agree": 0.8, "embedding": 0.95, "phash": 0.8}
METHODS = tuple(COSINES)
RULES = ("greedy", "semdedup", "components")
MIB, GIB = 1 << 20, 1 << 30


@dataclass(kw_only=True)
class Closeness:
    """When two rows are taken for the same image.

    ``method``: ``agree`` (embedding and perceptual hash must both say so), ``embedding`` or ``phash`` alone.
    ``similarity``: cosine from which embeddings are near; None is .95 for embeddings alone, and .8 where they
    only confirm what the hash says (measured: docs/duplicates.md). ``phash_distance``: most differing bits of
    near hashes.
    """

    method: str = "agree"
    similarity: float | None = None
    phash_distance: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method}: one of {', '.join(METHODS)}")
        if self.similarity is not None and not 0 < self.similarity <= 1:
            raise ValueError(f"similarity={self.similarity}: a cosine in (0, 1]")
        if not 0 <= self.phash_distance <= 16:
            raise ValueError(
                f"phash_distance={self.phash_distance}: 0 to 16 of 64 bits; unrelated images differ in 32"
            )

    @property
    def cosine(self) -> float:
        """``similarity``, or the method's own."""
        return self.similarity if self.similarity is not None else COSINES[self.method]

    @property
    def least(self) -> float:
        """Similarity from which a pair counts: the cosine, or the share of equal bits for the hash alone."""
        return 1 - self.phash_distance / 64 if self.method == "phash" else self.cosine


@dataclass(kw_only=True)
class NearConfig(Closeness):
    """How near duplicates are found and which of them stay.

    ``rule``: greedy, semdedup or components (rules.py). ``recall``: share of near pairs to find.
    ``clusters``: None sizes them from the pool. ``sample_rows``: rows compared with the whole pool to set and
    measure recall. ``task_memory``: bytes one task may use.
    """

    rule: str = "greedy"
    recall: float = 0.99
    clusters: int | None = None
    sample_rows: int = 2000
    task_memory: int = 1 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule}: one of {', '.join(RULES)}")
        if not 0 < self.recall < 1:
            raise ValueError(f"recall={self.recall}: in (0, 1); 1 would compare every pair")
        if self.clusters is not None and self.clusters < 1:
            raise ValueError(f"clusters={self.clusters}: at least 1, or null to size them from the pool")
        if self.sample_rows < 100:
            raise ValueError(f"sample_rows={self.sample_rows}: at least 100; fewer say nothing about recall")
        if self.task_memory < 256 * MIB:
            raise ValueError(f"task_memory={self.task_memory}: at least {256 * MIB} bytes (256 MiB)")

    def searched(self) -> dict[str, Any]:
        """The settings that decide which pairs are looked for."""
        own = {name: getattr(self, name) for name in ("method", "phash_distance", "seed", "clusters")}
        return own | {"similarity": self.cosine}

    def raised(self, similarity: float) -> NearConfig:
        """The same with a higher ``least``. Raises ValueError for a lower one."""
        if similarity < self.least:
            raise ValueError(
                f"similarity={similarity}: pairs were searched from {self.least}; lower needs a new run"
            )
        if self.method == "phash":
            return replace(self, phash_distance=math.floor((1 - similarity) * 64))
        return replace(self, similarity=similarity)

    def cluster_count(self, rows: int, width: int) -> int:
        """Clusters for a pool of rows x width: sqrt(n) / 3, where assigning and comparing cost about alike.

        Never so many that k-means has fewer than 39 rows a centroid (FAISS's own floor), be it that the pool
        has no more or that the memory does not hold them; never none.
        """
        wanted = self.clusters or round(math.sqrt(rows) / 3)
        return max(1, min(wanted, rows // LEAST_ROWS, self.task_memory // ((LEAST_ROWS + 1) * width * 8)))


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs, in bytes: tasks by step, the driver to decide, disk; and passes over a cluster.

    ``whole``: to compare the largest cluster in one piece. A task loads ``tile_rows`` rows of a section at a
    time instead; ``passes`` is how often for that cluster.
    """

    train: int
    spill: int
    compare: int
    decide: int
    disk: int
    whole: int
    tile_rows: int
    passes: int

    @property
    def task_bytes(self) -> int:
        """Most bytes any one task holds at a time, with the libraries it loads."""
        return max(self.train, self.spill, self.compare) + LIBRARIES

    @property
    def driver_bytes(self) -> int:
        """Most bytes the process that runs the search holds."""
        return max(self.train, self.decide) + LIBRARIES

    def describe(self, task_memory: int, folder: str) -> str:
        """The plan in one line, held against the memory of a task and the disk that `folder` lies on."""
        free = shutil.disk_usage(Path(folder).anchor).free
        return (
            f"at most {self.task_bytes / GIB:.1f} GiB a task and {self.driver_bytes / GIB:.1f} GiB here;"
            f" {self.disk / GIB:.1f} GiB of disk, {free / GIB:.0f} GiB are free; the largest cluster needs"
            f" {self.whole / GIB:.1f} GiB, dedup.task_memory is {task_memory / GIB:.1f} GiB: {passes(self.passes)}"
        )


def passes(count: int) -> str:
    return f"{count} pass{'es' * (count > 1)}"


# One block of the comparison: rows x columns of float32 similarities.
BLOCK_ROWS, BLOCK_COLUMNS = 1024, 4096
# Pairs verified together; their vectors are gathered in slices of this many.
VERIFY_PAIRS, VERIFY_SLICE = 262_144, 16_384
# Rows of a block read at a time when they are placed, and most products with centroids held while they are.
READ_ROWS, PLACE_PRODUCTS = 8192, 1 << 24
# Rows a centroid below which FAISS warns that k-means has too few.
LEAST_ROWS = 39
# What Python holds with numpy, torch, faiss and scipy loaded.
LIBRARIES = 850 * MIB
# Pairs read at a time, and pairs that are decided together.
READ_PAIRS, PARTITION_PAIRS = 4_000_000, 8_000_000


def band_edges(distance: int) -> list[int]:
    """Where the bands of a hash start and end, in bits: one more than may differ, none wider than 16 bits."""
    bands = max(distance + 1, 4)
    return [64 * band // bands for band in range(bands + 1)]


def payload_bytes(config: NearConfig, width: int, sketch: int) -> int:
    """Bytes a placed row takes on disk: its number, and its sketch (float16) or its hash."""
    return 8 + (2 * min(sketch, width) if config.method == "embedding" else 8)


def memory_plan(
    config: NearConfig,
    rows: int,
    width: int,
    *,
    sketch: int = 64,
    placements: float = 6.0,
    largest: int | None = None,
    duplicates: float = 0.2,
) -> MemoryPlan:
    """What a pool of ``rows`` x ``width`` needs; ``largest`` is the largest cluster's rows when known.

    ``duplicates`` is the share of rows that have a near pair, at one pair a row.

    ``sketch`` and ``placements`` (clusters a row goes to) are known after training; the defaults are
    those of vectors without any cluster structure, the hardest case. The hash alone has a cluster for each
    value of each band, and needs no training.
    """
    clusters = trained = config.cluster_count(rows, width)
    if config.method == "phash":
        edges = band_edges(config.phash_distance)
        placements, trained = len(edges) - 1.0, 0
        clusters = sum(1 << (stop - start) for start, stop in itertools.pairwise(edges))
    lane = payload_bytes(config, width, sketch)
    columns = min(sketch, width) if config.method == "embedding" else 64
    largest = largest if largest is not None else math.ceil(4 * placements * rows / clusters)
    batch = batch_rows(config, width, clusters, lane, placements)
    tile = tile_rows(config, width, columns)
    involved, pairs = math.ceil(duplicates * rows), math.ceil(min(duplicates * rows, PARTITION_PAIRS))
    return MemoryPlan(
        train=training_rows(config, trained, width) * width * 8 + trained * width * 8,
        spill=_reading(width, clusters) + math.ceil(min(batch, rows) * placements * _placing(lane)),
        compare=_comparing(width) + _loaded(min(tile, largest), columns),
        decide=involved * 68 + pairs * 160,
        disk=math.ceil(rows * placements * lane + involved * 25),
        whole=_comparing(width) + _loaded(largest, columns),
        tile_rows=tile,
        passes=math.ceil(largest / tile),
    )


def _reading(width: int, clusters: int) -> int:
    """Bytes of the rows being placed: vectors in three copies, products with the centroids in three."""
    return 3 * 4 * (READ_ROWS * width + min(READ_ROWS * clusters, PLACE_PRODUCTS))


def _placing(lane: int) -> int:
    """Bytes of a placement while a spill is gathered and sorted: five copies with its cluster, two orders.

    Three copies are live at a time; the rest is what the allocator does not give back (measured).
    """
    return 5 * (lane + 8) + 16


def _comparing(width: int) -> int:
    """Bytes of one block of products with all its pairs candidates, and of the pairs being verified."""
    block = BLOCK_ROWS * BLOCK_COLUMNS * (4 + 1 + 16)
    return block + VERIFY_SLICE * width * 4 * 3 + VERIFY_PAIRS * 80 + (BLOCK_ROWS + BLOCK_COLUMNS) * width * 8


def _loaded(rows: int, columns: int) -> int:
    """Bytes of two sections of a cluster that are compared, with their factors."""
    return 2 * rows * 8 * (columns + 2)


def tile_rows(config: NearConfig, width: int, columns: int) -> int:
    """Most rows of one section of a cluster that a task loads at a time; larger sections are split."""
    return max(BLOCK_COLUMNS, (config.task_memory - _comparing(width)) // (2 * 8 * (columns + 2)))


def batch_rows(config: NearConfig, width: int, clusters: int, lane: int, placements: float) -> int:
    """Rows whose placements one spill task gathers: what fits beside its reading buffers."""
    room = max(config.task_memory - _reading(width, clusters), config.task_memory // 4)
    return max(READ_ROWS, int(room / (placements * _placing(lane))))


def training_rows(config: NearConfig, clusters: int, width: int) -> int:
    """Rows k-means sees: 256 a centroid (where FAISS stops by itself), fewer when the memory asks for it."""
    return max(LEAST_ROWS * clusters, min(256 * clusters, config.task_memory // (width * 8) - clusters))

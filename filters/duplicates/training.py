"""What a search learns before it places rows: a checked sample, centroids, visiting margin and sketch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from filters.duplicates.blocks import BlockSource, Shelf
from filters.duplicates.clusters import Codebook, similarities, train_centroids
from filters.duplicates.config import LEAST_ROWS, NearConfig, training_rows
from filters.duplicates.near import PAIR, choose_sketch, rotation, sketch_reach
from filters.duplicates.recall import (
    LEAST_PAIRS,
    MOST_PAIRS,
    ExactNeighbours,
    choose_margin,
    crossing_gaps,
    plant_pairs,
)
from filters.duplicates.survey import SampleRows, Survey
from filters.duplicates.tasks import Runner, run_all

# Rows of the training sample that show which pairs meet in a cluster.
LOOK_ROWS = 2048
_TRAIN, _CHECK = 1, 2


@dataclass(frozen=True)
class Entry(Survey):
    """A shard as it entered a search, and its place among the shards that did."""

    ordinal: int


@dataclass(frozen=True)
class Sample:
    """Rows drawn from the pool and every live row near to one of them (PAIR records, ``a`` the drawn row)."""

    ids: np.ndarray
    vectors: np.ndarray
    pairs: np.ndarray

    def half(self, second: bool) -> np.ndarray:
        """Pairs of every other drawn row: the first half sets the margin, the second measures recall."""
        return self.pairs[np.searchsorted(self.ids, self.pairs["a"]) % 2 == int(second)]


def draw_sample(
    source: BlockSource, runner: Runner, config: NearConfig, entries: list[Entry], shelf: Shelf
) -> Sample:
    """Rows drawn from those entering, and their exact neighbours among all rows of this run."""
    share = min(1.0, config.sample_rows / max(sum(e.alive for e in entries), 1))
    tasks = [(entry.ordinal, entry.shard) for entry in entries]
    drawn = run_all(runner, SampleRows(source, share, config.seed, _CHECK), tasks)
    ids, vectors, hashes = (np.concatenate(columns) for columns in zip(*drawn))
    order = np.argsort(ids)
    ids, vectors, hashes = ids[order], vectors[order], hashes[order]
    most = max(1000, MOST_PAIRS // len(shelf.shards))
    exact = ExactNeighbours(
        source, config.method, config.cosine, config.phash_distance, ids, vectors, hashes, most, config.seed
    )  # fmt: skip
    present = set(source.shards)
    others = [(ordinal, shard) for ordinal, shard in enumerate(shelf.shards) if shard in present]
    found = run_all(runner, exact, others)
    return Sample(ids, vectors, np.concatenate([*found, np.empty(0, dtype=PAIR)]))


def train_book(
    source: BlockSource,
    runner: Runner,
    config: NearConfig,
    entries: list[Entry],
    shelf: Shelf,
    sample: Sample,
) -> Codebook:
    """Centroids, margin and sketch for the rows that enter."""
    rows = sum(entry.alive for entry in entries)
    clusters = config.cluster_count(rows, shelf.width)
    share = min(1.0, training_rows(config, clusters, shelf.width) / max(rows, 1))
    tasks = [(entry.ordinal, entry.shard) for entry in entries]
    drawn = run_all(runner, SampleRows(source, share, config.seed, _TRAIN), tasks)
    training = np.concatenate([vectors for _, vectors, _ in drawn])
    if not len(training):
        training = np.eye(1, shelf.width, dtype=np.float32)
    clusters = min(clusters, max(1, len(training) // LEAST_ROWS))  # unusable rows may have thinned the sample
    centroids = train_centroids(training, config, clusters)
    margin = find_margin(config, centroids, shelf, sample)
    return with_sketch(config, centroids, margin, training, sample)


def find_margin(config: NearConfig, centroids: np.ndarray, shelf: Shelf, sample: Sample) -> float:
    """Visiting margin that brings the recall for the least similar third of the pool's near pairs.

    Closer pairs are found more often, so the recall holds near the threshold and not only on average.
    LEAST_PAIRS are looked at in any case, planted ones when the pool has fewer.
    """
    pairs = sample.half(second=False)
    pairs = pairs[np.argsort(pairs["similarity"], kind="stable")][: max(LEAST_PAIRS, len(pairs) // 3)]
    pairs = pairs[:: len(pairs) // (50 * LEAST_PAIRS) + 1]
    others, place = np.unique(pairs["b"], return_inverse=True)
    x = sample.vectors[np.searchsorted(sample.ids, pairs["a"])]
    y = shelf.vectors(others)[place]
    missing = LEAST_PAIRS - len(pairs)
    if missing > 0 and len(sample.vectors):
        rng = np.random.default_rng([config.seed, 3])
        planted = plant_pairs(sample.vectors, config.cosine, missing, rng)
        x = np.concatenate([x, sample.vectors[np.arange(missing) % len(sample.vectors)]])
        y = np.concatenate([y, planted])
    return choose_margin(crossing_gaps(x, y, centroids), config.recall) if len(x) else 0.0


def with_sketch(
    config: NearConfig, centroids: np.ndarray, margin: float, training: np.ndarray, sample: Sample
) -> Codebook:
    """The codebook with the sketch that is cheapest for the pairs its clusters bring together."""
    width = training.shape[1]
    look = training[:: max(1, len(training) // LOOK_ROWS)][:LOOK_ROWS]
    products = similarities(look, centroids)
    home = products.argmax(1)
    met = (products.max(1)[:, None] - products <= margin)[:, home]
    met[np.tril_indices(len(look))] = False
    cosines = similarities(look, look)[met][:200_000]
    sketch = choose_sketch(cosines, config.cosine, width) if len(cosines) else min(64, width)
    # Rows that were not trained on: those that were lie closer to their centroid and visit less.
    fresh = similarities(sample.vectors if len(sample.vectors) else look, centroids)
    visits = float((fresh.max(1)[:, None] - fresh <= margin).sum(1).mean())
    reach = sketch_reach(config.cosine, sketch, width)
    return Codebook(centroids, rotation(width, sketch, config.seed), margin, reach, visits)

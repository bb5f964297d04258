"""What a pool's row is labelled as: a column of the tables, zero-shot prompts, captions, or clusters.

A pool rarely has labels. Zero-shot prompts (Radford et al., ICML 2021, section 3.1.4) give each image the
class whose prompts its embedding is nearest to; `captions` does the same with the embedding of the caption,
so that a picture under another's caption carries a wrong label; clusters stand in where no class is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl

from pipeline.errors import Refused

UNKNOWN = -1
PSEUDO = ("prompts", "captions", "clusters")
MOST_CLASSES = 10_000
Towers = Callable[[str], np.ndarray]  # a tower's name to one shard's embeddings, float16 (rows, d)


@dataclass(frozen=True)
class Coder:
    """Names of classes or groups, and which one a table's value means: a name, or its number as text."""

    names: tuple[str, ...]

    def codes(self, values: pl.Series) -> np.ndarray:
        """(n,) int32 number of each value, UNKNOWN for nulls and for what is no name."""
        known = {str(i): i for i in range(len(self.names))} | {name: i for i, name in enumerate(self.names)}
        text = values.cast(pl.String)
        return (
            text.replace_strict(known, default=UNKNOWN, return_dtype=pl.Int32).fill_null(UNKNOWN).to_numpy()
        )

    @classmethod
    def of_values(cls, key: str, found: set[str]) -> Coder:
        """The distinct values of a column, numbers in their order. Raises Refused where they name no classes."""
        if len(found) < 2:
            raise Refused(f"{key}: {len(found)} different values in the pool; at least 2 are needed")
        if len(found) > MOST_CLASSES:
            raise Refused(
                f"{key}: more than {MOST_CLASSES} different values in the pool; they name no classes"
            )
        numbers = all(value.lstrip("-").isdigit() for value in found)
        return cls(tuple(sorted(found, key=(lambda v: (int(v), v)) if numbers else None)))  # type: ignore[arg-type]


class LabelRule(Protocol):
    """How rows get class numbers; picklable, it works on one shard at a time."""

    @property
    def names(self) -> tuple[str, ...]:
        """The classes, by number."""
        ...

    @property
    def columns(self) -> list[str]:
        """Table columns that `label` reads."""
        ...

    def label(self, frame: pl.DataFrame, towers: Towers) -> np.ndarray:
        """(rows,) int32 class numbers of one shard, UNKNOWN where there is none."""
        ...


@dataclass(frozen=True)
class ColumnLabels:
    """The classes that a column of the tables names."""

    column: str
    coder: Coder

    @property
    def names(self) -> tuple[str, ...]:
        return self.coder.names

    @property
    def columns(self) -> list[str]:
        return [self.column]

    def label(self, frame: pl.DataFrame, towers: Towers) -> np.ndarray:
        return self.coder.codes(frame[self.column])


@dataclass(frozen=True)
class NearestLabels:
    """The nearest of some points: largest x . points[c] - offsets[c]. points (C, d) float32, offsets (C,)."""

    names: tuple[str, ...]
    tower: str
    points: np.ndarray
    offsets: np.ndarray

    @property
    def columns(self) -> list[str]:
        return []

    def label(self, frame: pl.DataFrame, towers: Towers) -> np.ndarray:
        x = np.asarray(towers(self.tower), np.float32)
        near = (x @ self.points.T - self.offsets).argmax(axis=1).astype(np.int32)
        near[~np.isfinite(x).all(axis=1)] = UNKNOWN
        return near


@dataclass(frozen=True)
class TrueLabels:
    """A target set's own labels where it has them, the pool's rule for the other rows."""

    rule: LabelRule
    coder: Coder

    @property
    def names(self) -> tuple[str, ...]:
        return self.coder.names

    @property
    def columns(self) -> list[str]:
        return ["label", *self.rule.columns]

    def label(self, frame: pl.DataFrame, towers: Towers) -> np.ndarray:
        own = self.coder.codes(frame["label"])
        return np.where(own == UNKNOWN, self.rule.label(frame, towers), own)


def prompt_labels(
    tower: str,
    names: Sequence[str],
    templates: Sequence[str],
    embed_text: Callable[[Sequence[str]], np.ndarray],
) -> NearestLabels:
    """Classes by the mean of the unit embeddings of their prompts, made a unit again."""
    prompts = [template.format(name) for name in names for template in templates]
    vectors = embed_text(prompts).reshape(len(names), len(templates), -1).mean(axis=1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return NearestLabels(tuple(names), tower, vectors.astype(np.float32), np.zeros(len(names), np.float32))


def cluster_labels(tower: str, sample: np.ndarray, clusters: int, seed: int) -> NearestLabels:
    """k-means on a sample (m, d) of the pool's embeddings; the other rows go to the nearest centre.

    Raises Refused for fewer sample rows than clusters.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    if len(sample) < clusters:
        raise Refused(f"selection.clusters={clusters}: the pool has only {len(sample)} rows to cluster")
    with threadpool_limits(1):  # sums in one order, whatever the machine's cores
        found = KMeans(clusters, n_init=1, random_state=seed).fit(np.asarray(sample, np.float64))
    centres = found.cluster_centers_.astype(np.float32)
    names = tuple(f"cluster {i}" for i in range(clusters))
    return NearestLabels(names, tower, centres, (centres**2).sum(axis=1) / 2)

"""How far a stored score column can be trusted: a seeded sample of the pool is scored anew and held against it.

Published scores do not reproduce from the images that are distributed with them (other resolutions, other
decoders), so a column given by others is never mixed with one of ours; this measures how far apart they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.figure import Figure
from scipy.stats import pearsonr, spearmanr

from pipeline import shards as finding
from pipeline import sidecar as sidecars
from pipeline import storage
from pipeline.decode import DecodeConfig, Decoder, ImageRejected
from pipeline.errors import Refused, WinnowError
from pipeline.progress import Progress
from pipeline.samples import PoolConfig, Sample, format_uid, read_sample
from pipeline.scorer import Scorer
from pipeline.shards import open_shard

SHARDS = 20  # a sample comes from so many shards at most: each costs the reading of all its headers
BATCH = 64


@dataclass(frozen=True)
class Sampled:
    """Samples that were scored anew (uid, shard, key, stored, computed), and why others were not."""

    rows: pl.DataFrame
    left_out: dict[str, int]


def rescore(
    pool: PoolConfig, metadata: Any, column: str, scorer: Scorer, decode: DecodeConfig, sample: int, seed: int
) -> Sampled:
    """Score `sample` samples of up to SHARDS shards, drawn by `seed`, and find what is stored for them.

    Stored values are those of the parquet file beside a shard or of the samples' json; or, with `metadata`, those
    of metadata parquet files elsewhere, by uid. Raises Refused when the pool has no shard, or no value at all.
    """
    rng = np.random.default_rng(seed)
    pool = replace(pool, json_fields={**pool.json_fields, column: "float"})
    paths = finding.expand(pool.shards)
    absent = set(finding.missing(paths))
    paths = [p for p in paths if p not in absent]
    if not paths or (absent and pool.missing == "error"):
        raise Refused(f"pool.shards={pool.shards}: {len(absent)} shards are missing, {min(absent)} for one")
    chosen = sorted(rng.permutation(len(paths))[:SHARDS].tolist())
    quotas = np.diff(np.linspace(0, sample, len(chosen) + 1).astype(int))
    decoder = Decoder(decode, scorer.preprocess)
    left_out: Counter[str] = Counter()
    found: list[dict[str, Any]] = []
    with Progress("conformance", len(chosen)) as progress:
        for number, quota in zip(chosen, quotas):
            for batch in _batches(_draw(paths[number], pool, int(quota), seed + number)):
                found += _score(paths[number], batch, column, decoder, scorer, left_out)
            progress.step(int(quota))
    rows = pl.DataFrame(found, schema={
        "uid": pl.String, "shard": pl.String, "key": pl.String, "stored": pl.Float64, "computed": pl.Float64
    })  # fmt: skip
    if metadata:
        rows = _with_values(rows, metadata, column)
    usable = rows.filter(pl.col("stored").is_finite() & pl.col("computed").is_finite())
    left_out["no_stored_value"] = len(rows) - len(usable)
    if len(usable) < 3:
        raise Refused(
            f"column={column}: {len(usable)} of {len(rows)} readable samples have a finite value of it; is it a column"
            " of the parquet files beside the shards, a json field, or of metadata=...?"
        )
    return Sampled(usable, {k: n for k, n in sorted(left_out.items()) if n})


def _draw(path: str, pool: PoolConfig, quota: int, seed: int) -> Iterator[tuple[Sample, bytes | None]]:
    """Samples of one shard in its order, with the bytes of their images."""
    beside = sidecars.path_of(path)
    sidecar = sidecars.read(beside) if storage.exists(beside) else None
    with storage.local_copy(path) as local, open_shard(local) as shard:
        raws = shard.index(None).samples
        rows = np.random.default_rng(seed).permutation(len(raws))[:quota]
        for raw in (raws[i] for i in sorted(rows.tolist())):
            sample = read_sample(shard, storage.name(path), raw, pool)
            if sidecar:
                sidecar.match([sample])
            yield sample, shard.read(sample.image) if sample.status == "ok" and sample.image else None


def _batches(samples: Iterator[tuple[Sample, bytes | None]]) -> Iterator[list[tuple[Sample, bytes | None]]]:
    batch = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _score(
    path: str, batch: Sequence[tuple[Sample, bytes | None]], column: str, decoder: Decoder, scorer: Scorer,
    left_out: Counter[str],
) -> list[dict[str, Any]]:  # fmt: skip
    samples: list[Sample] = []
    pixels: list[torch.Tensor] = []
    for sample, data in batch:
        if data is None:
            left_out[sample.status] += 1
            continue
        try:
            image = decoder(data)
        except ImageRejected as e:
            left_out[e.reason] += 1
            continue
        assert image.pixels is not None
        samples.append(sample)
        pixels.append(image.pixels)
    if not samples:
        return []
    scores = scorer.embed(pixels, [s.caption or "" for s in samples])[2]
    return [
        {
            "uid": format_uid(*s.uid), "shard": path, "key": s.key,
            "stored": s.metadata.get(column), "computed": float(score),
        }
        for s, score in zip(samples, scores)
    ]  # fmt: skip


def _with_values(rows: pl.DataFrame, metadata: Any, column: str) -> pl.DataFrame:
    """`stored` from metadata files; one file's uids are in memory at a time."""
    parts = []
    for path in finding.expand(metadata, (".parquet",), "metadata"):
        with storage.local_copy(path) as local:
            lazy = pl.scan_parquet(local)
            if lacking := {"uid", column} - set(lazy.collect_schema().names()):
                raise Refused(f"metadata: {path} has no column {min(lacking)!r}")
            named = lazy.select(uid=pl.col("uid").str.to_lowercase(), value=pl.col(column).cast(pl.Float64))
            parts.append(named.filter(pl.col("uid").is_in(rows["uid"].implode())).collect())
    values = pl.concat(parts).unique("uid", keep="first", maintain_order=True)
    joined = rows.join(values, on="uid", how="left", maintain_order="left")
    return joined.with_columns(stored=pl.col("value")).drop("value")


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """What a stored column is worth beside a scorer of one's own, on n samples.

    pearson with its 95 % interval, spearman; differences are computed - stored. decisions: for each top
    fraction, the share of the sample on which both columns decide alike, and the share of the rows that
    the stored column keeps which the computed one keeps too.
    """

    n: int
    pearson: float
    pearson_low: float
    pearson_high: float
    spearman: float
    mean_difference: float
    mean_absolute_difference: float
    max_absolute_difference: float
    decisions: list[dict[str, float]]

    def describe(self) -> str:
        lines = [
            f"{self.n:,} samples: Pearson {self.pearson:.4f} ({self.pearson_low:.4f} to {self.pearson_high:.4f}),"
            f" Spearman {self.spearman:.4f}",
            f"computed - stored: mean {self.mean_difference:+.4f}, mean absolute {self.mean_absolute_difference:.4f},"
            f" largest {self.max_absolute_difference:.4f}",
        ]
        for d in self.decisions:
            lines.append(
                f"top {d['top_fraction']:.0%}: {d['agreement']:.1%} decided alike; of what the stored column keeps,"
                f" the computed one keeps {d['overlap']:.1%}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(stored: np.ndarray, computed: np.ndarray, fractions: Sequence[float]) -> Conformance:
    """Two finite columns (n,) float of the same rows. Raises WinnowError when one is constant: it has no order."""
    if np.ptp(stored) == 0 or np.ptp(computed) == 0:
        raise WinnowError("the stored or the computed scores are all equal: there is no order to compare")
    linear = pearsonr(stored, computed)
    interval = linear.confidence_interval(0.95) if len(stored) > 3 else None
    apart = computed - stored
    decisions = []
    for fraction in fractions:
        k = max(1, round(fraction * len(stored)))
        ours, theirs = (
            np.isin(np.arange(len(x)), np.argsort(-x, kind="stable")[:k]) for x in (computed, stored)
        )
        decisions.append({
            "top_fraction": fraction, "agreement": float((ours == theirs).mean()),
            "overlap": float((ours & theirs).sum() / k),
        })  # fmt: skip
    return Conformance(
        n=len(stored), pearson=float(linear.statistic),
        pearson_low=float(interval.low) if interval else -1.0,
        pearson_high=float(interval.high) if interval else 1.0,
        spearman=float(spearmanr(stored, computed).statistic), mean_difference=float(apart.mean()),
        mean_absolute_difference=float(np.abs(apart).mean()),
        max_absolute_difference=float(np.abs(apart).max()), decisions=decisions,
    )  # fmt: skip


def draw(rows: pl.DataFrame, column: str, scorer: str) -> Figure:
    """Stored against computed scores, with the line on which they would be equal."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    ax = figure.subplots()
    ax.scatter(rows["stored"], rows["computed"], s=6, alpha=0.4, linewidths=0)
    both = np.concatenate([rows["stored"].to_numpy(), rows["computed"].to_numpy()])
    ax.plot([both.min(), both.max()], [both.min(), both.max()], color="black", linewidth=0.8)
    ax.set_xlabel(f"stored: {column}")
    ax.set_ylabel(f"computed: {scorer}")
    ax.grid(alpha=0.3)
    return figure

"""Costs of the stages that a probe of one shard cannot show: reckoned, at rates that docs/scale.md measured."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from filters.duplicates.config import memory_plan, passes
from filters.duplicates.stage import DedupConfig
from filters.duplicates.table_blocks import TOWERS
from pipeline import storage
from pipeline.estimate import Cost, PoolSize, human
from pipeline.probe import Probe
from pipeline.shards import SHARD_SUFFIXES, CountFiles, expand
from selection.influence.stage_config import InfluenceStageConfig
from selection.run_rounds import RoundsConfig

EXACT_SECONDS = 5e-6  # a row
NEAR_SECONDS = 83e-6  # a row of 512 numbers on one core, in a pool of a million
LEAK_FLOPS = 50e9  # hash products a second, one core
HEAD_FLOPS = 11e9  # products of a head in float64 a second, one busy core (benchmarks/influence.py)
SCORE_BYTES = 40  # of disk, a row of the influence stage
CODE_BITS = 64
UID_BYTES = 16
SHARD_SAMPLES = 10_000  # of an evaluation shard that no file counts


@dataclass(frozen=True)
class Basis:
    """What the reckoning rests on: rows that the filters leave, cores, samples a second of the scan, embedding width."""

    rows: int
    cores: int
    pace: float
    width: int
    probe: Probe


def stage_costs(parts: Mapping[str, Any], basis: Basis) -> Iterator[Cost]:
    """Costs of leakage, dedup, influence and rounds, those that the configuration asks for."""
    if parts["leakage"] and parts["leakage"].sets:
        yield _leakage(parts["leakage"].sets, basis)
    if parts["dedup"]:
        yield _dedup(parts["dedup"], basis)
    if parts["selection"]:
        yield _influence(parts["selection"], basis)
    if parts["rounds"] and parts["rounds"].rounds:
        yield _rounds(parts["rounds"], basis)


def _leakage(sets: Mapping[str, str], basis: Basis) -> Cost:
    images = sum(evaluation_size(storage.absolute(path, "leakage.sets")) for path in sets.values())
    seconds = images / basis.pace + 2.0 * basis.rows * images * CODE_BITS / LEAK_FLOPS / basis.cores
    return Cost(
        "leakage", seconds, note=f"reckoned: {images:,} evaluation images against {basis.rows:,} rows"
    )


def evaluation_size(path: str) -> int:
    """Images of an evaluation set: rows of a parquet file, or files; samples of shards by their count files."""
    if path.endswith(".parquet"):
        with storage.open_input(path, "parquet", "leakage.sets") as f:
            return pq.ParquetFile(f).metadata.num_rows
    fs, p = storage.resolve(path)
    if fs.isdir(p) and not any(n.endswith(SHARD_SUFFIXES) for n in storage.listdir(path)):
        return len(fs.find(p))
    counts = [CountFiles().promised(s) for s in expand(path)]
    return sum(c[0] if c else SHARD_SAMPLES for c in counts)


def _dedup(config: DedupConfig, basis: Basis) -> Cost:
    rows, own = basis.rows, "; and a second scan, by dedup.scorer" if config.scorer else ""
    if not config.near:
        return Cost("dedup", EXACT_SECONDS * rows, note="reckoned; exact duplicates alone")
    width = 1 if config.method == "phash" else max(basis.width, 1) * len(TOWERS[config.embedding])
    need = memory_plan(config.search(), rows, width)
    seconds = rows * NEAR_SECONDS * max(width, CODE_BITS) / 512 * max(rows / 1e6, 1.0) ** 0.05
    memory = f"{human(need.task_bytes)} a task, {human(need.driver_bytes)} to decide"
    note = (
        f"reckoned for {rows:,} rows; the largest cluster needs {human(need.whole)}, dedup.task_memory is"
        f" {human(config.task_memory)}: {passes(need.passes)}{own}"
    )
    return Cost("dedup", seconds / basis.cores, memory, need.disk, note=note)


def _influence(config: InfluenceStageConfig, basis: Basis) -> Cost:
    classes = config.expected_classes() or _classes(config.labels, basis.probe)
    need = config.cost(basis.rows, max(basis.width, 1), classes)
    memory = f"{human(need.worker_bytes)} a task, {human(need.driver_bytes)} to decide"
    note = f"reckoned for {basis.rows:,} rows, {classes:,} classes: {need.describe()}"
    seconds = need.flops / HEAD_FLOPS / basis.cores
    return Cost("influence", seconds, memory, basis.rows * SCORE_BYTES, note=note)


def _classes(column: str, probe: Probe) -> int:
    """Different labels in the probe's rows; 2 at least."""
    names = pq.read_schema(io.BytesIO(probe.table)).names
    if column not in names:
        return 2
    return max(2, pl.read_parquet(probe.table, columns=[column])[column].drop_nulls().n_unique())


def _rounds(config: RoundsConfig, basis: Basis) -> Cost:
    size = config.ratio * basis.rows
    disk = config.rounds * size * UID_BYTES if config.files else 0.0
    seconds = config.rounds * basis.rows * 6e-8 / basis.cores  # 6.2 s a round of 10^8 entries
    return Cost("rounds", seconds, disk=disk, note=f"reckoned: {config.rounds:,} rounds of {size:,.0f}")


def basis_of(size: PoolSize, probes: list[Probe], workers: int, cpus: int, width: int, kept: float) -> Basis:
    pace = sum(p.samples / p.seconds for p in probes) / len(probes) * workers
    return Basis(round(size.samples * kept), max(1, workers * cpus), pace, width, probes[0])

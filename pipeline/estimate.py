"""What a run will take, reckoned from a probe of the pool: seconds, memory, disk."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import storage
from pipeline.cluster import Workers
from pipeline.decisions import Stage, run_chain
from pipeline.manifest import Run, write_outputs
from pipeline.probe import Probe
from pipeline.scan import Scan, Survey
from pipeline.shards import CountFiles
from pipeline.tables import ShardReport, TableSet, shard_id
from pipeline.uids import IN_MEMORY, RECORD

COPIES = 5  # of the probe's table, to tell what a shard costs from what a stage costs
REPORT_BYTES = 1500  # the driver's share of one shard: its report as an object


@dataclass(frozen=True)
class Cost:
    """What one part of a run needs; `memory` as a person reads it, `gpu_seconds` over all GPUs, disk in bytes."""

    name: str
    seconds: float
    memory: str = ""
    disk: float = 0.0
    gpu_seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class PoolSize:
    """Shards, samples and bytes of a pool, and how the samples were told. `todo`: those without tables."""

    shards: int
    samples: int
    bytes: int
    told_by: str
    todo_shards: int
    todo_samples: int


def pool_size(here: Survey, todo: Sequence[str], probe: Probe, probed: str) -> PoolSize:
    """Samples by the pool's own count files where all shards have one, else by the probed shard's bytes a sample."""
    counts = CountFiles()
    marks = {folder: storage.signatures(folder) for folder in {storage.parent(s) for s in here.found}}
    sizes = {s: marks[storage.parent(s)][storage.name(s)]["size"] for s in here.found}
    promised = {s: counts.promised(s) for s in here.found}
    if all(promised.values()):
        of, told_by = {s: p[0] for s, p in promised.items() if p}, "its count files"
    else:
        dense = probe.in_shard / max(sizes[probed], 1)
        of, told_by = {s: round(n * dense) for s, n in sizes.items()}, f"the bytes of {storage.name(probed)}"
    return PoolSize(
        len(of), sum(of.values()), sum(sizes.values()), told_by, len(todo), sum(of[s] for s in todo)
    )  # fmt: skip


def scan_cost(size: PoolSize, workers: Workers, probes: Sequence[Probe], embed_dim: int) -> Cost:
    """Whole shards on all workers, at the mean pace of those that were probed together."""
    pace = sum(p.samples / p.seconds for p in probes) / len(probes)
    each = size.todo_samples / max(size.todo_shards, 1) / pace
    turns = -(-size.todo_shards // workers.count)
    row = len(probes[0].table) / max(probes[0].samples, 1) + 4 * embed_dim  # two float16 blocks
    peak = max(p.peak for p in probes)
    return Cost(
        "scan", turns * each, f"{workers.count} x {human(peak)}", row * size.todo_samples,
        gpu_seconds=turns * each * workers.count * workers.gpus,
        note=f"{pace:,.0f} samples/s on each of {workers.count} workers",
    )  # fmt: skip


def chain_costs(
    here: Survey, probe: Probe, stages: Sequence[Stage], size: PoolSize
) -> tuple[list[Cost], float]:
    """Costs of stages and outputs, each run on the probe's table once and on COPIES of it; and the kept share.

    What one shard more costs, times the pool's shards, and what a stage costs at all. Raises Refused for what a stage refuses: a column that is not there, or holds no numbers.
    """
    with tempfile.TemporaryDirectory(prefix="winnow-plan-") as folder:
        times, disks, kept = [], [], 1.0
        for copies in (1, COPIES):
            scan = _copies(here, probe, Path(folder) / f"features{copies}", copies)
            run = Run(f"{folder}/out{copies}", "plan")
            with contextlib.redirect_stderr(io.StringIO()):  # its progress is of no interest
                last, results = run_chain(scan, stages, run.path("stages"))
            started = time.monotonic()
            write_outputs(run, scan, last, results, {})
            seconds = {r.name: r.seconds for r in results} | {"outputs": time.monotonic() - started}
            times.append(seconds)
            disks.append(sum(p.stat().st_size for p in Path(run.folder).rglob("*") if p.is_file()))
            if copies == 1:
                kept = results[-1].kept / max(probe.samples, 1)
    more = COPIES - 1
    scale = size.samples / max(probe.samples, 1)
    costs = []
    for name, first in times[0].items():
        slope = max(times[1][name] - first, 0.0) / more
        costs.append(Cost(name, max(first - slope, 0.0) + slope * scale))
    disk = max(disks[1] - disks[0], 0) / more * scale
    sorter = human(min(size.samples, IN_MEMORY) * RECORD.itemsize * 2)
    spill = 2 * RECORD.itemsize * size.samples
    costs[-1] = replace(
        costs[-1], disk=disk, memory=sorter, note=f"{human(spill)} of it temporary, on this machine"
    )  # fmt: skip
    costs[-1] = replace(costs[-1], disk=disk + spill)
    return costs, kept


def _copies(here: Survey, probe: Probe, folder: Path, copies: int) -> Scan:
    """The probe's table as the scan of a pool of `copies` shards."""
    assert probe.report
    tables = TableSet(str(folder))
    storage.write_json(tables.path("set", "json"), here.identity)
    reports: list[ShardReport] = []
    for number in range(copies):
        name = shard_id(f"{number}/{probe.report.shard}")
        storage.write_bytes(tables.path(name, "parquet"), probe.table)
        reports.append(replace(probe.report, id=name))
    return Scan(tables, reports, here.scorer.column if here.scorer else None, copies)


def driver_bytes(shards: int) -> float:
    """Memory of the process that runs the job: what it has now, and a report a shard."""
    return _resident() + REPORT_BYTES * shards


def _resident() -> int:
    """Bytes this process holds now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def process_age() -> float:
    """Seconds since this process began: its imports are part of what a run takes. 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def human(size: float) -> str:
    """Bytes for a person."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= one:
            return f"{size / one:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

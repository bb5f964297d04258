"""Metadata-only curation of a million rows against the time polars needs to read the columns that it uses.

python -m benchmarks.metadata [--rows 1000000] [--repeats 5] [--parts engine,memory,language,command]

  engine    in one process, in turns, medians of wall and CPU seconds: polars reading the columns; the filter
            stage on existing tables (reading, repeated uids, the cut, a decision for every row); the same with
            the scan before it (uid text to numbers, tables written); and with every output of a run written
  memory    peak resident bytes of a process that runs all of it on n rows and on 4n
  language  captions/s on all cores through Ray, and with one worker
  command   `python -m jobs.curate` as a user runs it, first and second time: imports, Ray and outputs included

`filters`: clip_score (top_fraction=0.3), and basic without its language rule.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.metadata_pool import write
from filters.base import Filter
from filters.rules import Rules
from filters.score import ScoreCut
from filters.stage import FilterStage
from pipeline import cluster
from pipeline.cluster import ClusterConfig
from pipeline.decisions import Chain, run_chain
from pipeline.language import ensure_languages
from pipeline.manifest import Run, write_outputs
from pipeline.metadata_scan import scan_metadata
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, Scan

FILTERS: dict[str, tuple[list[str], Callable[[], Filter]]] = {
    "clip_score": (
        ["uid", "clip_l14_similarity_score"],
        lambda: ScoreCut(name="clip_score", column="clip_l14_similarity_score", top_fraction=0.3),
    ),
    "basic": (
        ["uid", "text", "original_width", "original_height"],
        lambda: Rules(name="basic", min_words=3, min_chars=6, min_side=200, max_aspect=3.0),
    ),
}


def inline(_workers: Any, actor: Any, args: Any, method: str, tasks: Any) -> Iterator[tuple[Any, Any]]:
    """`cluster.map_actors` in this process: what is measured is the engine, not Ray's start."""
    worker = actor(*args)
    for task in tasks:
        yield task, getattr(worker, method)(task)


def without_ray() -> None:
    cluster.map_actors = inline
    cluster.connect = lambda: None
    cluster.plan_workers = lambda _config, _units: cluster.Workers(1, 1, 0.0)


def scan(path: Path, out: Path) -> Scan:
    return scan_metadata(str(out), PoolConfig(metadata=str(path)), ClusterConfig(), ErrorBudget())


def decide(scanned: Scan, made: Filter, out: Path) -> int:
    stage = FilterStage([made])
    return sum(
        int(f["kept"].sum()) for _, f in stage.run(Chain(scanned.tables, scanned.ids, None, str(out), ""))
    )


def everything(path: Path, made: Filter, out: Path) -> None:
    """Scan, decisions, manifest, subset, receipt."""
    shutil.rmtree(out, ignore_errors=True)
    scanned = scan(path, out)
    here = Run(str(out), "r")
    last, results = run_chain(scanned, [FilterStage([made])], here.path("stages"))
    write_outputs(here, scanned, last, results, {"config": {}, "seed": 0, "seconds": {}})


def engine(path: Path, folder: Path, repeats: int) -> None:
    without_ray()
    for name, (columns, make) in FILTERS.items():
        ready = scan(path, folder / "ready")

        def first(make: Callable[[], Filter] = make) -> None:
            shutil.rmtree(folder / "first", ignore_errors=True)
            decide(scan(path, folder / "first"), make(), folder)

        steps: dict[str, Callable[[], Any]] = {
            "polars reads": lambda columns=columns: pl.read_parquet(path, columns=columns),
            "filter stage": lambda make=make, ready=ready: decide(ready, make(), folder),
            "scan + stage": first,
            "whole run": lambda make=make: everything(path, make(), folder / "whole"),
        }
        taken: dict[str, list[tuple[float, float]]] = {k: [] for k in steps}
        for _ in range(repeats):
            for step, call in steps.items():
                wall, cpu = time.perf_counter(), time.process_time()
                call()
                taken[step].append((time.perf_counter() - wall, time.process_time() - cpu))
        base = [statistics.median(t[i] for t in taken["polars reads"]) for i in (0, 1)]
        for step, times in taken.items():
            wall, cpu = (statistics.median(t[i] for t in times) for i in (0, 1))
            print(
                f"{name:<11} {step:<13} {wall:7.3f} s wall ({wall / base[0]:5.2f}x)  {cpu:7.3f} s CPU ({cpu / base[1]:5.2f}x)",
                flush=True,
            )


def _high_water() -> float:
    """MiB; the kernel's own mark, since getrusage's outlives the fork that made this process."""
    marks = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(marks["VmHWM"].split()[0]) / 1024


def _peak(path: Path, out: Path, name: str) -> None:
    without_ray()
    before = _high_water()
    everything(path, FILTERS[name][1](), out)
    print(
        f"{name:<11} {path.name}: {before:,.0f} MiB after imports, {_high_water():,.0f} MiB at most",
        flush=True,
    )


def memory(path: Path, folder: Path, rows: int) -> None:
    larger = write(folder / "larger.parquet", 4 * rows, seed=1)
    for file in (path, larger):
        for name in FILTERS:
            child = multiprocessing.get_context("spawn").Process(
                target=_peak, args=(file, folder / f"memory-{name}-{file.stem}", name)
            )
            child.start()
            child.join()


def language(path: Path, folder: Path, rows: int) -> None:
    for workers in (0, 1):
        scanned = scan(path, folder / f"language{workers}")
        warm = scan_metadata(
            str(folder / f"warm{workers}"), PoolConfig(metadata=str(write(folder / "warm.parquet", 1000))),
            ClusterConfig(), ErrorBudget(),
        )  # fmt: skip
        ensure_languages(warm.tables, warm.ids, ClusterConfig(workers=workers))  # Ray is up from here on
        started = time.perf_counter()
        ensure_languages(scanned.tables, scanned.ids, ClusterConfig(workers=workers))
        taken = time.perf_counter() - started
        count = workers or len(os.sched_getaffinity(0))
        print(f"language    {count} workers: {rows / taken:,.0f} captions/s ({taken:.1f} s)", flush=True)


def command(path: Path, folder: Path) -> None:
    base = [sys.executable, "-m", "jobs.curate", f"pool.metadata={path}", f"out={folder}/command"]
    runs = {
        "clip_score": ["filters=[clip_score]", "run=clip"],
        "basic": ["filters=[basic]", "filters.basic.languages=null", "run=basic"],
        "clip_score, again": ["filters=[clip_score]", "run=again"],
    }
    for name, overrides in runs.items():
        started = time.perf_counter()
        subprocess.run([*base, *overrides], check=True, capture_output=True)
        print(f"command     {name:<18} {time.perf_counter() - started:6.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="engine,memory,language,command")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="winnow-bench-") as name:
        folder = Path(name)
        path = write(folder / "metadata.parquet", given.rows)
        print(
            f"{given.rows:,} rows, {path.stat().st_size / 1e6:,.0f} MB; polars threads: {pl.thread_pool_size()}",
            flush=True,
        )
        parts = given.parts.split(",")
        if "command" in parts:  # while this process is small
            command(path, folder)
        if "memory" in parts:
            memory(path, folder, given.rows)
        if "language" in parts:
            language(path, folder, given.rows)
        if "engine" in parts:
            engine(path, folder, given.repeats)


if __name__ == "__main__":
    main()

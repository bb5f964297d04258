"""A census of a million captions against polars reading the column: seconds and peak memory.

python -m benchmarks.census [--rows 1000000] [--pool FILE.parquet] [--turns 2]

Without a pool it makes one: captions of 4 to 16 words of a Zipf vocabulary, a fifth of them copies of others.
Each side runs in a process of its own, so that its peak is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl


def make(path: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    vocabulary = np.array([f"word{n}" for n in range(50_000)])
    ranks = np.minimum(rng.zipf(1.3, (rows, 16)), len(vocabulary)) - 1
    lengths = rng.integers(4, 17, rows)
    captions = [" ".join(vocabulary[r[:n]]) for r, n in zip(ranks, lengths)]
    copied = rng.random(rows) < 0.2
    source = np.minimum(rng.zipf(1.5, rows), rows) - 1
    captions = [captions[source[n]] if c else captions[n] for n, c in enumerate(copied)]
    hosts = np.minimum(rng.zipf(1.3, rows), 200_000)
    pl.DataFrame(
        {
            "uid": [f"{n:032x}" for n in range(rows)],
            "url": [f"https://host{h}.example/{n}.jpg" for n, h in enumerate(hosts)],
            "text": captions,
            "language": ["en"] * rows,
            "original_width": rng.integers(50, 2000, rows),
            "original_height": rng.integers(50, 2000, rows),
        }
    ).write_parquet(path)


def read_column(path: str) -> Any:
    return int(pl.read_parquet(path, columns=["text"])["text"].str.len_chars().sum())


def census(path: str, near: int) -> Any:
    from pipeline.census.count import CensusConfig, take_census
    from pipeline.census.source import Metadata

    found = take_census(Metadata([path]), CensusConfig(near_captions=near))
    return {k: v["distinct"] for k, v in found["values"].items()}


def search(path: str) -> Any:
    from pipeline.census.search import find_phrase
    from pipeline.census.source import Metadata

    return sum(len(f) for f in find_phrase(Metadata([path]), "word7 word1"))


def _measured(pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if work is not read_column:
        import pipeline.census.count  # noqa: F401  imports are not what is measured
    started = time.perf_counter()
    result = work(*args)
    seconds = time.perf_counter() - started
    pipe.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result))


def measure(name: str, work: Callable[..., Any], *args: Any) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=_measured, args=(theirs, work, args))
    child.start()
    seconds, peak, result = mine.recv()
    child.join()
    print(f"{name:44}{seconds:9.2f} s{peak:9.0f} MiB  {json.dumps(result)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pool", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.pool or Path(folder) / "pool.parquet"
        if not arguments.pool:
            make(path, arguments.rows)
        for _ in range(arguments.turns):  # in turns: the machine may be busier at one time than at another
            measure("polars reads the column", read_column, str(path))
            measure("census without near duplicates", census, str(path), 0)
            measure("census, near duplicates of 300,000 captions", census, str(path), 300_000)
            measure("phrase search", search, str(path))


if __name__ == "__main__":
    main()

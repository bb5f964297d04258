"""What is in a pool: counts, lengths, most and least common captions, words and domains, duplicates, languages.

python -m jobs.census pool.shards='/data/pool/*.tar' [to=/data/census]   # or pool.metadata='/data/*.parquet'
python -m jobs.census out=/data/winnow [run=default]                     # a scan; with a run: kept against dropped
python -m jobs.census out=/data/winnow run=default search='golden retriever'
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, register
from pipeline import shards, storage
from pipeline.census.count import CensusConfig, take_census
from pipeline.census.evaluation import evaluation_captions
from pipeline.census.report import describe, draw
from pipeline.census.search import find_phrase
from pipeline.census.source import Metadata, Shards, Source, Tables
from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.samples import PoolConfig, format_uid

MATCH = pa.schema(
    [("uid_hi", pa.uint64()), ("uid_lo", pa.uint64())]
    + [(name, pa.string()) for name in ("shard", "key", "group", "caption")]
)
SHOWN = 20  # matches of a search that are printed


@dataclass(kw_only=True)
class CensusJobConfig:
    """pool: shards, or metadata parquet files, read as they are; or out: the folder of a scan, and run: a finished
    run in it, of which kept and dropped samples are told apart.

    to: the folder for census.json and pictures (search: for matches.parquet); by default `census` in the run's
    folder, and nowhere for a bare pool. search: an exact phrase; the samples that hold it are named instead.
    evaluation: captions of an evaluation set (parquet, txt or shards) to look for. count: see `CensusConfig`.
    """

    pool: PoolConfig = MISSING
    out: str | None = None
    run: str | None = None
    to: str | None = None
    search: str | None = None
    evaluation: str | None = None
    count: CensusConfig = field(default_factory=CensusConfig)


def run(node: DictConfig) -> None:
    bare = node.pool.shards is not None or node.pool.metadata is not None
    if bare == (node.out is not None):
        raise Refused(
            "pool: give pool.shards or pool.metadata for a pool as it lies, or out= for a scanned one"
        )
    if not bare:
        node.pool.shards = "none"  # of no use: the tables tell
    config = build(node, "", CensusJobConfig)
    source, home = _source(config)
    to = storage.absolute(config.to, "to") if config.to else home
    if config.search is not None:
        _search(source, config.search, to)
        return
    captions = frozenset[str]()
    if config.evaluation:
        where = storage.absolute(config.evaluation, "evaluation")
        if not storage.exists(where):
            raise Refused(f"evaluation={config.evaluation}: there is no such file")
        captions = evaluation_captions(where)
    census = take_census(source, config.count, captions)
    print(describe(census))
    if to:
        storage.write_json(storage.join(to, "census.json"), census)
        draw(census, to)
        print(f"\n{to}/ holds census.json and a picture of each distribution")


def _source(config: CensusJobConfig) -> tuple[Source, str | None]:
    """What to read, and where the results go unless told otherwise."""
    if config.out is not None:
        out = storage.absolute(config.out, "out")
        if config.run is None:
            return Tables.of_scan(out), storage.join(out, "census")
        here = Run(out, config.run)
        return Tables.of_run(here), here.path("census")
    if config.run is not None:
        raise Refused(f"run={config.run}: give out= as well, the folder that holds the run")
    if config.pool.metadata:
        files = shards.expand(config.pool.metadata, (".parquet",), "pool.metadata")
    else:
        files = shards.expand(config.pool.shards)
    if absent := shards.missing(files):
        raise Refused(f"pool: {len(absent)} files are missing, {absent[0]} for one")
    return (Metadata(files) if config.pool.metadata else Shards(files, config.pool)), None


def _search(source: Source, phrase: str, to: str | None) -> None:
    if not phrase.strip():
        raise Refused("search: give a phrase")
    path, count = storage.join(to, "matches.parquet") if to else None, 0
    with storage.commit(path) if path else contextlib.nullcontext(os.devnull) as tmp:
        with pq.ParquetWriter(tmp, MATCH, compression="zstd") as writer:
            for found in find_phrase(source, phrase):
                for row in found.head(max(0, SHOWN - count)).iter_rows(named=True):
                    print(_match(row, len(source.groups) > 1))
                count += len(found)
                writer.write_table(found.to_arrow().cast(MATCH))
    print(f"{count:,} captions hold {phrase!r}")
    if path:
        print(f"{path} names them all")


def _match(row: dict[str, Any], grouped: bool) -> str:
    uid = format_uid(row["uid_hi"], row["uid_lo"]) if row["uid_hi"] is not None else "-"
    group = f"  {row['group']}" if grouped else ""
    return f"{uid}{group}  {row['shard']} {row['key'] or ''}  {row['caption']!r}"


register("census", CensusJobConfig)

if __name__ == "__main__":
    launch("census", run)

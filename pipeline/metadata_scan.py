"""The scan of a pool that is known by its metadata alone: no shard is read, every parquet file becomes tables."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import cluster, npz, shards, storage
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from pipeline.metadata import Source
from pipeline.progress import Progress
from pipeline.samples import PoolConfig, parse_uid, synthetic_uid
from pipeline.scan import ErrorBudget, Scan, tally
from pipeline.tables import NAME, TABLE_VERSION, ShardReport, TableSet, digest_json, shard_id, write_report

TABLE_ROWS = 1 << 17  # of one table, unless a single row group of the file has more
OWN = pa.schema([("uid_hi", pa.uint64()), ("uid_lo", pa.uint64()), ("shard", NAME), ("status", NAME)])


@dataclass(frozen=True, kw_only=True)
class MetadataTask:
    """One table to make, of whole row groups of a metadata file."""

    shard: str
    id: str
    signature: dict[str, Any]
    beside: dict[str, Any] | None
    source: Source


class MetadataWorker:
    """The Ray actor. Memory: the uids of one table as text."""

    def __init__(self, folder: str, invalid_uid: str) -> None:
        self.tables = TableSet(folder)
        self.synthesise = invalid_uid == "synthesise"

    def scan(self, task: MetadataTask) -> ShardReport:
        """Write the table and its report. Raises Refused for a file without uids."""
        hi, lo, valid = self._uids(task.source)
        ok = valid | self.synthesise
        status = pa.DictionaryArray.from_arrays(pa.array((~ok).astype(np.int32)), ["ok", "invalid_uid"])
        shard = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(hi), np.int32)), [task.shard])
        schema = OWN.with_metadata(task.source.encode())
        for name in storage.listdir(self.tables.folder):  # columns derived from an earlier state of the file
            if name.startswith(f"{task.id}.") and name.count(".") > task.id.count(".") + 1:
                storage.remove_tree(storage.join(self.tables.folder, name))
        with storage.commit(self.tables.path(task.id, "parquet")) as tmp:
            table = pa.table([pa.array(hi), pa.array(lo), shard, status], schema=schema)
            pq.write_table(table, tmp, compression="none", use_dictionary=["shard", "status"])  # random bits
            files = {"parquet": storage.digest(tmp)}
        counts = {"ok": int(ok.sum()), "invalid_uid": int((~ok).sum())}
        report = ShardReport(
            shard=task.shard, id=task.id, signature=task.signature, sidecar=task.beside,
            digest=digest_json([task.signature, task.beside, task.source.first, task.source.rows]),
            rows=len(hi), status={k: n for k, n in counts.items() if n},
            files=files,
        )  # fmt: skip
        write_report(self.tables, report)
        return report

    def _uids(self, source: Source) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """High and low halves uint64 (n,), and whether the file's uid is one; others get a synthesised one."""
        with storage.open_file(source.path) as f:
            file = pq.ParquetFile(f)
            if "uid" not in file.schema_arrow.names:
                raise Refused(f"{source.path}: no column 'uid'; it has {', '.join(file.schema_arrow.names)}")
            column = file.read_row_groups(list(source.groups), columns=["uid"]).column(0)
        texts = column.cast(pa.large_string()).combine_chunks()
        try:
            halves = _unhex(texts)
            return halves[:, 0], halves[:, 1], np.ones(len(texts), bool)
        except ValueError:
            return _unhex_some(texts.to_pylist(), storage.name(source.path), source.first)


def _unhex(texts: pa.LargeStringArray) -> np.ndarray:
    """uint64 (n, 2) of n strings of 32 hex digits. Raises ValueError when one of them is not."""
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    if texts.null_count or (np.diff(offsets) != 32).any():
        raise ValueError("a uid is not 32 characters long")
    if not len(texts):
        return np.empty((0, 2), np.uint64)
    digits = memoryview(texts.buffers()[2])[int(offsets[0]) : int(offsets[-1])]
    return np.frombuffer(binascii.unhexlify(digits), ">u8").astype(np.uint64).reshape(-1, 2)


def _unhex_some(texts: Sequence[Any], file: str, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    uids, valid = [], []
    for row, text in enumerate(texts):
        try:
            uids.append(parse_uid(str(text)))
            valid.append(True)
        except ValueError:
            uids.append(synthetic_uid(file, str(first + row)))
            valid.append(False)
    halves = np.array(uids, np.uint64).reshape(-1, 2)
    return halves[:, 0], halves[:, 1], np.array(valid, bool)


def scan_metadata(out: str, pool: PoolConfig, workers: ClusterConfig, errors: ErrorBudget) -> Scan:
    """Bring the tables of a metadata pool up to date and return them; files whose tables are current stay closed.

    Raises Refused when a file is missing, has no uids, or lies beside an npz with another number of rows;
    WinnowError past the error budget.
    """
    files = shards.expand(pool.metadata, (".parquet",), "pool.metadata")
    absent = [f for f in files if not storage.exists(f)]
    if absent and (pool.missing == "error" or len(absent) == len(files)):
        raise Refused(
            f"pool.metadata={pool.metadata}: {len(absent)} files are missing, {absent[0]} for one"
            + ("" if pool.missing == "skip" else "; pool.missing=skip goes on without them")
        )
    identity = {
        "version": TABLE_VERSION, "pool": {"metadata": True, "invalid_uid": pool.invalid_uid}, "scorer": None
    }  # fmt: skip
    tables = TableSet(storage.join(out, "features", digest_json(identity)))
    storage.write_json(storage.join(tables.folder, "set.json"), identity)
    done, tasks, order = _divide(tables, [f for f in files if f not in set(absent)])
    if tasks:
        cluster.connect()
        with Progress("scan", len(order), unit="table", done=len(done)) as progress:
            for _, report in cluster.map_actors(
                cluster.plan_workers(workers, len(tasks)), MetadataWorker,
                [tables.folder, pool.invalid_uid], "scan", tasks,
            ):  # fmt: skip
                done[report.id] = report
                progress.step(report.rows)
    reports = [done[i] for i in order]
    if not any(r.status.get("ok") for r in reports):
        raise Refused(f"pool.metadata={pool.metadata}: no row of {len(files)} files has a valid uid")
    errors.check(tally(reports), sum(r.samples for r in reports), reports)
    return Scan(tables, reports, None, len({t.source.path for t in tasks}))


def _divide(
    tables: TableSet, files: Sequence[str]
) -> tuple[dict[str, ShardReport], list[MetadataTask], list[str]]:
    """Reports of tables that are current, tasks for the rest, and the ids of all in the pool's order."""
    marks: dict[str, dict[str, Any]] = {}
    committed = set(storage.listdir(tables.folder))
    done: dict[str, ShardReport] = {}
    tasks: list[MetadataTask] = []
    order = []
    for file in files:
        folder = storage.parent(file)
        if folder not in marks:
            marks[folder] = storage.signatures(folder)
        mark, beside = marks[folder][storage.name(file)], marks[folder].get(storage.name(npz.beside(file)))
        known = _current(tables, file, committed, mark, beside)
        if known:
            done |= {r.id: r for r in known}
            order += [r.id for r in known]
            continue
        for source in _sources(file):
            shard = table_name(source)
            tasks.append(
                MetadataTask(shard=shard, id=shard_id(shard), signature=mark, beside=beside, source=source)
            )
            order.append(shard_id(shard))
    return done, tasks, order


def table_name(source: Source) -> str:
    """What stands for a shard's name: the file, and `#row` of its first row where that is not the file's first."""
    return f"{source.path}#{source.first}" if source.first else source.path


def _current(
    tables: TableSet, file: str, committed: set[str], mark: dict[str, Any], beside: dict[str, Any] | None
) -> list[ShardReport]:
    """The reports of a file's tables when they cover it and it has not changed since; else none."""
    found: list[ShardReport] = []
    name, rows, total = file, 0, None
    while f"{shard_id(name)}.json" in committed and rows != total:
        report, source = tables.report(shard_id(name)), tables.source(shard_id(name))
        if report is None or source is None or report.signature != mark or report.sidecar != beside:
            return []
        found.append(report)
        rows, total = rows + report.rows, source.total
        name = f"{file}#{rows}"
    return found if rows == total else []


def _sources(file: str) -> list[Source]:
    """A file's row groups, as many to a table as come to TABLE_ROWS. Refuses an npz that does not fit."""
    with storage.open_input(file, "parquet") as f:
        meta = pq.ParquetFile(f).metadata
    npz.check_rows(file, meta.num_rows)
    found: list[Source] = []
    groups: list[int] = []
    first = rows = 0
    for number in range(meta.num_row_groups):
        size = meta.row_group(number).num_rows
        if groups and rows + size > TABLE_ROWS:
            found.append(Source(path=file, groups=tuple(groups), first=first, rows=rows, total=meta.num_rows))
            groups, first, rows = [], first + rows, 0
        groups.append(number)
        rows += size
    return [*found, Source(path=file, groups=tuple(groups), first=first, rows=rows, total=meta.num_rows)]

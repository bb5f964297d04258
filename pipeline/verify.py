"""Verify a finished run: recount and rehash everything it left, and say where it first disagrees with itself.

Memory is one shard's columns and one range of sorted uids, whatever the size of the pool.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import cluster, reasons, storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import DECISION
from pipeline.errors import WinnowError
from pipeline.manifest import OUTPUTS, Run, account, kept_rows
from pipeline.progress import Progress
from pipeline.tables import ShardReport, TableSet
from pipeline.uids import SUBSET, UidSorter

COUNTS = ("samples", "kept", "dropped", "rejected", "entries", "reasons")
THREADS = 8
BATCH = 1 << 16  # manifest rows read at a time


class Difference(WinnowError):
    """Two outputs that do not agree; the message names the file and both values."""


def verify(run: Run, deep: bool = False, config: ClusterConfig | None = None) -> Iterator[str]:
    """Check a run part by part; yields one line for each part that agrees.

    By default everything but pool shards and embeddings is read: a shard of the pool is compared by size and
    time stamp, and read only where these have changed. deep: read all of them too, on Ray.
    Raises Difference at the first thing that does not agree, Refused when there is no finished run.
    """
    receipt = _receipt(run)
    yield f"receipt: {receipt['pool']['samples']:,} samples = kept + dropped + rejected"
    yield _outputs(run, receipt)
    accounting = pl.read_parquet(storage.read_bytes(run.path("accounting.parquet")))
    yield _accounting(run, receipt, accounting)
    tables = run.tables()
    reports = []
    sorter = UidSorter()
    rows = _Manifest(run, receipt)
    for number, (report, kept) in enumerate(_shards(run, tables, accounting, rows.features)):
        reports.append(report)
        rows.expect(kept)
        hi, lo = (np.repeat(kept[c].to_numpy(), kept["copies"].to_numpy()) for c in ("uid_hi", "uid_lo"))
        sorter.add(hi, lo, number, np.zeros(len(hi), np.uint32))
    _damaged(run, receipt, reports)
    yield f"decisions: {len(reports):,} shards, one row for each row of the feature table, and as accounted for"
    rows.end()
    yield f"manifest.parquet: {rows.taken:,} rows, those that the decisions keep"
    yield _subset(run, sorter)
    yield _pool(reports, tables, deep, config or ClusterConfig())


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn whatever a reader says of a damaged or missing file into a Difference that names it."""
    try:
        yield
    except FileNotFoundError:
        raise Difference(f"{path}: is missing") from None
    except (pl.exceptions.PolarsError, pa.ArrowException, ValueError, KeyError, TypeError) as e:
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise Difference(f"{path}: cannot be read: {first}") from None


def differs(where: str, what: str, here: Any, there: Any, other: str) -> None:
    """Raise Difference unless the two values are equal."""
    if here != there:
        raise Difference(f"{where}: {what} is {here}, {other} says {there}")


# ---------------------------------------------------------------- receipt, accounting, digests


def _receipt(run: Run) -> dict[str, Any]:
    path = run.path("receipt.json")
    with readable(path):
        receipt = run.receipt()
        if "outputs" not in receipt:
            raise Difference(f"{path}: holds no digests of the outputs; run jobs.curate again to write them")
        parts = {k: sum(receipt[k].values()) for k in ("dropped", "rejected")}
        total, kept = receipt["pool"]["samples"], receipt["kept"]
        if kept + sum(parts.values()) != total or receipt["adds_up"] is not True:
            raise Difference(
                f"{path}: does not add up: {kept} kept + {parts['dropped']} dropped + {parts['rejected']} rejected"
                f" of {total} samples, adds_up={receipt['adds_up']}"
            )
        for kind in ("dropped", "rejected"):
            wrong = [r for r in receipt[kind] if (r in reasons.REJECTED) != (kind == "rejected")]
            if wrong:
                raise Difference(f"{path}: {wrong[0]} is not a reason to be {kind}")
        last = receipt["stages"][-1]
        for key in ("kept", "entries"):
            differs(path, key, receipt[key], last[key], f"its last stage, {last['name']},")
    return receipt


def _outputs(run: Run, receipt: dict[str, Any]) -> str:
    for name in OUTPUTS:
        path = run.path(name)
        with readable(path):
            differs(path, "sha256", storage.sha256(path), receipt["outputs"].get(name), "the receipt")
    return f"{', '.join(OUTPUTS)}: sha256 as in the receipt"


def _accounting(run: Run, receipt: dict[str, Any], accounting: pl.DataFrame) -> str:
    path = run.path("accounting.parquet")
    counts: Counter[str] = Counter()
    for shard in accounting["reasons"]:
        counts.update({r["reason"]: r["count"] for r in shard})
    shards = accounting["shard"].n_unique()
    differs(path, "the count of shards", shards, receipt["pool"]["shards"], "the receipt")
    for key, wanted in (
        ("samples", receipt["pool"]["samples"]),
        ("kept", receipt["kept"]),
        ("entries", receipt["entries"]),
        ("dropped", sum(receipt["dropped"].values())),
        ("rejected", sum(receipt["rejected"].values())),
    ):
        differs(path, f"the sum of {key}", int(accounting[key].sum()), wanted, "the receipt")
    told = {**receipt["dropped"], **receipt["rejected"]}
    for reason in sorted(counts.keys() | told.keys()):
        differs(path, f"the count of {reason}", counts[reason], told.get(reason, 0), "the receipt")
    for row in accounting.iter_rows(named=True):
        parts = row["kept"] + row["dropped"] + row["rejected"]
        differs(
            path, f"{row['shard']}: kept + dropped + rejected", parts, row["samples"], "its samples column"
        )
    return f"accounting.parquet: {len(accounting):,} shards add up to the receipt"


def _damaged(run: Run, receipt: dict[str, Any], reports: list[ShardReport]) -> None:
    told = sorted(d["shard"] for d in receipt["pool"]["damaged_shards"])
    found = sorted(r.shard for r in reports if r.damage)
    differs(run.path("receipt.json"), "the list of damaged shards", told, found, "the scan")


# ---------------------------------------------------------------- decisions, shard by shard


def _shards(
    run: Run, tables: TableSet, accounting: pl.DataFrame, columns: list[str]
) -> Iterator[tuple[ShardReport, pl.DataFrame]]:
    """(report, kept rows) of every shard in pool order, each checked; a few threads read ahead."""
    names = {f"{i}.parquet" for i in accounting["id"]}
    stray = sorted(set(storage.listdir(run.decisions.folder)) - names)
    if stray:
        raise Difference(f"{run.decisions.folder}/{stray[0]}: belongs to no shard of accounting.parquet")
    waiting: deque[Future[tuple[ShardReport, pl.DataFrame]]] = deque()
    with ThreadPoolExecutor(THREADS) as pool, Progress("verify", len(accounting)) as progress:
        for row in accounting.iter_rows(named=True):
            waiting.append(pool.submit(_shard, run, tables, row, columns))
            if len(waiting) > 2 * THREADS:
                yield _stepped(waiting.popleft().result(), progress)
        while waiting:
            yield _stepped(waiting.popleft().result(), progress)


def _stepped(found: tuple[ShardReport, pl.DataFrame], progress: Progress) -> tuple[ShardReport, pl.DataFrame]:
    progress.step(found[0].rows)
    return found


def _shard(
    run: Run, tables: TableSet, row: dict[str, Any], columns: list[str]
) -> tuple[ShardReport, pl.DataFrame]:
    path = run.decisions.path(row["id"])
    with readable(path):
        content = storage.read_bytes(path)
        digest = hashlib.sha256(content).hexdigest()
        differs(path, "sha256", digest, row["decisions_sha256"], "accounting.parquet")
        decisions = pl.read_parquet(content)
    report, features = _features(tables, row["id"], columns)
    differs(path, "the count of rows", len(decisions), len(features), "the feature table")
    _same_rows(
        path, decisions.select("uid_hi", "uid_lo"), features.select("uid_hi", "uid_lo"), "the feature table"
    )
    _sound(path, decisions, features["status"])
    counted = account(report, decisions)
    for key in COUNTS:
        differs(path, f"{key}, recounted,", counted[key], row[key], "accounting.parquet")
    return report, kept_rows(features, decisions)


def _features(tables: TableSet, shard: str, columns: list[str]) -> tuple[ShardReport, pl.DataFrame]:
    path = tables.path(shard, "parquet")
    with readable(tables.path(shard, "json")):
        report = tables.report(shard)
    if report is None:
        raise Difference(f"{tables.path(shard, 'json')}: is missing")
    with readable(path):
        if "parquet" in report.files:  # tables of earlier versions have no digests
            differs(path, "xxh3-128", storage.digest(path), report.files["parquet"], "the scan's report")
        frame = tables.read(shard, list(dict.fromkeys(["uid_hi", "uid_lo", "status", *columns])))
    differs(path, "the count of rows", len(frame), report.rows, "the scan's report")
    status = dict(sorted(frame["status"].cast(pl.String).value_counts().iter_rows()))
    differs(path, "samples by status", status, report.status, "the scan's report")
    return report, frame


def _sound(path: str, decisions: pl.DataFrame, status: pl.Series) -> None:
    """Each decision for itself: kept has copies and no reason, and what could not be read is rejected for that."""
    differs(path, "its columns", dict(decisions.schema), DECISION, "the format")
    kept, reason = pl.col("kept"), pl.col("reason")
    unreadable = pl.lit(status.cast(pl.String)) != "ok"
    wrong = decisions.filter(
        (kept != reason.is_null())
        | (kept != (pl.col("copies") > 0))
        | (unreadable & reason.ne_missing(pl.lit(status.cast(pl.String))))
    )
    if len(wrong):
        raise Difference(f"{path}: a decision contradicts itself or the scan: {wrong.row(0, named=True)}")


def _same_rows(where: str, here: pl.DataFrame, there: pl.DataFrame, other: str) -> None:
    """Raise Difference naming the first cell in which two frames of equal shape differ."""
    for name in here.columns:
        unlike = here[name].ne_missing(there[name].cast(here[name].dtype)).arg_true()
        if len(unlike):
            row = unlike[0]
            differs(where, f"{name} of row {row}", here[name][row], there[name][row], other)


# ---------------------------------------------------------------- manifest and subset


class _Manifest:
    """manifest.parquet read along with the shards: `expect` takes the rows that one shard should have given."""

    def __init__(self, run: Run, receipt: dict[str, Any]) -> None:
        self.path, self.taken = run.path("manifest.parquet"), 0
        self.file = storage.open_file(self.path)
        with readable(self.path):
            parquet = pq.ParquetFile(self.file)
            differs(self.path, "the count of rows", parquet.metadata.num_rows, receipt["kept"], "the receipt")
            self.batches = parquet.iter_batches(BATCH)
            names = parquet.schema_arrow.names
        self.features = [n for n in names if n not in ("row", "copies", "order")]
        self.held = pl.DataFrame()

    def expect(self, kept: pl.DataFrame) -> None:
        parts, missing = [self.held], len(kept) - len(self.held)
        while missing > 0:
            with readable(self.path):
                batch = next(self.batches, None)
            if batch is None:
                raise Difference(
                    f"{self.path}: ends after {self.taken + len(self.held)} rows; decisions keep more"
                )
            frame = pl.from_arrow(batch)
            assert isinstance(frame, pl.DataFrame)
            parts.append(frame)
            missing -= len(frame)
        held = pl.concat([p for p in parts if p.width]) if any(p.width for p in parts) else self.held
        mine, self.held = held.head(len(kept)), held.slice(len(kept))
        order = pl.int_range(self.taken, self.taken + len(kept), dtype=pl.Int64, eager=True)
        if len(kept):
            wanted = kept.with_columns(order=order)
            _same_rows(self.path, mine, wanted.select(mine.columns), "decisions and feature table")
        self.taken += len(kept)

    def end(self) -> None:
        more = len(self.held) + sum(len(b) for b in self.batches)
        self.file.close()
        if more:
            raise Difference(f"{self.path}: holds {more} rows more than the decisions keep")


def _subset(run: Run, sorter: UidSorter) -> str:
    path = run.path("subset.npy")
    with storage.local_copy(path) as local:
        with readable(path):
            subset = np.lib.format.open_memmap(local, mode="r")
        differs(path, "its type", (subset.dtype, subset.ndim), (SUBSET, 1), "the format")
        differs(path, "the count of uids", len(subset), sorter.count, "the manifest's copies")
        at = 0
        for records in sorter.sorted_ranges():
            block = subset[at : at + len(records)]
            wrong = np.flatnonzero((block["f0"] != records["hi"]) | (block["f1"] != records["lo"]))
            if len(wrong):
                raise Difference(
                    f"{path}: entry {at + wrong[0]} is not the manifest's; sorted uids with copies differ"
                )
            at += len(records)
    return f"subset.npy: {at:,} uids, sorted, the manifest's with their copies"


# ---------------------------------------------------------------- the pool


class DigestWorker:
    """The Ray actor: digests of whole files."""

    def digest(self, path: str) -> str:
        return storage.digest(path)


def _pool(reports: list[ShardReport], tables: TableSet, deep: bool, config: ClusterConfig) -> str:
    """Shards against what the scan saw: by size and time stamp, by content where these changed or `deep` asks."""
    marks = {folder: storage.signatures(folder) for folder in {storage.parent(r.shard) for r in reports}}
    found = [marks[storage.parent(r.shard)].get(storage.name(r.shard)) for r in reports]
    wanted: dict[str, str] = {}
    if any(found):
        for report, mark in zip(reports, found):
            if mark is None:
                raise Difference(f"{report.shard}: is missing")
            differs(report.shard, "its size", mark["size"], report.signature["size"], "the scan")
            if deep or mark != report.signature:
                wanted[report.shard] = report.digest
    if deep:
        for report in reports:
            blocks = {s: d for s, d in report.files.items() if s != "parquet"}
            wanted |= {tables.path(report.id, s): d for s, d in blocks.items()}
    digests = each_file(list(wanted), config) if deep else ((p, storage.digest(p)) for p in wanted)
    for path, digest in digests:
        differs(path, "xxh3-128 of its content", digest, wanted[path], "the scan")
    if not any(found):
        return "pool: cannot be reached; its shards were not compared"
    how = "content" if deep else "size and time stamp"
    return f"pool: {len(reports):,} shards, {how} as scanned"


def each_file(paths: list[str], config: ClusterConfig) -> Iterator[tuple[str, str]]:
    """(path, digest) of every file, as Ray workers finish them."""
    cluster.connect()
    workers = cluster.plan_workers(ClusterConfig(workers=config.workers, gpus_per_worker=0.0), len(paths))
    with Progress("content", len(paths), "file") as progress:
        for path, digest in cluster.map_actors(workers, DigestWorker, [], "digest", paths):
            progress.step()
            yield path, digest

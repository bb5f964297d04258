"""Chosen samples into training shards: stored bytes copied, names and order the same from run to run.

The layout is DataComp's resharder's: `{:08d}.tar` without gaps, `_stats.json`, `sizes.json`, `meta.json`,
`sample_ids.npy`; open_clip's webdataset loader reads it as it is.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from pipeline import cluster, storage
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused, WinnowError
from pipeline.progress import Progress
from pipeline.samples import IMAGE_EXTS, format_uid, pick
from pipeline.shards import Member, Shard, open_shard
from pipeline.tables import TableSet, shard_id
from pipeline.uids import find_uids

SHARD_FORMAT = "{:08d}.tar"
COPIED = ("json", "cls")  # beside image and caption


@dataclass(frozen=True)
class Slice:
    """Entries [start, stop) among the rows of a manifest row group that have more than `copy` copies."""

    group: int
    copy: int
    start: int
    stop: int


@dataclass(frozen=True)
class OutputShard:
    number: int
    slices: list[Slice]

    @property
    def samples(self) -> int:
        return sum(s.stop - s.start for s in self.slices)


def plan(manifest: str, shard_size: int) -> list[OutputShard]:
    """Cut the entries of a manifest into shards: all first copies in manifest order, then all second ones, ..."""
    with storage.open_file(manifest) as f:
        parquet = pq.ParquetFile(f)
        copies = [
            parquet.read_row_group(g, ["copies"])["copies"].to_numpy() for g in range(parquet.num_row_groups)
        ]
    most = max((int(c.max()) for c in copies if len(c)), default=0)
    shards: list[OutputShard] = []
    slices: list[Slice] = []
    room = shard_size
    for copy in range(most):
        for group, counts in enumerate(copies):
            start, total = 0, int((counts > copy).sum())
            while start < total:
                stop = min(total, start + room)
                slices.append(Slice(group, copy, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    shards.append(OutputShard(len(shards), slices))
                    slices, room = [], shard_size
    return [*shards, OutputShard(len(shards), slices)] if slices else shards


class ReshardWorker:
    """The Ray actor: writes whole output shards; memory is one source shard's rows and one sample."""

    def __init__(self, manifest: str, tables: str, to: str) -> None:
        self.manifest, self.tables, self.to = manifest, TableSet(tables), to

    def write(self, task: OutputShard) -> int:
        """Write one shard and its stats file; returns the samples written. Raises WinnowError for changed bytes."""
        name = SHARD_FORMAT.format(task.number)
        written = 0
        with storage.commit(storage.join(self.to, name)) as tmp, open(tmp, "wb") as f:
            for part in task.slices:
                for rows in self.rows(part):
                    written += self._copy(f, rows, part.copy)
            f.write(bytes(2 * tarfile.BLOCKSIZE))
            f.write(bytes(-f.tell() % tarfile.RECORDSIZE))
        if written != task.samples:
            raise WinnowError(f"{self.to}/{name}: {written} samples written, {task.samples} planned")
        storage.write_json(stats_path(self.to, task.number), {"successes": written})
        return written

    def rows(self, part: Slice) -> Iterator[pl.DataFrame]:
        """The slice's manifest rows with their members, one frame a source shard."""
        with storage.open_file(self.manifest) as f:
            group = pl.from_arrow(pq.ParquetFile(f).read_row_group(part.group))
        assert isinstance(group, pl.DataFrame)
        rows = group.filter(pl.col("copies") > part.copy)[part.start : part.stop]
        for (shard,), mine in rows.group_by("shard", maintain_order=True):
            features = self.tables.read(
                shard_id(str(shard)), ["members", "caption", "caption_repaired", "sha256"]
            )
            yield mine.hstack(features[mine["row"].to_list()])

    def _copy(self, f: IO[bytes], rows: pl.DataFrame, copy: int) -> int:
        source = rows["shard"][0]
        try:
            with open_shard(source) as shard:
                for row in rows.iter_rows(named=True):
                    _write_sample(f, shard, row, copy)
        except FileNotFoundError:
            raise Refused(f"{source}: the shard is gone; resharding copies bytes from the pool") from None
        return len(rows)


def _write_sample(f: IO[bytes], shard: Shard, row: dict[str, Any], copy: int) -> None:
    key = f"{format_uid(row['uid_hi'], row['uid_lo'])}-{copy}"
    members = [Member(m["suffix"], m["offset"], m["size"]) for m in row["members"]]
    image = pick(members, IMAGE_EXTS)
    data = shard.read(image) if image else b""
    if image is None or hashlib.sha256(data).digest() != row["sha256"]:
        raise WinnowError(
            f"{row['shard']}: the image of {row['key']!r} is not the one that was scanned; scan again"
        )
    text = pick(members, ("txt",))
    stored = text is not None and not row["caption_repaired"]
    _write_member(f, f"{key}.{image.ext}", data)
    _write_member(f, f"{key}.txt", shard.read(text) if text and stored else row["caption"].encode())
    for ext in COPIED:
        if member := pick(members, (ext,)):
            _write_member(f, f"{key}.{ext}", shard.read(member))


def _write_member(f: IO[bytes], name: str, data: bytes) -> None:
    f.write(_header(name, len(data)))
    f.write(data)
    f.write(bytes(-len(data) % tarfile.BLOCKSIZE))


BLANK = tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT)


def _header(name: str, size: int) -> bytes:
    """tarfile's USTAR header of a plain file with this name and size filled in; three times as fast.

    The fields and the checksum are POSIX.1-1988's: name in bytes 0-99, size in octal in 124-135, the sum of
    all bytes, with blanks for itself, in 148-155. `name` is at most 100 ASCII characters.
    """
    if size >= 8**11 or len(name) > 100:
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.GNU_FORMAT)
    header = bytearray(BLANK)
    header[:100] = name.encode("ascii").ljust(100, b"\0")
    header[124:136] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def reshard(
    manifest: str, tables: TableSet, subset: str, to: str, shard_size: int, config: ClusterConfig
) -> int:
    """Write the training shards of a manifest to the folder `to`; returns the number of shards.

    Finished shards of an interrupted run of the same plan are kept. Raises Refused when `to` holds
    anything else.
    """
    shards = plan(manifest, shard_size)
    if not shards:
        raise Refused(f"{manifest}: the run kept no sample, there is nothing to write")
    with storage.lock(to):
        _claim(to, {"manifest": storage.digest(manifest), "shard_size": shard_size})
        todo = [s for s in shards if not storage.exists(stats_path(to, s.number))]
        if todo:
            cluster.connect()
            workers = cluster.plan_workers(
                ClusterConfig(workers=config.workers, gpus_per_worker=0.0), len(todo)
            )
            args = [manifest, tables.folder, to]
            with Progress("reshard", len(shards), done=len(shards) - len(todo)) as progress:
                for _task, written in cluster.map_actors(workers, ReshardWorker, args, "write", todo):
                    progress.step(written)
        sizes = {SHARD_FORMAT.format(s.number): s.samples for s in shards}
        storage.copy(subset, storage.join(to, "sample_ids.npy"))
        storage.write_json(storage.join(to, "sizes.json"), sizes)
        meta = {
            "output_shard_count": len(shards),
            "output_shard_format": SHARD_FORMAT,
            "shard_size": shard_size,
            "output_count": sum(sizes.values()),
        }
        storage.write_json(storage.join(to, "meta.json"), meta)
    return len(shards)


def stats_path(to: str, number: int) -> str:
    return storage.join(to, SHARD_FORMAT.format(number).replace(".tar", "_stats.json"))


def _claim(to: str, digest: dict[str, Any]) -> None:
    """Mark the folder with the plan it is for; refuse one that is for another."""
    mark = storage.join(to, ".reshard.json")
    if storage.exists(mark):
        if storage.read_json(mark) != digest:
            raise Refused(
                f"to={to}: holds the shards of another selection or shard size; choose another folder"
            )
        return
    others = [n for n in storage.listdir(to) if not n.startswith(".")]
    if others:
        raise Refused(f"to={to}: is not empty ({others[0]}, ...); choose another folder")
    storage.write_json(mark, digest)


def manifest_of_subset(subset: np.ndarray, tables: TableSet, ids: Sequence[str], path: str) -> np.ndarray:
    """Write the manifest of a user's own subset (sorted `u8,u8`); returns the uids that the pool lacks.

    A uid that several samples of the pool carry goes to the first of them, as everywhere.
    """
    unique, copies = np.unique(subset, return_counts=True)
    hi, lo = unique["f0"], unique["f1"]
    found = np.zeros(len(unique), bool)
    order = 0
    with storage.commit(path) as tmp:
        writer: pq.ParquetWriter | None = None
        for _shard, frame in tables.stream(ids, ["uid_hi", "uid_lo", "shard", "key", "status"]):
            at = find_uids(hi, lo, frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy())
            rows = np.flatnonzero((at >= 0) & (frame["status"] == "ok").to_numpy())
            first = np.sort(np.unique(at[rows], return_index=True)[1])
            rows = rows[first]
            rows = rows[~found[at[rows]]]
            found[at[rows]] = True
            mine = frame[rows].select(
                "uid_hi", "uid_lo", pl.col("shard").cast(pl.String), "key",
                row=pl.Series(rows, dtype=pl.Int32),
                copies=pl.Series(copies[at[rows]], dtype=pl.UInt32),
                order=pl.int_range(order, order + len(rows), dtype=pl.Int64, eager=True),
            ).to_arrow()  # fmt: skip
            writer = writer or pq.ParquetWriter(tmp, mine.schema, compression="zstd")
            if len(rows):
                writer.write_table(mine)
            order += len(rows)
        if writer:
            writer.close()
    return unique[~found]

"""Feature tables on disk: one a shard, written in row groups, with embedding blocks beside it.

features/<table set>/<shard id>.parquet     one row a sample, in shard order
features/<table set>/<shard id>.image.npy   float16 (rows, d), unit length, NaN where there is none
features/<table set>/<shard id>.text.npy
features/<table set>/<shard id>.<column>.parquet   a column that was made later, see `write_column`
features/<table set>/<shard id>.json        the shard's report; written last, so it commits the rest
features/<table set>/set.json               what the tables were made with
features/<table set>/scans.json             shards opened and seconds of each finished scan
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.errors import WinnowError
from pipeline.metadata import Source
from pipeline.shards import stem

TABLE_VERSION = 1
HELD = 1 << 29  # bytes: a pass over 20 million uids and scores
ROW_GROUP = 8192
TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
NAME = pa.dictionary(pa.int32(), pa.string())
BASE = {
    "uid_hi": pa.uint64(),
    "uid_lo": pa.uint64(),
    "shard": NAME,
    "key": pa.string(),
    "offset": pa.int64(),
    "size": pa.int64(),
    "members": pa.list_(pa.struct({"suffix": pa.string(), "offset": pa.int64(), "size": pa.int64()})),
    "status": NAME,
    "detail": pa.string(),
    "caption": pa.string(),
    "caption_repaired": pa.bool_(),
    "language": NAME,
    "width": pa.int32(),
    "height": pa.int32(),
    "sha256": pa.binary(32),
    "pixel_hash": pa.binary(16),
    "phash": pa.uint64(),
    "label": pa.string(),
}


def schema(metadata: Mapping[str, pa.DataType], score_column: str | None) -> pa.Schema:
    """The columns of one feature table; metadata columns never shadow those of the scan itself."""
    extra = {k: t for k, t in metadata.items() if k not in BASE and k != score_column}
    score = {score_column: pa.float32()} if score_column else {}
    return pa.schema({**BASE, **extra, **score})


@dataclass(kw_only=True)
class ShardReport:
    """What the scan of one shard found; the accounting of a run is the sum of these.

    promised: (samples, the count file that says so) or None. rows: samples in the table; status: their
    counts by status; lost: samples that are promised and cannot be read, under the damage's reason.
    notes: counts that are no loss (members passed over, repaired captions, ...). digest: of the shard's
    content; files: digests of what the scan wrote, by suffix.
    """

    shard: str
    id: str
    signature: dict[str, Any]
    sidecar: dict[str, Any] | None = None
    promised: tuple[int, str] | None = None
    digest: str = ""
    rows: int = 0
    status: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    damage: str | None = None
    detail: str = ""
    notes: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.promised is not None:  # JSON knows no tuples
            self.promised = (self.promised[0], self.promised[1])

    @property
    def samples(self) -> int:
        return self.rows + self.lost

    def rejected(self) -> dict[str, int]:
        counts = {k: n for k, n in self.status.items() if k != "ok"}
        if self.lost and self.damage:
            counts[self.damage] = counts.get(self.damage, 0) + self.lost
        return counts


def shard_id(shard: str) -> str:
    """Name of a shard's files: its stem, and a hash of its whole path since stems repeat between folders."""
    return f"{stem(shard)}-{hashlib.blake2b(shard.encode(), digest_size=4).hexdigest()}"


@dataclass(frozen=True)
class TableSet:
    """All tables made with one scorer and one way of reading; never mixed with another's."""

    folder: str

    def path(self, shard: str, suffix: str) -> str:
        return storage.join(self.folder, f"{shard}.{suffix}")

    def report(self, shard: str) -> ShardReport | None:
        """The committed report of a shard id, or None when its scan has not finished."""
        path = self.path(shard, "json")
        return ShardReport(**storage.read_json(path)) if storage.exists(path) else None

    def identity(self) -> dict[str, Any]:
        return storage.read_json(storage.join(self.folder, "set.json"))

    def note_time(self, shards: int, seconds: float) -> None:
        """Add a scan to `scans.json`: how many shards it opened, and what it took."""
        path = storage.join(self.folder, "scans.json")
        noted = storage.read_json(path) if storage.exists(path) else []
        storage.write_json(path, [*noted, {"shards": shards, "seconds": round(seconds, 3)}])

    def seconds_per_shard(self) -> float | None:
        """What a shard took, over all scans that came to their end; None when none did."""
        path = storage.join(self.folder, "scans.json")
        noted = storage.read_json(path) if storage.exists(path) else []
        shards = sum(n["shards"] for n in noted)
        return sum(n["seconds"] for n in noted) / shards if shards else None

    def schema(self, shard: str) -> pa.Schema:
        """The table's own columns and those of its metadata file; columns derived later are not among them."""
        with storage.open_file(self.path(shard, "parquet")) as f:
            own = pq.read_schema(f)
        source = Source.of(own)
        return pa.unify_schemas([own, _without(source.schema(), own)]) if source else own

    def columns(self, shard: str) -> list[str]:
        return self.schema(shard).names

    def read(self, shard: str, columns: Sequence[str]) -> pl.DataFrame:
        """Rows of one shard in shard order; a column that this table lacks comes as nulls.

        The table's own columns come first, then those derived from it (`write_column`), then its metadata file's.
        """
        with storage.open_file(self.path(shard, "parquet")) as f:
            file = pq.ParquetFile(f)
            source = Source.of(file.schema_arrow)
            own = [c for c in columns if c in file.schema_arrow.names]
            frame = _frame(file.read(columns=own))
        absent = [c for c in columns if c not in own]
        for column in absent:
            if storage.exists(self.path(shard, f"{column}.parquet")):
                frame = frame.hstack(self._derived(shard, column))
        if source and (left := [c for c in absent if c not in frame.columns]):
            frame = frame.hstack(source.read(left))
        return frame.with_columns(pl.lit(None).alias(c) for c in columns if c not in frame.columns).select(
            columns
        )

    def _derived(self, shard: str, column: str) -> pl.DataFrame:
        with storage.open_file(self.path(shard, f"{column}.parquet")) as f:
            return _frame(pq.read_table(f))

    def write_column(self, shard: str, column: str, values: pa.Array) -> None:
        """Keep a column that was made after the table, one value a row, in a file of its own."""
        with storage.commit(self.path(shard, f"{column}.parquet")) as tmp:
            pq.write_table(pa.table({column: values}), tmp, compression="zstd")

    def without_column(self, ids: Sequence[str], column: str) -> list[str]:
        """Those of `ids` whose derived `column` has still to be made."""
        made = set(storage.listdir(self.folder))
        return [i for i in ids if f"{i}.{column}.parquet" not in made]

    def source(self, shard: str) -> Source | None:
        """Where the rows of a metadata pool's table lie; None for the table of a shard."""
        with storage.open_file(self.path(shard, "parquet")) as f:
            return Source.of(pq.read_schema(f))

    def stream(self, ids: Iterable[str], columns: Sequence[str]) -> Iterator[tuple[str, pl.DataFrame]]:
        """(shard id, its columns) in the order of `ids`, read ahead by a few threads."""
        ids = list(ids)
        threads = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            ahead = deque(pool.submit(self.read, i, columns) for i in ids[: 2 * threads])
            for n, shard in enumerate(ids):
                frame = ahead.popleft().result()
                if n + 2 * threads < len(ids):
                    ahead.append(pool.submit(self.read, ids[n + 2 * threads], columns))
                yield shard, frame

    def embeddings(self, shard: str, tower: str) -> np.ndarray:
        """float16 (rows, d) of `tower` (image or text); memory-mapped when local.

        Raises WinnowError naming both widths when the block is not of this set's scorer.
        """
        path = self.path(shard, f"{tower}.npy")
        if storage.is_local(path):
            block = np.load(storage.resolve(path)[1], mmap_mode="r")
        else:
            with storage.open_file(path) as f:
                block = np.load(f)
        scorer = self.identity()["scorer"]
        width = scorer["architecture"]["embed_dim"] if scorer else None
        if block.ndim != 2 or block.shape[1] != width:
            raise WinnowError(
                f"{path}: embeddings are {block.shape[1:]} wide, those of this run's scorer {width}"
            )
        return block

    def embedding_blocks(self, shard: str, name: str, rows: int) -> Iterator[np.ndarray]:
        """float (n, d) blocks of up to `rows` rows: of a tower, or of an array of a metadata pool's npz files."""
        source = self.source(shard)
        if source:
            yield from source.embeddings(name, rows)
            return
        block = self.embeddings(shard, name)
        for start in range(0, len(block), rows):
            yield block[start : start + rows]


class Passes:
    """Several passes over the same tables: columns stay in memory from one to the next while they fit in HELD bytes."""

    def __init__(self, tables: TableSet, ids: Sequence[str]) -> None:
        self.tables, self.ids = tables, ids
        self._held: dict[str, pl.DataFrame] = {}
        self._left = HELD

    def stream(self, columns: Sequence[str]) -> Iterator[tuple[str, pl.DataFrame]]:
        """As `TableSet.stream`."""
        alike = itertools.groupby(self.ids, lambda i: tuple(self._held[i].columns) if i in self._held else ())
        for have, group in alike:
            ids = list(group)
            new = [c for c in columns if c not in have]
            for shard, frame in self.tables.stream(ids, new) if new else ((i, pl.DataFrame()) for i in ids):
                size = int(frame.estimated_size())
                whole = self._held[shard].hstack(frame) if have else frame
                if new and size <= self._left:
                    self._left -= size
                    self._held[shard] = whole
                yield shard, whole.select(columns)


class TableWriter:
    """Streams rows of one shard to its table; memory is one row group, whatever the shard's size."""

    def __init__(self, path: str, table_schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, table_schema, compression="zstd")
        self._schema = table_schema
        self._pending: list[pa.RecordBatch] = []
        self._rows = 0

    def add(self, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        arrays = [_array(columns[f.name], f.type) for f in self._schema]
        self._pending.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._rows += len(arrays[0])
        if self._rows >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            table = pa.Table.from_batches(self._pending, self._schema).unify_dictionaries()
            self._writer.write_table(table.combine_chunks(), row_group_size=self._rows)
        self._pending, self._rows = [], 0

    def close(self) -> None:
        self._flush()
        self._writer.close()


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).dictionary_encode()
    return pa.array(values, kind)


class BlockWriter:
    """Streams float16 rows to an .npy file whose header is written last, when the count is known."""

    def __init__(self, path: str, width: int) -> None:
        self._file: IO[bytes] = open(path, "wb")
        self._width, self._rows = width, 0
        self._header()

    def _header(self) -> None:
        # numpy pads this header so that the row count can grow in place
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": "<f2", "fortran_order": False, "shape": (self._rows, self._width)}
        )

    def add(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, dtype="<f2").tobytes())
        self._rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.close()


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _without(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    return pa.schema([f for f in schema if f.name not in other.names])


def write_report(tables: TableSet, report: ShardReport) -> None:
    storage.write_json(tables.path(report.id, "json"), asdict(report))


def digest_json(value: Any, size: int = 8) -> str:
    """Hex digest of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, default=list)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()

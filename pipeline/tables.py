"""Feature tables on disk: one a shard, written in row groups, with embedding blocks beside it.

features/<table set>/<shard id>.parquet     one row a sample, in shard order
features/<table set>/<shard id>.image.npy   float16 (rows, d), unit length, NaN where there is none
features/<table set>/<shard id>.text.npy
features/<table set>/<shard id>.json        the shard's report; written last, so it commits the rest
features/<table set>/set.json               what the tables were made with
"""

from __future__ import annotations

import hashlib
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
from pipeline.shards import stem

TABLE_VERSION = 1
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

    def schema(self, shard: str) -> pa.Schema:
        with storage.open_file(self.path(shard, "parquet")) as f:
            return pq.read_schema(f)

    def columns(self, shard: str) -> list[str]:
        return self.schema(shard).names

    def read(self, shard: str, columns: Sequence[str]) -> pl.DataFrame:
        """Rows of one shard in shard order; a column that this table lacks comes as nulls."""
        have = set(self.columns(shard))
        with storage.open_file(self.path(shard, "parquet")) as f:
            frame = pl.from_arrow(pq.read_table(f, columns=[c for c in columns if c in have]))
        assert isinstance(frame, pl.DataFrame)
        return frame.with_columns(pl.lit(None).alias(c) for c in columns if c not in have).select(columns)

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


def write_report(tables: TableSet, report: ShardReport) -> None:
    storage.write_json(tables.path(report.id, "json"), asdict(report))


def digest_json(value: Any, size: int = 8) -> str:
    """Hex digest of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, default=list)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()

"""Metadata that lies beside a shard: `<stem>.parquet`, and `<stem>.npz` aligned to it by row position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import npz, storage
from pipeline.errors import Refused
from pipeline.samples import Sample, format_uid
from pipeline.shards import stem


def path_of(shard: str) -> str:
    return storage.join(storage.parent(shard), f"{stem(shard)}.parquet")


@dataclass
class Sidecar:
    """Rows by uid, or by key in a file that has no uid column. `types`: its scalar columns."""

    by: str
    types: dict[str, pa.DataType]
    rows: dict[str, dict[str, Any]]

    def match(self, samples: Sequence[Sample]) -> None:
        """Give each sample its row's columns; samples without a row keep what their json said."""
        for sample in samples:
            row = self.rows.get(self._name(sample))
            if row is not None:
                sample.metadata.update(row)

    def unmatched(self, samples: Sequence[tuple[str, tuple[int, int]]]) -> dict[str, list[str]]:
        """Names of rows with no sample and of samples with no row; `samples` are (key, uid) pairs."""
        names = [format_uid(*uid) if self.by == "uid" else key for key, uid in samples]
        have = set(names)
        return {
            "metadata_without_sample": [n for n in self.rows if n not in have],
            "sample_without_metadata": [n for n in names if n not in self.rows],
        }

    def _name(self, sample: Sample) -> str:
        return format_uid(*sample.uid) if self.by == "uid" else sample.key


def read(path: str) -> Sidecar:
    """Raises Refused when the file has neither uid nor key, or its npz has another number of rows."""
    with storage.open_input(path, "parquet") as f:
        table = pq.read_table(f)
    by = next((c for c in ("uid", "key") if c in table.column_names), None)
    if by is None:
        raise Refused(f"{path}: no uid and no key column, so its rows cannot be matched with samples")
    npz.check_rows(path, table.num_rows)
    types = {
        f.name: plain_type(f.type) for f in table.schema if plain_type(f.type) is not None and f.name != by
    }
    names = [str(v).lower() if by == "uid" else str(v) for v in table[by].to_pylist()]
    columns = table.select(list(types)).cast(pa.schema(types))
    return Sidecar(by, types, dict(zip(names, columns.to_pylist())))


def plain_type(kind: pa.DataType) -> pa.DataType | None:
    """The column type a scalar is kept as; None for lists, structs and binaries."""
    if pa.types.is_integer(kind):
        return pa.uint64() if kind == pa.uint64() else pa.int64()
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return pa.float32() if kind == pa.float32() else pa.float64()
    if pa.types.is_boolean(kind):
        return pa.bool_()
    return pa.string() if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None

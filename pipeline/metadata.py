"""Metadata parquet files as the rows of a pool: where a table's rows lie in one, and what it adds to them.

The table of a metadata pool holds the uid as two numbers and the status. Every other column stays where it is,
in the metadata file, and is read from there when a filter asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import npz, storage
from pipeline.sidecar import plain_type

KEY = b"winnow.source"
CAPTION = ("text", "caption")  # the caption's name in DataComp's files, in img2dataset's


@dataclass(frozen=True, kw_only=True)
class Source:
    """Whole row groups of a metadata file: `rows` of its `total` rows, from row `first` on."""

    path: str
    groups: tuple[int, ...]
    first: int
    rows: int
    total: int

    def encode(self) -> dict[bytes, bytes]:
        """As key-value metadata of a table's schema."""
        return {KEY: json.dumps(asdict(self)).encode()}

    @classmethod
    def of(cls, schema: pa.Schema) -> Source | None:
        """The source that a table names, None for a table that holds all that it has."""
        text = (schema.metadata or {}).get(KEY)
        if text is None:
            return None
        fields = json.loads(text)
        return cls(**{**fields, "groups": tuple(fields["groups"])})

    def schema(self) -> pa.Schema:
        """The scalar columns, under the names that tables give them."""
        with storage.open_file(self.path) as f:
            return pa.schema(
                {
                    name: kind
                    for name, (_, kind) in _names(pq.read_schema(f)).items()
                    if plain_type(kind) is not None
                }
            )

    def read(self, columns: Sequence[str]) -> pl.DataFrame:
        """Those of `columns` that the file has, in its row order."""
        with storage.open_file(self.path) as f:
            file = pq.ParquetFile(f)
            names = _names(file.schema_arrow)
            wanted = {c: names[c][0] for c in columns if c in names}
            if storage.is_local(self.path):  # polars reads local files a third faster
                lazy = pl.scan_parquet(storage.resolve(self.path)[1], glob=False).slice(self.first, self.rows)
            else:
                table = file.read_row_groups(list(self.groups), columns=list(wanted.values()))
                lazy = pl.DataFrame(table).lazy()
        return lazy.select(pl.col(theirs).alias(ours) for ours, theirs in wanted.items()).collect()

    def embeddings(self, array: str, block: int) -> Iterator[np.ndarray]:
        """Blocks of rows of an array of the npz file beside this one; see `npz.stream_rows`."""
        yield from npz.stream_rows(npz.beside(self.path), array, self.first, self.rows, block)


def _names(schema: pa.Schema) -> dict[str, tuple[str, pa.DataType]]:
    """Columns of a metadata file by the table's name for them: (their own name, type)."""
    names = {f.name: (f.name, f.type) for f in schema}
    theirs = next((c for c in CAPTION if c in names), None)
    return names | ({"caption": names[theirs]} if theirs else {})

"""Arrays of an .npz file by blocks of rows: DataComp's embeddings (`b32_img`, `l14_img`, ...), never held whole."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from pipeline import storage
from pipeline.errors import Refused


def beside(parquet: str) -> str:
    """The npz file whose rows are those of a parquet file."""
    return parquet.removesuffix(".parquet") + ".npz"


def check_rows(parquet: str, rows: int) -> None:
    """Raises Refused when the npz beside a parquet file holds an array with another number of rows."""
    path = beside(parquet)
    if not storage.exists(path):
        return
    with storage.open_file(path) as f, zipfile.ZipFile(f) as archive:
        for entry in archive.namelist():
            with archive.open(entry) as member:
                count = _header(member)[0][0]
            if count != rows:
                raise Refused(
                    f"{path}: {entry.removesuffix('.npy')} has {count} rows, {storage.name(parquet)} has {rows};"
                    " they belong together by row position"
                )


def stream_rows(path: str, array: str, first: int, rows: int, block: int) -> Iterator[np.ndarray]:
    """Rows [first, first + rows) of a 2-D float array, `block` at a time, as stored: (n, d) float16 or float32.

    Raises Refused when the file does not exist or has no such array of rows of floats.
    """
    if not storage.exists(path):
        raise Refused(f"{path}: no such file; embeddings lie in an npz beside their parquet file")
    with storage.open_file(path) as f, zipfile.ZipFile(f) as archive:
        if f"{array}.npy" not in archive.namelist():
            known = ", ".join(n.removesuffix(".npy") for n in archive.namelist())
            raise Refused(f"{path}: no array {array!r}; it holds {known}")
        with archive.open(f"{array}.npy") as member:
            shape, by_column, dtype = _header(member)
            if len(shape) != 2 or by_column or dtype.kind != "f":
                raise Refused(f"{path}: {array} is {dtype} {shape}, embeddings are rows of floats")
            member.seek(member.tell() + first * shape[1] * dtype.itemsize)
            for start in range(0, rows, block):
                count = min(block, rows - start)
                data = member.read(count * shape[1] * dtype.itemsize)
                yield np.frombuffer(data, dtype).reshape(count, shape[1])


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(member)

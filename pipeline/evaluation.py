"""Evaluation sets as pools: shards are taken as they are, parquet files and folders of images become shards."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath

import pyarrow.parquet as pq

from pipeline import storage
from pipeline.errors import Refused
from pipeline.samples import IMAGE_EXTS
from pipeline.shards import SHARD_SUFFIXES

IMAGE_COLUMNS = ("jpg", "png", "webp", "image", "img", "bytes")
ROWS = 2_000  # held at a time
Image = tuple[str, bytes, str | None]  # key, bytes, label


def as_shards(path: str, folder: str) -> str:
    """A `pool.shards` value for the evaluation set at `path`; shards that have to be made go to `folder`.

    Keys are row numbers of a parquet file, or paths within a folder of images. The column `label`, or the name
    of the folder that an image lies in, becomes a cls member. Raises Refused for a parquet file without an
    image column, and for a folder without images.
    """
    if path.endswith(".parquet"):
        return _write(_parquet_images(path), folder)
    fs, p = storage.resolve(path)
    if not fs.isdir(p) or any(n.endswith(SHARD_SUFFIXES) for n in storage.listdir(path)):
        return path
    files = sorted(f for f in fs.find(p) if f.rpartition(".")[2].lower() in IMAGE_EXTS)
    if not files:
        raise Refused(
            f"{path}: neither shards ({', '.join(SHARD_SUFFIXES)}) nor images ({', '.join(IMAGE_EXTS)})"
        )
    names = ((PurePosixPath(f).relative_to(PurePosixPath(p)), f) for f in files)
    return _write(
        (
            (str(n).replace(".", "_").replace("/", "_"), fs.cat_file(f), n.parent.name or None)
            for n, f in names
        ),
        folder,
    )


def _parquet_images(path: str) -> Iterator[Image]:
    with storage.open_file(path) as f:
        table = pq.ParquetFile(f)
        column = next((c for c in IMAGE_COLUMNS if c in table.schema_arrow.names), None)
        if column is None:
            raise Refused(f"{path}: no image column (looked for {', '.join(IMAGE_COLUMNS)})")
        columns = [column, *({"label"} & set(table.schema_arrow.names))]
        row = 0
        for batch in table.iter_batches(256, columns=columns):
            for record in batch.to_pylist():
                value, label = record[column], record.get("label")
                data = value["bytes"] if isinstance(value, dict) else value
                yield str(row), data, None if label is None else str(label)
                row += 1


def _write(images: Iterator[Image], folder: str) -> str:
    """Shards of ROWS images each, committed whole; images keep their bytes whatever their format."""
    for number in itertools.count():
        some = list(itertools.islice(images, ROWS))
        if not some and number:
            break
        path = storage.join(folder, f"{number:05d}.tar")
        with storage.commit(path) as tmp, tarfile.open(tmp, "w", format=tarfile.PAX_FORMAT) as tar:
            for key, data, label in some:
                _add(tar, f"{key}.jpg", data)  # read by its bytes, not by its name
                if label is not None:
                    _add(tar, f"{key}.cls", label.encode())
    return folder


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))

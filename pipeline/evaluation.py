"""Evaluation sets as pools: shards are taken as they are, parquet files and folders of images become shards."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pyarrow.parquet as pq

from pipeline import shards, storage
from pipeline.errors import Refused
from pipeline.samples import IMAGE_EXTS
from pipeline.shards import SHARD_SUFFIXES
from pipeline.tables import digest_json

IMAGE_COLUMNS = ("jpg", "png", "webp", "image", "img", "bytes")
CAPTION_COLUMNS = ("caption", "text", "captions")  # of a list of captions the first is taken
ROWS = 2_000  # held at a time
Image = tuple[str, dict[str, bytes]]  # key, members by extension


def as_shards(path: str, folder: str) -> str:
    """A `pool.shards` value for the evaluation set at `path`; shards that have to be made go to `folder`.

    Keys are row numbers of a parquet file, or paths within a folder of images. The column `label`, or the name
    of the folder that an image lies in, becomes a cls member, a column of captions txt members. Raises Refused for a parquet file without an
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
    return _write((_image_of_folder(fs, p, f) for f in files), folder)


def _image_of_folder(fs: Any, folder: str, file: str) -> Image:
    within = PurePosixPath(file).relative_to(PurePosixPath(folder))
    label = {"cls": within.parent.name.encode()} if within.parent.name else {}
    return str(within).replace(".", "_").replace("/", "_"), {"jpg": fs.cat_file(file), **label}


def fingerprint(path: str, key: str) -> str:
    """Digest of what an evaluation set consists of: every file's name, size and time stamp; nothing is read.

    key: the setting that names it. Raises Refused when there is nothing.
    """
    fs, p = storage.resolve(storage.absolute(path, key))
    if fs.exists(p):
        files = fs.find(p, detail=True) if fs.isdir(p) else {p: fs.info(p)}
        return digest_json([[name, storage.mark(files[name])] for name in sorted(files)])
    try:
        return digest_json([[shard, storage.signature(shard)] for shard in shards.expand(path)])
    except (Refused, FileNotFoundError) as e:
        raise Refused(f"{key}={path}: there is no such file or folder") from e


def _parquet_images(path: str) -> Iterator[Image]:
    with storage.open_input(path, "parquet") as f:
        table = pq.ParquetFile(f)
        column = next((c for c in IMAGE_COLUMNS if c in table.schema_arrow.names), None)
        if column is None:
            raise Refused(f"{path}: no image column (looked for {', '.join(IMAGE_COLUMNS)})")
        names = table.schema_arrow.names
        caption = next((c for c in CAPTION_COLUMNS if c in names), None)
        columns = [column, *({"label", caption} & set(names))]
        row = 0
        for batch in table.iter_batches(256, columns=columns):
            for record in batch.to_pylist():
                yield str(row), _members(record, column, caption)
                row += 1


def _members(record: dict[str, Any], image: str, caption: str | None) -> dict[str, bytes]:
    """What a row of an image table holds, by extension."""
    value = record[image]
    found: dict[str, Any] = {"cls": record.get("label"), "txt": record[caption] if caption else None}
    if isinstance(found["txt"], list):
        found["txt"] = found["txt"][0] if found["txt"] else None
    texts = {ext: str(text).encode() for ext, text in found.items() if text is not None}
    return {"jpg": value["bytes"] if isinstance(value, dict) else value, **texts}


def _write(images: Iterator[Image], folder: str) -> str:
    """Shards of ROWS images each, committed whole; images keep their bytes whatever their format."""
    for number in itertools.count():
        some = list(itertools.islice(images, ROWS))
        if not some and number:
            break
        path = storage.join(folder, f"{number:05d}.tar")
        with storage.commit(path) as tmp, tarfile.open(tmp, "w", format=tarfile.PAX_FORMAT) as tar:
            for key, members in some:
                for ext, data in members.items():  # images are read by their bytes, not by the name
                    _add(tar, f"{key}.{ext}", data)
    return folder


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))

"""Builders of real, tiny inputs: images, shards, pools; and short ways to run the parts under test on them."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from PIL import Image

from jobs.launch import launch
from pipeline import cluster, storage
from pipeline.decode import DecodeConfig, Decoder
from pipeline.samples import PoolConfig
from pipeline.scan_shard import ShardScanner, ShardTask
from pipeline.scorer import Scorer
from pipeline.tables import ShardReport, TableSet, shard_id

Members = Mapping[str, bytes]
TINY = (8, 6)


def uid(n: int) -> str:
    """The n-th of an endless list of uids."""
    return hashlib.md5(str(n).encode()).hexdigest()


def halves(text: str) -> tuple[int, int]:
    return int(text[:16], 16), int(text[16:], 16)


def array(size: tuple[int, int] = TINY, seed: int = 0, channels: int = 3) -> np.ndarray:
    """A smooth random picture, uint8 (height, width, channels), with some noise on it."""
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (5, 5, channels), dtype=np.uint8)
    planes = [
        np.asarray(Image.fromarray(rough[:, :, c]).resize(size, Image.Resampling.BICUBIC))
        for c in range(channels)
    ]
    noisy = np.stack(planes, 2).astype(np.int16) + rng.integers(-12, 13, (size[1], size[0], channels))
    return noisy.clip(0, 255).astype(np.uint8)


def picture(size: tuple[int, int] = TINY, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture in any PIL mode."""
    if mode == "I;16":
        return Image.fromarray(array(size, seed, 1)[:, :, 0].astype(np.uint16) * 257)
    if mode == "P":
        return Image.fromarray(array(size, seed)).quantize(32)
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    data = array(size, seed, channels)
    return Image.fromarray(data[:, :, 0] if channels == 1 else data, mode)


def encode(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def jpeg(size: tuple[int, int] = TINY, seed: int = 0) -> bytes:
    return encode(picture(size, seed), quality=90)


def sample(
    n: int, /, key: str | None = None, record: Any = None, **members: bytes | None
) -> tuple[str, Members]:
    """(key, members by extension): a jpg, a txt and a json with a uid. None leaves a member out."""
    full: dict[str, bytes | None] = {
        "jpg": jpeg(seed=n),
        "txt": f"a picture of thing number {n}".encode(),
        "json": json.dumps({"uid": uid(n)} if record is None else record).encode(),
    }
    full.update(members)
    return key if key is not None else f"{n:05d}", {k: v for k, v in full.items() if v is not None}


def tar(samples: Iterable[tuple[str, Members]]) -> bytes:
    return tar_of((f"{key}.{ext}", data) for key, members in samples for ext, data in members.items())


def tar_of(files: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar of (name, bytes) in this order; names may be anything that a tar can hold."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def make_shard(path: Path, samples: Iterable[tuple[str, Members]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar(samples))
    return str(path)


def make_pool(folder: Path, shards: int, each: int, first: int = 0) -> str:
    """Shards of numbered samples `first`, ...; returns the pool's glob."""
    for s in range(shards):
        numbers = range(first + s * each, first + (s + 1) * each)
        make_shard(folder / f"{s:05d}.tar", map(sample, numbers))
    return str(folder / "*.tar")


def scan_shard(
    shard: str,
    out: Path,
    pool: PoolConfig | None = None,
    decode: DecodeConfig | None = None,
    scorer: Scorer | None = None,
    promised: tuple[int, str] | None = None,
    batch_size: int = 16,
    threads: int = 1,
) -> tuple[ShardReport, pl.DataFrame]:
    """Scan one shard in this process; its report, and its whole table."""
    tables = TableSet(str(out))
    decoder = Decoder(decode or DecodeConfig(), scorer.preprocess if scorer else None)
    column = "score_tiny" if scorer else None
    pool = pool or PoolConfig(shards=shard)
    scanner = ShardScanner(tables, pool, decoder, scorer, column, batch_size, threads)
    report = scanner.scan(task(shard, promised))
    return report, tables.read(report.id, tables.columns(report.id))


def task(shard: str, promised: tuple[int, str] | None = None) -> ShardTask:
    beside = shard.rsplit(".tar", 1)[0] + ".parquet"
    return ShardTask(
        shard=shard, id=shard_id(shard), signature=storage.signature(shard),
        sidecar=storage.signature(beside) if storage.exists(beside) else None, promised=promised,
    )  # fmt: skip


def contents(folder: Path, suffix: str = "") -> dict[str, bytes]:
    """Every file under a folder by relative name, dot files apart."""
    found = sorted(p for p in folder.rglob(f"*{suffix}") if p.is_file() and not p.name.startswith("."))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


class LocalPool:
    """Stands in for `cluster.ActorPool`: one worker, an object of this process."""

    def __init__(self, _workers: Any, actor: Any, args: Any) -> None:
        self.worker = actor(*args)

    def map(self, method: str, tasks: Any, *shared: Any) -> Iterator[tuple[Any, Any]]:
        for task in tasks:
            yield task, getattr(self.worker, method)(*shared, task)

    def close(self) -> None:
        pass


def work_in_process(patch: Callable[[Any, str, Any], None]) -> None:
    """Have stages work without Ray; `patch` is setattr, or a monkeypatch's."""
    patch(cluster, "connect", lambda: None)
    patch(cluster, "plan_workers", lambda _config, _units: cluster.Workers(1, 1, 0.0))
    patch(cluster, "largest_node", lambda _resource: 1.0)
    patch(cluster, "worker_device", lambda: "cpu")
    patch(cluster, "ActorPool", LocalPool)


def call(job: Any, *overrides: str) -> int:
    """Run a job's command line in this process; its exit code."""
    name = job.__name__.rsplit(".", 1)[1]
    before, sys.argv = sys.argv, [f"jobs/{name}.py", *overrides]
    try:
        launch(name, getattr(job, "start", job.run))
    except SystemExit as e:
        return int(e.code or 0)
    finally:
        sys.argv = before
    raise AssertionError("launch returned")

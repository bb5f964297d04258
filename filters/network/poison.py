"""Trusted shards in which a share of the pairs is replaced by pairs of an unfiltered pool (Fang et al., section 4)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pipeline import shards, storage
from pipeline.samples import IMAGE_EXTS, PoolConfig, Sample, format_uid, pick, read_sample
from pipeline.uid_draw import uniform

SHARD = "{:05d}.tar"
DONE = "poison.json"


class _Place(NamedTuple):
    """Where a sample of the pool is, and the number that was drawn for it."""

    drawn: float
    shard: str
    number: int


def poison_shards(trusted: PoolConfig, pool: PoolConfig, share: float, seed: int, folder: str) -> str:
    """Write the poisoned shards to `folder`, one for each trusted one, and return it; a finished folder is kept.

    Each trusted pair is replaced with probability `share`, by its uid; a larger share replaces those of a
    smaller one and more. Its place goes to a pair of the pool, drawn by uid among those with an image and a
    caption; a pool that is too small gives pairs again. Memory: a hundred bytes a replaced pair.
    """
    request = {"trusted": trusted.shards, "pool": pool.shards, "share": share, "seed": seed}
    done = storage.join(folder, DONE)
    if storage.exists(done) and storage.read_json(done)["request"] == request:
        return folder
    paths = shards.expand(trusted.shards)
    wanted = sum(_replaced(sample, share, seed) for path in paths for _, sample in _readable(path, trusted))
    instead = _contents(_drawn(pool, wanted, seed), pool) if wanted else iter(())
    for number, path in enumerate(paths):
        with storage.commit(storage.join(folder, SHARD.format(number))) as tmp:
            with tarfile.open(tmp, "w", format=tarfile.USTAR_FORMAT) as tar:
                for shard, sample in _readable(path, trusted):
                    replace = _replaced(sample, share, seed)
                    _write(tar, *(next(instead) if replace else _content(shard, sample)))
    storage.write_json(done, {"request": request, "replaced": wanted})
    return folder


def _replaced(sample: Sample, share: float, seed: int) -> bool:
    return _number(sample, seed) < share


def _number(sample: Sample, seed: int) -> float:
    hi, lo = (np.array([half], np.uint64) for half in sample.uid)
    return float(uniform(hi, lo, seed)[0])


def _readable(path: str, pool: PoolConfig) -> Iterator[tuple[shards.Shard, Sample]]:
    """Samples of a shard that have an image and a caption, and their shard while it is open."""
    with shards.open_shard(path) as shard:
        index = shard.index()
        for raw in index.samples:
            sample = read_sample(shard, storage.name(path), raw, pool)
            if sample.status == "ok" and raw.key not in index.incomplete:
                yield shard, sample


def _drawn(pool: PoolConfig, n: int, seed: int) -> list[_Place]:
    """The n places with the lowest numbers, in the order of these; again from the first when there are fewer."""
    best: list[_Place] = []
    for path in shards.expand(pool.shards):
        best += [_Place(_number(s, seed + 1), path, i) for i, (_, s) in enumerate(_readable(path, pool))]
        best = sorted(best)[:n]
    return [best[i % len(best)] for i in range(n)]


def _contents(places: list[_Place], pool: PoolConfig) -> Iterator[tuple[str, str, bytes, str]]:
    """What lies at the places, in their order; shards are opened once for each run of a few thousand places."""
    for start in range(0, len(places), 4096):
        some = places[start : start + 4096]
        found: dict[tuple[str, int], tuple[str, str, bytes, str]] = {}
        for path in {p.shard for p in some}:
            numbers = {p.number for p in some if p.shard == path}
            for i, (shard, sample) in enumerate(_readable(path, pool)):
                if i in numbers:
                    found[path, i] = _content(shard, sample)
        yield from (found[p.shard, p.number] for p in some)


def _content(shard: shards.Shard, sample: Sample) -> tuple[str, str, bytes, str]:
    """(uid, extension and bytes of the image, caption)."""
    image = pick(sample.members, IMAGE_EXTS)
    assert image is not None
    return format_uid(*sample.uid), image.ext, shard.read(image), sample.caption or ""


def _write(tar: tarfile.TarFile, uid: str, ext: str, image: bytes, caption: str) -> None:
    record = f'{{"uid": "{uid}"}}'
    for suffix, data in ((ext, image), ("txt", caption.encode()), ("json", record.encode())):
        info = tarfile.TarInfo(f"{uid}.{suffix}")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))

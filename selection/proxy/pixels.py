"""Decoded images of one size with a text each (a label or a caption): from shards, or from a run's pool.

A run's images can be kept in a folder, where later calls find them memory-mapped.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
from open_clip.transform import PreprocessCfg

from pipeline import shards, storage
from pipeline.decode import DecodeConfig, Decoder, ImageRejected
from pipeline.evaluation import as_shards
from pipeline.manifest import Run
from pipeline.progress import Progress
from pipeline.samples import PoolConfig, read_sample
from pipeline.tables import TableSet
from pipeline.uid_draw import uniform
from selection.manifest_rows import UID

PIXELS, ROWS, ABOUT = "pixels.bin", "rows.parquet", "about.json"
_READ = 256  # images held as bytes at a time


class Sample(NamedTuple):
    """What is known of a sample before its image is decoded."""

    uid: tuple[int, int]
    label: str | None
    caption: str | None
    member: shards.Member | None
    status: str = "ok"
    copies: int = 1


TextOf = Callable[[Sample], str | None]
Shards = Iterable[tuple[shards.Shard, Iterable[Sample]]]


@dataclass(frozen=True)
class Images:
    """n decoded images.

    pixels: uint8 (n, H, W, 3). texts: what `text_of` said of each. uids: `u8,u8` (n,). copies: int64 (n,).
    skipped: samples left out, by reason. seconds: that reading and decoding took.
    """

    pixels: npt.NDArray[np.uint8]
    texts: list[str]
    uids: npt.NDArray[np.void]
    copies: npt.NDArray[np.int64]
    skipped: dict[str, int]
    seconds: float

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, mask: npt.NDArray[np.bool_]) -> Images:
        """Those that the mask names; their pixels move to memory."""
        texts = [text for text, wanted in zip(self.texts, mask) if wanted]
        return replace(
            self, pixels=self.pixels[mask], texts=texts, uids=self.uids[mask], copies=self.copies[mask]
        )


def of_source(source: Any, text_of: TextOf, image_size: int, decode: DecodeConfig) -> Images:
    """All images with a text of shards (what `pool.shards` takes), of a parquet table or of a folder."""
    with tempfile.TemporaryDirectory(prefix="winnow-") as folder:
        spec = as_shards(source, folder) if isinstance(source, str) else source
        pool = PoolConfig(shards=spec, default_caption="")
        return _decoded(_of_shards(pool), text_of, image_size, decode)


def of_run(
    run: Run, text_of: TextOf, image_size: int, decode: DecodeConfig, *, whole_pool: bool, share: float = 1.0,
    seed: int = 0,
) -> Images:  # fmt: skip
    """The images with a text of a run's manifest, in its order.

    whole_pool: those of all readable samples of the pool, with `copies` 0 where the run dropped them.
    share: of the samples, drawn by uid and seed.
    """
    return _decoded(_of_run(run, whole_pool, share, seed), text_of, image_size, decode)


def kept(folder: str, make: Callable[[], Images]) -> Images:
    """The images in `folder`; made and put there first when there are none."""
    about = storage.join(folder, ABOUT)
    if not storage.exists(about):
        _save(folder, make())
    told = storage.read_json(about)
    shape = tuple(told["shape"])
    path = storage.join(folder, PIXELS)
    pixels: npt.NDArray[np.uint8] = np.empty(shape, np.uint8)
    if not shape[0]:
        pass  # an empty file cannot be mapped
    elif storage.is_local(path):
        pixels = np.memmap(storage.resolve(path)[1], np.uint8, "r", shape=shape)
    else:
        pixels = np.frombuffer(storage.read_bytes(path), np.uint8).reshape(shape)
    with storage.open_file(storage.join(folder, ROWS)) as f:
        rows = pl.read_parquet(f.read())
    uids = np.empty(len(rows), UID)
    uids["f0"], uids["f1"] = rows["uid_hi"].to_numpy(), rows["uid_lo"].to_numpy()
    return Images(
        pixels, rows["text"].to_list(), uids, rows["copies"].to_numpy(), told["skipped"], told["seconds"]
    )


def _save(folder: str, images: Images) -> None:
    with storage.commit(storage.join(folder, PIXELS)) as tmp:
        images.pixels.tofile(tmp)
    rows = pl.DataFrame(
        {
            "uid_hi": images.uids["f0"],
            "uid_lo": images.uids["f1"],
            "text": images.texts,
            "copies": images.copies,
        }
    )
    with storage.commit(storage.join(folder, ROWS)) as tmp:
        rows.write_parquet(tmp)
    about = {"shape": images.pixels.shape, "skipped": images.skipped, "seconds": images.seconds}
    storage.write_json(storage.join(folder, ABOUT), about)


def drawn(uids: npt.NDArray[np.void], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which uids are in a random `share` of all: each by itself, the same in any company."""
    return uniform(uids["f0"], uids["f1"], seed) < share


def _of_shards(pool: PoolConfig) -> Shards:
    counts = shards.CountFiles()
    for path in shards.expand(pool.shards):
        with shards.open_shard(path) as shard:
            index = shard.index(counts.promised(path))
            yield shard, _samples(shard, storage.name(path), index, pool)


def _samples(shard: shards.Shard, name: str, index: shards.ShardIndex, pool: PoolConfig) -> Iterator[Sample]:
    for raw in index.samples:
        sample = read_sample(shard, name, raw, pool)
        status = "ok" if sample.status == "empty_caption" else sample.status  # there may be a label
        yield Sample(
            sample.uid, sample.label, sample.caption, sample.image,
            "truncated_shard" if raw.key in index.incomplete else status,
        )  # fmt: skip


def _of_run(run: Run, whole_pool: bool, share: float, seed: int) -> Shards:
    tables = run.tables()
    ids = run.shard_ids()
    with Progress("read images", len(ids)) as progress:
        for shard in ids:
            frame = _chosen(run, tables, shard, whole_pool, share, seed)
            report = tables.report(shard)
            if len(frame) and report is not None:
                with shards.open_shard(report.shard) as opened:
                    yield (
                        opened,
                        (
                            Sample((hi, lo), label, caption, shards.Member("", offset, size), status, copies)
                            for hi, lo, label, caption, offset, size, status, copies in frame.iter_rows()
                        ),
                    )
            progress.step(len(frame))


def _chosen(
    run: Run, tables: TableSet, shard: str, whole_pool: bool, share: float, seed: int
) -> pl.DataFrame:
    """The readable rows of one shard that are wanted, with their copies."""
    columns = ["uid_hi", "uid_lo", "label", "caption", "offset", "size", "status"]
    frame = tables.read(shard, columns).with_columns(copies=run.decisions.read(shard, ["copies"])["copies"])
    uids = np.empty(len(frame), UID)
    uids["f0"], uids["f1"] = frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy()
    wanted = (frame["status"].cast(pl.String) == "ok").to_numpy() & drawn(uids, share, seed)
    return frame.filter(wanted if whole_pool else wanted & (frame["copies"].to_numpy() > 0))


def _decoded(sources: Shards, text_of: TextOf, image_size: int, decode: DecodeConfig) -> Images:
    """Decode what has a text, shard by shard; the pixels go through a temporary file and are mapped from it."""
    started = time.monotonic()
    side = (image_size, image_size)
    read = _reader(Decoder(decode, PreprocessCfg(size=side, interpolation="bicubic", resize_mode="shortest")))
    found: list[tuple[tuple[int, int], str, int]] = []
    skipped: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(tempfile.TemporaryFile(prefix="winnow-"))
        threads = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        for shard, samples in sources:
            for batch in _batched(shard, samples, text_of, skipped):
                for (sample, text, _), pixels in zip(batch, threads.map(read, [b[2] for b in batch])):
                    if isinstance(pixels, str):
                        skipped[pixels] += 1
                    else:
                        file.write(pixels)
                        found.append((sample.uid, text, sample.copies))
        file.flush()
        shape = (len(found), image_size, image_size, 3)
        mapped = np.memmap(file, np.uint8, "r+", shape=shape) if found else np.empty(shape, np.uint8)
    return Images(
        mapped,
        [text for _, text, _ in found],
        np.asarray([uid for uid, _, _ in found], UID),
        np.asarray([copies for _, _, copies in found], np.int64),
        dict(sorted(skipped.items())),
        time.monotonic() - started,
    )


def _batched(
    shard: shards.Shard, samples: Iterable[Sample], text_of: TextOf, skipped: Counter[str]
) -> Iterator[list[tuple[Sample, str, bytes]]]:
    batch: list[tuple[Sample, str, bytes]] = []
    for sample in samples:
        text = text_of(sample) if sample.status == "ok" else None
        if text is None or sample.member is None:
            skipped["no_text" if sample.status == "ok" else sample.status] += 1
            continue
        batch.append((sample, text, shard.read(sample.member)))
        if len(batch) == _READ:
            yield batch
            batch = []
    yield batch


def _reader(decoder: Decoder) -> Callable[[bytes], bytes | str]:
    """From image bytes to the bytes of its pixels in (H, W, 3) order, or the reason why not."""

    def read(data: bytes) -> bytes | str:
        try:
            image = decoder(data).pixels
        except ImageRejected as e:
            return e.reason
        assert image is not None
        return image.permute(1, 2, 0).numpy().tobytes()

    return read

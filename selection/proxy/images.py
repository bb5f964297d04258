"""Labelled images at one size: from shards, from image tables and folders, from a run."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from open_clip.transform import PreprocessCfg

from pipeline import shards, storage
from pipeline.decode import DecodeConfig, Decoder, ImageRejected
from pipeline.errors import Refused
from pipeline.evaluation import as_shards
from pipeline.manifest import Run
from pipeline.samples import PoolConfig, read_sample
from pipeline.tables import TableSet
from selection.manifest_rows import UID

NO_CAPTION = "no caption"
FIELDS = ("label", "caption")


@dataclass(frozen=True, kw_only=True)
class LabelConfig:
    """Where the label of an image is.

    field: `label` (a cls member, the json field `label`, the column `label`, the folder's name) or `caption`:
    the class whose name the caption holds as whole words, the longest such name, upper and lower case alike.
    classes: the names of the classes; labels that are numbers count into them from 0. Empty: the distinct
    labels that occur, sorted (numbers by value); captions need names.
    """

    field: str = "label"
    classes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.field not in FIELDS:
            raise ValueError(f"field={self.field}: must be {' or '.join(FIELDS)}")
        if self.field == "caption" and not self.classes:
            raise ValueError("classes: name them, to be found in the captions")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes: a name stands twice")


@dataclass(frozen=True)
class LabelledImages:
    """n images.

    images: uint8 (n, H, W, 3), in memory or memory-mapped. labels: int64 (n,), places in `classes`. uids:
    `u8,u8` (n,). copies: int64 (n,), entries that each counts for in its selection. skipped: samples that could
    not be used, by reason.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    uids: npt.NDArray[np.void]
    copies: npt.NDArray[np.int64]
    skipped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Any) -> LabelledImages:
        """Some of the images, in that order: row numbers or a mask."""
        return replace(
            self, images=self.images[rows], labels=self.labels[rows], uids=self.uids[rows],
            copies=self.copies[rows],
        )  # fmt: skip

    def entries(self) -> npt.NDArray[np.int64]:
        """The row of each entry, int64 (copies.sum(),)."""
        return np.repeat(np.arange(len(self)), self.copies)


class _Source(NamedTuple):
    """What is known of a sample before its image is decoded."""

    uid: tuple[int, int]
    label: str | None
    caption: str | None
    member: shards.Member | None
    status: str = "ok"
    copies: int = 1


Shards = Iterable[tuple[shards.Shard, Iterable[_Source]]]


def load_images(
    source: Any, labels: LabelConfig | None = None, *, known: Sequence[str] = (), image_size: int = 32,
    decode: DecodeConfig | None = None,
) -> LabelledImages:  # fmt: skip
    """All labelled images of shards (anything that `pool.shards` takes), a parquet table with an image and a
    `label` column, or a folder with a folder a class.

    known: the classes of another set, which these labels must name; `labels.classes` goes before it. Raises
    Refused when there is none, or a label is not a class.
    """
    labels = labels or LabelConfig()
    with tempfile.TemporaryDirectory(prefix="winnow-") as folder:
        pool = PoolConfig(
            shards=as_shards(source, folder) if isinstance(source, str) else source,
            default_caption=NO_CAPTION,
        )
        return _collect(_of_shards(pool), labels, known, image_size, decode or DecodeConfig(), f"{source}")


def of_run(
    run: Run, labels: LabelConfig | None = None, *, known: Sequence[str] = (), image_size: int = 32,
    decode: DecodeConfig | None = None, whole_pool: bool = False,
) -> LabelledImages:  # fmt: skip
    """The labelled images of a finished run's manifest, in its order.

    whole_pool: all readable samples of the pool, with `copies` 0 where the run dropped them.
    """
    return _collect(
        _of_run(run, whole_pool),
        labels or LabelConfig(),
        known,
        image_size,
        decode or DecodeConfig(),
        run.folder,
    )


def _of_shards(pool: PoolConfig) -> Shards:
    counts = shards.CountFiles()
    for path in shards.expand(pool.shards):
        with shards.open_shard(path) as shard:
            index = shard.index(counts.promised(path))
            yield shard, _samples(shard, storage.name(path), index, pool)


def _samples(shard: shards.Shard, name: str, index: shards.ShardIndex, pool: PoolConfig) -> Iterator[_Source]:
    for raw in index.samples:
        sample = read_sample(shard, name, raw, pool)
        status = "truncated_shard" if raw.key in index.incomplete else sample.status
        yield _Source(sample.uid, sample.label, sample.caption, sample.image, status)


def _of_run(run: Run, whole_pool: bool) -> Shards:
    tables = run.tables()
    for shard in run.shard_ids():
        rows = _rows(tables, run, shard, whole_pool)
        if rows:
            report = tables.report(shard)
            assert report is not None
            with shards.open_shard(report.shard) as opened:
                yield opened, rows


def _rows(tables: TableSet, run: Run, shard: str, whole_pool: bool) -> list[_Source]:
    columns = ["uid_hi", "uid_lo", "label", "caption", "offset", "size", "status"]
    frame = tables.read(shard, columns).with_columns(copies=run.decisions.read(shard, ["copies"])["copies"])
    frame = frame.filter(frame["status"].cast(str) == "ok")
    return [
        _Source((hi, lo), label, caption, shards.Member("jpg", offset, size), status, copies)
        for hi, lo, label, caption, offset, size, status, copies in frame.iter_rows()
        if whole_pool or copies
    ]


def _collect(
    sources: Shards,
    labels: LabelConfig,
    known: Sequence[str],
    image_size: int,
    decode: DecodeConfig,
    what: str,
) -> LabelledImages:
    """Decode what has a label, shard by shard."""
    size = (image_size, image_size)
    decoder = Decoder(decode, PreprocessCfg(size=size, interpolation="bicubic", resize_mode="shortest"))
    pixels: list[np.ndarray] = []
    found: list[tuple[tuple[int, int], str, int]] = []
    skipped: Counter[str] = Counter()
    label_of = _label_reader(labels)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for shard, samples in sources:
            wanted: list[tuple[_Source, str, bytes]] = []
            for sample in samples:
                label = label_of(sample)
                if sample.status != "ok" or sample.member is None or label is None:
                    skipped["no_label" if sample.status == "ok" else sample.status] += 1
                else:
                    wanted.append((sample, label, shard.read(sample.member)))
            for (sample, label, _), image in zip(
                wanted, threads.map(_decoded(decoder), [w[2] for w in wanted])
            ):
                if isinstance(image, str):
                    skipped[image] += 1
                else:
                    pixels.append(image)
                    found.append((sample.uid, label, sample.copies))
    if not found:
        raise Refused(f"{what}: no image with a label there ({dict(skipped) or 'it is empty'})")
    classes = tuple(labels.classes or known) or _distinct(f[1] for f in found)
    places = {name: i for i, name in enumerate(classes)}
    if labels.classes:
        places = {str(i): i for i in range(len(classes))} | places
    unknown = sorted({f[1] for f in found} - places.keys())
    if unknown:
        raise Refused(
            f"{what}: label {unknown[0]!r} is none of the classes ({', '.join(classes[:10])}); name the classes,"
            " in the order of their numbers"
        )
    return LabelledImages(
        images=np.stack(pixels),
        labels=np.asarray([places[f[1]] for f in found], np.int64),
        classes=classes,
        uids=np.asarray([f[0] for f in found], UID),
        copies=np.asarray([f[2] for f in found], np.int64),
        skipped=dict(skipped),
    )


def _decoded(decoder: Decoder) -> Any:
    def decode(data: bytes) -> np.ndarray | str:
        try:
            image = decoder(data).pixels
        except ImageRejected as e:
            return e.reason
        assert image is not None
        return np.ascontiguousarray(image.permute(1, 2, 0).numpy())

    return decode


def _label_reader(labels: LabelConfig) -> Any:
    """From a sample to the text of its label, or None."""
    if labels.field == "label":
        return lambda sample: sample.label or None
    names = sorted(labels.classes, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)({'|'.join(re.escape(n) for n in names)})(?!\w)", re.IGNORECASE)
    spelling = {name.lower(): name for name in labels.classes}

    def in_caption(sample: _Source) -> str | None:
        found = pattern.findall(sample.caption or "")
        return spelling[max(found, key=len).lower()] if found else None

    return in_caption


def _distinct(labels: Iterable[str]) -> tuple[str, ...]:
    names = set(labels)
    numbers = all(name.lstrip("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int if numbers else str))

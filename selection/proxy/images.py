"""Labelled images at one size: from shards, from image tables and folders, from a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.manifest import Run
from selection.proxy import pixels
from selection.proxy.pixels import Images, Sample, TextOf

FIELDS = ("label", "caption")


@dataclass(kw_only=True)
class LabelConfig:
    """Where the label of an image is.

    field: `label` (a cls member, the json field `label`, the column `label`, the folder's name) or `caption`:
    the class whose name the caption holds as whole words, the longest such name, upper and lower case alike.
    classes: the names of the classes; labels that are numbers count into them from 0. Empty: the distinct
    labels that occur, sorted (numbers by value); captions need names.
    """

    field: str = "label"
    classes: list[str] = dataclasses.field(default_factory=list)

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


def load_images(
    source: Any, labels: LabelConfig | None = None, *, known: Sequence[str] = (), image_size: int = 32,
    decode: DecodeConfig | None = None,
) -> LabelledImages:  # fmt: skip
    """All labelled images of shards (anything that `pool.shards` takes), a parquet table with an image and a
    `label` column, or a folder with a folder a class.

    known: the classes of another set, which these labels must name; `labels.classes` goes before it. Raises
    Refused when there is no image, or a label is not a class.
    """
    labels = labels or LabelConfig()
    found = pixels.of_source(source, text_of(labels), image_size, decode or DecodeConfig())
    return labelled(found, labels, known, f"{source}")


def of_run(
    run: Run, labels: LabelConfig | None = None, *, known: Sequence[str] = (), image_size: int = 32,
    decode: DecodeConfig | None = None, whole_pool: bool = False,
) -> LabelledImages:  # fmt: skip
    """The labelled images of a finished run's manifest, in its order.

    whole_pool: all readable samples of the pool, with `copies` 0 where the run dropped them.
    """
    labels = labels or LabelConfig()
    found = pixels.of_run(run, text_of(labels), image_size, decode or DecodeConfig(), whole_pool=whole_pool)
    return labelled(found, labels, known, run.folder)


def labelled(images: Images, labels: LabelConfig, known: Sequence[str], what: str) -> LabelledImages:
    """Images whose texts are labels; `what` names them in messages."""
    if not len(images):
        raise Refused(f"{what}: no image with a label there ({images.skipped or 'it is empty'})")
    classes = tuple(labels.classes or known) or distinct(images.texts)
    places = {name: i for i, name in enumerate(classes)}
    if labels.classes:
        places = {str(i): i for i in range(len(classes))} | places
    unknown = sorted(set(images.texts) - places.keys())
    if unknown:
        raise Refused(
            f"{what}: label {unknown[0]!r} is none of the classes ({', '.join(classes[:10])}); name the classes,"
            " in the order of their numbers"
        )
    return LabelledImages(
        images=images.pixels,
        labels=np.asarray([places[text] for text in images.texts], np.int64),
        classes=classes,
        uids=images.uids,
        copies=images.copies,
        skipped=images.skipped,
    )


def text_of(labels: LabelConfig) -> TextOf:
    """From a sample to the text of its label, or None."""
    if labels.field == "label":
        return lambda sample: sample.label or None
    names = sorted(labels.classes, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)({'|'.join(re.escape(n) for n in names)})(?!\w)", re.IGNORECASE)
    spelling = {name.lower(): name for name in labels.classes}

    def in_caption(sample: Sample) -> str | None:
        found = pattern.findall(sample.caption or "")
        return spelling[max(found, key=len).lower()] if found else None

    return in_caption


def distinct(labels: Iterable[str]) -> tuple[str, ...]:
    """The labels that occur, sorted; numbers by value."""
    names = set(labels)
    numbers = all(name.lstrip("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int if numbers else str))

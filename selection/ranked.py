"""Small training sets in rank order: what condensation and coresets write, and how it is read back.

<folder>/00000000.tar, ...   webdataset shards: all images of rank 0, a class after the other, then rank 1, ...
<folder>/meta.json           classes, images of each, decode factor, normalisation, how to train on it
<folder>/contact_sheet.png   a row a class, a column a rank
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from pipeline import storage
from pipeline.errors import Refused
from selection.condense.images import decode, to_bytes, to_unit
from selection.proxy.images import LabelConfig, LabelledImages, load_images
from selection.proxy.train import DEVIATION, MEAN

META = "meta.json"
SHARD_SIZE = 10_000
SHEET = 20  # classes and ranks that a contact sheet shows


@dataclass(frozen=True)
class Item:
    """One sample: encoded image and its extension, class, rank in it, caption, further fields of its json."""

    data: bytes
    ext: str
    label: str
    rank: int
    caption: str
    record: dict[str, Any]


@dataclass(frozen=True)
class RankedSet:
    """A set in rank order. images: the stored ones, n of each of C classes, uint8 (n C, H, W, 3); entry i has
    rank i // C. meta: what its folder's meta.json says."""

    images: LabelledImages
    meta: dict[str, Any]

    def first(self, s: int) -> RankedSet:
        """The first s images of each class. Raises ValueError when s is not in 1 .. n."""
        if not 1 <= s <= self.meta["images_per_class"]:
            raise ValueError(f"s={s}: must lie in 1 .. {self.meta['images_per_class']}")
        part = self.images.take(slice(0, s * len(self.images.classes)))
        return RankedSet(part, {**self.meta, "images_per_class": s})

    def training_images(self) -> LabelledImages:
        """What to train on: every stored image decoded to its factor^2 images, uint8, in rank order."""
        factor, classes = self.meta["factor"], len(self.images.classes)
        if factor == 1:
            return self.images
        stored = to_unit(self.images.images).unflatten(0, (-1, classes))
        made = to_bytes(decode(stored, factor).flatten(0, 1))
        rows = np.arange(len(self.images)).reshape(-1, 1, classes)
        kept = self.images.take(np.repeat(rows, factor**2, axis=1).ravel())
        return LabelledImages(made, kept.labels, kept.classes, kept.uids, kept.copies)


def load_ranked(folder: str) -> RankedSet:
    """The set in a folder that jobs.condense wrote. Raises Refused when there is none, or it is not finished."""
    path = storage.join(folder, META)
    if not storage.exists(path):
        raise Refused(f"{folder}: no condensed set there (no {META})")
    meta = storage.read_json(path)
    labels = LabelConfig(classes=list(meta["classes"]))
    images = load_images([folder], labels, image_size=meta["image_size"])
    wanted = meta["images_per_class"] * len(meta["classes"])
    if len(images) != wanted:
        raise Refused(f"{folder}: {len(images)} images can be read, {META} says {wanted}")
    return RankedSet(images, meta)


def png(pixels: np.ndarray) -> bytes:
    """uint8 (H, W, 3) as a PNG file; nothing is lost."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_ranked(folder: str, items: Sequence[Item], meta: dict[str, Any], image_size: int) -> None:
    """Write the shards, their counts, the contact sheet and, last, meta.json. `items` in rank order."""
    sizes = {}
    for number, start in enumerate(range(0, len(items), SHARD_SIZE)):
        part = items[start : start + SHARD_SIZE]
        name = f"{number:08d}.tar"
        with storage.commit(storage.join(folder, name)) as tmp, tarfile.open(tmp, "w") as tar:
            for at, item in enumerate(part, start):
                for member, data in _members(f"{at:08d}", item):
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        storage.write_json(storage.join(folder, f"{number:08d}_stats.json"), {"successes": len(part)})
        sizes[name] = len(part)
    storage.write_json(storage.join(folder, "sizes.json"), sizes)
    _contact_sheet(storage.join(folder, "contact_sheet.png"), items, meta["classes"], image_size)
    normalisation = {"scale": 255, "mean": [MEAN] * 3, "std": [DEVIATION] * 3}
    about = {**meta, "image_size": image_size, "normalisation": normalisation}
    storage.write_json(storage.join(folder, META), about)


def _members(key: str, item: Item) -> Iterator[tuple[str, bytes]]:
    record = {"label": item.label, "rank": item.rank, **item.record}
    yield f"{key}.{item.ext}", item.data
    yield f"{key}.txt", item.caption.encode()
    yield f"{key}.cls", item.label.encode()
    yield f"{key}.json", json.dumps(record, ensure_ascii=False).encode()


def _contact_sheet(path: str, items: Sequence[Item], classes: Sequence[str], side: int) -> None:
    rows, columns = list(classes)[:SHEET], min(SHEET, len(items) // len(classes))
    if len(classes) == 1:  # no classes to set below each other: ranks in reading order
        rows, columns = [""] * -(-min(len(items), SHEET**2) // SHEET), min(SHEET, len(items))
    shown = max(side, 32)
    gap = 2
    sheet = np.full((len(rows) * (shown + gap) + gap, columns * (shown + gap) + gap, 3), 255, np.uint8)
    for at in range(len(rows) * columns):
        row, column = divmod(at, columns)
        index = at if len(classes) == 1 else column * len(classes) + row
        if index >= len(items):
            break
        image = Image.open(io.BytesIO(items[index].data)).convert("RGB")
        image = image.resize(
            (shown, shown), Image.Resampling.NEAREST if side < 32 else Image.Resampling.BICUBIC
        )
        top, left = gap + row * (shown + gap), gap + column * (shown + gap)
        sheet[top : top + shown, left : left + shown] = np.asarray(image)
    storage.write_bytes(path, png(sheet))


def save_figure(path: str, figure: Figure) -> None:
    """A matplotlib figure as PNG, the same bytes each time."""
    with storage.commit(path) as tmp:
        figure.savefig(tmp, format="png", dpi=110, metadata={"Software": None})

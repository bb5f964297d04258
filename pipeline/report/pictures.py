"""What a report shows of single samples: their row of the table, their decision, and a thumbnail by byte range."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import polars as pl
from PIL import Image

from pipeline import storage
from pipeline.decisions import Decisions
from pipeline.decode import FORMATS
from pipeline.samples import format_uid
from pipeline.tables import TableSet

SIDE = 128  # longest side of a thumbnail, pixels
TINY = 64  # up to this side pixels are shown as squares
QUALITY = 72
CAPTION = 600  # characters shown of a caption
THREADS = 8  # shards read at a time; their latency counts when they are far
COLUMNS = [
    "uid_hi",
    "uid_lo",
    "shard",
    "key",
    "offset",
    "size",
    "sha256",
    "status",
    "detail",
    "caption",
    "label",
]
COLUMNS += ["width", "height"]


class Place(NamedTuple):
    """A row of a feature table: the table set's folder, the shard's id, the row."""

    folder: str
    shard: str
    row: int


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One sample as the report shows it. source: its thumbnail as a data URI, or None, and then why."""

    uid: str
    shard: str
    key: str
    caption: str
    label: str | None
    size: str
    detail: str
    fate: str
    kept: bool
    numbers: dict[str, float]
    source: str | None = None
    missing: str = ""
    tiny: bool = False

    @property
    def alt(self) -> str:
        return self.caption or f"{self.key}, without a caption"


@dataclass
class Album:
    """Fetches shots: tables once a shard, pictures by byte range, never a whole shard (unless it is gzipped).

    unreachable: shards that could not be opened, with the error of each.
    """

    decisions: Decisions
    decided: str  # folder of the table set that `decisions` are about
    scores: list[str]
    shots: dict[Place, Shot] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)

    def fetch(self, places: Iterable[Place]) -> None:
        """Fill `shots` for these places, in an order that does not depend on the caller's."""
        wanted: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place in sorted(set(places) - self.shots.keys()):
            wanted[place[:2]].append(place.row)
        with ThreadPoolExecutor(THREADS) as pool:
            for shots, failed in pool.map(lambda item: self._of_shard(*item), wanted.items()):
                self.shots |= shots
                self.unreachable |= failed

    def __getitem__(self, place: Place) -> Shot:
        return self.shots[place]

    def _of_shard(self, key: tuple[str, str], rows: list[int]) -> tuple[dict[Place, Shot], dict[str, str]]:
        folder, shard = key
        frame = TableSet(folder).read(shard, [*COLUMNS, *self.scores])[rows]
        decided = self.decisions.read(shard)[rows] if folder == self.decided else None
        records = frame.to_dicts()
        pictures, failed = _pictures(records)
        shots = {}
        for i, (row, record) in enumerate(zip(rows, records)):
            decision = decided.row(i, named=True) if decided is not None else None
            shots[Place(folder, shard, row)] = self._shot(record, decision, pictures[i])
        return shots, failed

    def _shot(self, record: dict[str, Any], decision: dict[str, Any] | None, picture: Any) -> Shot:
        source, missing, tiny = picture
        caption = record["caption"] or ""
        return Shot(
            uid=format_uid(record["uid_hi"], record["uid_lo"]), shard=record["shard"], key=record["key"],
            caption=caption if len(caption) <= CAPTION else caption[:CAPTION] + " …", label=record["label"],
            size=f"{record['width']} × {record['height']}" if record["width"] else "", detail=record["detail"] or "",
            fate=_fate(decision), kept=bool(decision and decision["kept"]),
            numbers={c: record[c] for c in self.scores if record[c] is not None},
            source=source, missing=missing, tiny=tiny,
        )  # fmt: skip


def _fate(decision: dict[str, Any] | None) -> str:
    if decision is None:
        return ""
    if decision["kept"]:
        return "kept"
    against = (
        f" ({decision['value']:.6g} against {decision['cut']:.6g})"
        if decision["value"] is not None and decision["cut"] is not None
        else ""
    )
    return f"{decision['reason']}{against}"


def _pictures(records: list[dict[str, Any]]) -> tuple[list[tuple[str | None, str, bool]], dict[str, str]]:
    """(data URI or None, why not, is it tiny) for rows of one shard; and the shard's error when it has one."""
    found: list[tuple[str | None, str, bool]] = [(None, _unseen(r), False) for r in records]
    readable = [i for i, (_, why, _tiny) in enumerate(found) if not why]
    if not readable:
        return found, {}
    path = records[readable[0]]["shard"]
    try:
        spans = [(records[i]["offset"], records[i]["size"]) for i in readable]
        data = _read_spans(path, spans)
    except (OSError, EOFError) as e:
        for i in readable:
            found[i] = (None, "the shard is out of reach", False)
        return found, {path: f"{type(e).__name__}: {e}"}
    for i, blob in zip(readable, data):
        found[i] = _thumbnail(blob, records[i]["sha256"])
    return found, {}


def _unseen(record: Mapping[str, Any]) -> str:
    """Why no picture of this row is tried; empty when it is."""
    if record["status"] != "ok":
        return f"no picture: {record['status']}"
    return "" if record["offset"] is not None and record["sha256"] is not None else "the pool has no pictures"


def _read_spans(path: str, spans: list[tuple[int, int]]) -> list[bytes]:
    """Bytes of (offset, size) spans of a shard; in a gzipped one offsets are those of the tar inside."""
    fs, p = storage.resolve(path)
    if fs.cat_file(p, start=0, end=2) == b"\x1f\x8b":
        order = sorted(range(len(spans)), key=lambda i: spans[i])
        found: dict[int, bytes] = {}
        with storage.open_file(path) as raw, gzip.open(raw) as tar:
            for i in order:
                tar.seek(spans[i][0])
                found[i] = tar.read(spans[i][1])
        return [found[i] for i in range(len(spans))]
    return [fs.cat_file(p, start=offset, end=offset + size) for offset, size in spans]


def _thumbnail(data: bytes, digest: bytes) -> tuple[str | None, str, bool]:
    if hashlib.sha256(data).digest() != digest:
        return None, "the shard has changed since the scan", False
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.draft("RGB", (2 * SIDE, 2 * SIDE))
        small = image.convert("RGB")
    except (
        Exception
    ) as e:  # the scan decoded it, with other limits or another version; what is wrong is shown
        return None, f"not decoded: {type(e).__name__}", False
    return data_uri(small), "", max(small.size) <= TINY


def data_uri(image: Image.Image) -> str:
    """An RGB image at no more than SIDE pixels a side as a WebP data URI; tiny ones keep every pixel as it is."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", lossless=max(small.size) <= TINY, quality=QUALITY, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def places(folder: str, rows: pl.DataFrame) -> list[Place]:
    """The places of a frame with the columns shard and row."""
    return [Place(folder, shard, row) for shard, row in rows.select("shard", "row").iter_rows()]

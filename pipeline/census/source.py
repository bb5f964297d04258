"""Where a census reads: feature tables of a scan, shards (headers and text, no pixel), or metadata parquet."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl
import pyarrow.parquet as pq
from PIL import Image

from pipeline import storage
from pipeline.decode import FORMATS
from pipeline.errors import Refused
from pipeline.language import language
from pipeline.manifest import Run
from pipeline.samples import IMAGE_EXTS, PoolConfig, Sample, parse_uid, read_sample
from pipeline.shards import Shard, open_shard
from pipeline.tables import TableSet

ROWS, CHARACTERS = 1 << 16, 1 << 25  # of one chunk, about
HEADER = 1 << 16  # bytes of an image that its size is looked for in
KEPT, DROPPED = 0, 1
CHUNK: dict[str, Any] = {
    "uid_hi": pl.UInt64, "uid_lo": pl.UInt64, "shard": pl.String, "key": pl.String,
    "group": pl.UInt8, "readable": pl.Boolean, "caption": pl.String, "language": pl.String, "url": pl.String,
    "width": pl.Int64, "height": pl.Int64, "format": pl.String, "score": pl.Float64,
}  # fmt: skip
CAPTIONS = ("text", "caption", "captions", "txt")
WIDTHS, HEIGHTS = ("original_width", "width"), ("original_height", "height")


class Source(Protocol):
    """Rows of a pool, in chunks with the columns of CHUNK; what a source does not know is null.

    groups: names of the groups that rows are told apart by: one, or kept and dropped. shards: files it reads.
    """

    @property
    def groups(self) -> tuple[str, ...]: ...

    @property
    def shards(self) -> int: ...

    def chunks(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]: ...


def gather(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Frames joined until they are worth a pass: ROWS rows, or CHARACTERS of captions."""
    held: list[pl.DataFrame] = []
    rows = size = 0
    for frame in frames:
        held.append(frame)
        rows += len(frame)
        size += int(frame["caption"].str.len_bytes().sum()) if "caption" in frame.columns else 0
        if rows >= ROWS or size >= CHARACTERS:
            yield pl.concat(held)
            held, rows, size = [], 0, 0
    if held:
        yield pl.concat(held)


def _shaped(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The wanted columns of CHUNK; those that the frame lacks are null."""
    return frame.select(
        (pl.col(c) if c in frame.columns else pl.lit(None)).cast(CHUNK[c]).alias(c) for c in columns
    )


@dataclass(frozen=True)
class Tables:
    """Feature tables; with a run, its decisions tell kept from dropped. The score is that of the scan."""

    tables: TableSet
    ids: list[str]
    run: Run | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        return ("kept", "dropped") if self.run else ("all",)

    @property
    def shards(self) -> int:
        return len(self.ids)

    @classmethod
    def of_run(cls, run: Run) -> Tables:
        tables = run.tables()  # first: it refuses a run that has not finished
        ids = pl.read_parquet(storage.read_bytes(run.path("accounting.parquet")), columns=["id"])["id"]
        return cls(tables, ids.to_list(), run)

    @classmethod
    def of_scan(cls, out: str) -> Tables:
        """The tables under `out`. Raises Refused when no scan, or more than one scorer's, lies there."""
        root = storage.join(out, "features")
        sets = {
            n: [x for x in storage.listdir(storage.join(root, n)) if x.startswith("pool-")]
            for n in storage.listdir(root)
        }
        whole = [n for n, listings in sets.items() if listings]
        if len(whole) != 1 or len(sets[whole[0]]) != 1:
            what = "no finished scan there" if not whole else "scans of several scorers or pools there"
            raise Refused(f"out={out}: {what}; name a finished run with run=NAME, or pool.shards")
        folder = storage.join(root, whole[0])
        reports = storage.read_json(storage.join(folder, sets[whole[0]][0]))
        return cls(TableSet(folder), [r["id"] for r in reports])

    def chunks(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        return gather(self._frames(columns))

    def _frames(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        scorer = self.tables.identity().get("column")
        source = {"width": WIDTHS, "height": HEIGHTS}
        own = [c for c in columns if c in ("uid_hi", "uid_lo", "shard", "key", "caption", "language", "url")]
        more = [name for c in columns for name in source.get(c, ())]
        more += [scorer] if scorer and "score" in columns else []
        more += ["members"] if "format" in columns else []
        for shard, frame in self.tables.stream(self.ids, list(dict.fromkeys([*own, *more, "status"]))):
            ok = (pl.col("status").cast(pl.String) == "ok").alias("readable")
            made = [
                pl.coalesce(pl.col(n).cast(pl.Int64) for n in names).alias(c)
                for c, names in source.items()
                if c in columns
            ]
            if "format" in columns:
                suffix = pl.col("members").list.eval(
                    pl.element()
                    .struct.field("suffix")
                    .filter(pl.element().struct.field("suffix").is_in(IMAGE_EXTS))
                )
                made.append(suffix.list.first().alias("format"))
            if scorer and "score" in columns:
                made.append(pl.col(scorer).alias("score"))
            frame = frame.with_columns(ok, *made, group=pl.lit(KEPT))
            if self.run:
                kept = self.run.decisions.read(shard, ["kept"])["kept"]
                frame = frame.with_columns(group=pl.when(kept).then(KEPT).otherwise(DROPPED))
            yield _shaped(frame, columns)


@dataclass(frozen=True)
class Metadata:
    """Metadata parquet files as DataComp has them: `text` (or `caption`), `url`, `original_width`, `uid`, ..."""

    files: list[str]
    groups: tuple[str, ...] = ("all",)

    @property
    def shards(self) -> int:
        return len(self.files)

    def chunks(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        return gather(self._frames(columns))

    def _frames(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        for path in self.files:
            with storage.open_file(path) as f:
                parquet = pq.ParquetFile(f)
                have = parquet.schema_arrow.names
                caption = next((c for c in CAPTIONS if c in have), None)
                if caption is None:
                    raise Refused(f"{path}: no caption column (looked for {', '.join(CAPTIONS)})")
                first = {
                    "caption": caption,
                    "width": next((c for c in WIDTHS if c in have), None),
                    "height": next((c for c in HEIGHTS if c in have), None),
                    **{c: c for c in ("url", "language", "key", "uid") if c in have},
                }
                uids = any(c.startswith("uid_") for c in columns)
                names = {c: n for c, n in first.items() if n and (c in columns or (c == "uid" and uids))}
                for batch in parquet.iter_batches(ROWS, columns=list(names.values())):
                    frame = pl.from_arrow(batch)
                    assert isinstance(frame, pl.DataFrame)
                    frame = frame.rename({n: c for c, n in names.items()})
                    if "uid" in frame.columns:
                        frame = frame.with_columns(_halves(frame["uid"]))
                    frame = frame.with_columns(shard=pl.lit(path), group=pl.lit(KEPT), readable=pl.lit(True))
                    yield _shaped(frame, columns)


def _halves(uids: pl.Series) -> list[pl.Series]:
    """uid_hi and uid_lo of hexadecimal uids; null where the uid is none."""
    pairs = []
    for text in uids.to_list():
        try:
            pairs.append(parse_uid(str(text)))
        except ValueError:
            pairs.append((None, None))  # type: ignore[arg-type]
    return [pl.Series(f"uid_{half}", [p[i] for p in pairs], pl.UInt64) for i, half in enumerate(("hi", "lo"))]


@dataclass(frozen=True)
class Shards:
    """Shards as they lie: members and text are read, of an image only what tells its size and format."""

    files: list[str]
    pool: PoolConfig
    groups: tuple[str, ...] = ("all",)

    @property
    def shards(self) -> int:
        return len(self.files)

    def chunks(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        return gather(
            pl.DataFrame(rows, schema={c: CHUNK[c] for c in columns}) for rows in self._rows(columns)
        )

    def _rows(self, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        looks = bool({"width", "height", "format"} & set(columns))
        for path in self.files:
            rows: list[dict[str, Any]] = []
            with open_shard(path) as shard:
                for raw in shard.index().samples:
                    sample = read_sample(shard, storage.name(path), raw, self.pool)
                    row = _row(sample, path) | (_look(shard, sample) if looks else {})
                    if sample.caption is not None and "language" in columns:
                        row["language"] = language(sample.caption)
                    rows.append({c: row.get(c) for c in columns})
            yield rows


def _row(sample: Sample, path: str) -> dict[str, Any]:
    return {
        "uid_hi": sample.uid[0], "uid_lo": sample.uid[1], "shard": path, "key": sample.key, "group": KEPT,
        "readable": sample.status == "ok", "caption": sample.caption, "url": sample.metadata.get("url"),
    }  # fmt: skip


def _look(shard: Shard, sample: Sample) -> dict[str, Any]:
    """Width, height and format by the image's header; nothing where that cannot be read."""
    if sample.image is None:
        return {}
    member = sample.image
    head = type(member)(member.suffix, member.offset, min(member.size, HEADER))
    for part in dict.fromkeys((head, member)):  # some headers lie behind a long preview
        try:
            with Image.open(io.BytesIO(shard.read(part)), formats=FORMATS) as image:
                return {"width": image.width, "height": image.height, "format": str(image.format).lower()}
        except Exception:  # whatever PIL says of such bytes: they count as an image without a size
            continue
    return {"format": f"unknown (.{sample.image.ext})"}

"""Find samples of a pool by uid, and what a run has written of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.tables import TableSet

Uid = tuple[int, int]


@dataclass(frozen=True)
class Place:
    """Where a sample is: shard id, and row of that shard's tables."""

    shard: str
    row: int


def find_samples(
    tables: TableSet, ids: Iterable[str], uids: Sequence[Uid], every: bool = False
) -> dict[Uid, list[Place]]:
    """Places of each uid in pool order; a uid that the pool lacks has none.

    Streams the high halves of the uids, 8 bytes a row, and stops once every uid was met. every: read on to
    the end, for pools that use a uid twice. Uids are random, so no statistics of a table can rule it out.
    """
    found: dict[Uid, list[Place]] = {uid: [] for uid in uids}
    highs = [hi for hi, _ in found]
    for shard, frame in tables.stream(ids, ["uid_hi"]):
        rows = frame["uid_hi"].is_in(highs).arg_true().to_list()
        if not rows:
            continue
        lows = tables.read(shard, ["uid_lo"])["uid_lo"]
        for row in rows:
            uid = (frame["uid_hi"][row], lows[row])
            if uid in found:
                found[uid].append(Place(shard, row))
        if not every and all(found.values()):
            break
    return found


def rows_of(
    path: str, uid: Uid, prefix: str = "", limit: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """(rows of a parquet file whose `<prefix>uid_hi`, `<prefix>uid_lo` are `uid`, up to `limit`; their count).

    Row groups whose statistics rule the uid out are not read: in a file sorted by uid all but one. An absent
    file, or one without these columns, has no rows.
    """
    if not storage.exists(path):
        return [], 0
    hi, lo = f"{prefix}uid_hi", f"{prefix}uid_lo"
    with storage.open_file(path) as f:
        if not {hi, lo} <= set(pq.read_schema(f).names):
            return [], 0
        f.seek(0)
        wanted = [(name, "=", pa.scalar(half, pa.uint64())) for name, half in zip((hi, lo), uid)]
        frame = pl.from_arrow(pq.read_table(f, filters=wanted))
    assert isinstance(frame, pl.DataFrame)
    return frame.head(limit or len(frame)).to_dicts(), len(frame)

"""What rounds and their loader need of a manifest: the rows of one shard at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from selection.draws import Ints, Words

UID = np.dtype("u8,u8")
"""High and low 64 bits of a uid: the layout of subset.npy."""


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """The selected samples of one shard, n rows in the manifest's order.

    uid_hi, uid_lo: uint64 (n,); key: n strings; copies: int64 (n,), entries each row counts for; stratum:
    int64 (n,), column of the strata counts, or None when not stratified. image_offset, image_size: int64
    (n,), bytes of the image member's data in the plain tar; None where only uids are asked for. caption: n
    strings; or None, and then caption_offset, caption_size: int64 (n,) of the caption member's data.
    """

    uid_hi: Words
    uid_lo: Words
    key: Sequence[str]
    copies: Ints
    image_offset: Ints | None = None
    image_size: Ints | None = None
    stratum: Ints | None = None
    caption: Sequence[str] | None = None
    caption_offset: Ints | None = None
    caption_size: Ints | None = None

    def rows_of_entries(self) -> Ints:
        """The row of each entry, int64 (copies.sum(),): row 0 copies[0] times, then row 1, and so on."""
        return np.repeat(np.arange(len(self.copies)), self.copies)

    @property
    def uids(self) -> npt.NDArray[np.void]:
        """uid of each row, `u8,u8` (n,)."""
        uids = np.empty(len(self.uid_hi), UID)
        uids["f0"], uids["f1"] = self.uid_hi, self.uid_lo
        return uids

    def take(self, rows: Ints) -> "ShardRows":
        """Some of the rows, in the order given; a row may be taken more than once."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return ShardRows(**{name: _take(column, rows) for name, column in columns.items()})


def _take(column: Any, rows: Ints) -> Any:
    if column is None or isinstance(column, np.ndarray):
        return column if column is None else column[rows]
    return [column[row] for row in rows.tolist()]


class Manifest(Protocol):
    """A manifest read one shard at a time; picklable, since loader workers read it themselves."""

    @property
    def shards(self) -> Sequence[str]:
        """Path of each shard, any fsspec address, in the order of the counts."""
        ...

    def rows(self, shard: int) -> ShardRows:
        """The selected samples of shard number `shard`; the same on every call."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShardMembers:
    """The entries of one shard that a round takes.

    index, path: the shard; positions: int64 (m,), sorted entry numbers within the shard; rows: the manifest
    row of each position, in that order, with uids and byte ranges (a row stands twice when two of its copies
    are taken).
    """

    index: int
    path: str
    positions: Ints
    rows: ShardRows

"""What rounds and their loader need of a manifest: the rows of one shard at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from selection.draws import Ints, Words

UID = np.dtype("u8,u8")
"""High and low 64 bits of a uid: the layout of subset.npy."""


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """The selected samples of one shard, n rows in the manifest's order.

    uid_hi, uid_lo: uint64 (n,); key: n strings; copies: int64 (n,), entries each row counts for;
    stratum: int64 (n,), column of the strata counts, or None when not stratified.
    image_offset, image_size: int64 (n,), bytes of the image member's data in the plain tar.
    caption: n strings; or None, and then caption_offset, caption_size: int64 (n,) of the caption member's data.
    """

    uid_hi: Words
    uid_lo: Words
    key: Sequence[str]
    copies: Ints
    image_offset: Ints
    image_size: Ints
    stratum: Ints | None = None
    caption: Sequence[str] | None = None
    caption_offset: Ints | None = None
    caption_size: Ints | None = None

    def rows_of_entries(self) -> Ints:
        """The row of each entry, int64 (copies.sum(),): row 0 copies[0] times, then row 1, and so on."""
        return np.repeat(np.arange(len(self.copies)), self.copies)

    def uids(self, rows: Ints) -> npt.NDArray[np.void]:
        """uids of some rows in the `u8,u8` layout."""
        uids = np.empty(len(rows), UID)
        uids["f0"], uids["f1"] = self.uid_hi[rows], self.uid_lo[rows]
        return uids


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

    index, path: the shard; positions: int64 (m,), sorted entry numbers within the shard; rows: all of the shard's
    manifest rows; chosen: int64 (m,), the row of each position (a row repeats when several of its copies are taken).
    """

    index: int
    path: str
    positions: Ints
    rows: ShardRows
    chosen: Ints

    @property
    def uids(self) -> npt.NDArray[np.void]:
        """uid of each position, `u8,u8` (m,), in the order of positions."""
        return self.rows.uids(self.chosen)

    @property
    def image_ranges(self) -> tuple[Ints, Ints]:
        """First byte and size of each position's image within the shard."""
        return self.rows.image_offset[self.chosen], self.rows.image_size[self.chosen]

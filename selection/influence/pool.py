"""A pool's rows for influence, streamed from the feature tables: which take part, with what label and group.

One Ray task a shard writes `<folder>/<shard>.npz`; the passes of the fit then read those and the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from pipeline import storage
from pipeline.decisions import Decisions
from pipeline.tables import TableSet
from pipeline.uid_draw import uniform
from selection.influence.objectives import HeldOut
from selection.influence.pool_labels import UNKNOWN, Coder, LabelRule
from selection.influence.rows import OrderedMap, Rows

TOWERS = {"image": ("image",), "text": ("text",), "both": ("image", "text")}


@dataclass(frozen=True)
class Features:
    """Embeddings as features: one tower, or both side by side, and a column of ones for the intercept."""

    tables: TableSet
    towers: tuple[str, ...]

    def load(self, shard: str) -> np.ndarray:
        """float16 (rows, d) of one shard; rows that could not be read are NaN."""
        blocks = [np.asarray(self.tables.embeddings(shard, tower)) for tower in self.towers]
        return np.hstack([*blocks, np.ones((len(blocks[0]), 1), np.float16)])


@dataclass(frozen=True)
class Part:
    """The rows of one shard that take part: n of its table's rows. Arrays are read where they are needed."""

    shard: str
    path: str
    train: int
    held: int
    unknown: int

    def read(self, name: str) -> np.ndarray:
        """`rows` (table row numbers), `y` (classes) and `s` (groups) of the training rows, int32 (train,)."""
        with storage.open_file(self.path) as f, np.load(f) as arrays:
            return arrays[name]


@dataclass(frozen=True)
class TableShard:
    """The training rows of one shard, for `Rows`."""

    features: Features
    part: Part

    @property
    def rows(self) -> int:
        return self.part.train

    def load(self) -> tuple[np.ndarray, np.ndarray]:
        return self.features.load(self.part.shard)[self.part.read("rows")], self.part.read("y")


@dataclass(frozen=True)
class Preparation:
    """What decides a shard's part. `held_share` of the rows, drawn by uid and seed, is held out of training."""

    features: Features
    before: Decisions | None
    rule: LabelRule
    groups: tuple[str, Coder] | None
    held_share: float
    seed: int
    folder: str

    def parts(self, ids: Sequence[str], ordered_map: OrderedMap) -> list[Part]:
        """The parts of all shards; those that an earlier, interrupted run wrote are not made again."""
        return list(ordered_map(partial(_prepare, self), ids))

    def held_out(self, parts: Iterable[Part]) -> HeldOut | None:
        """The rows held out of training, in pool order: in memory."""
        x, y, s = [], [], []
        for part in parts:
            if part.held:
                x.append(self.features.load(part.shard)[part.read("held_rows")].astype(np.float32))
                y.append(part.read("held_y"))
                s.append(part.read("held_s"))
        if not x:
            return None
        groups = np.concatenate(s) if self.groups else None
        return HeldOut(np.concatenate(x), np.concatenate(y).astype(np.int64), groups)


def _prepare(work: Preparation, shard: str) -> Part:
    path = storage.join(work.folder, f"{shard}.npz")
    if not storage.exists(path):
        _write(work, shard, path)
    with storage.open_file(path) as f, np.load(f) as arrays:
        return Part(shard, path, len(arrays["y"]), len(arrays["held_y"]), int(arrays["unknown"]))


def _write(work: Preparation, shard: str, path: str) -> None:
    tables = work.features.tables
    columns = ["uid_hi", "uid_lo", "status", *work.rule.columns, *([work.groups[0]] if work.groups else [])]
    frame = tables.read(shard, list(dict.fromkeys(columns)))
    usable = (frame["status"] == "ok").to_numpy()
    if work.before is not None:
        usable = usable & work.before.read(shard, ["kept"])["kept"].to_numpy()
    usable &= np.isfinite(work.features.load(shard)).all(axis=1)
    y = work.rule.label(frame, lambda tower: tables.embeddings(shard, tower))
    s = work.groups[1].codes(frame[work.groups[0]]) if work.groups else np.zeros(len(y), np.int32)
    known = usable & (y != UNKNOWN) & (s != UNKNOWN)
    held = known & (
        uniform(frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy(), work.seed) < work.held_share
    )
    train = known & ~held
    with storage.commit(path) as tmp, open(tmp, "wb") as f:
        np.savez(
            f,
            rows=np.flatnonzero(train).astype(np.int32), y=y[train], s=s[train],
            held_rows=np.flatnonzero(held).astype(np.int32), held_y=y[held], held_s=s[held],
            unknown=int((usable & ~known).sum()),
        )  # fmt: skip


@dataclass(frozen=True)
class PoolRows:
    """The training rows of a pool: row numbers of `Rows`, and the samples that they are."""

    features: Features
    parts: list[Part]

    @classmethod
    def of(cls, features: Features, parts: Sequence[Part]) -> PoolRows:
        return cls(features, [part for part in parts if part.train])

    def rows(self, ordered_map: OrderedMap) -> Rows:
        return Rows([TableShard(self.features, part) for part in self.parts], ordered_map=ordered_map)

    @property
    def starts(self) -> np.ndarray:
        """(parts + 1,) first row number of each part, and the total."""
        return np.concatenate([[0], np.cumsum([part.train for part in self.parts])])

    def groups(self) -> np.ndarray:
        """(n,) int32 group of each row."""
        return np.concatenate([part.read("s") for part in self.parts])

    def gather(self, rows: np.ndarray, columns: Sequence[str]) -> pl.DataFrame:
        """Table columns of a few rows, in the order asked for, one shard in memory at a time."""
        order = np.argsort(rows, kind="stable")
        ordered, frames = rows[order], []
        cuts = np.searchsorted(ordered, self.starts)
        for part, start, low, high in zip(self.parts, self.starts, cuts[:-1], cuts[1:]):
            if low < high:
                inside = part.read("rows")[ordered[low:high] - start]
                table = self.features.tables.read(part.shard, list(columns))
                frames.append(table[inside.tolist()].cast({pl.Categorical: pl.String}))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        found = pl.concat(frames, how="vertical_relaxed") if frames else pl.DataFrame(schema=list(columns))
        return found[back.tolist()]

"""Trusted pairs, streamed from shards in an order that any step can be resumed at.

An epoch goes through the shards in a random order, a window of whole shards at a time, and draws its
batches from the window's pairs in random order. Decoded shards stay in memory as long as the budget
lasts, so a small trusted set is decoded once, and one of 10^8 pairs takes the memory of two windows.

Of several workers each decodes and holds its own samples, every so-manieth of a shard, and all draw the same
batches: what can be read is told between them, pixels are not. A worker's part of a batch is therefore
an equal share only on average.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from filters.network.captions import Captioner
from filters.network.world import Rows, World
from pipeline import shards, storage
from pipeline.decode import Decoder, ImageRejected
from pipeline.errors import Refused, WinnowError
from pipeline.samples import PoolConfig, Sample, format_uid, read_sample

Tokenizer = Callable[[list[str]], torch.Tensor]


@dataclass(kw_only=True)
class DataConfig:
    """How trusted pairs are set apart, shuffled and kept in memory.

    held_out: share of the pairs (by uid, so it is the same ones in every run) that is not trained on, but
    judges the network; the first `held_out_limit` of them are used. An image that comes several times
    with different captions can fall on both sides, which flatters the figures.
    window: pairs, at least, among which batches are shuffled; it is rounded up to whole shards.
    cache_bytes: memory for decoded images (3 bytes a pixel at the model's input size).
    """

    held_out: float = 0.05
    held_out_limit: int = 1024
    window: int = 16_384
    cache_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if not 0 <= self.held_out <= 0.5:
            raise ValueError(f"held_out={self.held_out}: must be between 0 and 0.5")
        for key, low in (("held_out_limit", 0), ("window", 1), ("cache_bytes", 0)):
            if getattr(self, key) < low:
                raise ValueError(f"{key}={getattr(self, key)}: must be at least {low}")


class Pairs(NamedTuple):
    """images: uint8 (n, 3, H, W). tokens: int32 (n, length), equal rows where captions are equal."""

    images: torch.Tensor
    tokens: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.images.nbytes + self.tokens.nbytes


class Batch(NamedTuple):
    """A worker's part of a batch. largest: pairs of the worker that holds most of it."""

    pairs: Pairs
    rows: Rows
    largest: int


class Position(NamedTuple):
    """The next batch: `batch` of the window that starts at shard number `start` of the epoch's order."""

    epoch: int = 0
    start: int = 0
    batch: int = 0


@dataclass
class Tally:
    """What one shard gave. damage: why the shard itself is damaged, or empty."""

    trained_on: int = 0
    held_out: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    damage: str = ""


class _Shard(NamedTuple):
    """A worker's part of a decoded shard."""

    training: Pairs
    held_out: Pairs


REJECTED, TRAINING, HELD_OUT = 0, 1, 2


@dataclass(frozen=True)
class _Slice:
    """This worker's pairs of one shard, among all that there are: whose each is, and which of its owner's."""

    pairs: Pairs
    owner: np.ndarray
    place: np.ndarray


@dataclass(frozen=True)
class _Window:
    """Decoded shards, the random order of their rows as (shard, row), and the shard that follows."""

    shards: list[_Slice]
    rows: np.ndarray
    stop: int


class TrustedPairs:
    """The pairs of `pool`, decoded by `decoder` and tokenised by `tokenizer`; those of this worker of `world`.

    captioner: gives samples that have a label and no caption one.

    Raises Refused when shards are missing (unless `pool.missing` is skip) or there are none. `tallies`
    holds what was found in each shard read so far, by its number; `digest` changes when a shard does.
    """

    def __init__(
        self, pool: PoolConfig, decoder: Decoder, tokenizer: Tokenizer, config: DataConfig, seed: int = 0,
        captioner: Captioner | None = None, world: World | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.decoder, self.tokenizer = pool, decoder, tokenizer
        self.config, self.seed = config, seed
        self.captioner, self.world = captioner, world or World()
        self.paths = _present(pool)
        self.digest = _digest(self.paths)
        self.tallies: dict[int, Tally] = {}
        self._counts = shards.CountFiles()
        self._cache: dict[int, Pairs] = {}
        self._free = config.cache_bytes
        self._fates: dict[int, np.ndarray] = {}  # of every sample of a shard, whoever holds it
        threads = max(1, (os.cpu_count() or 1) // self.world.neighbours)
        self._decoders = ThreadPoolExecutor(threads, "decode")

    def batches(self, size: int, position: Position) -> Generator[tuple[Batch, Position], None, None]:
        """Batches without end from `position` on, each with the position that follows it.

        Pairs left over at the end of a window wait for the next epoch. A pool of less than `size` pairs is
        one batch. Raises WinnowError when a whole epoch gives fewer than two pairs.
        """
        with ThreadPoolExecutor(1, "window") as ahead:  # decodes the next window while this one is in use
            coming = ahead.submit(self._window, position.epoch, position.start, size)
            while True:
                window, (epoch, start, batch) = coming.result(), position
                whole = start == 0 and window.stop == len(self.paths)
                if whole and len(window.rows) < 2:
                    raise WinnowError(
                        f"pool.shards={self.pool.shards}: no pairs to train on: {self.report()}"
                    )
                n = min(size, len(window.rows)) if whole else size
                after = Position(epoch, window.stop) if window.stop < len(self.paths) else Position(epoch + 1)
                coming = ahead.submit(self._window, after.epoch, after.start, size)
                last = len(window.rows) // n - 1
                for b in range(batch, last + 1):
                    position = Position(epoch, start, b + 1) if b < last else after
                    yield self._take(window, b * n, n), position
                position = after

    def held_out(self) -> Batch | None:
        """The held-out pairs, in the order of the shards; None when there are none."""
        slices: list[_Slice] = []
        left = self.config.held_out_limit if self.config.held_out else 0
        for number in range(len(self.paths)):
            if left == 0:
                break
            pairs = self._read(number).held_out
            owner, place = self._owners(number, HELD_OUT)
            slices.append(_Slice(pairs, owner[:left], place[:left]))
            left -= len(slices[-1].owner)
        window = _Window(slices, _rows(slices), 0)
        return self._take(window, 0, len(window.rows)) if len(window.rows) else None

    def report(self) -> dict[str, Any]:
        """Counts over the shards read so far.

        `shards` of the pool and `shards_read`; pairs `trained_on` and `held_out`; `rejected` {reason: n};
        `damaged_shards` {path: what is wrong with it}.
        """
        tallies = self.tallies.values()
        rejected = sum((Counter(t.rejected) for t in tallies), Counter())
        return {
            "shards": len(self.paths),
            "shards_read": len(tallies),
            "trained_on": sum(t.trained_on for t in tallies),
            "held_out": sum(t.held_out for t in tallies),
            "rejected": dict(sorted(rejected.items())),
            "damaged_shards": {self.paths[i]: t.damage for i, t in sorted(self.tallies.items()) if t.damage},
        }

    def close(self) -> None:
        self._decoders.shutdown()

    def _window(self, epoch: int, start: int, size: int) -> _Window:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.paths))
        taken: list[_Slice] = []
        for stop in range(start, len(order)):
            number = int(order[stop])
            taken.append(_Slice(self._shard(number), *self._owners(number, TRAINING)))
            if sum(len(s.owner) for s in taken) >= max(self.config.window, size):
                break
        rows = np.random.default_rng([self.seed, epoch, start]).permutation(_rows(taken))
        return _Window(taken, rows, stop + 1)

    def _shard(self, number: int) -> Pairs:
        """The training pairs of a shard, from memory or decoded anew."""
        return self._cache[number] if number in self._cache else self._read(number).training

    def _owners(self, number: int, fate: int) -> tuple[np.ndarray, np.ndarray]:
        """For each sample of a shard with this fate, in shard order: its worker, and its place among that one's."""
        owner = (np.flatnonzero(self._fates[number] == fate) + number) % self.world.size
        place = np.zeros(len(owner), np.int64)
        for rank in range(self.world.size):
            mine = owner == rank
            place[mine] = np.arange(mine.sum())
        return owner, place

    def _take(self, window: _Window, start: int, n: int) -> Batch:
        """This worker's part of the rows [start, start + n) of a window."""
        rows = window.rows[start : start + n]
        owner = np.array([window.shards[s].owner[r] for s, r in rows])
        at = np.flatnonzero(owner == self.world.rank)
        found = [(window.shards[s].pairs, window.shards[s].place[r]) for s, r in rows[at]]
        if found:
            pairs = Pairs(
                torch.stack([p.images[i] for p, i in found]), torch.stack([p.tokens[i] for p, i in found])
            )
        else:
            pairs = self._pairs([])
        return Batch(pairs, Rows(torch.from_numpy(at), len(rows)), int(np.bincount(owner).max()))

    def _read(self, number: int) -> _Shard:
        """Decode this worker's part of a shard, count the whole, and keep its training pairs if there is room."""
        path = self.paths[number]
        with shards.open_shard(path) as shard:
            index = shard.index(self._counts.promised(path))
            read = partial(self._sample, shard, storage.name(path), index.incomplete)
            first = (self.world.rank - number) % self.world.size
            kept: dict[bool, list[tuple[torch.Tensor, str]]] = {True: [], False: []}
            fates: list[int | str] = []
            for sample, pixels in self._decoders.map(read, index.samples[first :: self.world.size]):
                if pixels is None:
                    fates.append(sample.status)
                else:
                    held_out = self._is_held_out(sample)
                    fates.append(HELD_OUT if held_out else TRAINING)
                    kept[held_out].append((pixels, sample.caption or ""))
        content = _Shard(self._pairs(kept[False]), self._pairs(kept[True]))
        if number not in self._fates:
            self._count(number, index, fates)
        if content.training.nbytes <= self._free:
            self._free -= content.training.nbytes
            self._cache[number] = content.training
        return content

    def _count(self, number: int, index: shards.ShardIndex, own: list[int | str]) -> None:
        """Learn the fates of the whole shard from all workers; on a first reading, which all do in one order."""
        whole: list[int | str] = [REJECTED] * len(index.samples)
        for rank, fates in enumerate(self.world.exchange(own)):
            whole[(rank - number) % self.world.size :: self.world.size] = fates
        rejected = Counter(f for f in whole if isinstance(f, str))
        if index.reason and index.lost:
            rejected[index.reason] += index.lost
        self._fates[number] = np.array([REJECTED if isinstance(f, str) else f for f in whole], np.uint8)
        self.tallies[number] = Tally(
            trained_on=whole.count(TRAINING),
            held_out=whole.count(HELD_OUT),
            rejected=dict(rejected),
            damage=f"{index.reason}: {index.detail}" if index.reason else "",
        )

    def _sample(
        self, shard: shards.Shard, name: str, incomplete: set[str], raw: shards.RawSample
    ) -> tuple[Sample, torch.Tensor | None]:
        """A sample and its pixels, or None with the reason in its status."""
        sample = read_sample(shard, name, raw, self.pool)
        if self.captioner:
            self.captioner.caption(sample)
        if raw.key in incomplete:
            sample.status = "truncated_shard"
        if sample.status != "ok" or sample.image is None:
            return sample, None
        if sample.image.size > self.decoder.config.max_bytes:
            sample.status = "image_too_large"
            return sample, None
        try:
            return sample, self.decoder(shard.read(sample.image)).pixels
        except ImageRejected as e:
            sample.status = e.reason
            return sample, None

    def _pairs(self, samples: list[tuple[torch.Tensor, str]]) -> Pairs:
        if not samples:
            tokens = self.tokenizer([""]).to(torch.int32)[:0]
            return Pairs(torch.empty(0, 3, *self.decoder.frame, dtype=torch.uint8), tokens)
        distinct: dict[str, int] = {}
        rows = [distinct.setdefault(caption, len(distinct)) for _, caption in samples]
        tokens = self.tokenizer(list(distinct)).to(torch.int32)
        return Pairs(torch.stack([pixels for pixels, _ in samples]), tokens[rows])

    def _is_held_out(self, sample: Sample) -> bool:
        """By a hash, for uids that only count up."""
        digest = hashlib.blake2b(format_uid(*sample.uid).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.config.held_out * 2**64


def _rows(slices: list[_Slice]) -> np.ndarray:
    """(slice, row in it) of all rows, int64 (n, 2)."""
    return np.array([(i, r) for i, s in enumerate(slices) for r in range(len(s.owner))], np.int64).reshape(
        -1, 2
    )


def _present(pool: PoolConfig) -> list[str]:
    """The shards of `pool`, without missing ones if those may be skipped."""
    paths = shards.expand(pool.shards)
    absent = shards.missing(paths)
    if absent and pool.missing == "error":
        raise Refused(
            f"pool.shards={pool.shards}: {len(absent)} shards are missing (pool.missing=skip goes on without "
            f"them): {', '.join(absent[:10])}{' ...' if len(absent) > 10 else ''}"
        )
    paths = [p for p in paths if p not in set(absent)]
    if not paths:
        raise Refused(f"pool.shards={pool.shards}: all {len(absent)} shards are missing")
    return paths


def _digest(paths: list[str]) -> str:
    """Of names, sizes and times of the shards, told without reading them."""
    folders = {storage.parent(p) for p in paths}
    signatures = {f: storage.signatures(f) for f in sorted(folders)}
    marks = [(p, signatures[storage.parent(p)].get(storage.name(p))) for p in paths]
    return hashlib.blake2b(json.dumps(marks).encode(), digest_size=16).hexdigest()

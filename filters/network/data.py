"""Trusted pairs, streamed from shards in an order that any step can be resumed at.

An epoch goes through the shards in a random order, a window of whole shards at a time, and draws its
batches from the window's pairs in random order. Decoded shards stay in memory as long as the budget
lasts, so a small trusted set is decoded once, and one of 10^8 pairs takes the memory of two windows.
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
    """A decoded shard."""

    training: Pairs
    held_out: Pairs


@dataclass(frozen=True)
class _Window:
    """Decoded shards, the random order of their rows as (shard, row), and the shard that follows."""

    shards: list[Pairs]
    rows: np.ndarray
    stop: int


class TrustedPairs:
    """The pairs of `pool`, decoded by `decoder` and tokenised by `tokenizer`.

    Raises Refused when shards are missing (unless `pool.missing` is skip) or there are none. `tallies`
    holds what was found in each shard read so far, by its number; `digest` changes when a shard does.
    """

    def __init__(
        self, pool: PoolConfig, decoder: Decoder, tokenizer: Tokenizer, config: DataConfig, seed: int = 0
    ) -> None:
        self.pool, self.decoder, self.tokenizer = pool, decoder, tokenizer
        self.config, self.seed = config, seed
        self.paths = _present(pool)
        self.digest = _digest(self.paths)
        self.tallies: dict[int, Tally] = {}
        self._counts = shards.CountFiles()
        self._cache: dict[int, Pairs] = {}
        self._free = config.cache_bytes
        self._decoders = ThreadPoolExecutor(os.cpu_count(), "decode")

    def batches(self, size: int, position: Position) -> Generator[tuple[Pairs, Position], None, None]:
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
                    yield _take(window, b * n, n), position
                position = after

    def held_out(self) -> Pairs | None:
        """The held-out pairs, in the order of the shards; None when there are none."""
        found: list[Pairs] = []
        left = self.config.held_out_limit if self.config.held_out else 0
        for number in range(len(self.paths)):
            if left == 0:
                break
            images, tokens = self._read(number).held_out
            if len(images):
                found.append(Pairs(images[:left], tokens[:left]))
                left -= len(found[-1].images)
        return Pairs(*(torch.cat(x) for x in zip(*found))) if found else None

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
        taken: list[Pairs] = []
        for stop in range(start, len(order)):
            taken.append(self._shard(int(order[stop])))
            if sum(len(p.images) for p in taken) >= max(self.config.window, size):
                break
        rows = np.array([(i, r) for i, p in enumerate(taken) for r in range(len(p.images))]).reshape(-1, 2)
        rows = np.random.default_rng([self.seed, epoch, start]).permutation(rows)
        return _Window(taken, rows, stop + 1)

    def _shard(self, number: int) -> Pairs:
        """The training pairs of a shard, from memory or decoded anew."""
        return self._cache[number] if number in self._cache else self._read(number).training

    def _read(self, number: int) -> _Shard:
        """Decode a whole shard, count it, and keep its training pairs if there is room."""
        path = self.paths[number]
        with shards.open_shard(path) as shard:
            index = shard.index(self._counts.promised(path))
            tally = Tally(damage=f"{index.reason}: {index.detail}" if index.reason else "")
            rejected = Counter({index.reason: index.lost} if index.reason and index.lost else {})
            read = partial(self._sample, shard, storage.name(path), index.incomplete)
            kept: dict[bool, list[tuple[torch.Tensor, str]]] = {True: [], False: []}
            for sample, pixels in self._decoders.map(read, index.samples):
                if pixels is None:
                    rejected[sample.status] += 1
                else:
                    kept[self._is_held_out(sample)].append((pixels, sample.caption or ""))
        content = _Shard(self._pairs(kept[False]), self._pairs(kept[True]))
        tally.trained_on, tally.held_out, tally.rejected = len(kept[False]), len(kept[True]), dict(rejected)
        self.tallies[number] = tally
        if content.training.nbytes <= self._free:
            self._free -= content.training.nbytes
            self._cache[number] = content.training
        return content

    def _sample(
        self, shard: shards.Shard, name: str, incomplete: set[str], raw: shards.RawSample
    ) -> tuple[Sample, torch.Tensor | None]:
        """A sample and its pixels, or None with the reason in its status."""
        sample = read_sample(shard, name, raw, self.pool)
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
            return Pairs(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int32))
        distinct: dict[str, int] = {}
        rows = [distinct.setdefault(caption, len(distinct)) for _, caption in samples]
        tokens = self.tokenizer(list(distinct)).to(torch.int32)
        return Pairs(torch.stack([pixels for pixels, _ in samples]), tokens[rows])

    def _is_held_out(self, sample: Sample) -> bool:
        """By a hash, for uids that only count up."""
        digest = hashlib.blake2b(format_uid(*sample.uid).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.config.held_out * 2**64


def _take(window: _Window, start: int, n: int) -> Pairs:
    rows = window.rows[start : start + n]
    return Pairs(
        torch.stack([window.shards[s].images[r] for s, r in rows]),
        torch.stack([window.shards[s].tokens[r] for s, r in rows]),
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

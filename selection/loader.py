"""Train on a round straight from the original shards, reading only the bytes of the chosen samples.

A round is laid out as one line of its k entries: shards in an order drawn from (seed, t), then neighbouring
shards pooled until `shuffle` entries are together and shuffled as one. Rank r of W takes a contiguous piece
of the line, k/W entries give or take one, and cuts it into `steps` batches whose sizes differ by at most one.
Which entries are in batch j of rank r therefore depends on (seed, t, W, batch size) alone: loader workers
share out whole batches, their number changes nothing, and a round can be resumed at any step.

Every rank has the same number of steps, known from k, W and the batch size beforehand: no rank waits for a
batch that another does not have. Nothing is padded. With remainder="keep" every entry of the round is seen
exactly once; if W does not divide k, a step's batches may differ in size by one between ranks. Losses that
gather features of equal shape over the ranks (open_clip's ClipLoss) need remainder="drop", which leaves the
last k mod W entries of the line out of that round, at most W-1 of them, and makes all batches of a step
alike.
"""

import os
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import fsspec.core
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from selection.draws import Ints, derive, seed_key, shuffled
from selection.manifest_rows import ShardMembers
from selection.rounds import Rounds

_SHARD_ORDER, _MIXING = 101, 102


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are cut and read.

    batch_size: samples of one rank's batch, at most; workers: loader processes of each rank, started anew for
    each round, 0 to load in the training process; shuffle: entries of neighbouring shards that are mixed with
    each other; remainder: see the module.
    """

    batch_size: int
    workers: int = 0
    shuffle: int = 10_000
    remainder: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: at least 1")
        if self.workers < 0:
            raise ValueError(f"workers={self.workers}: 0 for none, or more")
        if self.shuffle < 1:
            raise ValueError(f"shuffle={self.shuffle}: at least 1")
        if self.remainder not in ("keep", "drop"):
            raise ValueError(f"remainder={self.remainder}: keep or drop")


@dataclass(frozen=True)
class Division:
    """How a line of `size` entries is divided over ranks and steps."""

    size: int
    world_size: int
    steps: int

    @classmethod
    def of(cls, entries: int, world_size: int, config: LoaderConfig) -> "Division":
        """Raises ValueError if some rank would have a step without a sample."""
        size = entries - entries % world_size if config.remainder == "drop" else entries
        steps = -(-size // (world_size * config.batch_size))
        if steps == 0 or size // world_size < steps:
            raise ValueError(
                f"batch_size={config.batch_size}: a round of {entries} entries on {world_size} ranks leaves "
                "a rank without a sample in some step; use fewer ranks, a larger ratio or larger batches"
            )
        return cls(size, world_size, steps)

    def batch(self, rank: int, step: int) -> range:
        """Places on the line of one batch."""
        first, after = (self.size * r // self.world_size for r in (rank, rank + 1))
        start, stop = (first + (after - first) * s // self.steps for s in (step, step + 1))
        return range(start, stop)


class Line:
    """The order of a round's entries: shards shuffled, pooled to `shuffle` entries, shuffled again in the
    pool.

    sizes: int64 (S,), entries of the round in each shard. shards_mixed: shards of the largest pool.
    """

    def __init__(self, sizes: Ints, seed: int, t: int, shuffle: int) -> None:
        order = shuffled(derive(seed_key(seed), _SHARD_ORDER, t), 0, np.asarray([len(sizes)]))
        self._shards = order[sizes[order] > 0]
        sizes = sizes[self._shards]
        self._first = np.cumsum(sizes) - sizes
        # A pool is opened by the first shard that starts in a new stretch of `shuffle` entries.
        stretch = self._first // shuffle
        self._opens = np.flatnonzero(np.diff(stretch, prepend=-1))
        self._end = int(sizes.sum())
        self.shards_mixed = int(np.diff(self._opens, append=len(sizes)).max())
        self._key = derive(seed_key(seed), _MIXING, t)

    def at(self, places: range) -> tuple[Ints, Ints]:
        """(shard, number among the shard's members) of the entries at some places, int64 (places,) each."""
        found: list[Ints] = []
        starts = self._first[self._opens]
        pool = int(np.searchsorted(starts, places.start, side="right")) - 1
        while pool < len(starts) and starts[pool] < places.stop:
            start = int(starts[pool])
            stop = int(starts[pool + 1]) if pool + 1 < len(starts) else self._end
            mixed = shuffled(self._key, pool, np.asarray([stop - start])) + start
            found.append(mixed[max(places.start, start) - start : min(places.stop, stop) - start])
            pool += 1
        entries = np.concatenate(found)
        shard = np.searchsorted(self._first, entries, side="right") - 1
        return self._shards[shard], entries - self._first[shard]


def read_members(paths: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """Data of some tar members, one request to the filesystem for all of them; each is checked against its
    header.

    offsets: first byte of the data in the plain tar. Raises ValueError naming the shard if the header before
    it does not announce that size: the shard is not the one that was scanned, or it is compressed.
    """
    filesystems: dict[int, tuple[Any, list[int]]] = {}
    stripped = [""] * len(paths)
    for number, path in enumerate(paths):
        filesystem, stripped[number] = fsspec.core.url_to_fs(path)
        filesystems.setdefault(id(filesystem), (filesystem, []))[1].append(number)
    data = [b""] * len(paths)
    for filesystem, numbers in filesystems.values():
        contents = filesystem.cat_ranges(
            [stripped[number] for number in numbers],
            [offsets[number] - tarfile.BLOCKSIZE for number in numbers],
            [offsets[number] + sizes[number] for number in numbers],
            on_error="raise",
        )
        for number, content in zip(numbers, contents):
            data[number] = _checked(content, paths[number], offsets[number], sizes[number])
    return data


def _checked(content: bytes, path: str, offset: int, size: int) -> bytes:
    try:
        announced = tarfile.TarInfo.frombuf(content[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape").size
    except tarfile.HeaderError as error:
        announced = -1
        cause: Exception | None = error
    else:
        cause = None
    if announced != size or len(content) != tarfile.BLOCKSIZE + size:
        raise ValueError(
            f"{path}: no member of {size} bytes at byte {offset}; the shard has changed since it was "
            "scanned, or is compressed: scan it again, or reshard"
        ) from cause
    return content[tarfile.BLOCKSIZE :]


class RoundDataset(IterableDataset):
    """The batches of one rank in one round, from step `start` on; loader workers share them out in turn.

    transform: image bytes to anything `torch.utils.data.default_collate` takes; tokenize: the same for the
    caption. Yields (images, captions), each collated. Raises RuntimeError naming shard and key if a transform
    fails.
    """

    def __init__(
        self,
        rounds: Rounds,
        t: int,
        *,
        line: Line,
        division: Division,
        rank: int,
        start: int,
        transform: Callable[[bytes], Any],
        tokenize: Callable[[str], Any],
    ) -> None:
        self._rounds, self._t, self._line, self._division = rounds, t, line, division
        self._rank, self._start = rank, start
        self._transform, self._tokenize = transform, tokenize
        self._open: OrderedDict[int, ShardMembers] = OrderedDict()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for step in range(self._start + number, self._division.steps, workers):
            yield self._batch(self._division.batch(self._rank, step))

    def _batch(self, places: range) -> Any:
        samples = [
            (self._members(shard), row) for shard, row in zip(*(a.tolist() for a in self._line.at(places)))
        ]
        images = _images(samples)
        captions = _captions(samples)
        return default_collate(
            [
                self._transformed(image, caption, members, row)
                for image, caption, (members, row) in zip(images, captions, samples)
            ]
        )

    def _transformed(self, image: bytes, caption: str, members: ShardMembers, row: int) -> tuple[Any, Any]:
        try:
            return self._transform(image), self._tokenize(caption)
        except Exception as error:
            raise RuntimeError(f"{members.path}: sample {members.rows.key[row]}: {error}") from error

    def _members(self, shard: int) -> ShardMembers:
        """The round's members of a shard; those of the pools being read are kept."""
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            self._open[shard] = self._rounds.shard(self._t, shard)
            if len(self._open) > 2 * self._line.shards_mixed:
                self._open.popitem(last=False)
        return self._open[shard]


def _images(samples: Sequence[tuple[ShardMembers, int]]) -> list[bytes]:
    offsets, sizes = [], []
    for members, row in samples:
        if members.rows.image_offset is None or members.rows.image_size is None:
            raise ValueError(f"{members.path}: the manifest does not say where its images are")
        offsets.append(int(members.rows.image_offset[row]))
        sizes.append(int(members.rows.image_size[row]))
    return read_members([members.path for members, _ in samples], offsets, sizes)


def _captions(samples: Sequence[tuple[ShardMembers, int]]) -> list[str]:
    """Captions from the manifest where it holds them, the others from their tar members."""
    captions = ["" if members.rows.caption is None else members.rows.caption[row] for members, row in samples]
    unread = [number for number, (members, _) in enumerate(samples) if members.rows.caption is None]
    offsets, sizes = [], []
    for number in unread:
        members, row = samples[number]
        if members.rows.caption_offset is None or members.rows.caption_size is None:
            raise ValueError(f"{members.path}: the manifest has neither captions nor where they are")
        offsets.append(int(members.rows.caption_offset[row]))
        sizes.append(int(members.rows.caption_size[row]))
    read = read_members([samples[number][0].path for number in unread], offsets, sizes)
    for number, content in zip(unread, read):
        captions[number] = content.decode("utf-8", "replace")
    return captions


def _identity(value: Any) -> Any:
    return value


class RoundLoader:
    """Batches of round after round for this rank: what a training loop iterates.

    rank and world_size come from torch.distributed when it is initialised, else from RANK and WORLD_SIZE,
    else 0, 1.

    Iterating yields the batches of round `self.round` from step `self.step` on, then moves to the next round.
    `set_epoch(t)` chooses the round; it keeps the step if round t is already under way, as after
    `load_state_dict`. It also has what open_clip_train's loop asks of data["train"]: `dataloader`,
    `set_epoch`, and on the former `num_batches` and `num_samples`.
    """

    def __init__(
        self,
        rounds: Rounds,
        config: LoaderConfig,
        *,
        transform: Callable[[bytes], Any],
        tokenize: Callable[[str], Any] = _identity,
    ) -> None:
        self.rounds, self.config = rounds, config
        self.rank, self.world_size = _rank_and_world_size()
        self.round, self.step = 0, 0
        self.division = Division.of(rounds.k, self.world_size, config)
        self._transform, self._tokenize = transform, tokenize

    @property
    def dataloader(self) -> "RoundLoader":
        return self

    @property
    def num_batches(self) -> int:
        """Steps of a whole round, the same on every rank and in every round."""
        return self.division.steps

    @property
    def num_samples(self) -> int:
        """Samples of a whole round on all ranks together: k, less what remainder="drop" leaves out."""
        return self.division.size

    @property
    def batch_size(self) -> int:
        """Samples of this rank's batch, at most."""
        return self.config.batch_size

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.round:
            self.round, self.step = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from, and what must be alike for it to be the same batch."""
        return {"round": self.round, "step": self.step} | self._identity()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken. Raises ValueError if batches are cut differently here."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(f"{name}={value}: the saved loader had {state[name]}; batches would differ")
        self.round, self.step = state["round"], state["step"]

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.rounds.seed,
            "round_size": self.rounds.k,
            "world_size": self.world_size,
            "batch_size": self.config.batch_size,
            "shuffle": self.config.shuffle,
            "num_samples": self.num_samples,
        }

    def __iter__(self) -> Iterator[Any]:
        dataset = RoundDataset(
            self.rounds,
            self.round,
            line=Line(self.rounds.shard_sizes(self.round), self.rounds.seed, self.round, self.config.shuffle),
            division=self.division,
            rank=self.rank,
            start=self.step,
            transform=self._transform,
            tokenize=self._tokenize,
        )
        loader = DataLoader(
            dataset, batch_size=None, num_workers=self.config.workers, pin_memory=torch.cuda.is_available()
        )
        for batch in loader:
            self.step += 1
            if self.step == self.num_batches:
                self.round, self.step = self.round + 1, 0
            yield batch


def _rank_and_world_size() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

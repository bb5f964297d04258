"""The scan of one shard: read, decode, embed, write its table. What a Ray worker does with a shard."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pipeline import sidecar as sidecars
from pipeline import storage
from pipeline.decode import Decoder, ImageRejected
from pipeline.language import language
from pipeline.phash import SIDE, perceptual_hash
from pipeline.samples import PoolConfig, Sample, read_sample
from pipeline.scorer import Scorer
from pipeline.shards import RawSample, Shard, ShardIndex, open_shard
from pipeline.tables import BASE, TYPES, BlockWriter, ShardReport, TableSet, TableWriter, schema, write_report


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard to scan; `promised` is (count, file that says so) or None."""

    shard: str
    id: str
    signature: dict[str, Any]
    sidecar: dict[str, Any] | None
    promised: tuple[int, str] | None


@dataclass
class Chunk:
    """Rows of up to one batch of samples, column by column; embeddings are float16 (rows, d)."""

    samples: list[Sample]
    columns: dict[str, Any]
    embeddings: list[np.ndarray] = field(default_factory=list)  # image, text; none without a scorer


@dataclass
class ShardScanner:
    """Scans shards with one scorer. Memory: `threads` batches and decoded frames, one row group of a table.

    Each thread takes whole batches from bytes to embeddings, so that decoding runs ahead of the model
    and the result does not depend on the number of threads.
    """

    tables: TableSet
    pool: PoolConfig
    decoder: Decoder
    scorer: Scorer | None
    column: str | None
    batch_size: int
    threads: int
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads)

    def scan(self, task: ShardTask) -> ShardReport:
        """Write the shard's table and report, and return the report.

        A shard whose content is as before under a new time stamp keeps its table. Raises OSError when it
        cannot be read at all, Refused when what lies beside it does not fit.
        """
        with storage.local_copy(task.shard) as local:
            digest = storage.digest(local)
            before = self.tables.report(task.id)
            now = (digest, task.sidecar, task.promised)
            if before and (before.digest, before.sidecar, before.promised) == now:
                before.signature = task.signature
                write_report(self.tables, before)
                return before
            with open_shard(local) as shard:
                return self._write(task, shard, digest)

    def _write(self, task: ShardTask, shard: Shard, digest: str) -> ShardReport:
        index = shard.index(task.promised)
        sidecar = sidecars.read(sidecars.path_of(task.shard)) if task.sidecar else None
        metadata = {k: TYPES[kind] for k, kind in self.pool.json_fields.items()} | (
            sidecar.types if sidecar else {}
        )
        report = ShardReport(
            shard=task.shard, id=task.id, signature=task.signature, sidecar=task.sidecar,
            promised=task.promised, digest=digest,
            lost=index.lost, damage=index.reason, detail=index.detail,
        )  # fmt: skip
        counts: Counter[str] = Counter()
        notes = Counter({f"passed_over_{k}": n for k, n in index.passed_over.items()})
        notes["duplicate_member"] = index.duplicate_members
        names: list[tuple[str, tuple[int, int]]] = []
        columns = schema(metadata, self.column)
        own = [name for name in columns.names if name not in BASE and name != self.column]
        with self._writers(task.id, columns, report.files) as (table, blocks):
            for chunk in self._chunks(task, shard, index, sidecar, own):
                table.add(chunk.columns)
                for block, rows in zip(blocks, chunk.embeddings):
                    block.add(rows)
                counts.update(chunk.columns["status"])
                notes["repaired_caption"] += sum(s.repaired for s in chunk.samples)
                notes["unreadable_json"] += sum(s.unreadable_json for s in chunk.samples)
                report.rows += len(chunk.samples)
                if sidecar:
                    names += [(s.key, s.uid) for s in chunk.samples]
        storage.remove_tree(self.tables.path(task.id, "unmatched.json"))  # of an earlier scan
        if sidecar:
            notes.update(self._list_unmatched(task.id, sidecar, names))
        report.status = dict(sorted(counts.items()))
        report.notes = {k: n for k, n in sorted(notes.items()) if n}
        write_report(self.tables, report)
        return report

    @contextlib.contextmanager
    def _writers(
        self, shard: str, table_schema: Any, digests: dict[str, str]
    ) -> Iterator[tuple[TableWriter, list[BlockWriter]]]:
        """Writers of the table and of both embedding blocks, committed together; `digests` gets their files'."""
        with contextlib.ExitStack() as stack:
            suffixes = ["parquet", *(["image.npy", "text.npy"] if self.scorer else [])]
            files = {s: stack.enter_context(storage.commit(self.tables.path(shard, s))) for s in suffixes}
            table = TableWriter(files["parquet"], table_schema)
            blocks = [BlockWriter(files[s], self.scorer.embed_dim) for s in suffixes[1:] if self.scorer]
            yield table, blocks
            table.close()
            for block in blocks:
                block.close()
            digests.update({s: storage.digest(path) for s, path in files.items()})

    def _chunks(
        self,
        task: ShardTask,
        shard: Shard,
        index: ShardIndex,
        sidecar: sidecars.Sidecar | None,
        metadata: list[str],
    ) -> Iterator[Chunk]:
        """Chunks in shard order; a bounded number is in work at a time."""
        waiting: deque[Future[Chunk]] = deque()
        for start in range(0, len(index.samples), self.batch_size):
            raws = index.samples[start : start + self.batch_size]
            waiting.append(
                self._pool.submit(self._chunk, task, shard, raws, index.incomplete, sidecar, metadata)
            )
            if len(waiting) > self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _chunk(
        self,
        task: ShardTask,
        shard: Shard,
        raws: Sequence[RawSample],
        incomplete: set[str],
        sidecar: sidecars.Sidecar | None,
        metadata: list[str],
    ) -> Chunk:
        base = storage.name(task.shard)
        samples = []
        for raw in raws:
            sample = read_sample(shard, base, raw, self.pool)
            if raw.key in incomplete:
                sample.status = "truncated_shard"
            samples.append(sample)
        if sidecar:
            sidecar.match(samples)
        columns = _columns(samples, task.shard)
        pixels = self._decode(shard, samples, columns)
        columns["status"] = [s.status for s in samples]
        for name in metadata:
            columns[name] = [s.metadata.get(name) for s in samples]
        chunk = Chunk(samples, columns)
        if self.scorer and self.column:
            self._embed(chunk, pixels)
        return chunk

    def _decode(self, shard: Shard, samples: list[Sample], columns: dict[str, Any]) -> list[torch.Tensor]:
        """Fill the pixel columns; returns the model inputs of the samples that are ok, in order."""
        n = len(samples)
        columns.update(
            {k: [None] * n for k in ("detail", "width", "height", "sha256", "pixel_hash", "phash")}
        )
        thumbs = np.zeros((n, SIDE, SIDE), np.float32)
        decoded = []
        for i, sample in enumerate(samples):
            if sample.status != "ok" or sample.image is None:
                continue
            if sample.image.size > self.decoder.config.max_bytes:
                sample.status, columns["detail"][i] = "image_too_large", f"{sample.image.size} bytes"
                continue
            data = shard.read(sample.image)
            columns["sha256"][i] = hashlib.sha256(data).digest()
            try:
                image = self.decoder(data)
            except ImageRejected as e:
                sample.status, columns["detail"][i] = e.reason, e.detail
                columns["width"][i], columns["height"][i] = e.size or (None, None)
                continue
            columns["width"][i], columns["height"][i] = image.width, image.height
            columns["pixel_hash"][i] = image.pixel_hash
            thumbs[i] = image.thumb
            if image.pixels is not None:
                decoded.append(image.pixels)
        hashes = perceptual_hash(thumbs).tolist()
        columns["phash"] = [h if s.status == "ok" else None for h, s in zip(hashes, samples)]
        return decoded

    def _embed(self, chunk: Chunk, pixels: list[torch.Tensor]) -> None:
        assert self.scorer
        assert self.column
        n, d = len(chunk.samples), self.scorer.embed_dim
        image, text = (np.full((n, d), np.nan, np.float16) for _ in range(2))
        score = np.full(n, np.nan, np.float32)
        rows = [i for i, s in enumerate(chunk.samples) if s.status == "ok"]
        if rows:
            captions = [chunk.samples[i].caption or "" for i in rows]
            image[rows], text[rows], score[rows] = self.scorer.embed(pixels, captions)
        chunk.columns[self.column] = score
        chunk.embeddings = [image, text]

    def _list_unmatched(
        self, shard: str, sidecar: sidecars.Sidecar, names: list[tuple[str, tuple[int, int]]]
    ) -> dict[str, int]:
        """Count rows and samples that found no partner; their names go to a file beside the table."""
        unmatched = sidecar.unmatched(names)
        if any(unmatched.values()):
            storage.write_json(self.tables.path(shard, "unmatched.json"), unmatched)
        return {k: len(v) for k, v in unmatched.items()}


def _columns(samples: list[Sample], shard: str) -> dict[str, Any]:
    """What is known of samples before their pixels are: lists, one entry a sample."""
    ok = [s.status == "ok" and s.caption is not None for s in samples]
    columns: dict[str, Any] = {k: [None] * len(samples) for k in BASE}
    columns["uid_hi"] = np.array([s.uid[0] for s in samples], np.uint64)
    columns["uid_lo"] = np.array([s.uid[1] for s in samples], np.uint64)
    columns["shard"] = [shard] * len(samples)
    columns["key"] = [s.key for s in samples]
    columns["offset"] = [s.image.offset if s.image else None for s in samples]
    columns["size"] = [s.image.size if s.image else None for s in samples]
    columns["members"] = [
        [{"suffix": m.suffix, "offset": m.offset, "size": m.size} for m in s.members] for s in samples
    ]
    columns["caption"] = [s.caption for s in samples]
    columns["caption_repaired"] = [s.repaired for s in samples]
    columns["language"] = [language(s.caption or "") if k else None for s, k in zip(samples, ok)]
    columns["label"] = [s.label for s in samples]
    return columns

"""A probe of the scan: the first samples of one shard, read by a real worker, and what they cost.

Nothing is written but to the worker's temporary folder.
"""

from __future__ import annotations

import itertools
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from pipeline import sidecar, storage
from pipeline.decode import ImageRejected
from pipeline.samples import IMAGE_EXTS, pick
from pipeline.scan import ScanWorker
from pipeline.scan_shard import ShardTask
from pipeline.shards import BLOCK, RawSample, Shard, open_shard
from pipeline.tables import ShardReport, shard_id

SECONDS = 8.0  # that the measured part takes, about; half of it at least
TIMED = 32  # images and pairs that decoding and the model are timed on by themselves


@dataclass(frozen=True)
class ProbeTask:
    """The shard to read; `number` tells workers that read the same one apart."""

    shard: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one worker measured.

    samples: read in `seconds` by all threads of the worker, of `in_shard`. load_seconds: to load the model. decoded, scored: images and pairs a second on one thread, alone; 0 without
    a scorer. peak: bytes of memory. gpu_peak, gpu_total: of the GPU, 0 without one.
    report, table: what the scan made of them. refused: why the batch does not fit, if it does not.
    """

    samples: int
    in_shard: int
    seconds: float
    load_seconds: float
    decoded: float
    scored: float
    peak: int
    gpu_peak: int
    gpu_total: int
    report: ShardReport | None
    table: bytes
    refused: str = ""


class ProbeWorker:
    """The Ray actor: a ScanWorker that writes to a temporary folder of its own."""

    def __init__(self, setup: dict[str, Any], threads: int) -> None:
        started = time.monotonic()
        self.folder = tempfile.TemporaryDirectory(prefix="winnow-probe-")
        self.batch = setup["batch_size"] * threads
        self.worker = ScanWorker({**setup, "tables": self.folder.name}, threads)
        self.load_seconds = time.monotonic() - started

    def probe(self, task: ProbeTask) -> Probe:
        """Scan a first part to warm up and see the pace, then one that takes about SECONDS."""
        scanner = self.worker.scanner
        measured: dict[str, Any] = {"decoded": 0.0, "scored": 0.0}
        report, refused, seconds = None, "", 0.0
        with open_shard(task.shard) as shard:
            found = shard.index().samples
            count = min(len(found), self.batch)
            size = _end(found[:count])
            try:
                measured = self._apart(shard, found[:TIMED])
                while report is None or seconds < SECONDS / 2:
                    part = self._part(shard, task.shard, size)
                    started = time.monotonic()
                    report = scanner.scan(part)
                    seconds = time.monotonic() - started
                    if count == len(found):
                        break
                    wanted = max(count, int(count / max(seconds, 1e-3) * SECONDS))
                    count = min(len(found), wanted // self.batch * self.batch)
                    size = _end(found[:count])
            except torch.cuda.OutOfMemoryError as e:
                refused = str(e).splitlines()[0]
            table = storage.read_bytes(scanner.tables.path(report.id, "parquet")) if report else b""
            gpu = (
                torch.cuda.is_available()
                and scanner.scorer is not None
                and scanner.scorer.device.type == "cuda"
            )
            return Probe(
                samples=report.rows if report else 0, in_shard=len(found), seconds=seconds,
                load_seconds=self.load_seconds, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
                gpu_peak=torch.cuda.max_memory_reserved() if gpu else 0,
                gpu_total=torch.cuda.get_device_properties(0).total_memory if gpu else 0,
                report=report, table=table, refused=refused, **measured,
            )  # fmt: skip

    def _part(self, shard: Shard, name: str, size: int) -> ShardTask:
        """A shard that ends where the wanted samples end, under the same base name."""
        path = os.path.join(self.folder.name, storage.name(name))
        with open(path, "wb") as f:
            for start in range(0, size, 1 << 20):
                f.write(os.pread(shard.fileno(), min(1 << 20, size - start), start))
            f.write(bytes(2 * BLOCK))
        beside = None
        if storage.exists(sidecar.path_of(name)):
            storage.copy(sidecar.path_of(name), sidecar.path_of(path))
            beside = storage.signature(sidecar.path_of(path))
        return ShardTask(
            shard=path, id=shard_id(name), signature=storage.signature(path), sidecar=beside, promised=None
        )

    def _apart(self, shard: Shard, found: list[RawSample]) -> dict[str, float]:
        """Decoding and the model by themselves, after one call each that does not count."""
        scanner, pixels = self.worker.scanner, []
        images = [m for raw in found if (m := pick(raw.members, IMAGE_EXTS))]
        started, decoded = time.monotonic(), 0
        for number, member in enumerate(itertools.chain(images[:1], images)):
            if number == 1:
                started = time.monotonic()
            try:
                image = scanner.decoder(shard.read(member))
            except ImageRejected:
                continue
            decoded += number > 0
            if image.pixels is not None and number:
                pixels.append(image.pixels)
        rate = decoded / max(time.monotonic() - started, 1e-6)
        if not pixels or scanner.scorer is None:
            return {"decoded": rate, "scored": 0.0}
        captions = [f"a photo of {n} things" for n in range(len(pixels))]
        scanner.scorer.embed(pixels, captions)
        started = time.monotonic()
        scanner.scorer.embed(pixels, captions)
        return {"decoded": rate, "scored": len(pixels) / (time.monotonic() - started)}


def _end(samples: list[RawSample]) -> int:
    """Bytes of the plain tar up to the end of these samples' last member."""
    last = max((m.offset + m.size for raw in samples for m in raw.members), default=0)
    return -(-last // BLOCK) * BLOCK

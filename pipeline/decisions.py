"""Decisions and the chain of stages that makes them.

A stage reads the decisions of the stage before it, shard by shard, and writes its own: one row for each row
of the shard's feature table, in the same order. What a stage has written under the same settings, for the
same input, is not computed again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import polars as pl

from pipeline import storage
from pipeline.progress import Progress
from pipeline.scan import Scan
from pipeline.tables import TableSet, digest_json

DECISION = {
    "uid_hi": pl.UInt64,
    "uid_lo": pl.UInt64,
    "kept": pl.Boolean,
    "reason": pl.String,  # null when kept
    "value": pl.Float64,  # what was measured, and the cut it was held against
    "cut": pl.Float64,
    "copies": pl.UInt32,  # 0 when dropped
}


@dataclass(frozen=True)
class Decisions:
    """The decisions of one stage: `<folder>/<shard id>.parquet`."""

    folder: str

    def read(self, shard: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        with storage.open_file(self.path(shard)) as f:
            return pl.read_parquet(f.read(), columns=list(columns) if columns else None)

    def path(self, shard: str) -> str:
        return storage.join(self.folder, f"{shard}.parquet")

    def write(self, shard: str, frame: pl.DataFrame) -> None:
        with storage.commit(self.path(shard)) as tmp:
            frame.write_parquet(tmp, compression="zstd")


@dataclass(frozen=True)
class Chain:
    """What a stage is given: the tables, the shard ids in pool order, and the decisions so far (None at first).

    digest: of all that decides the stage's outcome, for naming what a killed run may find again.
    """

    tables: TableSet
    ids: list[str]
    before: Decisions | None
    folder: str  # the stage's own, for files beside its decisions
    digest: str


class Stage(Protocol):
    """A link of the chain: `run` yields (shard id, decisions) for every id of the chain, in its order.

    `identity` names all settings that decide the outcome; equal identity over equal input is not run again.
    """

    @property
    def name(self) -> str: ...

    def identity(self) -> dict[str, Any]: ...

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]: ...


@dataclass(kw_only=True)
class StageResult:
    """Counts of one finished stage; `dropped` are totals after it, by reason."""

    name: str
    digest: str
    kept: int = 0
    entries: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def run_chain(scan: Scan, stages: Sequence[Stage], folder: str) -> tuple[Decisions, list[StageResult]]:
    """Run the stages in order; returns the last one's decisions and a result for each."""
    inputs = [[r.id, r.digest] for r in scan.reports]
    digest = digest_json([storage.name(scan.tables.folder), inputs])
    before: Decisions | None = None
    results = []
    for number, stage in enumerate(stages):
        digest = digest_json([digest, stage.name, stage.identity()])
        own = storage.join(folder, f"{number:02d}-{stage.name}")
        chain = Chain(scan.tables, scan.ids, before, own, digest)
        results.append(_run_stage(stage, chain))
        before = Decisions(own)
    assert before is not None
    return before, results


def _run_stage(stage: Stage, chain: Chain) -> StageResult:
    done = storage.join(chain.folder, "stage.json")
    if storage.exists(done):
        before = StageResult(**storage.read_json(done))
        if before.digest == chain.digest:
            return before
        storage.remove_tree(done)  # first: a crash from here on finds an unfinished stage
    started = time.monotonic()
    decisions = Decisions(chain.folder)
    result = StageResult(name=stage.name, digest=chain.digest)
    dropped: Counter[str] = Counter()
    with Progress(stage.name, len(chain.ids)) as progress:
        for shard, frame in stage.run(chain):
            decisions.write(shard, frame)
            result.kept += int(frame["kept"].sum())
            result.entries += int(frame["copies"].sum())
            for reason, n in frame["reason"].drop_nulls().value_counts().iter_rows():
                dropped[reason] += n
            progress.step(len(frame))
    result.dropped = dict(sorted(dropped.items()))
    result.seconds = round(time.monotonic() - started, 3)
    storage.write_json(done, asdict(result))
    return result

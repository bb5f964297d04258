"""The scan: every shard of a pool into a feature table, once. Later runs find the tables and open no shard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from pipeline import cluster, reasons, shards, sidecar, storage
from pipeline.cluster import ClusterConfig
from pipeline.decode import DecodeConfig, Decoder
from pipeline.errors import Refused, WinnowError
from pipeline.progress import Progress
from pipeline.samples import PoolConfig
from pipeline.scan_shard import ShardScanner, ShardTask
from pipeline.scorer import Scorer, ScorerConfig
from pipeline.tables import TABLE_VERSION, ShardReport, TableSet, digest_json, shard_id

log = logging.getLogger(__name__)
CPU_BATCH = 64  # a batch of activations a core; larger ones are no faster there
BUDGET_MINIMUM = 10_000  # samples before a running scan is held against the error budget


@dataclass(kw_only=True)
class ErrorBudget:
    """What share of the pool may be unreadable before the run stops.

    max_fraction holds for each reason by itself; by_reason overrides it for the reasons it names.
    """

    max_fraction: float = 0.2
    by_reason: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in {"max_fraction": self.max_fraction, **self.by_reason}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{key}={value}: must lie in [0, 1]")
        unknown = set(self.by_reason) - set(reasons.REJECTED)
        if unknown:
            raise ValueError(
                f"by_reason.{min(unknown)}: no such reason; known: {', '.join(reasons.REJECTED)}"
            )

    def check(self, counts: Counter[str], total: float, reports: Iterable[ShardReport]) -> None:
        """Hold counts by reason against `total` samples; `reports` are read only to name the worst shards.

        Raises WinnowError for the most frequent reason that is past its budget.
        """
        for reason, n in counts.most_common():
            allowed = self.by_reason.get(reason, self.max_fraction)
            if n > allowed * total:
                shares = [(r.rejected().get(reason, 0), r.shard) for r in reports]
                worst = sorted(shares, key=lambda s: -s[0])[:5]
                names = ", ".join(f"{shard} ({count})" for count, shard in worst if count)
                raise WinnowError(
                    f"{n} of {total:.0f} samples are rejected as {reason}, more than errors.max_fraction={allowed:g}"
                    f" allows; most in: {names}. Mend these shards, or set +errors.by_reason.{reason}=<share>"
                )


@dataclass(frozen=True)
class Scan:
    """A scanned pool: its tables and one report a shard, in pool order."""

    tables: TableSet
    reports: list[ShardReport]
    column: str | None
    scanned: int  # shards that this run opened

    @property
    def samples(self) -> int:
        return sum(r.samples for r in self.reports)

    @property
    def ids(self) -> list[str]:
        return [r.id for r in self.reports]

    def rejected(self) -> dict[str, int]:
        return dict(sorted(_tally(self.reports).items()))


class ScanWorker:
    """The Ray actor: one loaded scorer, whole shards."""

    def __init__(self, setup: dict[str, Any], threads: int) -> None:
        torch.set_num_threads(1)  # threads take whole batches: bits do not depend on their number
        device = cluster.worker_device()
        config: ScorerConfig | None = setup["scorer"]
        scorer = Scorer(config, device) if config else None
        if scorer and scorer.fingerprint != setup["fingerprint"]:
            raise Refused(
                f"a worker's scorer has fingerprint {scorer.fingerprint}, the driver's {setup['fingerprint']}:"
                f" {config.weights if config else ''} differs between machines"
            )
        decoder = Decoder(setup["decode"], scorer.preprocess if scorer else None)
        self.scanner = ShardScanner(
            TableSet(setup["tables"]), setup["pool"], decoder, scorer,
            config.column if config else None, setup["batch_size"], threads,
        )  # fmt: skip

    def scan(self, task: ShardTask) -> ShardReport:
        return self.scanner.scan(task)


def scan(
    out: str,
    pool: PoolConfig,
    scorer: ScorerConfig | None,
    decode: DecodeConfig,
    workers: ClusterConfig,
    errors: ErrorBudget,
) -> Scan:
    """Bring the tables of a pool up to date and return them.

    Shards whose signature (size and time stamp) is that of their table are not opened. When the pool
    cannot be reached at all, the tables of an earlier complete scan of the same setting serve.
    Raises Refused for a pool that is incomplete or holds no readable sample, WinnowError past the budget.
    """
    here = survey(out, pool, scorer, decode, workers)
    tables, column = here.tables, scorer.column if scorer else None
    listing = storage.join(tables.folder, f"pool-{digest_json([here.pool.shards, here.pool.missing])}.json")
    if not here.found and storage.exists(listing):
        log.warning("the pool cannot be reached; using the %s of its earlier scan", listing)
        return Scan(tables, [ShardReport(**r) for r in storage.read_json(listing)], column, 0)
    here.check()
    storage.write_json(storage.join(tables.folder, "set.json"), here.identity)
    done, tasks = divide(tables, here.found)
    if tasks:
        done |= _run(here, decode, workers, errors, tasks, done)
    reports = [done[shard_id(s)] for s in here.found]
    if not any(r.status.get("ok") for r in reports):
        raise Refused(f"no sample of the pool can be read: {_why(reports)}")
    errors.check(_tally(reports), sum(r.samples for r in reports), reports)
    storage.write_json(listing, [asdict(r) for r in reports])
    return Scan(tables, reports, column, len(tasks))


@dataclass(frozen=True)
class Survey:
    """What is there before a scan, found without writing anything.

    pool: with absolute paths. found, absent: shards. identity: what decides the content of tables. scorer: its
    precision settled. tables: where they are, or will be.
    """

    pool: PoolConfig
    found: list[str]
    absent: list[str]
    identity: dict[str, Any]
    scorer: ScorerConfig | None
    tables: TableSet

    def check(self) -> None:
        """Raises Refused for a pool that is not there, or not whole."""
        if not self.found:
            raise Refused(
                f"pool.shards={self.pool.shards}: none of {len(self.absent)} shards exists, {self.absent[0]} for one"
            )
        if self.absent and self.pool.missing == "error":
            names = f"{', '.join(self.absent[:10])}{' ...' if len(self.absent) > 10 else ''}"
            raise Refused(
                f"{len(self.absent)} shards of the pool are missing: {names}; pool.missing=skip goes on without them"
            )

    def worker_setup(self, tables: str, decode: DecodeConfig) -> dict[str, Any]:
        """What a `ScanWorker` that writes to the folder `tables` is built from."""
        return {
            "tables": tables,
            "pool": self.pool,
            "decode": decode,
            "scorer": self.scorer,
            "fingerprint": self.identity.get("fingerprint"),
            "batch_size": self.identity["batch_size"],
        }


def survey(
    out: str, pool: PoolConfig, scorer: ScorerConfig | None, decode: DecodeConfig, workers: ClusterConfig
) -> Survey:
    """Find the pool's shards and settle the scorer, which is loaded unless tables of `out` know it.

    Raises Refused when the scorer cannot be loaded, or no shard is named.
    """
    absolute = PoolConfig(**{**asdict(pool), "shards": _absolute(pool.shards)})
    found, absent = _find(absolute)
    identity, settled = _identity(out, absolute, scorer, decode, workers, bool(found))
    tables = TableSet(storage.join(out, "features", _table_set_name(identity)))
    return Survey(absolute, found, absent, identity, settled, tables)


def _absolute(spec: Any) -> Any:
    patterns = [spec] if isinstance(spec, str) else list(spec)
    return [storage.absolute(p, "pool.shards") for p in patterns]


def _find(pool: PoolConfig) -> tuple[list[str], list[str]]:
    """(shards that exist, shards that are listed or implied but absent)."""
    try:
        listed = shards.expand(pool.shards)
    except Refused:
        if any(storage.exists(storage.parent(p)) for p in pool.shards):
            raise
        return [], list(pool.shards)
    absent = shards.missing(listed)
    gone = set(absent)
    return [s for s in listed if s not in gone], absent


def _identity(
    out: str,
    pool: PoolConfig,
    scorer: ScorerConfig | None,
    decode: DecodeConfig,
    workers: ClusterConfig,
    scan_ahead: bool,
) -> tuple[dict[str, Any], ScorerConfig | None]:
    """What decides the content of tables, and the scorer with its precision settled.

    A scorer that tables of this folder were made with is recognised by its files, without loading it.
    """
    base = {"version": TABLE_VERSION, "pool": pool.reading(), "decode": asdict(decode)}
    if scorer is None:
        return {**base, "scorer": None, "batch_size": CPU_BATCH}, None
    source = scorer.source()
    root = storage.join(out, "features")
    for name in storage.listdir(root):
        known = TableSet(storage.join(root, name))
        identity = known.identity() if storage.exists(known.path("set", "json")) else {}
        if identity.get("source") != {**source, "name": scorer.name}:
            continue
        if any(identity[k] != base[k] for k in base):
            continue
        precision = identity["scorer"]["precision"]
        if scorer.precision in ("auto", precision):
            return identity, ScorerConfig(**{**asdict(scorer), "precision": precision})
    if scan_ahead:
        cluster.connect()
    gpu = cluster.plan_workers(workers, 1).gpus > 0 if scan_ahead else torch.cuda.is_available()
    precision = scorer.precision if scorer.precision != "auto" else "fp16" if gpu else "fp32"
    settled = ScorerConfig(**{**asdict(scorer), "precision": precision})
    loaded = Scorer(settled)
    identity = {
        **base,
        "scorer": loaded.identity,
        "column": scorer.column,
        "fingerprint": loaded.fingerprint,
        "source": {**source, "name": scorer.name},
        "batch_size": scorer.batch_size if gpu else min(scorer.batch_size, CPU_BATCH),
    }
    return identity, settled


def _table_set_name(identity: dict[str, Any]) -> str:
    """Digest of all that decides the content of tables; where the weights lie is not part of it."""
    return digest_json({k: v for k, v in identity.items() if k != "source"})


def divide(tables: TableSet, found: list[str]) -> tuple[dict[str, ShardReport], list[ShardTask]]:
    """Reports of shards whose table is current, and tasks for the rest."""
    marks: dict[str, dict[str, Any]] = {}
    counts = shards.CountFiles()
    committed = {n for n in storage.listdir(tables.folder) if n.endswith(".json")}
    done, tasks = {}, []
    for shard in found:
        folder = storage.parent(shard)
        if folder not in marks:
            marks[folder] = storage.signatures(folder)
        mark = marks[folder][storage.name(shard)]
        beside = marks[folder].get(storage.name(sidecar.path_of(shard)))
        name = shard_id(shard)
        report = tables.report(name) if f"{name}.json" in committed else None
        task = ShardTask(
            shard=shard, id=name, signature=mark, sidecar=beside, promised=counts.promised(shard)
        )
        now = (mark, beside, task.promised)
        if report and (report.signature, report.sidecar, report.promised) == now:
            done[name] = report
        else:
            tasks.append(task)
    return done, tasks


def _run(
    here: Survey,
    decode: DecodeConfig,
    config: ClusterConfig,
    errors: ErrorBudget,
    tasks: list[ShardTask],
    done: dict[str, ShardReport],
) -> dict[str, ShardReport]:
    """Scan the tasks on Ray; returns their reports by shard id."""
    cluster.connect()
    workers = cluster.plan_workers(config, len(tasks))
    setup, total = here.worker_setup(here.tables.folder, decode), len(here.found)
    fresh: dict[str, ShardReport] = {}
    counts, samples = _tally(done.values()), sum(r.samples for r in done.values())
    with Progress("scan", total, done=total - len(tasks)) as progress:
        for _task, report in cluster.map_actors(workers, ScanWorker, [setup, workers.cpus], "scan", tasks):
            fresh[report.id] = report
            progress.step(report.samples)
            counts.update(report.rejected())
            samples += report.samples
            if (
                samples >= BUDGET_MINIMUM
            ):  # stop early only for what the shards still to come cannot make good
                expected = samples * total / (len(done) + len(fresh))
                errors.check(counts, expected, fresh.values())
    return fresh


def _tally(reports: Iterable[ShardReport]) -> Counter[str]:
    """Rejected samples by reason."""
    counts: Counter[str] = Counter()
    for r in reports:
        counts.update(r.rejected())
    return counts


def _why(reports: Sequence[ShardReport]) -> str:
    damaged = [f"{storage.name(r.shard)}: {r.detail}" for r in reports if r.damage]
    parts = [f"{n} {reason}" for reason, n in _tally(reports).most_common()] or ["the shards hold none"]
    return "; ".join([*parts, *damaged[:5]])

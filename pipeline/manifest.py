"""What a run leaves: decisions, subset.npy, manifest.parquet, accounting.parquet and the receipt."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import reasons, storage
from pipeline.decisions import Decisions, StageResult
from pipeline.errors import Refused, WinnowError
from pipeline.scan import Scan
from pipeline.tables import ShardReport, TableSet
from pipeline.uids import SUBSET, UidSorter

VERSIONED = (
    "winnow",
    "ray",
    "torch",
    "torchvision",
    "open-clip-torch",
    "faiss-gpu",
    "faiss-cpu",
    "polars",
    "numpy",
)

ACCOUNT: dict[str, Any] = {
    "shard": pl.String,
    "id": pl.String,
    "samples": pl.Int64,
    "kept": pl.Int64,
    "dropped": pl.Int64,
    "rejected": pl.Int64,
    "entries": pl.Int64,
    "reasons": pl.List(pl.Struct({"reason": pl.String, "count": pl.Int64})),
    "decisions_sha256": pl.String,
}
OUTPUTS = ("subset.npy", "manifest.parquet", "accounting.parquet")


@dataclass(frozen=True)
class Run:
    """A finished (or running) selection: `<out>/runs/<name>/`."""

    out: str
    name: str

    @property
    def folder(self) -> str:
        return storage.join(self.out, "runs", self.name)

    def path(self, *parts: str) -> str:
        return storage.join(self.folder, *parts)

    @property
    def decisions(self) -> Decisions:
        return Decisions(self.path("decisions"))

    def receipt(self) -> dict[str, Any]:
        """Raises Refused when the run has not finished, or was never started."""
        path = self.path("receipt.json")
        if not storage.exists(path):
            runs = storage.listdir(storage.join(self.out, "runs"))
            raise Refused(
                f"out={self.out} run={self.name}: no finished run there (runs: {', '.join(runs) or 'none'})"
            )
        return storage.read_json(path)

    def digest(self) -> str:
        """Of all that decided the selection: another one under the same name has another. Refuses as `receipt`."""
        return self.receipt()["stages"][-1]["digest"]

    def shard_ids(self) -> list[str]:
        """The shard ids of the pool, in its order."""
        with storage.open_file(self.path("accounting.parquet")) as f:
            return pq.read_table(f, columns=["id"])["id"].to_pylist()

    def tables(self) -> TableSet:
        return TableSet(storage.join(self.out, "features", self.receipt()["tables"]))


def write_outputs(
    run: Run, scan: Scan, last: Decisions, results: Sequence[StageResult], about: dict[str, Any]
) -> dict:
    """Write everything and return the receipt; `about` adds its config, seconds and seed.

    Raises WinnowError when shards, decisions, manifest and subset do not tell the same numbers.
    """
    storage.remove_tree(run.path("receipt.json"))  # it vouches for the rest, so it goes first and comes last
    storage.remove_tree(run.path("report.html"))  # of what was here before
    accounts = []
    sorter = UidSorter()
    columns = [scan.column] if scan.column else []
    schema = _manifest_schema(columns)
    entries = 0
    with storage.commit(run.path("manifest.parquet")) as tmp:
        with pq.ParquetWriter(tmp, schema, compression="zstd") as writer:
            for number, (kept, counted) in enumerate(_kept(run, scan, last, columns)):
                accounts.append(counted)
                if len(kept):
                    order = pl.int_range(entries, entries + len(kept), eager=True)
                    writer.write_table(
                        kept.with_columns(order=order).to_arrow().select(schema.names).cast(schema)
                    )
                entries += len(kept)
                copies = kept["copies"].to_numpy()
                hi, lo = (np.repeat(kept[c].to_numpy(), copies) for c in ("uid_hi", "uid_lo"))
                sorter.add(hi, lo, number, np.zeros(len(hi), np.uint32))
    written = _write_subset(run.path("subset.npy"), sorter)
    accounting = pl.DataFrame(accounts, schema=ACCOUNT)
    with storage.commit(run.path("accounting.parquet")) as tmp:
        accounting.write_parquet(tmp)
    digests = {name: storage.sha256(run.path(name)) for name in OUTPUTS}
    receipt = _receipt(scan, accounting, entries, written, results, {"outputs": digests, **about})
    storage.write_json(run.path("receipt.json"), receipt)
    if not receipt["adds_up"]:
        raise WinnowError(
            f"{run.path('receipt.json')}: the run does not add up; its outputs are not to be used"
        )
    return receipt


def _kept(
    run: Run, scan: Scan, last: Decisions, columns: list[str]
) -> Iterator[tuple[pl.DataFrame, dict[str, Any]]]:
    """(manifest rows, account) of each shard; the decisions become the run's own on the way."""
    storage.remove_tree(run.path("decisions"))
    wanted = ["uid_hi", "uid_lo", "shard", "key", *columns]
    for report, (shard, rows) in zip(scan.reports, scan.tables.stream(scan.ids, wanted)):
        storage.link(last.path(shard), run.decisions.path(shard))
        content = storage.read_bytes(last.path(shard))
        frame = pl.read_parquet(content)
        if len(frame) != len(rows) or not frame["uid_lo"].equals(rows["uid_lo"]):
            raise WinnowError(f"{last.path(shard)}: its rows are not those of the feature table")
        digest = hashlib.sha256(content).hexdigest()
        yield kept_rows(rows, frame), {**account(report, frame), "decisions_sha256": digest}


def kept_rows(rows: pl.DataFrame, decisions: pl.DataFrame) -> pl.DataFrame:
    """The rows of a feature table that its decisions keep, with their row number and copies."""
    numbered = rows.with_columns(row=pl.int_range(len(rows), dtype=pl.Int32), copies=decisions["copies"])
    return numbered.filter(decisions["kept"])


def _manifest_schema(columns: list[str]) -> pa.Schema:
    scores = [(c, pa.float32()) for c in columns]
    return pa.schema(
        [
            ("uid_hi", pa.uint64()),
            ("uid_lo", pa.uint64()),
            ("shard", pa.string()),
            ("key", pa.string()),
            ("row", pa.int32()),  # of the shard's feature table
            ("copies", pa.uint32()),
            *scores,
            ("order", pa.int64()),
        ]
    )


def _write_subset(path: str, sorter: UidSorter) -> int:
    """The uids, sorted, one entry a copy; returns how many were written."""
    total, written = sorter.count, 0
    with storage.commit(path) as tmp, open(tmp, "wb") as f:
        np.lib.format.write_array_header_1_0(
            f, {"descr": np.lib.format.dtype_to_descr(SUBSET), "fortran_order": False, "shape": (total,)}
        )
        for records in sorter.sorted_ranges():
            block = np.empty(len(records), SUBSET)
            block["f0"], block["f1"] = records["hi"], records["lo"]
            f.write(block.tobytes())
            written += len(block)
    return written


def account(report: ShardReport, decisions: pl.DataFrame) -> dict[str, Any]:
    """One shard's samples by fate, counted from its decisions and not from its report."""
    counts = Counter(dict(decisions["reason"].drop_nulls().value_counts().iter_rows()))
    rejected = {r: n for r, n in sorted(counts.items()) if r in reasons.REJECTED}
    if report.lost and report.damage:
        rejected[report.damage] = rejected.get(report.damage, 0) + report.lost
    dropped = {r: n for r, n in sorted(counts.items()) if r not in reasons.REJECTED}
    return {
        "shard": report.shard,
        "id": report.id,
        "samples": report.samples,
        "kept": int(decisions["kept"].sum()),
        "dropped": sum(dropped.values()),
        "rejected": sum(rejected.values()),
        "entries": int(decisions["copies"].sum()),
        "reasons": [{"reason": r, "count": n} for r, n in {**dropped, **rejected}.items()],
    }


def _receipt(
    scan: Scan, accounting: pl.DataFrame, rows: int, entries: int,
    results: Sequence[StageResult], about: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    counts: Counter[str] = Counter()
    for shard in accounting["reasons"]:
        counts.update({r["reason"]: r["count"] for r in shard})
    notes: Counter[str] = Counter()
    for report in scan.reports:
        notes.update(report.notes)
    rejected = {r: n for r, n in sorted(counts.items()) if r in reasons.REJECTED}
    dropped = {r: n for r, n in sorted(counts.items()) if r not in reasons.REJECTED}
    each = (
        accounting["kept"] + accounting["dropped"] + accounting["rejected"] == accounting["samples"]
    ).all()
    kept = int(accounting["kept"].sum())
    identity = scan.tables.identity()
    return {
        "pool": {
            "shards": len(scan.reports),
            "samples": scan.samples,
            "damaged_shards": [
                {"shard": r.shard, "reason": r.damage, "detail": r.detail, "lost": r.lost}
                for r in scan.reports
                if r.damage
            ],
            "empty_shards": [r.shard for r in scan.reports if not r.samples and not r.damage],
            "notes": dict(sorted(notes.items())),
        },
        "kept": kept,
        "entries": entries,
        "dropped": dropped,
        "rejected": rejected,
        "adds_up": bool(
            each
            and kept + sum(dropped.values()) + sum(rejected.values()) == scan.samples
            and kept == rows
            and entries == int(accounting["entries"].sum())
            and rejected == scan.rejected()
        ),
        "reasons": {r: reasons.explain(r) for r in sorted(counts)},
        "stages": [
            {"name": r.name, "kept": r.kept, "entries": r.entries, "digest": r.digest} for r in results
        ],
        "tables": storage.name(scan.tables.folder),
        "scorer": {
            "fingerprint": identity.get("fingerprint"),
            "column": scan.column,
            **(identity["scorer"] or {}),
        },
        **about,
        "versions": {"python": platform.python_version(), **versions()},
    }


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on, those that are installed."""
    found = {}
    for package in VERSIONED:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found

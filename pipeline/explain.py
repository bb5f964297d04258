"""Why one sample stayed or went: what every stage of a run said of it, and what it was compared with."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from PIL import Image

from pipeline import reasons, storage
from pipeline.decisions import Decisions
from pipeline.decode import FORMATS
from pipeline.errors import Refused
from pipeline.lookup import Place, Uid, find_samples, rows_of
from pipeline.manifest import Run
from pipeline.samples import format_uid, parse_uid
from pipeline.shards import Member, open_shard

BYTES = ("sha256", "pixel_hash")
HIDDEN = ("uid_hi", "uid_lo", "shard", "key", "members", "offset", "size", "caption_repaired")
LISTED = 10  # duplicates of one sample that are named


@dataclass(frozen=True)
class Verdict:
    """One stage's word: kept or the reason, and the number that decided with the cut it was held against."""

    stage: str
    kept: bool
    reason: str | None
    value: float | None
    cut: float | None
    copies: int

    def line(self, before: Verdict | None) -> str:
        if before is not None and not before.kept:
            return f"{self.stage}: was out already"
        if self.kept:
            return f"{self.stage}: kept{self._numbers()}" + (
                f", {self.copies} copies" if self.copies > 1 else ""
            )
        assert self.reason is not None
        return f"{self.stage}: {self.reason}{self._numbers()}: {reasons.explain(self.reason)}"

    def _numbers(self) -> str:
        if self.value is None:
            return ""
        return (
            f" ({self.value:.6g})"
            if self.cut is None
            else f" ({self.value:.6g} against a cut of {self.cut:.6g})"
        )


@dataclass(frozen=True)
class Explanation:
    """All that a run knows of one sample. `features`: its row of the feature table, by column.

    duplicate_of: what it was dropped for; stands_for: what was dropped for it, `stands_for_count` of them.
    leaks: evaluation images it is too close to. influence: rows of influence tables.
    rounds: those that show it, and how often; None without rounds.
    """

    uid: Uid
    place: Place
    features: dict[str, Any]
    verdicts: list[Verdict]
    duplicate_of: list[dict[str, Any]] = field(default_factory=list)
    stands_for: list[dict[str, Any]] = field(default_factory=list)
    stands_for_count: int = 0
    leaks: list[dict[str, Any]] = field(default_factory=list)
    influence: list[dict[str, Any]] = field(default_factory=list)
    rounds: dict[int, int] | None = None

    @property
    def kept(self) -> bool:
        return self.verdicts[-1].kept

    def image(self) -> bytes | None:
        """The stored bytes of the picture; None when the sample has none, or its shard is gone."""
        offset, size = self.features.get("offset"), self.features.get("size")
        if offset is None or size is None:
            return None
        try:
            with open_shard(self.features["shard"]) as shard:
                return shard.read(Member("", offset, size))
        except FileNotFoundError:
            return None

    def picture(self) -> Image.Image | None:
        """The decoded picture as RGB; None where there is none, or it cannot be decoded."""
        data = self.image()
        try:
            return Image.open(io.BytesIO(data), formats=FORMATS).convert("RGB") if data else None
        except Exception:  # whatever PIL says of damaged bytes: the scan gave the reason already
            return None

    def describe(self) -> str:
        """What a person reads."""
        f = self.features
        lines = [
            f"{format_uid(*self.uid)}: {'kept' if self.kept else f'out: {self.verdicts[-1].reason}'}",
            f"  lies in   {f['shard']}",
            f"            key {f.get('key')!r}, row {self.place.row}"
            + (f", image at byte {f['offset']:,}, {f['size']:,} bytes" if f.get("size") else ", no image"),
            f"  caption   {f.get('caption')!r}",
        ]
        lines += [
            f"  {k:9} {_plain(v)}" for k, v in f.items() if k not in (*HIDDEN, "caption") and v is not None
        ]
        lines.append("  stages")
        lines += [f"    {v.line(before)}" for v, before in zip(self.verdicts, [None, *self.verdicts])]
        lines += [f"  duplicate of {_pair(d, 'kept_uid')}" for d in self.duplicate_of]
        if self.stands_for_count:
            lines.append(f"  stands for {self.stands_for_count:,} samples that were dropped for it")
            lines += [f"    {_pair(d, 'uid')}" for d in self.stands_for]
        lines += [
            f"  leaks {r['set']}: {r['evaluation']}, similarity {r['similarity']:.4f}" for r in self.leaks
        ]
        for row in self.influence:
            told = ", ".join(f"{k} {_plain(v)}" for k, v in row.items() if not k.startswith("uid_"))
            lines.append(f"  influence {told}")
        if self.rounds is not None:
            shown = [f"{t}" if n == 1 else f"{t} ({n} times)" for t, n in self.rounds.items()]
            lines.append(f"  rounds    {', '.join(shown) or 'none'}")
        return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _pair(row: dict[str, Any], which: str) -> str:
    bits = f", {row['hamming']} of 64 hash bits differ" if row.get("hamming") is not None else ""
    uid = format_uid(row[f"{which}_hi"], row[f"{which}_lo"])
    return f"{uid}, similarity {row['similarity']:.4f}{bits} ({row['reason']})"


def explain(run: Run, uids: Sequence[str]) -> list[Explanation]:
    """Explanations in the order of `uids` (32 hex digits each); a uid that the pool uses twice has two.

    Raises Refused for a malformed uid, for uids that the pool lacks, and when there is no finished run.
    """
    try:
        wanted = [parse_uid(u) for u in uids]
    except ValueError as e:
        raise Refused(f"uid: {e}") from None
    receipt = run.receipt()
    ids = pl.read_parquet(storage.read_bytes(run.path("accounting.parquet")), columns=["id"])["id"]
    repeats = "duplicate_uid" in receipt["dropped"]
    found = find_samples(run.tables(), ids.to_list(), wanted, every=repeats)
    if absent := [format_uid(*u) for u, places in found.items() if not places]:
        raise Refused(f"uid={', '.join(absent)}: not in the pool of {run.folder}")
    return [_explain(run, receipt, uid, place) for uid in wanted for place in found[uid]]


def _explain(run: Run, receipt: dict[str, Any], uid: Uid, place: Place) -> Explanation:
    tables = run.tables()
    features = tables.read(place.shard, tables.columns(place.shard)).row(place.row, named=True)
    stages = [f"{n:02d}-{s['name']}" for n, s in enumerate(receipt["stages"])]
    verdicts = []
    for number, stage in enumerate(stages):
        row = Decisions(run.path("stages", stage)).read(place.shard).row(place.row, named=True)
        numbers = {k: row[k] for k in ("kept", "reason", "value", "cut", "copies")}
        verdicts.append(Verdict(receipt["stages"][number]["name"], **numbers))
    of = {
        name: [run.path("stages", s, f"{name}.parquet") for s in stages]
        for name in ("duplicates", "leaks", "influence")
    }
    stand_ins = [rows_of(p, uid, "kept_", LISTED) for p in of["duplicates"]]
    return Explanation(
        uid, place, features, verdicts,
        duplicate_of=[r for p in of["duplicates"] for r in rows_of(p, uid)[0]],
        stands_for=[r for rows, _ in stand_ins for r in rows][:LISTED],
        stands_for_count=sum(n for _, n in stand_ins),
        leaks=[r for p in of["leaks"] for r in rows_of(p, uid)[0]],
        influence=[r for p in of["influence"] for r in rows_of(p, uid)[0]],
    )  # fmt: skip

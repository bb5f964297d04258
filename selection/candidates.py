"""Samples of a run with features to choose a coreset from: a bounded share of the run, read shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.samples import IMAGE_EXTS, format_uid, pick
from pipeline.shards import Member, open_shard
from pipeline.uids import find_uids
from selection.manifest_rows import UID
from selection.proxy.pixels import drawn
from selection.ranked import Item

COLUMNS = ["uid_hi", "uid_lo", "label", "status"]


@dataclass(frozen=True)
class Candidates:
    """n samples. uids: `u8,u8` (n,), sorted. labels: n texts, "" where the pool has none. features: float (n, d).
    skipped: samples without usable features."""

    uids: npt.NDArray[np.void]
    labels: list[str]
    features: np.ndarray
    skipped: int = 0

    def labelled(self, labels: list[str]) -> Candidates:
        return replace(self, labels=labels)

    def with_labels(self) -> Candidates:
        """Those that have a label; the others count as skipped. Raises Refused when there are none."""
        rows = [i for i, label in enumerate(self.labels) if label]
        if not rows:
            raise Refused("labels=pool: no sample has a label; labels=none takes the pool as one class")
        lost = len(self.labels) - len(rows)
        labels = [self.labels[i] for i in rows]
        return Candidates(self.uids[rows], labels, self.features[rows], self.skipped + lost)


def share_of(run: Run, most: int) -> float:
    """The share of a run's samples that comes to about `most`, in (0, 1]."""
    return min(1.0, most / max(1, run.receipt()["kept"]))


def has_embeddings(run: Run) -> bool:
    return bool(run.tables().identity().get("scorer"))


def embedded(run: Run, most: int, seed: int) -> Candidates:
    """About `most` samples of the run, drawn by uid and seed, with their unit image embeddings, float16 (n, d)."""
    tables, share = run.tables(), share_of(run, most)
    uids, labels, features, skipped = [], [], [], 0
    for shard in run.shard_ids():
        frame = tables.read(shard, COLUMNS)
        kept = run.decisions.read(shard, ["copies"])["copies"].to_numpy() > 0
        mine = _uids(frame)
        rows = np.flatnonzero(kept & drawn(mine, share, seed))
        if not len(rows):
            continue
        block = np.asarray(tables.embeddings(shard, "image")[rows])
        usable = np.isfinite(block).all(1)
        skipped += int((~usable).sum())
        uids.append(mine[rows[usable]])
        features.append(block[usable])
        labels += frame["label"][rows[usable].tolist()].fill_null("").to_list()
    if not uids:
        raise Refused(f"{run.folder}: the run kept no sample")
    joined = np.concatenate(uids)
    order = np.argsort(joined, order=("f0", "f1"), kind="stable")
    return Candidates(joined[order], [labels[i] for i in order], np.concatenate(features)[order], skipped)


def clusters(features: np.ndarray, k: int, seed: int) -> list[str]:
    """Labels "0" .. "k-1" by spherical k-means. features: float (n, d), unit rows. Raises Refused when k > n."""
    if k > len(features):
        raise Refused(f"clusters={k}: there are {len(features)} samples")
    x = np.ascontiguousarray(features, np.float32)
    kmeans = faiss.Kmeans(
        x.shape[1], k, niter=20, seed=seed, spherical=True, min_points_per_centroid=1,
        max_points_per_centroid=len(x) // k + 1,
    )  # fmt: skip
    kmeans.train(x)
    _, nearest = kmeans.index.search(x, 1)
    width = len(str(k - 1))
    return [f"{c:0{width}d}" for c in nearest[:, 0]]


def items_of(run: Run, uids: npt.NDArray[np.void], labels: Sequence[str], ranks: Sequence[int]) -> list[Item]:
    """The samples `uids`, in that order, with their image bytes and captions as the pool stores them.

    Raises Refused when a shard is gone.
    """
    found: dict[int, Item] = {}
    order = np.argsort(uids, order=("f0", "f1"))
    wanted = uids[order]
    for shard, frame in _rows(run):
        at = find_uids(wanted["f0"], wanted["f1"], frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy())
        rows = np.flatnonzero(at >= 0)
        if not len(rows):
            continue
        try:
            with open_shard(shard) as opened:
                for row, place in zip(frame[rows.tolist()].iter_rows(named=True), order[at[rows]]):
                    members = [Member(m["suffix"], m["offset"], m["size"]) for m in row["members"]]
                    image = pick(members, IMAGE_EXTS)
                    assert image is not None  # the scan has read it
                    record = {"uid": format_uid(row["uid_hi"], row["uid_lo"])}
                    found[int(place)] = Item(
                        opened.read(image), image.ext, labels[place], int(ranks[place]), row["caption"] or "", record
                    )  # fmt: skip
        except FileNotFoundError:
            raise Refused(f"{shard}: the shard is gone; the chosen images are read from the pool") from None
    return [found[i] for i in range(len(uids))]


def _rows(run: Run) -> Iterator[tuple[str, pl.DataFrame]]:
    tables = run.tables()
    for shard in run.shard_ids():
        frame = tables.read(shard, ["uid_hi", "uid_lo", "caption", "members"])
        kept = run.decisions.read(shard, ["copies"])["copies"].to_numpy() > 0
        report = tables.report(shard)
        if report is not None and kept.any():
            yield report.shard, frame.filter(kept)


def _uids(frame: pl.DataFrame) -> npt.NDArray[Any]:
    uids = np.empty(len(frame), UID)
    uids["f0"], uids["f1"] = frame["uid_hi"].to_numpy(), frame["uid_lo"].to_numpy()
    return uids

"""RS2 rounds of a finished run: `<run>/rounds/`, as one uid file a round and as a description that needs none.

    rounds.json, rounds.counts.npy   what `open_rounds` makes every round from
    00000.npy, 00001.npy, ...        uids of round 0, 1, ...: dtype `u8,u8`, sorted

Every file is written whole or not at all, and holds the same bytes whichever worker writes it, so a killed
writing goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline import cluster, storage
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.progress import Progress
from selection import round_files
from selection.quotas import round_size
from selection.rounds import Rounds
from selection.run_manifest import RunManifest

DESCRIPTION = "rounds.json"
DRAWS = ("format", "seed", "ratio", "replacement", "counts_sha256", "stratify", "strata", "manifest")
"""What in a description decides which entries a round has."""


@dataclass(kw_only=True)
class RoundsConfig:
    """RS2: every round is a fresh random share of the run's entries (Okanovic et al., ICLR 2024).

    ratio: that share. rounds: how many; 0 for none. replacement: whether rounds are drawn independently; without
    it every entry is used once before any is used again. stratify: a column whose values keep their shares in
    every round. seed: of the draws. files: write a uid file a round; the description is written in any case.
    batch_size: samples a step on all devices together, to tell the steps of a round; null leaves them open.
    """

    ratio: float = 0.1
    rounds: int = 200
    replacement: bool = False
    stratify: str | None = None
    seed: int = 0
    files: bool = True
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio}: above 0 and at most 1")
        if not 0 <= self.rounds < 1 << 32:
            raise ValueError(f"rounds={self.rounds}: 0 for none, or more")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed}: 0 or more")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: at least 1, or null")


@dataclass(frozen=True)
class RoundTask:
    """One round to write; its name stands in messages."""

    t: int

    def __str__(self) -> str:
        return f"round {self.t}"


class RoundWriter:
    """The Ray actor: writes uid files; memory is one shard's rows and a bounded sort."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rounds = open_rounds(run, members=False)

    def write(self, task: RoundTask) -> int:
        with storage.commit(path_of(self.run, task.t)) as tmp:
            round_files.write_uids(self.rounds, task.t, tmp)
        return self.rounds.size(task.t)


def write_rounds(run: Run, config: RoundsConfig, workers: ClusterConfig) -> dict[str, Any]:
    """Describe the rounds of a run, write their files, and return the description.

    Rounds of other settings, or of another manifest, that are there already are replaced. Raises Refused for a
    run that is not finished or kept nothing, for an unknown column, and for a ratio too small for its entries.
    """
    manifest = RunManifest(run, config.stratify, members=False)
    counts, strata, values = manifest.count()
    try:
        round_size(int(counts.sum()), config.ratio)
    except ValueError as e:
        raise Refused(str(e)) from None
    rounds = Rounds(counts, config.ratio, config.seed, replacement=config.replacement, strata=strata)
    about = _about(rounds, config, manifest.digest, values)
    _describe(run, rounds, about)
    _write_files(run, config, workers, rounds.k)
    return about


def _about(rounds: Rounds, config: RoundsConfig, manifest: str, values: list[Any]) -> dict[str, Any]:
    """What the description says beyond what makes the rounds again."""
    steps = None if config.batch_size is None else rounds.steps(0, config.batch_size)
    return {
        "manifest": manifest,
        "rounds": config.rounds,
        "samples_per_round": rounds.k,
        "samples_in_all": rounds.k * config.rounds,
        "batch_size": config.batch_size,
        "steps_per_round": steps,
        "steps_in_all": None if steps is None else steps * config.rounds,
        "unique_entries": _unique(rounds, config.rounds),
        "stratify": config.stratify,
        "strata": values,
    }


def _unique(rounds: Rounds, number: int) -> int:
    """Distinct entries that so many rounds show together: exact without replacement, with it the mean, rounded."""
    if not rounds.replacement:
        return rounds.unique_seen(number)
    return round(rounds.entries * (1 - (1 - rounds.k / rounds.entries) ** number))


def _describe(run: Run, rounds: Rounds, about: dict[str, Any]) -> None:
    """Write the description; files of other draws go first, so that none is ever taken for one of these."""
    path = run.path("rounds", DESCRIPTION)
    new = round_files.description(rounds, path, about)
    old = storage.read_json(path) if storage.exists(path) else {}
    if old == new:
        return
    same = all(old.get(key) == new[key] for key in DRAWS)
    storage.remove_tree(path)
    keep = {storage.name(path_of(run, t)) for t in range(new["rounds"])} if same else set()
    for name in storage.listdir(run.path("rounds")):
        if name.endswith(".npy") and name not in keep:
            storage.remove_tree(run.path("rounds", name))
    round_files.save(rounds, path, about)


def _write_files(run: Run, config: RoundsConfig, workers: ClusterConfig, size: int) -> None:
    there = set(storage.listdir(run.path("rounds")))
    wanted = range(config.rounds) if config.files else range(0)
    tasks = [RoundTask(t) for t in wanted if storage.name(path_of(run, t)) not in there]
    if not tasks:
        return
    cluster.connect()
    plan = cluster.plan_workers(workers, len(tasks))
    with Progress("rounds", config.rounds, "round", config.rounds - len(tasks)) as progress:
        for _ in cluster.map_actors(plan, RoundWriter, (run,), "write", tasks):
            progress.step(size)


def describe(run: Run, about: dict[str, Any]) -> str:
    """The rounds in two lines, as a person reads them."""
    steps = "" if about["steps_per_round"] is None else f", {about['steps_per_round']:,} steps each"
    return (
        f"{about['rounds']:,} rounds of {about['samples_per_round']:,} samples{steps}; together they show "
        f"{about['unique_entries']:,} distinct entries\n{run.path('rounds')}/ holds them"
    )


def path_of(run: Run, t: int) -> str:
    """The uid file of round t."""
    return run.path("rounds", f"{t:05d}.npy")


def open_rounds(run: Run, *, members: bool = True) -> Rounds:
    """The rounds that `write_rounds` described, over the run's manifest: `uids(t)`, `shards(t)`, and what
    `selection.loader.RoundLoader` trains on.

    members: whether `shards` also tells where images and captions lie. Raises Refused when there are none, or
    the run has been made anew since.
    """
    path = run.path("rounds", DESCRIPTION)
    if not storage.exists(path):
        raise Refused(f"{run.folder}: it has no rounds; make them with python -m jobs.rounds")
    told = storage.read_json(path)
    manifest = RunManifest(run, told["stratify"], told["strata"], members=members)
    if manifest.digest != told["manifest"]:
        raise Refused(f"{path}: the run's manifest has changed since; make the rounds anew with jobs.rounds")
    return round_files.load(path, manifest)


def rounds_of_sample(run: Run, shard: str, uid: tuple[int, int]) -> dict[int, int] | None:
    """Rounds that show a sample, and how often each does; None for a run without rounds.

    shard: the sample's. Draws that one shard of every round; no round's file is read.
    """
    if not storage.exists(run.path("rounds", DESCRIPTION)):
        return None
    rounds = open_rounds(run, members=False)
    manifest = rounds.manifest
    assert manifest is not None
    if shard not in manifest.shards:
        return {}
    index = list(manifest.shards).index(shard)
    rows = manifest.rows(index)
    mine = np.flatnonzero((rows.uid_hi == np.uint64(uid[0])) & (rows.uid_lo == np.uint64(uid[1])))
    entries = np.flatnonzero(np.isin(rows.rows_of_entries(), mine))
    number = storage.read_json(run.path("rounds", DESCRIPTION))["rounds"]
    shown = {t: int(np.isin(rounds.members(t, index), entries).sum()) for t in range(number)}
    return {t: n for t, n in shown.items() if n}

"""Verify training shards: that a resharded folder holds exactly the samples of the selection it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from pipeline import cluster, storage
from pipeline.cluster import ClusterConfig
from pipeline.manifest import Run
from pipeline.progress import Progress
from pipeline.reshard import SHARD_FORMAT, OutputShard, ReshardWorker, plan, stats_path
from pipeline.samples import IMAGE_EXTS, format_uid, pick
from pipeline.shards import open_shard
from pipeline.verify import Difference, differs, readable


def verify_training(run: Run, to: str, config: ClusterConfig) -> Iterator[str]:
    """Check the training shards in the folder `to`; yields one line for each part that agrees.

    Every shard is read: names, order, captions, and each image against the sha256 that the scan took.
    Raises Difference at the first thing that does not agree.
    """
    manifest, subset, shard_size = _selection(run, to)
    shards = plan(manifest, shard_size)
    yield _lists(to, shards, subset)
    cluster.connect()
    workers = cluster.plan_workers(ClusterConfig(workers=config.workers, gpus_per_worker=0.0), len(shards))
    args = [manifest, run.tables().folder, to]
    samples = 0
    with Progress("training shards", len(shards)) as progress:
        for task, wrong in cluster.map_actors(workers, TrainingShardWorker, args, "check", shards):
            if wrong:
                raise Difference(wrong)
            samples += task.samples
            progress.step(task.samples)
    yield f"training shards: {samples:,} samples in {len(shards):,} shards, every image and caption as scanned"


def _selection(run: Run, to: str) -> tuple[str, str, int]:
    """(manifest, subset file, shard size) that the folder was written from."""
    path = storage.join(to, ".reshard.json")
    with readable(path):
        mark: dict[str, Any] = storage.read_json(path)
        digest, shard_size = mark["manifest"], mark["shard_size"]
    folders = [run.folder, *(run.path("subsets", n) for n in storage.listdir(run.path("subsets")))]
    for folder in folders:
        manifest = storage.join(folder, "manifest.parquet")
        if storage.exists(manifest) and storage.digest(manifest) == digest:
            return manifest, storage.join(folder, "subset.npy"), shard_size
    raise Difference(
        f"{to}: was not written from the manifest of {run.folder}, nor from a subset resharded with it"
    )


def _lists(to: str, shards: list[OutputShard], subset: str) -> str:
    """What lies beside the shards, against the plan."""
    sizes = {SHARD_FORMAT.format(s.number): s.samples for s in shards}
    for name, wanted in (
        ("sizes.json", sizes),
        ("meta.json", {"output_shard_count": len(shards), "output_count": sum(sizes.values())}),
    ):
        path = storage.join(to, name)
        with readable(path):
            found = storage.read_json(path)
        differs(path, "its content", {k: v for k, v in found.items() if k in wanted}, wanted, "the manifest")
    tars = {n for n in storage.listdir(to) if n.endswith(".tar")}
    if wrong := sorted(tars ^ sizes.keys()):
        what = "is not among the manifest's shards" if wrong[0] in tars else "is missing"
        raise Difference(f"{storage.join(to, wrong[0])}: {what}")
    for shard in shards:
        path = stats_path(to, shard.number)
        with readable(path):
            differs(path, "successes", storage.read_json(path)["successes"], shard.samples, "the manifest")
    path = storage.join(to, "sample_ids.npy")
    with readable(path):
        differs(path, "sha256", storage.sha256(path), storage.sha256(subset), storage.name(subset))
    return f"sizes.json, meta.json, sample_ids.npy and {len(shards):,} stats files: as the manifest has it"


class TrainingShardWorker(ReshardWorker):
    """The Ray actor: reads a training shard beside the rows that it should hold."""

    def check(self, task: OutputShard) -> str | None:
        """The first difference, or None."""
        path = storage.join(self.to, SHARD_FORMAT.format(task.number))
        try:
            self._compare(path, task)
        except Difference as e:
            return str(e)
        return None

    def _compare(self, path: str, task: OutputShard) -> None:
        with open_shard(path) as shard:
            index = shard.index()
            if index.reason:
                raise Difference(f"{path}: {index.detail}")
            differs(path, "the count of samples", len(index.samples), task.samples, "the manifest")
            found = iter(index.samples)
            for part in task.slices:
                for rows in self.rows(part):
                    for row in rows.iter_rows(named=True):
                        raw = next(found)
                        key = f"{format_uid(row['uid_hi'], row['uid_lo'])}-{part.copy}"
                        differs(path, "a sample's key", raw.key, key, "the manifest")
                        image, text = pick(raw.members, IMAGE_EXTS), pick(raw.members, ("txt",))
                        if image is None or text is None:
                            raise Difference(f"{path}: {key} lacks its {'caption' if image else 'image'}")
                        if hashlib.sha256(shard.read(image)).digest() != row["sha256"]:
                            raise Difference(f"{path}: the image of {key} is not the one that was scanned")
                        caption = shard.read(text).decode("utf-8", "replace")
                        differs(path, f"the caption of {key}", caption, row["caption"], "the feature table")

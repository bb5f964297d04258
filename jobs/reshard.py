"""Write training shards from a finished run, or from a subset file of your own over the same pool.

python -m jobs.reshard out=/data/winnow run=default to=/data/train
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.reshard import manifest_of_subset, reshard
from pipeline.samples import format_uid
from pipeline.uids import load_subset


@dataclass(kw_only=True)
class ReshardConfig:
    """out, run: the finished run. to: the folder for the shards. shard_size: samples in one, at most 10,000.

    subset: a `u8,u8` subset file to use instead of the run's own. allow_missing: go on although the pool
    lacks some of its uids.
    """

    out: str = MISSING
    run: str = "default"
    to: str = MISSING
    shard_size: int = 10_000
    subset: str | None = None
    allow_missing: bool = False
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.shard_size <= 10_000:
            raise ValueError(f"shard_size={self.shard_size}: must lie in [1, 10000]")


def run(node: DictConfig) -> None:
    config = build(node, "", ReshardConfig)
    here = Run(storage.absolute(config.out, "out"), config.run)
    to = storage.absolute(config.to, "to")
    tables = here.tables()
    if tables.identity()["pool"].get("metadata"):
        raise Refused(
            f"run={config.run}: its pool is metadata alone, without images; scan the shards (jobs.curate"
            f" pool.shards=...) and give that run subset={here.path('subset.npy')}"
        )
    manifest, subset = here.path("manifest.parquet"), here.path("subset.npy")
    if config.subset:
        subset = storage.absolute(config.subset, "subset")
        manifest, subset = _own_selection(here, subset, config.allow_missing)
    count = reshard(manifest, tables, subset, to, config.shard_size, config.cluster)
    samples = storage.read_json(storage.join(to, "meta.json"))["output_count"]
    print(f"{samples:,} samples in {count:,} shards under {to}")


def _own_selection(here: Run, subset: str, allow_missing: bool) -> tuple[str, str]:
    """Manifest and subset.npy of the user's subset, kept in the run's folder. Refuses uids that the pool lacks."""
    try:
        with storage.local_copy(subset) as local:
            uids = load_subset(local)
    except (OSError, ValueError) as e:
        raise Refused(f"subset={subset}: {e}") from None
    name = storage.name(subset).removesuffix(".npy")
    path = here.path("subsets", name, "manifest.parquet")
    missing = manifest_of_subset(uids, here.tables(), here.shard_ids(), path)
    if len(missing):
        listing = here.path("subsets", name, "missing.txt")
        storage.write_bytes(listing, "".join(f"{_hex(u)}\n" for u in missing).encode())
        message = f"subset={subset}: the pool lacks {len(missing)} of its uids, listed in {listing}"
        if not allow_missing:
            raise Refused(f"{message}; allow_missing=true goes on without them")
        print(message)
    used = here.path("subsets", name, "subset.npy")
    with storage.commit(used) as tmp, open(tmp, "wb") as f:
        np.save(f, uids[~np.isin(uids, missing)])
    return path, used


def _hex(uid: np.void) -> str:
    return format_uid(int(uid["f0"]), int(uid["f1"]))


register("reshard", ReshardConfig)

if __name__ == "__main__":
    launch("reshard", run)

"""Verify a finished run: recount, rehash, and compare everything it left; name the first difference.

python -m jobs.verify out=/data/winnow run=default [shards=/data/train] [deep=true]
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.manifest import Run
from pipeline.verify import verify
from pipeline.verify_training import verify_training


@dataclass(kw_only=True)
class VerifyConfig:
    """out, run: the finished run. shards: a folder of training shards made from it, to be verified as well.

    deep: read every pool shard and embedding again. Without it a pool shard is read only where its size or
    time stamp is not that of the scan.
    """

    out: str = MISSING
    run: str = "default"
    shards: str | None = None
    deep: bool = False
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def run(node: DictConfig) -> None:
    config = build(node, "", VerifyConfig)
    here = Run(storage.absolute(config.out, "out"), config.run)
    for line in verify(here, config.deep, config.cluster):
        print(f"ok  {line}", flush=True)
    if config.shards:
        for line in verify_training(here, storage.absolute(config.shards, "shards"), config.cluster):
            print(f"ok  {line}", flush=True)
    print(f"{here.folder} is whole")


register("verify", VerifyConfig)

if __name__ == "__main__":
    launch("verify", run)

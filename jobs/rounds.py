"""RS2 rounds of a finished run: a fresh random share of what it chose for every epoch.

python -m jobs.rounds out=/data/winnow run=default ratio=0.1 rounds=200
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.manifest import Run
from selection.run_rounds import RoundsConfig, describe, write_rounds


@dataclass(kw_only=True)
class RoundsJobConfig(RoundsConfig):
    """out, run: the finished run; the rounds go to `<out>/runs/<run>/rounds/`."""

    out: str = MISSING
    run: str = "default"
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds}: at least 1")


def run(node: DictConfig) -> None:
    config = build(node, "", RoundsJobConfig)
    here = Run(storage.absolute(config.out, "out"), config.run)
    here.receipt()  # refuses a run that is not there before its folder is made for the lock
    with storage.lock(here.out):
        about = write_rounds(here, config, config.cluster)
    print(describe(here, about))


register("rounds", RoundsJobConfig)

if __name__ == "__main__":
    launch("rounds", run)

"""The near pass interrupted and spread over workers: the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
from conftest import embedding, planted_pool, search

from filters.duplicates.tasks import ray_runner
from pipeline.cluster import ClusterConfig

RUN = """
import os, signal, sys
from pathlib import Path
import numpy as np
from filters.duplicates import compare, search
from filters.duplicates.blocks import Block, MemorySource
from filters.duplicates.config import NearConfig
from filters.duplicates.tasks import LocalRunner

pool, out, after = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
blocks = {}
for number, path in enumerate(sorted(pool.glob("*.npy"))):
    n = len(np.load(path, mmap_mode="r"))
    uid = np.arange(number * 500, number * 500 + n, dtype=np.uint64)
    blocks[path.stem] = Block(shard=path.stem, embeddings=[str(path)], uid_hi=uid * 0, uid_lo=uid,
                              score=np.zeros(n), alive=np.ones(n, bool))
compare.TASK_WORK = 30_000

class Dying(LocalRunner):
    def map(self, function, tasks):
        for index, result in super().map(function, tasks):
            yield index, result
            Dying.done = getattr(Dying, "done", 0) + 1
            if Dying.done == after:
                (out / "generation-0000" / "pairs-000099.tmp-1").touch()
                os.kill(os.getpid(), signal.SIGKILL)

config = NearConfig(method="embedding", similarity=.9, clusters=20)
search.NearSearch(MemorySource(blocks), out, config, Dying()).run()
"""


def test_killed_half_way_and_resumed(make_pool, tmp_path, monkeypatch):
    """Killed while placing rows and again while comparing: the files of an undisturbed run, byte for byte."""
    source = make_pool(planted_pool(4000, 32, np.random.default_rng(7))[0])
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    (tmp_path / "killed" / "generation-0000").mkdir(parents=True)

    def run(out: str, kill_after: int) -> int:
        arguments = [str(tmp_path / "pool"), str(tmp_path / out), str(kill_after)]
        return subprocess.run([sys.executable, "-c", RUN, *arguments], env=environment).returncode

    # 8 surveys, 8 samples, 8 exact checks, 8 training samples, 1 spill, then comparisons.
    assert run("killed", 33) == -signal.SIGKILL
    assert not list((tmp_path / "killed").rglob("pairs-??????"))
    assert run("killed", 33) == -signal.SIGKILL
    assert list((tmp_path / "killed").rglob("pairs-??????"))
    assert run("killed", 0) == 0
    monkeypatch.setattr("filters.duplicates.compare.TASK_WORK", 30_000)
    search(source, tmp_path / "whole", embedding(clusters=20))

    def files(out: str) -> dict[str, bytes]:
        paths = (tmp_path / out).rglob("*")
        return {str(p.relative_to(tmp_path / out)): p.read_bytes() for p in paths if p.is_file()}

    assert files("killed") == files("whole")


def test_one_worker_against_two(make_pool, tmp_path, monkeypatch, ray_cluster):
    monkeypatch.setattr("filters.duplicates.compare.TASK_WORK", 30_000)
    source = make_pool(planted_pool(4000, 32, np.random.default_rng(8))[0])
    search(source, tmp_path / "one", embedding(clusters=20))
    with ray_runner(ClusterConfig(workers=2), 2) as runner:
        two = search(source, tmp_path / "two", embedding(clusters=20), runner)
    assert two.dropped > 780
    for path in sorted(p for p in (tmp_path / "one").rglob("*") if p.is_file()):
        assert path.read_bytes() == (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes(), (
            path.name
        )

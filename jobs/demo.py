"""The whole chain on the default pool: pool, filter network, curation, shards, proof, condensed set, report.

python -m jobs.demo out=/tmp/winnow-demo
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hydra
import polars as pl
from omegaconf import MISSING, DictConfig

from jobs import condense, curate, prove, report, reshard, train_filter
from jobs.demo_pool import DemoPool, DemoPoolConfig
from jobs.demo_pool import build as build_pool
from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.manifest import Run
from pipeline.progress import Progress
from pipeline.samples import format_uid

RIGHT = ("clean", "exact_dup", "near_dup")  # kinds whose caption fits its picture
TOP_FRACTION = 0.5
SAMPLES_SEEN = 40_000  # a minute or two on two cores
ROUNDS = 10
ARMS = (
    "full_short",
    "static",
    "rs2",
    "subset",
    "subset_rs2",
)  # all but the whole pool in full, which takes longest


@dataclass(kw_only=True)
class DemoConfig:
    """out: a local folder for pool, filter, tables, run and training shards; about 300 MB."""

    out: str = MISSING
    pool: DemoPoolConfig = field(default_factory=DemoPoolConfig)


def run(node: DictConfig) -> None:
    config = build(node, "", DemoConfig)
    out = Path(storage.absolute(config.out, "out"))
    pool = _say(
        "1/7  the pool: drawings with names, some pairs swapped, copied or damaged",
        lambda: _pool(config, out),
    )
    _say("2/7  the filter network, trained on the trusted part", lambda: _train(pool, out))
    _say(
        "3/7  curate: keep the best half, drop duplicates and what harms, draw rounds",
        lambda: _curate(pool, out),
    )
    _say("4/7  training shards for open_clip", lambda: _reshard(out))
    _say(
        "5/7  proof: small networks trained on what was chosen, and on what was not",
        lambda: _prove(pool, out),
    )
    _say("6/7  a condensed set, every prefix of which is a small training set", lambda: _condense(out))
    _say("7/7  the report", lambda: _report(out))
    _compare(Run(str(out / "winnow"), "default"), pool)
    print(
        f"\nEverything lies under {out}:\n"
        f"  pool/trusted, pool/pool      the shards, and pool/truth.parquet with what is wrong in them\n"
        f"  filter/                      the trained network, with its loss in curve.png\n"
        f"  winnow/runs/default/         subset.npy, manifest.parquet, decisions/, receipt.json, rounds/, proof/\n"
        f"  train/                       the training shards\n"
        f"  condensed/                   small images that stand for a class, by rank\n"
        f"Open this in a browser:\n{out}/winnow/runs/default/report.html"
    )


def _say(title: str, work: Callable[[], DemoPool | None]) -> DemoPool:
    print(f"\n== {title}", flush=True)
    started = time.monotonic()
    result = work()
    print(f"   ({time.monotonic() - started:.0f} s)", flush=True)
    return result  # type: ignore[return-value]


def _pool(config: DemoConfig, out: Path) -> DemoPool:
    with Progress("pool", 1, "step") as bar:

        def progress(done: int, total: int) -> None:
            bar.total = bar.bar.total = total
            bar.step(units=done - bar.done)

        return build_pool(config.pool, out / "pool", progress=progress)


def _job(name: str, run_job: Callable[[DictConfig], None], *overrides: str) -> None:
    """Run another job as its command line would, in this process."""
    run_job(hydra.compose(name, overrides=list(overrides)))


def _train(pool: DemoPool, out: Path) -> None:
    _job(
        "train_filter", train_filter.run, f'pool.shards="{pool.trusted}"', f'out="{out}/filter"',
        f"train.samples_seen={SAMPLES_SEEN}", "train.batch_size=128",
    )  # fmt: skip


def _curate(pool: DemoPool, out: Path) -> None:
    _job(
        "curate", curate.run, f'pool.shards="{pool.pool}"', f'out="{out}/winnow"', f'scorer.weights="{out}/filter"',
        f"filters.dfn.top_fraction={TOP_FRACTION}", "dedup=near", "selection=influence",
        f'selection.target="{pool.trusted}"', f"rounds.rounds={ROUNDS}",
    )  # fmt: skip


def _reshard(out: Path) -> None:
    _job("reshard", reshard.run, f'out="{out}/winnow"', f'to="{out}/train"', "shard_size=1000")


def _prove(pool: DemoPool, out: Path) -> None:
    """Judged on the first shards of the trusted part."""
    _job(
        "prove", prove.run, f'out="{out}/winnow"', f'evaluate="{pool.trusted}/0000[0-3].tar"', f"arms=[{','.join(ARMS)}]",
        f"epochs={ROUNDS}", "evaluations=5", "proxy.width=8",
    )  # fmt: skip


def _condense(out: Path) -> None:
    """Distribution matching, the cheapest way, and not for long."""
    _job(
        "condense", condense.run, f'out="{out}/winnow"', f'to="{out}/condensed"', "method=dm",
        "images_per_class=5", "outer=30", "inner=10", "width=32",
    )  # fmt: skip


def _report(out: Path) -> None:
    _job("report", report.run, f'out="{out}/winnow"', f'condensed="{out}/condensed"')


def _compare(done: Run, pool: DemoPool) -> None:
    """Hold what was kept against the truth."""
    truth = pl.read_parquet(pool.truth)
    manifest = pl.read_parquet(done.path("manifest.parquet"))
    uids = pl.DataFrame({"uid": [format_uid(*u) for u in manifest.select("uid_hi", "uid_lo").iter_rows()]})
    kept = truth.join(uids, on="uid", how="semi")
    right = [float(frame["kind"].is_in(RIGHT).sum() / len(frame)) for frame in (truth, kept)]
    print(f"\nOf the pool's {len(truth):,} pairs, {right[0]:.1%} have the right caption.")
    print(f"Of the {len(kept):,} pairs that were kept, {right[1]:.1%} do.")


register("demo", DemoConfig)

if __name__ == "__main__":
    launch("demo", run)

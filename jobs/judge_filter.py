"""Judge filters by what comes of them: each keeps the same share of one pool, and a small model learns from it.

python -m jobs.judge_filter pool.shards='/data/pool/*.tar' trusted.shards='/data/trusted/*.tar' \\
    out=/data/judge truth.path=/data/truth.parquet \\
    held_out.images=/data/test.parquet 'held_out.class_names=[cat,dog]'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from omegaconf import MISSING, DictConfig

from filters.network.config import TrainConfig
from jobs.judge_contest import Arena, ContestantConfig, HeldOutConfig, Outcome, Trials, TruthConfig
from jobs.judge_drawing import draw
from jobs.launch import build, launch, plain, register
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.progress import Progress
from pipeline.samples import PoolConfig
from selection.proxy import ProxyConfig

FIGURES = ("precision", "auc", "own_accuracy", "accuracy")
TITLES = ("precision", "AUC", "own accuracy", "small model")


@dataclass(kw_only=True)
class JudgeConfig:
    """contestants: the filters by name, see `jobs.judge_contest.ContestantConfig`; `experiment=poisoning` sets
    them. trusted: shards of trusted pairs. truth, held_out: what the filters are judged by; at least one.

    keep: the share of the pool that each filter keeps. seeds: trials of each filter, with seeds 0, 1, ...
    model, init, train: of the networks that are trained here. proxy, steps: the small model, and its steps,
    the same for every filter.
    """

    out: str = MISSING
    pool: PoolConfig = MISSING
    trusted: Any = None
    contestants: dict[str, Any] = field(default_factory=dict)
    truth: TruthConfig = field(default_factory=TruthConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    keep: float = 0.5
    seeds: int = 3
    model: str = "small"
    init: str | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    steps: int = 500
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep={self.keep}: must lie in (0, 1]")
        for key in ("seeds", "steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be at least 1")


def run(node: DictConfig) -> None:
    config = build(node, "", JudgeConfig)
    if not config.truth.path and not config.held_out.images:
        raise Refused("truth.path, held_out.images: give at least one, there is nothing to judge by")
    config.held_out.check()
    trusted = build(node.trusted, "trusted", PoolConfig) if node.trusted.shards else None
    if not config.contestants:
        raise Refused("contestants: name at least one")
    contestants = {
        str(name): build(c, f"contestants.{name}", ContestantConfig) for name, c in node.contestants.items()
    }
    out = storage.absolute(config.out, "out")
    arena = Arena(
        out=out, pool=_absolute(config.pool, "pool"),
        trusted=_absolute(trusted, "trusted") if trusted else None,
        truth=config.truth if config.truth.path else None,
        held_out=config.held_out if config.held_out.images else None, keep=config.keep, model=config.model, init=config.init,
        train=config.train, proxy=config.proxy, steps=config.steps,
        decode=config.decode, cluster=config.cluster,
    )  # fmt: skip
    outcomes: list[Outcome] = []
    with storage.lock(out):
        trials = Trials(arena, contestants)
        with Progress("judge", len(contestants) * config.seeds, "trial") as progress:
            for seed in range(config.seeds):
                for name in contestants:
                    outcomes.append(trials.run(name, seed))
                    progress.step(note=f"{name}, seed {seed}")
        rows = [summary(name, [o for o in outcomes if o.filter == name]) for name in contestants]
        table = as_text(rows, config.keep)
        storage.write_json(
            storage.join(out, "judge.json"),
            {"filters": rows, "trials": [asdict(o) for o in outcomes], "config": plain(node)},
        )
        storage.write_bytes(storage.join(out, "judge.txt"), table.encode())
        storage.write_bytes(storage.join(out, "judge.png"), draw(rows))
    print(f"{table}\n{out}/ holds judge.json, judge.txt and judge.png, and each trial's run under runs/")


def _absolute(pool: PoolConfig, key: str) -> PoolConfig:
    shards = [pool.shards] if isinstance(pool.shards, str) else pool.shards
    return PoolConfig(**{**asdict(pool), "shards": [storage.absolute(s, f"{key}.shards") for s in shards]})


def summary(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Means over the trials of one filter, and sample standard deviations (None of a single trial)."""
    row: dict[str, Any] = {"filter": name, "trials": len(outcomes), "kept": outcomes[0].kept}
    for key in FIGURES:
        values = [v for o in outcomes if (v := getattr(o, key)) is not None]
        row[key] = float(np.mean(values)) if values else None
        row[f"{key}_sd"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return row


def as_text(rows: Sequence[dict[str, Any]], keep: float) -> str:
    """The table that a person reads; figures in per cent, mean and standard deviation."""
    width = max(len(r["filter"]) for r in rows)
    lines = [f"{'filter':{width}}  {'kept':>10}  " + "  ".join(f"{t:>13}" for t in TITLES)]
    for r in rows:
        figures = [_figure(r[key], r[f"{key}_sd"]) for key in FIGURES]
        lines.append(f"{r['filter']:{width}}  {r['kept']:>10,}  " + "  ".join(f"{x:>13}" for x in figures))
    lines.append(
        f"\nEach keeps {keep:.0%}; {rows[0]['trials']} trial(s), ± standard deviation. precision: right pairs among"
        " those kept;\nown accuracy: the network's, zero-shot; small model: accuracy of one trained on what was"
        " kept.\n"
    )
    return "\n".join(lines)


def _figure(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "-"
    return f"{100 * mean:.1f}" + ("" if deviation is None else f" ±{100 * deviation:.1f}")


register("judge_filter", JudgeConfig)

if __name__ == "__main__":
    launch("judge_filter", run)

"""Choose the cut: a table and a plot over keep-rates, from the scores that a finished run has stored.

python -m jobs.cuts out=/data/winnow run=default truth=/data/labelled.parquet against=other_run
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import polars as pl
from omegaconf import MISSING, DictConfig

from filters.cuts import Subset, Truth, cut_table, draw
from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.reasons import REJECTED


@dataclass(kw_only=True)
class CutsConfig:
    """out, run: a finished run; its samples that could be read, each uid once, are the pool.

    score: the column to cut by; null is the run's own, computed or given. rates: shares of the pool to look at.
    against: another run of this folder, or a subset file, to overlap with. truth: a parquet file with `uid` and
    `good` of a random sample of the pool that was labelled.
    """

    out: str = MISSING
    run: str = "default"
    score: str | None = None
    rates: list[float] = field(
        default_factory=lambda: [0.01, 0.03, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0]
    )
    against: str | None = None
    truth: str | None = None

    def __post_init__(self) -> None:
        for rate in self.rates:
            if not 0 < rate <= 1:
                raise ValueError(f"rates={self.rates}: each must lie in (0, 1]")
        if not self.rates:
            raise ValueError("rates=[]: give at least one")


def run(node: DictConfig) -> None:
    config = build(node, "", CutsConfig)
    here = Run(storage.absolute(config.out, "out"), config.run)
    receipt, tables = here.receipt(), here.tables()
    with storage.open_file(here.path("accounting.parquet")) as f:
        ids = pl.read_parquet(f.read(), columns=["id"])["id"].to_list()
    score = config.score or _own_score(receipt)
    schema = tables.schema(ids[0])
    if score not in schema.names:
        raise Refused(f"score={score}: the tables of run={config.run} have: {', '.join(schema.names)}")
    out_of_pool = [*REJECTED, "duplicate_uid"]

    def rows() -> Iterator[pl.DataFrame]:
        for shard, frame in tables.stream(ids, [score, "uid_hi", "uid_lo"]):
            reason = here.decisions.read(shard, ["reason"])["reason"]
            yield frame.filter(~reason.is_in(out_of_pool).fill_null(False))

    against = Subset.open(_subset(here.out, config.against)) if config.against else None
    truth = Truth.open(storage.absolute(config.truth, "truth")) if config.truth else None
    table = cut_table(rows, score, config.rates, against, truth)
    with storage.commit(here.path("cuts", f"{score}.csv")) as tmp:
        table.write_csv(tmp)
    with storage.commit(here.path("cuts", f"{score}.png")) as tmp:
        draw(table, score).savefig(tmp, format="png", dpi=120, metadata={"Software": None})
    with pl.Config(
        tbl_rows=-1,
        tbl_cols=-1,
        tbl_width_chars=200,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
    ):
        print(table)
    print(f"{here.path('cuts')}/ holds {score}.csv and {score}.png")


def _own_score(receipt: dict) -> str:
    """The column of the run's scorer, else that of the first filter which cuts by one."""
    given = (f.get("column") for f in receipt["config"]["filters"].values())
    column = receipt["scorer"]["column"] or next((c for c in given if c), None)
    if column is None:
        raise Refused("score: the run has no score of its own; name a column of its tables")
    return column


def _subset(out: str, against: str) -> str:
    """The local file of a run's subset, or of a path."""
    other = Run(out, against)
    path = against
    if "/" not in against and storage.exists(other.path("receipt.json")):
        path = other.path("subset.npy")
    path = storage.absolute(path, "against")
    if not storage.is_local(path) or not storage.exists(path):
        raise Refused(f"against={against}: neither a finished run of {out} nor a local subset file")
    return storage.resolve(path)[1]


register("cuts", CutsConfig)

if __name__ == "__main__":
    launch("cuts", run)

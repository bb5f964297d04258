"""Stored scores against computed ones, on real shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from jobs import conformance, curate
from pipeline.conformance import compare
from tests.build import call, make_shard, sample, uid

in_process = pytest.mark.usefixtures("in_process")


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Two shards; one picture is none. Nothing lies beside them."""
    for s in range(2):
        samples = [sample(n) for n in range(s * 40, s * 40 + 40)]
        if s:
            samples[3] = sample(43, jpg=b"junk")
        make_shard(tmp_path / "pool" / f"{s:05d}.tar", samples)
    return tmp_path / "pool"


def own_scores(pool: Path, scorer: Path, out: Path) -> pl.DataFrame:
    code = call(
        curate, f"pool.shards={pool}/*.tar", f"out={out}", f"scorer.weights={scorer}", "filters.dfn.top_fraction=1.0"
    )  # fmt: skip
    assert code == 0
    table = pl.concat(pl.read_parquet(p) for p in sorted((out / "features").glob("*/0*.parquet")))
    return table.filter(pl.col("status") == "ok").select("uid_hi", "uid_lo", "score_dfn")


def run(pool: Path, scorer: Path, out: Path, *more: str) -> tuple[int, dict]:
    code = call(
        conformance, f"pool.shards={pool}/*.tar", f"scorer.weights={scorer}", f"out={out}", "column=given", *more
    )  # fmt: skip
    path = out / "given.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


@in_process
def test_our_own_scores_conform_and_shuffled_ones_do_not(
    pool: Path, tiny_scorer: Path, tmp_path: Path
) -> None:
    own = own_scores(pool, tiny_scorer, tmp_path / "out")
    uids = [f"{hi:016x}{lo:016x}" for hi, lo in own.select("uid_hi", "uid_lo").rows()]
    given = pl.DataFrame({"uid": uids, "given": own["score_dfn"]})
    given[5:].write_parquet(tmp_path / "m.parquet")
    code, found = run(pool, tiny_scorer, tmp_path / "c", f"metadata={tmp_path}/m.parquet", "sample=80")
    assert code == 0
    assert (found["n"], found["left_out"]) == (74, {"no_stored_value": 5, "undecodable_image": 1})
    assert found["pearson"] == pytest.approx(1, abs=1e-6)
    assert found["max_absolute_difference"] < 1e-5
    assert all(d["agreement"] == 1 for d in found["decisions"])
    assert (tmp_path / "c/given.png").read_bytes().startswith(b"\x89PNG")

    for s in range(2):  # the same column, its rows moved, beside the shards
        some = given.with_columns(given=-pl.col("given"))[40 * s : 40 * s + 40]
        some.write_parquet(pool / f"{s:05d}.parquet")
    code, found = run(pool, tiny_scorer, tmp_path / "c", "sample=30")
    assert code == 0
    assert 25 <= found["n"] <= 30
    assert found["spearman"] == pytest.approx(-1)
    rows = pl.read_parquet(tmp_path / "c/given.parquet")
    assert set(rows["uid"]) <= {uid(n) for n in range(80)}
    again = run(pool, tiny_scorer, tmp_path / "again", "sample=30")[1]
    assert again["pearson"] == found["pearson"]
    assert run(pool, tiny_scorer, tmp_path / "other", "sample=30", "seed=1")[1]["pearson"] != found["pearson"]


def test_figures_by_hand() -> None:
    stored, computed = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.2, 0.1, 0.4, 0.5])
    found = compare(stored, computed, [0.25, 0.5, 0.75])
    assert found.spearman == pytest.approx(0.8)
    assert (found.mean_difference, found.max_absolute_difference) == (pytest.approx(0.05), pytest.approx(0.1))
    assert [d["agreement"] for d in found.decisions] == [1, 1, 0.5]
    assert [d["overlap"] for d in found.decisions] == [1, 1, pytest.approx(2 / 3)]


@in_process
def test_refusals(pool: Path, tiny_scorer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(pool, tiny_scorer, tmp_path / "c")[0] == 2
    assert "column=given: 0 of 79 readable samples have a finite value" in capfd.readouterr().err
    pl.DataFrame({"uid": [uid(0)]}).write_parquet(tmp_path / "m.parquet")
    assert run(pool, tiny_scorer, tmp_path / "c", f"metadata={tmp_path}/m.parquet")[0] == 2
    assert "m.parquet has no column 'given'" in capfd.readouterr().err
    assert run(pool, tiny_scorer, tmp_path / "c", "sample=1")[0] == 2
    assert "sample=1: must be at least 3" in capfd.readouterr().err

"""Chance and the trusted-or-not classifier: fractions, repeatability, and what they see."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from filters.baselines import RandomCut, TrustedOrNot
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from pipeline.tables import TableSet
from pipeline.uid_draw import uniform

D = 8
SCORER = {"architecture": {"embed_dim": D}, "weights": "w"}


def uids(n: int, first: int = 0) -> dict[str, np.ndarray]:
    return {"uid_hi": np.zeros(n, np.uint64), "uid_lo": np.arange(first, first + n, dtype=np.uint64)}


def write_tables(out: Path, shards: Sequence[np.ndarray], scorer: dict = SCORER, first: int = 0) -> TableSet:
    """Tables whose image and text embeddings are the given rows, float (n, D)."""
    folder = out / "features" / "set"
    folder.mkdir(parents=True)
    (folder / "set.json").write_text(json.dumps({"scorer": scorer}))
    for i, rows in enumerate(shards):
        name = f"{i:05d}-aa"
        frame = pl.DataFrame(uids(len(rows), first)).with_columns(status=pl.lit("ok"), row=pl.row_index())
        first += len(rows)
        frame.write_parquet(folder / f"{name}.parquet")
        for tower in ("image", "text"):
            np.save(folder / f"{name}.{tower}.npy", rows.astype(np.float16))
        report = {"shard": name, "id": name, "signature": {}, "digest": str(rows.sum())}
        (folder / f"{name}.json").write_text(json.dumps(report))
    return TableSet(str(folder))


@dataclass
class Pool:
    tables: TableSet
    ids: Sequence[str]

    def __call__(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        for _, frame in self.tables.stream(self.ids, columns):
            yield frame


def kept(chosen, pool: Pool) -> np.ndarray:
    """Of each row, whether the filter keeps it."""
    fitted = chosen.named("f").prepare(pool.tables, pool.ids, ClusterConfig(workers=1)).fit(pool)
    fails = [v.fails for v in fitted.verdicts()]
    frames = [frame.select(~pl.any_horizontal(fails)) for frame in pool(fitted.columns())]
    return np.concatenate([f.to_series().to_numpy() for f in frames])


def test_numbers_are_uniform_and_of_the_uid_and_the_seed():
    columns = uids(20_000)
    numbers = uniform(*columns.values(), seed=0)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 10, (0, 1))[0]
    assert np.abs(counts - 2000).max() < 200
    np.testing.assert_array_equal(uniform(*(c[::-1] for c in columns.values()), 0)[::-1], numbers)
    assert abs(np.corrcoef(numbers, uniform(*columns.values(), 1))[0, 1]) < 0.03
    assert uniform(*uids(2).values(), 0).tolist() == [0.13870941014555427, 0.18436667429957676]


def test_random_keeps_the_exact_share_whatever_the_shards(tmp_path: Path):
    rows = np.zeros((1001, D))
    one = Pool(write_tables(tmp_path / "a", [rows]), ["00000-aa"])
    two = Pool(write_tables(tmp_path / "b", [rows[:300], rows[300:]]), ["00000-aa", "00001-aa"])
    first = kept(RandomCut(top_fraction=0.3), one)
    assert first.sum() == 300
    np.testing.assert_array_equal(kept(RandomCut(top_fraction=0.3), two), first)
    assert 50 < (kept(RandomCut(top_fraction=0.3, seed=1), one) & first).sum() < 130


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Pool, np.ndarray]:
    """A trusted pool, a pool of which half looks like it, and which half; one row has no embedding."""
    rng = np.random.default_rng(0)
    shift = np.eye(D)[0] * 2
    write_tables(tmp_path / "trusted", [rng.normal(size=(300, D)) + shift])
    good = rng.random(600) < 0.5
    rows = rng.normal(size=(600, D)) + np.where(good[:, None], shift, -shift)
    rows[7] = np.nan
    tables = write_tables(tmp_path / "pool", [rows[:250], rows[250:]], first=1000)
    return tmp_path / "trusted", Pool(tables, ["00000-aa", "00001-aa"]), good


@pytest.mark.parametrize("towers", ["image", "both"])
def test_the_classifier_finds_what_looks_trusted(sides, towers: str):
    trusted, pool, good = sides
    chosen = TrustedOrNot(trusted=str(trusted), towers=towers, top_fraction=0.4)
    found = kept(chosen, pool)
    assert found.sum() == round(0.4 * 599)
    assert good[found].mean() > 0.97
    assert not found[7]
    before = {f.name: f.stat().st_mtime_ns for f in Path(pool.tables.folder).iterdir()}
    np.testing.assert_array_equal(kept(chosen, pool), found)
    assert {f.name: f.stat().st_mtime_ns for f in Path(pool.tables.folder).iterdir()} == before


def test_the_classifier_needs_trusted_tables_of_the_same_scorer(sides, tmp_path: Path):
    trusted, pool, _ = sides
    chosen = TrustedOrNot(trusted=str(trusted), top_fraction=0.5)
    before = chosen.identity()["trusted_tables"]
    write_tables(tmp_path / "other", [np.ones((200, D))], {**SCORER, "weights": "others"})
    for folder in (tmp_path / "other", tmp_path / "nothing"):
        with pytest.raises(Refused, match="no tables made with this run's scorer"):
            TrustedOrNot(trusted=str(folder), top_fraction=0.5, name="f").prepare(
                pool.tables, pool.ids, ClusterConfig()
            )
    report = trusted / "features" / "set" / "00000-aa.json"
    report.write_text(report.read_text().replace('"digest": "', '"digest": "x'))
    assert chosen.identity()["trusted_tables"] != before

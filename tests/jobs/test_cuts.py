"""Keep-rates of a stored score: exact thresholds, overlaps, and precision with its interval."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from filters.cuts import Subset, Truth, cut_table
from jobs import curate, cuts
from pipeline.uids import SUBSET
from tests.build import call, halves, uid

L14 = "clip_l14_similarity_score"
N = 200


@pytest.fixture(scope="module")
def scores() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    values = np.round(rng.normal(0.25, 0.05, N), 2).astype(np.float32)
    values[:10] = np.nan
    return pl.DataFrame({"uid": [uid(i) for i in range(N)], L14: values, "text": "a dog"})


@pytest.fixture
def out(scores: pl.DataFrame, tmp_path: Path, in_process: None) -> Path:
    """Runs `half` and `tenth`; the first row stands in the pool twice, one uid is none."""
    twice = pl.concat([scores, scores[20:21], scores[:1].with_columns(uid=pl.lit("none"))])
    twice.write_parquet(tmp_path / "m.parquet", row_group_size=70)
    for run, fraction in (("half", 0.5), ("tenth", 0.1)):
        code = call(
            curate, f"pool.metadata={tmp_path}/m.parquet", f"out={tmp_path}/out", f"run={run}",
            "filters=[clip_score]", f"filters.clip_score.top_fraction={fraction}",
        )  # fmt: skip
        assert code == 0
    return tmp_path / "out"


def best(scores: pl.DataFrame, k: int) -> pl.DataFrame:
    finite = scores.filter(pl.col(L14).is_finite())
    return finite.sort([L14, "uid"], descending=[True, False])[:k]


def test_table_of_a_run(out: Path, scores: pl.DataFrame, tmp_path: Path) -> None:
    labelled = scores[::2].with_columns(good=pl.col(L14).fill_nan(0) > 0.26).select("uid", "good")
    labelled.write_parquet(tmp_path / "labelled.parquet")
    code = call(
        cuts,
        f"out={out}",
        "run=half",
        "rates=[0.1,0.5,1.0]",
        "against=tenth",
        f"truth={tmp_path}/labelled.parquet",
    )
    assert code == 0
    table = pl.read_csv(out / "runs/half/cuts" / f"{L14}.csv")
    assert (out / "runs/half/cuts" / f"{L14}.png").read_bytes().startswith(b"\x89PNG")
    assert table["count"].to_list() == [19, 95, 190]
    for row in table.iter_rows(named=True):
        kept = best(scores, row["count"])
        assert row["threshold"] == pytest.approx(kept[L14].min())
        both = min(19, row["count"])
        assert row["overlap"] == both
        assert row["jaccard"] == pytest.approx(19 / max(19, row["count"]))
        of = labelled.join(kept, on="uid")
        assert (row["labelled"], row["precision"]) == (len(of), pytest.approx(of["good"].mean()))
        assert row["recall"] == pytest.approx(of["good"].sum() / labelled["good"].sum())
        p, n, z = of["good"].mean(), len(of), 1.959963984540054  # Wilson 1927, equation for the limits
        middle, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        assert row["precision_low"] == pytest.approx((middle - half) / (1 + z * z / n))
        assert row["precision_high"] == pytest.approx((middle + half) / (1 + z * z / n))
    subset = out / "runs/tenth/subset.npy"
    assert call(cuts, f"out={out}", "run=half", "rates=[0.1,0.5,1.0]", f"against={subset}") == 0
    assert pl.read_csv(out / "runs/half/cuts" / f"{L14}.csv")["overlap"].to_list() == [19, 19, 19]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["score=aesthetic"], "score=aesthetic: the tables of run=half have: uid_hi, uid_lo"),
        (["rates=[0]"], "rates=[0.0]: each must lie in (0, 1]"),
        (["rates=[0.0001]"], "190 rows have a finite value, too few"),
        (["against=nowhere"], "against=nowhere: neither a finished run"),
        (["against={out}/runs/half/decisions"], "decisions"),
        (["truth={out}/runs/half/manifest.parquet"], "columns uid and good are needed"),
        (["truth=/no/where.parquet"], "truth=/no/where.parquet"),
        (["run=none"], "no finished run there (runs: half, tenth)"),
    ],
)
def test_refusals(out: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], says: str) -> None:
    capfd.readouterr()
    assert call(cuts, f"out={out}", "run=half", *(o.replace("{out}", str(out)) for o in overrides)) == 2
    assert says in capfd.readouterr().err


SMALL = st.tuples(st.integers(0, 4), st.integers(0, 2**64 - 1) | st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(st.lists(SMALL, max_size=40), st.lists(SMALL, max_size=40))
def test_a_subset_file_is_searched_where_it_lies(
    tmp_path_factory: pytest.TempPathFactory, own: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("subset") / "s.npy"
    np.save(path, np.array(sorted(own), SUBSET))
    subset = Subset.open(str(path))
    hi, lo = (np.array([u[i] for u in asked], np.uint64) for i in (0, 1))
    assert subset.has(hi, lo).tolist() == [u in own for u in asked]
    assert subset.size == len(set(own))


def test_an_unsorted_subset_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.array([(2, 0), (1, 0)], SUBSET))
    with pytest.raises(Exception, match="is not sorted"):
        Subset.open(str(tmp_path / "s.npy"))


def test_truth_of_the_demo_and_rows_without_a_label(tmp_path: Path) -> None:
    kinds = ["clean", "mismatch", "near_dup"]
    pl.DataFrame({"uid": [uid(i) for i in range(3)], "kind": kinds}).write_parquet(tmp_path / "t.parquet")
    truth = Truth.open(str(tmp_path / "t.parquet"))
    hi, lo = (np.array([halves(uid(n))[i] for n in range(5)], np.uint64) for i in (0, 1))
    assert truth.labels(hi, lo).tolist() == [1, 0, 1, -1, -1]
    frame = pl.DataFrame({"x": [0.5, 0.4, 0.3, 0.2, 0.1], "uid_hi": hi, "uid_lo": lo})
    table = cut_table(lambda: [frame], "x", [0.4, 1.0], None, truth)
    assert table["precision"].to_list() == [0.5, pytest.approx(2 / 3)]
    assert table["labelled"].to_list() == [2, 3]

"""Parts of the report: samples, axes, exact counts at every cut, groups, pictures by byte range."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline.report import plots
from pipeline.report.chosen import uids_below
from pipeline.report.explorer import Explorer, _axis, _explorer
from pipeline.report.page import number, seconds, share
from pipeline.report.pairs import EVALUATION, largest_groups
from pipeline.report.pictures import _pictures
from pipeline.report.sampling import Smallest
from pipeline.report.survey import Range, Score
from pipeline.uid_draw import uniform
from pipeline.uids import SUBSET
from tests.build import make_shard, sample, scan_shard


def frame(rows: int, first: int = 0) -> pl.DataFrame:
    numbers = np.arange(first, first + rows, dtype=np.uint64)
    return pl.DataFrame(
        {
            "group": ["even" if n % 2 == 0 else "odd" for n in numbers],
            "order": uniform(numbers * np.uint64(7), numbers, 0),
            "shard": [f"s{n // 10}" for n in numbers],
            "row": [int(n) % 10 for n in numbers],
        }
    )


def test_a_sample_does_not_depend_on_how_the_pool_was_parted() -> None:
    whole, parts = Smallest({"odd": 3, "": 5}), Smallest({"odd": 3, "": 5})
    whole.add(frame(100))
    for start in (60, 0, 30):
        parts.add(frame({60: 40, 0: 30, 30: 30}[start], start))
    assert whole.rows().equals(parts.rows())
    assert dict(whole.rows()["group"].value_counts().iter_rows()) == {"odd": 3, "even": 5}


def found(values: np.ndarray, cut: float | None = None) -> Range:
    made = Range(cut=cut)
    made.add(values.astype(np.float64), np.random.default_rng(0).random(len(values)))
    return made


@pytest.mark.parametrize("cut", [0.31371, -5.0, 9.0])
def test_counts_at_every_cut_are_those_of_the_values(cut: float) -> None:
    values = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    explorer = _explorer(Score(column="s", reason="r"), found(values, cut))
    position = explorer.bins(values.astype(np.float64), np.zeros(len(values), bool), False)
    explorer.stays += np.bincount(position, minlength=len(explorer.edges) + 1)
    above = explorer.above()
    assert (above[0], above[-1]) == (5000, 0)
    assert [int((values >= edge).sum()) for edge in explorer.edges] == above[1:-1]
    assert explorer.edges[explorer.at - 1] == cut
    assert (np.diff(explorer.edges) > 0).all()


def test_equal_scores_lie_where_the_runs_tie_break_put_them() -> None:
    values = np.array([0.1, 0.5, 0.5, 0.5, 0.9])
    explorer = _explorer(Score(column="s", reason="r"), found(values, 0.5))
    position = explorer.bins(values, np.array([True, True, True, False, False]), False)
    explorer.stays += np.bincount(position, minlength=len(explorer.edges) + 1)
    assert explorer.above()[explorer.at] == 2


def test_a_cut_that_keeps_nothing_and_values_without_range() -> None:
    nothing = _explorer(Score(column="s", reason="r"), found(np.arange(9.0), np.inf))
    assert nothing.at == len(nothing.edges) + 1
    same = _explorer(Score(column="s"), found(np.full(4, 2.5)))
    assert (same.edges.tolist(), same.at) == ([2.5], 0)
    assert plots.histogram(same)["size"] == 2


def test_axis_has_round_numbers_and_leaves_far_values_to_its_ends() -> None:
    values = np.append(np.random.default_rng(0).random(10_000), 1e9)
    edges = _axis(found(values))
    assert 100 < len(edges) <= 410
    assert edges[-1] < 1.1
    assert all(len(f"{e:.10g}") <= 7 for e in edges)


def test_levels_keep_about_their_share() -> None:
    explorer = Explorer(Score(column="s"), None, np.linspace(0.01, 0.99, 99), 0)
    explorer.stays += 10
    assert [(x["share"], x["stay"]) for x in explorer.levels()][:3] == [(0.01, 10), (0.05, 50), (0.1, 100)]


def test_largest_groups_are_exact() -> None:
    rng = np.random.default_rng(3)
    keeper = np.concatenate([rng.integers(0, 3000, 4000), np.repeat([7, 8], [60, 40])]).astype(np.uint64)
    table = pl.DataFrame({"kept_uid_hi": keeper % np.uint64(5), "kept_uid_lo": keeper})
    counts = np.bincount(keeper.astype(np.int64))
    expected = sorted(
        ((-(n + 1), k % 5, k) for k, n in enumerate(counts.tolist()) if n), key=lambda group: group
    )
    got = [(-size, hi, lo) for hi, lo, size in largest_groups(table.lazy(), 6)]
    assert got == expected[:6]


def test_evaluation_names_are_taken_apart_at_the_shard() -> None:
    for name, parts in {
        "/x/y.tar/a/b.c": ("/x/y.tar", "a/b.c"),
        "s3://b/z.tar.gz/12": ("s3://b/z.tar.gz", "12"),
    }.items():
        matched = EVALUATION.fullmatch(name)
        assert matched
        assert matched.groups() == parts


@pytest.mark.parametrize("packed", [False, True])
def test_pictures_come_from_byte_ranges(tmp_path: Path, packed: bool) -> None:
    shard = make_shard(tmp_path / "0.tar", map(sample, range(6)))
    if packed:
        Path(shard).write_bytes(gzip.compress(Path(shard).read_bytes()))
    _, table = scan_shard(shard, tmp_path / "out")
    records = table[[4, 1]].to_dicts()
    pictures, failed = _pictures(records)
    assert not failed
    assert all(source and source.startswith("data:image/webp") for source, _, _ in pictures)
    assert pictures[0] != pictures[1]
    records[0]["sha256"] = bytes(32)
    assert _pictures(records)[0][0][1] == "the shard has changed since the scan"
    Path(shard).unlink()
    pictures, failed = _pictures(records)
    assert [why for _, why, _ in pictures] == ["the shard is out of reach"] * 2
    assert list(failed) == [shard]


def test_numbers_as_people_read_them() -> None:
    assert [share(1, 3), share(3, 10_000), share(1, 10**7), share(0, 5)] == [
        "33.3 %",
        "0.03 %",
        "< 0.01 %",
        "0.0 %",
    ]
    assert [seconds(1.26), seconds(75), seconds(7384)] == ["1.3 s", "1 min 15 s", "2 h 03 min"]
    assert [number(0.74504), number(12345.6), number(None)] == ["0.745", "12,346", ""]


def test_uid_files_are_read_up_to_a_limit(tmp_path: Path) -> None:
    uids = np.array(
        sorted((int(h), n) for n, h in enumerate(np.random.default_rng(0).integers(0, 1 << 63, 500))), SUBSET
    )
    np.save(tmp_path / "u.npy", uids)
    path, limit = str(tmp_path / "u.npy"), int(uids["f0"][123])
    np.testing.assert_array_equal(uids_below(path, None), uids)
    np.testing.assert_array_equal(uids_below(path, limit), uids[:123])
    assert len(uids_below(path, 0)) == 0

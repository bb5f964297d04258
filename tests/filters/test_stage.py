"""The filter stage over real tables."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from filters.rules import Rules
from filters.score import ScoreCut
from filters.stage import FilterStage
from pipeline.decisions import DECISION, Chain
from pipeline.errors import Refused
from pipeline.tables import TableSet
from tests.build import halves, make_shard, sample, scan_shard, uid


def chain(folder: Path, *shards: list) -> Chain:
    reports = [
        scan_shard(make_shard(folder / f"{n}.tar", samples), folder / "out")[0]
        for n, samples in enumerate(shards)
    ]
    return Chain(
        TableSet(str(folder / "out")), [r.id for r in reports], None, str(folder / "stage"), "digest"
    )


def reasons(stage: FilterStage, given: Chain) -> list[list[str | None]]:
    return [frame["reason"].to_list() for _, frame in stage.run(given)]


def test_rejected_repeated_and_filtered(tmp_path: Path) -> None:
    given = chain(
        tmp_path,
        [sample(0), sample(1, jpg=b"junk"), sample(2, txt=b"short")],
        [sample(3, record={"uid": uid(0)}), sample(1), sample(5, record={"uid": uid(2)})],
        [],
    )
    stage = FilterStage([Rules(name="words", min_words=2)])
    assert reasons(stage, given) == [
        [None, "undecodable_image", "caption_words"],
        ["duplicate_uid", None, "duplicate_uid"],
        [],
    ]
    for _, frame in stage.run(given):
        assert dict(frame.schema) == DECISION


def test_a_cut_counts_each_uid_of_the_pool_once(tmp_path: Path) -> None:
    def scored(n: int, value: float, key: int) -> tuple:
        return sample(key, record={"uid": uid(n), "original_width": value})

    given = chain(
        tmp_path, [scored(0, 9, 0), scored(1, 8, 1)], [scored(0, 9, 2), scored(2, 7, 3), scored(3, 6, 4)]
    )
    stage = FilterStage([ScoreCut(name="w", column="original_width", top_fraction=0.5)])
    assert reasons(stage, given) == [[None, None], ["duplicate_uid", "w_below_cut", "w_below_cut"]]


def test_filters_commute_but_for_the_reason(tmp_path: Path) -> None:
    given = chain(
        tmp_path,
        [
            sample(n, txt=b"one" if n % 2 else b"two words", record={"uid": uid(n), "original_width": n})
            for n in range(6)
        ],
    )
    words, width = Rules(name="words", min_words=2), ScoreCut(name="w", column="original_width", threshold=3)
    kept = [
        [frame["kept"].to_list() for _, frame in FilterStage(order).run(given)]
        for order in ([words, width], [width, words])
    ]
    assert kept[0] == kept[1] == [[False, False, False, False, True, False]]
    assert reasons(FilterStage([words, width]), given)[0][1] == "caption_words"
    assert reasons(FilterStage([width, words]), given)[0][1] == "w_below_cut"


def test_uids_stay_beside_their_decision(tmp_path: Path) -> None:
    given = chain(tmp_path, [sample(n) for n in range(3)])
    [(_, frame)] = list(FilterStage([]).run(given))
    assert frame.select("uid_hi", "uid_lo").rows() == [halves(uid(n)) for n in range(3)]
    assert frame["copies"].to_list() == [1, 1, 1]


def test_unknown_column_is_refused_with_those_there_are(tmp_path: Path) -> None:
    given = chain(tmp_path, [sample(0)])
    stage = FilterStage([ScoreCut(name="x", column="punsafe", threshold=0.5)])
    with pytest.raises(
        Refused, match=r"filters\.x: the pool has no column 'punsafe'; it has: .*original_width"
    ):
        list(stage.run(given))


@pytest.mark.parametrize("column", ["url", "caption", "language", "sha256"])
def test_a_column_that_is_no_number_is_refused(tmp_path: Path, column: str) -> None:
    given = chain(tmp_path, [sample(0, record={"uid": uid(0), "url": "http://x"})])
    with pytest.raises(Refused, match=rf"filters\.on_{column}: .*{column}.* numeric"):
        list(FilterStage([ScoreCut(name=f"on_{column}", column=column, threshold=0.5)]).run(given))


def test_a_column_that_one_shard_lacks_is_null_there(tmp_path: Path) -> None:
    pl.DataFrame({"uid": [uid(1)], "likes": [7]}).write_parquet(tmp_path / "1.parquet")
    given = chain(tmp_path, [sample(0)], [sample(1)])
    stage = FilterStage([ScoreCut(name="likes", column="likes", threshold=5)])
    assert reasons(stage, given) == [["non_finite_score"], [None]]

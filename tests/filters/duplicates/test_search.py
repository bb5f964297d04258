"""The near pass from blocks to duplicates.parquet."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import dropped, embedding, near_copies, planted_pool, search, unit

from filters.duplicates.blocks import MemorySource
from filters.duplicates.clusters import Codebook
from filters.duplicates.config import NearConfig
from filters.duplicates.near import PAIR
from filters.duplicates.result import DuplicateResult
from filters.duplicates.search import NearSearch
from pipeline.errors import Refused


def brute_force(vectors: np.ndarray, similarity: float) -> set[tuple[int, int]]:
    products = vectors.astype(np.float64) @ vectors.astype(np.float64).T
    return {tuple(pair) for pair in np.argwhere(np.triu(products >= similarity, 1)).tolist()}


def found_pairs(result: DuplicateResult) -> set[tuple[int, int]]:
    """(dropped, kept) of a result whose groups are pairs, as (low, high)."""
    table = result.duplicates().collect()
    return {(min(a, b), max(a, b)) for a, b in zip(table["uid_lo"].to_list(), table["kept_uid_lo"].to_list())}


def chain(count: int, cosine: float) -> np.ndarray:
    """Unit rows of which only neighbours are within the cosine: turns by a fixed angle in a plane."""
    angle = np.arccos(cosine) * np.arange(count)
    rows = np.zeros((count, 16), np.float32)
    rows[:, 0], rows[:, 1] = np.cos(angle), np.sin(angle)
    return rows


@pytest.mark.parametrize(
    ("rule", "expected"), [("greedy", [1, 3]), ("semdedup", [1, 2, 3, 4]), ("components", [1, 2, 3, 4])]
)
def test_chain_a_b_c_d_e(make_pool, tmp_path, rule, expected):
    source = make_pool(chain(5, 0.92), score=[5, 4, 3, 2, 1])
    assert dropped(search(source, tmp_path / "out", embedding(rule=rule))) == expected


def test_long_chain_is_decided_row_by_row(make_pool, tmp_path):
    # Turns of 10 degrees: one full circle would close, 35 rows do not; every second row stays.
    source = make_pool(chain(35, np.cos(np.pi / 18)), score=-np.arange(35))
    assert dropped(search(source, tmp_path / "out", embedding(similarity=0.98))) == list(range(1, 35, 2))


def test_ties_go_to_the_lowest_uid(make_pool, tmp_path):
    source = make_pool(np.tile(unit(np.ones((1, 16))), (4, 1)), uid=[7, 3, 9, 5])
    result = search(source, tmp_path / "out")
    assert dropped(result) == [5, 7, 9]
    assert set(result.duplicates().collect()["kept_uid_lo"]) == {3}


def test_score_decides_before_uid_and_nan_scores_rank_last(make_pool, tmp_path):
    source = make_pool(np.tile(unit(np.ones((1, 16))), (3, 1)), score=[np.nan, 0.1, 0.9])
    assert dropped(search(source, tmp_path / "out")) == [0, 1]


def test_identical_rows(make_pool, tmp_path):
    rng = np.random.default_rng(0)
    rows = unit(rng.standard_normal((300, 32)))
    source = make_pool(np.concatenate([rows, rows, rows]).astype(np.float16))
    result = search(source, tmp_path / "out", embedding(similarity=1.0))
    assert dropped(result) == list(range(300, 900))
    assert result.largest_groups(2)["size"].to_list() == [3, 3]


def test_all_zero_rows_never_enter(make_pool, tmp_path):
    result = search(make_pool(np.zeros((50, 16), np.float32)), tmp_path / "out")
    assert (result.rows, result.unusable, result.dropped, result.pairs) == (0, 50, 0, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_nan_row_harms_no_other(make_pool, tmp_path, bad):
    rng = np.random.default_rng(0)
    rows = unit(rng.standard_normal((200, 32)))
    vectors = np.concatenate([rows, rows])
    vectors[10, 3] = bad
    result = search(make_pool(vectors), tmp_path / "out")
    assert result.unusable == 1
    assert dropped(result) == [row for row in range(200, 400) if row != 210]


def test_fewer_rows_than_clusters(make_pool, tmp_path):
    rows = unit(np.random.default_rng(0).standard_normal((3, 16)))
    result = search(make_pool(np.concatenate([rows, rows])), tmp_path / "out", embedding(clusters=100))
    assert dropped(result) == [3, 4, 5]


def test_one_row_and_no_live_row(make_pool, tmp_path):
    assert dropped(search(make_pool(np.ones((1, 16), np.float32)), tmp_path / "one")) == []
    source = make_pool(np.ones((4, 16), np.float32), alive=[False] * 4, name="dead")
    assert dropped(search(source, tmp_path / "none")) == []


def test_one_giant_cluster_is_split_without_losing_pairs(make_pool, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    vectors, _ = planted_pool(2000, 32, rng)
    whole = search(make_pool(vectors), tmp_path / "whole", embedding(clusters=1))
    monkeypatch.setattr("filters.duplicates.compare.TASK_WORK", 20_000)
    monkeypatch.setattr("filters.duplicates.search.tile_rows", lambda *_: 100)
    tiled = search(make_pool(vectors), tmp_path / "tiled", embedding(clusters=1))
    assert len(list((tmp_path / "tiled" / "generation-0000").glob("pairs-*"))) > 50
    assert found_pairs(whole) == brute_force(vectors, 0.9)
    assert tiled.table.read_bytes() == whole.table.read_bytes()


def test_clusters_of_one(make_pool, tmp_path):
    # 78 rows and two centroids: 77 copies of one row, and one that is alone.
    rows = unit(np.eye(2, 16))
    result = search(make_pool(np.repeat(rows, [77, 1], axis=0)), tmp_path / "out", embedding(clusters=2))
    assert Codebook.load(tmp_path / "out" / "codebook.npz").clusters == 2
    assert dropped(result) == list(range(1, 77))


@pytest.mark.parametrize("rule", ["greedy", "semdedup", "components"])
def test_permuted_input_gives_the_same_survivors(make_pool, tmp_path, rule):
    rng = np.random.default_rng(1)
    vectors, _ = planted_pool(1500, 32, rng)
    vectors = np.concatenate([vectors, near_copies(vectors[:200], 0.93, rng)])
    score, order = rng.random(len(vectors)), rng.permutation(len(vectors))
    config = embedding(rule=rule, clusters=1)
    first = search(make_pool(vectors, score), tmp_path / "a", config)
    second = search(
        make_pool(vectors[order], score[order], uid=order, name="permuted"), tmp_path / "b", config
    )
    assert first.dropped > 300
    assert first.table.read_bytes() == second.table.read_bytes()


@pytest.mark.parametrize("clusters", [0, 40], ids=["isotropic", "clustered"])
@pytest.mark.parametrize(("cosine", "least"), [(0.99, 0.999), (0.95, 0.995), (0.90, 0.99)])
def test_recall_against_brute_force(make_pool, tmp_path, cosine, least, clusters):
    rng = np.random.default_rng(2)
    vectors, _ = planted_pool(8000, 64, rng, cosine, clusters)
    config = embedding(similarity=cosine - 0.005, clusters=50)
    result = search(make_pool(vectors, shard_rows=2000), tmp_path / "out", config)
    truth = brute_force(vectors, config.similarity)
    assert len(truth) >= 1600
    pairs = np.concatenate(
        [np.fromfile(p, PAIR) for p in NearSearch(None, tmp_path / "out", config, None).pair_files()]
    )
    rows = {tuple(sorted((2000 * (int(a) >> 32) + int(a) % 2**32, 2000 * (int(b) >> 32) + int(b) % 2**32)))
            for a, b in zip(pairs["a"], pairs["b"])}  # fmt: skip
    assert rows <= truth
    recall = len(rows) / len(truth)
    assert recall >= least
    assert result.recall.low <= recall <= result.recall.high


def test_incremental_equals_from_scratch(make_pool, tmp_path):
    rng = np.random.default_rng(3)
    vectors, _ = planted_pool(4000, 32, rng)
    source = make_pool(vectors, rng.random(4000))
    names = list(source.shards)
    config = embedding(clusters=30)
    search(MemorySource({name: source.load(name) for name in names[:5]}), tmp_path / "steps", config)
    early = {p: p.read_bytes() for p in sorted((tmp_path / "steps" / "generation-0000").glob("pairs-*"))}
    steps = search(source, tmp_path / "steps", config)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "codebook.npz").write_bytes((tmp_path / "steps" / "codebook.npz").read_bytes())
    assert steps.table.read_bytes() == search(source, scratch, config).table.read_bytes()
    assert {p: p.read_bytes() for p in early} == early
    assert steps.rows == 4000
    # Nothing new: nothing is searched again.
    assert search(source, tmp_path / "steps", config).table.read_bytes() == steps.table.read_bytes()
    assert not (tmp_path / "steps" / "generation-0002.json").exists()


def test_rows_that_come_alive_later_enter_then(make_pool, tmp_path):
    rng = np.random.default_rng(4)
    rows = unit(rng.standard_normal((300, 32)))
    vectors = np.concatenate([rows, rows])
    alive = np.arange(600) % 3 > 0
    strict, loose = make_pool(vectors, alive=alive), make_pool(vectors)
    first = search(strict, tmp_path / "out", embedding(clusters=4))
    assert dropped(first) == [r for r in range(300, 600) if r % 3]
    both = search(loose, tmp_path / "out", embedding(clusters=4))
    assert dropped(both) == list(range(300, 600))
    # Stricter again: pairs of rows that are not alive do not count.
    assert dropped(search(strict, tmp_path / "out", embedding(clusters=4))) == dropped(first)


def test_another_width_is_refused_by_name(make_pool, tmp_path):
    first, second = (
        make_pool(np.eye(8, dtype=np.float32), name="a"),
        make_pool(np.eye(9, dtype=np.float32), name="b"),
    )
    mixed = MemorySource({"x": first.load("00000"), "y": second.load("00000")})
    with pytest.raises(Refused, match=r"x holds embeddings of width 8, y of width 9"):
        search(mixed, tmp_path / "out")


def test_settings_of_a_directory_are_kept_to(make_pool, tmp_path):
    source = make_pool(np.eye(8, dtype=np.float32))
    search(source, tmp_path / "out")
    with pytest.raises(Refused, match=r"similarity=0.5: .* was searched with similarity=0.9"):
        search(source, tmp_path / "out", embedding(similarity=0.5))


def test_rethreshold_equals_a_run_at_that_threshold(make_pool, tmp_path):
    rng = np.random.default_rng(5)
    vectors, _ = planted_pool(1500, 32, rng, 0.92)
    vectors = np.concatenate([vectors, near_copies(vectors[:400], 0.97, rng)])
    score = rng.random(len(vectors))
    loose = search(make_pool(vectors, score), tmp_path / "loose", embedding(clusters=1))
    tight = search(make_pool(vectors, score), tmp_path / "tight", embedding(clusters=1, similarity=0.95))
    again = loose.rethreshold(0.95, tmp_path / "again")
    assert 0 < tight.dropped < loose.dropped
    assert again.table.read_bytes() == tight.table.read_bytes()
    assert DuplicateResult.load(tmp_path / "again") == again
    assert again.rethreshold(0.99, tmp_path / "third").dropped == 0
    assert (
        loose.least_similar(3)["similarity"].to_list()
        == sorted(loose.duplicates().collect()["similarity"])[:3]
    )
    with pytest.raises(ValueError, match="lower needs a new run"):
        loose.rethreshold(0.8, tmp_path / "no")


def test_agreement_of_embedding_and_hash(make_pool, tmp_path):
    rows = np.tile(unit(np.ones((1, 16))), (4, 1))
    hashes = np.array([0, 0b111, (1 << 30) - 1, 1 << 63], np.uint64)
    config = NearConfig(similarity=0.95, phash_distance=3)
    assert dropped(search(make_pool(rows, phash=hashes), tmp_path / "agree", config)) == [1, 3]
    far = np.concatenate([rows[:1], unit(np.eye(16)[:1]), rows[2:]])
    assert dropped(search(make_pool(far, phash=hashes, name="far"), tmp_path / "apart", config)) == [3]


def test_hash_alone_finds_every_pair(make_pool, tmp_path):
    rng = np.random.default_rng(6)
    hashes = rng.integers(0, 2**63, 2000, dtype=np.uint64)
    flips = np.array([rng.permutation(64)[:6] for _ in range(500)])
    hashes[1500:] = hashes[:500] ^ np.bitwise_or.reduce(np.uint64(1) << flips.astype(np.uint64), axis=1)
    source = make_pool(np.ones((2000, 4), np.float32), phash=hashes)
    found = search(source, tmp_path / "out", NearConfig(method="phash", phash_distance=6))
    assert found_pairs(found) == {(row, 1500 + row) for row in range(500)}
    assert set(found.duplicates().collect()["hamming"]) == {6}
    assert found.pairs == 500
    assert found.rethreshold(1 - 6 / 64, tmp_path / "same").table.read_bytes() == found.table.read_bytes()
    assert found.rethreshold(1 - 5 / 64, tmp_path / "closer").dropped == 0


def test_hashes_missing_is_an_error_that_says_what_to_do(make_pool, tmp_path):
    with pytest.raises(Refused, match=r"00000: no perceptual hashes; .*method=embedding"):
        search(make_pool(np.eye(4, dtype=np.float32)), tmp_path / "out", NearConfig())

"""Rules, sketches, recall intervals, settings and plans: the parts of the near pass on their own."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from conftest import near_copies, unit
from hypothesis import given
from hypothesis import strategies as st

from filters.duplicates import near, rules
from filters.duplicates.clusters import Codebook, HashBands, train_centroids
from filters.duplicates.compare import pack, plan_units
from filters.duplicates.config import MIB, NearConfig, memory_plan
from filters.duplicates.losses import SourceLosses, source_columns
from filters.duplicates.near import (
    HashTest,
    SketchTest,
    candidate_blocks,
    hamming,
    rotation,
    sketch_reach,
    thin_out,
)
from filters.duplicates.recall import choose_margin, estimate_recall, plant_pairs


def one_by_one(rows: int, pairs: list[tuple[int, int]]) -> list[bool]:
    kept = []
    for row in range(rows):
        kept.append(not any(kept[a] for a, b in pairs if b == row))
    return kept


@given(st.sets(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=150), st.integers(0, 5))
def test_greedy_equals_its_definition(pairs, rounds):
    pairs = sorted({(min(p), max(p)) for p in pairs if p[0] != p[1]})
    earlier, later = np.array(pairs, dtype=int).reshape(-1, 2).T
    before, rules.ROUNDS = rules.ROUNDS, rounds
    try:
        kept = rules.greedy(61, earlier, later)
    finally:
        rules.ROUNDS = before
    assert kept.tolist() == one_by_one(61, pairs)


def test_keepers_name_the_most_similar_kept_row():
    earlier, later = np.array([0, 0, 1, 2]), np.array([1, 3, 3, 3])
    similarity = np.array([0.9, 0.91, 0.99, 0.92])
    kept = rules.greedy(4, earlier, later)
    dropped, keeper, value = rules.keepers("greedy", kept, earlier, later, similarity)
    assert (dropped.tolist(), keeper.tolist(), value.tolist()) == ([1, 3], [0, 2], [0.9, 0.92])
    kept = rules.components(4, earlier, later)
    dropped, keeper, value = rules.keepers("components", kept, earlier, later, similarity)
    assert (dropped.tolist(), keeper.tolist(), value.tolist()) == ([1, 2, 3], [0, 0, 0], [0.99, 0.92, 0.99])


@pytest.mark.parametrize("sketch", [32, 64, 128])
def test_sketch_loses_no_more_than_it_says(sketch):
    rng = np.random.default_rng(0)
    x = unit(rng.standard_normal((20_000, 256)))
    y = near_copies(x, 0.9, rng)
    turn = rotation(256, sketch, 0)
    test = SketchTest(sketch_reach(0.9, sketch, 256))
    left, right = ((rows @ turn).astype(np.float16) for rows in (x, y))
    assert (~test.accept(left, right)).sum() <= 8  # 2 expected of 20,000
    products = (test.sides(left)[0] * test.sides(right)[1]).sum(1).numpy()
    assert (products >= test.cut).sum() >= test.accept(left, right).sum()


def test_hash_products_are_hamming_distances():
    hashes = np.random.default_rng(0).integers(0, 2**64, 50, dtype=np.uint64)
    left, right = HashTest(5).sides(hashes)
    expected = [[int(a ^ b).bit_count() for b in hashes.tolist()] for a in hashes.tolist()]
    assert ((64 - left @ right.T) / 2).int().tolist() == expected
    assert hamming(hashes[:-1], hashes[1:]).tolist() == [expected[i][i + 1] for i in range(49)]


@given(st.integers(0, 16), st.integers(0, 2**64 - 1), st.sets(st.integers(0, 63), max_size=16))
def test_bands_bring_near_hashes_together(distance, value, flips):
    other = value
    for bit in sorted(flips)[:distance]:
        other ^= 1 << bit
    bands = HashBands(distance)
    a, b = (bands.place(np.array([v], np.uint64))[0] for v in (value, other))
    first = bands.first_band(np.array([value ^ other], np.uint64))[0]
    shared = [int(c) for c in a[a == b]]
    assert shared
    assert bands.base(shared[0]) == first
    assert max(a) < bands.clusters


@pytest.mark.parametrize("triangle", [True, False])
def test_candidates_of_blocks_are_all_pairs_above_the_cut(triangle, monkeypatch):
    monkeypatch.setattr("filters.duplicates.near.BLOCK_ROWS", 7)
    monkeypatch.setattr("filters.duplicates.near.BLOCK_COLUMNS", 11)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    got = {
        (a, b)
        for i, j in candidate_blocks(x, x, 1.0, triangle=triangle)
        for a, b in zip(i.tolist(), j.tolist())
    }
    products = x @ x.T >= 1.0
    assert got == {tuple(p) for p in (products.triu(1) if triangle else products).nonzero().tolist()}


def test_thinning_a_dense_block_keeps_every_near_pair(monkeypatch):
    monkeypatch.setattr("filters.duplicates.near.BLOCK_ROWS", 1)
    rng = np.random.default_rng(0)
    x = unit(rng.standard_normal((30, 4)))
    a, b = (axis.ravel() for axis in np.meshgrid(np.arange(30), np.arange(30)))
    monkeypatch.setattr("filters.duplicates.near.BLOCK_COLUMNS", 100)
    keep = thin_out(lambda ids: x[ids], np.arange(30), np.arange(30), a, b, 0.8)
    exact = (x[a] * x[b]).sum(1)
    assert keep[exact >= 0.8].all()
    assert not keep[exact < 0.79].any()


def test_units_cover_every_pair_once():
    sizes = {"new homes": np.array([5, 0, 3]), "old homes": np.array([2, 1, 0])}
    sizes |= {"new visits": np.array([0, 4, 7]), "old visits": np.array([1, 0, 0])}
    units = list(plan_units(sizes, 2))
    area = sum(
        (u.left_rows[1] - u.left_rows[0]) * (u.right_rows[1] - u.right_rows[0])
        for u in units
        if not u.triangle
    )
    triangles = sum(
        (u.left_rows[1] - u.left_rows[0]) * (u.left_rows[1] - u.left_rows[0] - 1) // 2
        for u in units
        if u.triangle
    )
    assert area + triangles == (10 + 5 * 2 + 5) + 4 + (3 + 7 * 3)
    assert [unit for task in pack(units) for unit in task] == units


def test_interval_of_recall_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        owner = np.repeat(np.arange(150), rng.integers(1, 8, 150))
        lost_row = rng.random(150) < 0.05  # pairs of one row are lost together
        found = ~lost_row[owner]
        estimate = estimate_recall(found, owner, 150)
        held += estimate.low <= 0.95 <= estimate.high
    assert held >= 0.93 * 300


def test_recall_without_pairs_is_unknown():
    nothing = estimate_recall(np.empty(0, bool), np.empty(0, int), 10)
    assert (nothing.low, nothing.high) == (0.0, 1.0)
    assert "unknown" in str(nothing)


def test_margin_covers_the_recall_with_confidence():
    gaps = np.random.default_rng(0).random(1000)
    margin = choose_margin(gaps, 0.9)
    assert 0.9 < (gaps <= margin).mean() < 0.93
    assert choose_margin(gaps[:20], 0.99) > gaps[:20].max()


def test_planted_pairs_are_at_the_similarity():
    rng = np.random.default_rng(0)
    rows = unit(rng.standard_normal((10, 32)))
    planted = plant_pairs(rows, 0.9, 25, rng)
    np.testing.assert_allclose((rows[np.arange(25) % 10] * planted).sum(1), 0.9, atol=1e-5)


def test_source_that_loses_most_of_its_rows_is_found():
    urls = [f"https://user@{'a' if n < 30 else 'b'}.org:80/{n}" for n in range(60)]
    frame = pl.DataFrame({"shard": ["s"] * 60, "url": urls})
    told = frame.select(**source_columns(frame.columns))
    losses = SourceLosses()
    alive, gone = (
        pl.Series([True] * 58 + [False] * 2),
        pl.Series([n < 20 or n in (40, 41) for n in range(60)]),
    )
    for half in (slice(0, 45), slice(45, 60)):
        losses.add(told[half], alive[half], gone[half])
    assert losses.worst().rows() == [("domain", "a.org", 30, 20, 20 / 30)]
    assert losses.counts.filter(kind="shard").rows() == [("shard", "s", 58, 22)]


def test_forgotten_domains_are_those_of_fewest_rows(monkeypatch):
    monkeypatch.setattr("filters.duplicates.losses.NAMES", 10)
    losses = SourceLosses()
    names = pl.DataFrame({"domain": ["large"] * 30 + [f"small{n}" for n in range(11)]})
    losses.add(names, pl.Series([True] * 41), pl.Series([True] * 41))
    assert len(losses.counts) == 5
    assert losses.worst().rows() == [("domain", "large", 30, 30, 1.0)]


def test_plan_states_passes_and_keeps_to_the_memory():
    config = NearConfig(task_memory=512 * MIB)
    small, large = memory_plan(config, 10**6, 512), memory_plan(config, 10**9, 512)
    assert small.passes == 1
    assert small.whole < 512 * MIB < large.whole
    assert "0.5 GiB: 1 pass" in small.describe(512 * MIB, "/")
    assert f"0.5 GiB: {large.passes} passes" in large.describe(512 * MIB, "/")
    hashes = memory_plan(NearConfig(method="phash"), 10**6, 1)
    assert hashes.disk >= 11 * 16 * 10**6  # a placement in each of eleven bands
    assert large.passes == -(-4 * 6 * 10**9 // config.cluster_count(10**9, 512)) // large.tile_rows + 1
    assert max(small.train, small.spill, small.compare, large.train, large.spill, large.compare) <= 512 * MIB


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "cosine"), ("rule", "first"), ("similarity", 2), ("similarity", 0), ("phash_distance", 17),
        ("recall", 1), ("clusters", 0), ("sample_rows", 10), ("task_memory", 1),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}: "):
        NearConfig(**{field: value})


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_gives_the_same_pairs_and_placements(name, monkeypatch):
    """One interface: what a GPU computes, in its larger blocks, is what brute force on the CPU gives."""
    monkeypatch.setattr("filters.duplicates.near._device", torch.device(name))
    monkeypatch.setattr("filters.duplicates.near.block_shape", lambda: (64, 128))
    rng = np.random.default_rng(0)
    rows = unit(rng.standard_normal((300, 24)))
    sides = torch.from_numpy(rows)
    found = [
        pair
        for a, b in candidate_blocks(sides, sides, 0.5, triangle=True)
        for pair in zip(a.tolist(), b.tolist())
    ]
    assert sorted(found) == [tuple(p) for p in np.argwhere(np.triu(rows @ rows.T >= 0.5, 1)).tolist()]
    centroids = train_centroids(rows, NearConfig(), 7)
    book = Codebook(centroids, rotation(24, 8, 0), 0.1, 1.0, 2.0)
    home, row, cluster = book.place(rows)
    products = rows @ centroids.T
    assert home.tolist() == products.argmax(1).tolist()
    visits = products.max(1)[:, None] - products <= 0.1
    visits[np.arange(300), home] = False
    assert [*zip(row.tolist(), cluster.tolist())] == [tuple(v) for v in np.argwhere(visits).tolist()]


def test_the_device_is_the_gpu_where_faiss_has_one(monkeypatch):
    monkeypatch.setattr(near, "_device", None)  # put back at the end
    monkeypatch.setattr("faiss.get_num_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert near.device().type == "cuda"
    assert near.block_shape() == near.GPU_BLOCK
    near.use_device("cpu")  # what a worker without a share of the GPU is told
    assert near.device().type == "cpu"

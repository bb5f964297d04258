"""What RS2 promises of its rounds, over random pools, and that each round is a uniform subset."""

import hashlib
import math
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from selection.manifest_rows import ShardRows
from selection.quotas import Quotas
from selection.rounds import Rounds


class TableManifest:
    """A manifest in memory: for each shard, the stratum and the copies of its rows."""

    def __init__(self, strata, copies=None):
        self.shards = [f"{i:08d}.tar" for i in range(len(strata))]
        self._strata = [np.asarray(s, np.int64) for s in strata]
        self._copies = [np.ones_like(s) for s in self._strata] if copies is None else copies

    def rows(self, shard):
        n = len(self._strata[shard])
        number = np.arange(n, dtype=np.uint64)
        return ShardRows(
            uid_hi=(number * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(shard),
            uid_lo=number,
            key=[f"{i:05d}" for i in range(n)],
            copies=np.asarray(self._copies[shard], np.int64),
            stratum=self._strata[shard],
            image_offset=np.arange(n) * 1024 + 512,
            image_size=np.full(n, 100),
        )


@st.composite
def pools(draw):
    strata = draw(st.integers(1, 4))
    shards = draw(st.lists(st.lists(st.integers(0, strata - 1), max_size=12), min_size=1, max_size=6))
    assume(sum(map(len, shards)) > 0)
    return strata, shards


ratios = st.decimals("0.01", "1", places=2)


def make(pool, ratio, seed, replacement=False, stratified=True):
    strata, shards = pool
    table = np.asarray([np.bincount(np.asarray(s, int), minlength=strata) for s in shards])
    return Rounds(
        table.sum(axis=1),
        str(ratio),
        seed,
        replacement=replacement,
        strata=table if stratified else None,
        manifest=TableManifest(shards),
    )


def taken_by(rounds, t):
    return [rounds.members(t, s) for s in range(len(rounds.counts))]


@settings(max_examples=35, deadline=None)
@given(pools(), ratios, st.integers(0, 2**64 - 1), st.integers(1, 16), st.booleans(), st.booleans())
def test_every_round_is_exact_and_use_counts_stay_within_one(
    pool, ratio, seed, last, replacement, stratified
):
    entries = sum(map(len, pool[1]))
    k = int((ratio * entries).quantize(Decimal(1), ROUND_HALF_UP))
    assume(k > 0)
    rounds = make(pool, ratio, seed, replacement, stratified)
    assert rounds.k == k
    used = [np.zeros(len(s), int) for s in pool[1]]
    groups = np.concatenate([np.asarray(s, int) if stratified else np.zeros(len(s), int) for s in pool[1]])
    for t in range(last):
        members = taken_by(rounds, t)
        assert sum(map(len, members)) == k == rounds.size(t)
        assert rounds.shard_sizes(t).tolist() == [len(m) for m in members]
        before = [u.copy() for u in used]
        for shard, positions in enumerate(members):
            assert (np.diff(positions) > 0).all()
            used[shard][positions] += 1
        took = np.concatenate(used) - np.concatenate(before)
        assert np.bincount(groups, weights=took, minlength=len(rounds.stratum_sizes(t))).tolist() == (
            rounds.stratum_sizes(t).tolist()
        )
        if not replacement:
            for group in np.unique(groups):
                counts = np.concatenate(used)[groups == group]
                assert counts.max() - counts.min() <= 1
        assert rounds.unique_seen(t + 1) == np.count_nonzero(np.concatenate(used))


@settings(max_examples=40, deadline=None)
@given(pools(), ratios, st.integers(0, 9), st.integers(0, 40), st.booleans(), st.booleans())
def test_a_round_alone_equals_the_round_in_sequence(pool, ratio, seed, t, replacement, stratified):
    assume(int((ratio * sum(map(len, pool[1]))).quantize(Decimal(1), ROUND_HALF_UP)) > 0)
    in_sequence = make(pool, ratio, seed, replacement, stratified)
    for earlier in range(t):
        in_sequence.members(earlier, 0)
    streamed = dict(in_sequence.all_members(t))
    for shard in reversed(range(len(pool[1]))):
        alone = make(pool, ratio, seed, replacement, stratified).members(t, shard)
        assert streamed.get(shard, np.empty(0)).tolist() == alone.tolist()


def test_ratio_three_tenths_of_ten_for_nine_rounds():
    """The wrap case: the reference takes 2 where 3 are due and uses some samples twice, others five times."""
    for seed in range(8):
        rounds = Rounds([3, 0, 4, 3], 0.3, seed)
        used = [np.zeros(c, int) for c in rounds.counts]
        for t in range(9):
            members = taken_by(rounds, t)
            assert sum(map(len, members)) == 3
            for shard, positions in enumerate(members):
                used[shard][positions] += 1
        assert sorted(np.concatenate(used).tolist()) == [2] * 3 + [3] * 7


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.floats(0, 1), st.integers(1, 120))
def test_quotas_are_whole_parts_that_add_up_and_leave_nobody_behind(sizes, share, last):
    total = sum(sizes)
    assume(total > 0)
    k = math.ceil(share * total)
    quotas = Quotas(sizes, k)
    for t in range(last):
        taken = quotas.taken(t + 1) - quotas.taken(t)
        assert taken.sum() == k
        for c, size in enumerate(sizes):
            assert k * size // total <= taken[c] <= -(-k * size // total)
    assert np.abs(quotas.taken(last) - last * k * np.asarray(sizes) / total).max() < 2


def test_the_first_round_of_a_stratified_run_is_the_largest_remainder_apportionment():
    assert Quotas([47, 16, 15, 12, 10], 10).taken(1).tolist() == [5, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("entries", "ratio", "k"), [(10, 0.15, 2), (10, "0.25", 3), (100, 0.285, 29), (7, 1, 7)]
)
def test_round_size_is_rounded_half_up_in_decimal(entries, ratio, k):
    assert Rounds([entries], ratio, 0).k == k


@pytest.mark.parametrize("ratio", [0, 1.01, "x", "0.04", float("nan")])
def test_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio="):
        Rounds([10], ratio, 0)


def replicas(n, seed, ratio, replacement=False, sizes=(3, 4, 3)):
    """n pools of ten entries over three shards, as n strata: each is drawn by a key of its own."""
    strata = [np.repeat(np.arange(n), size) for size in sizes]
    table = np.full((len(sizes), n), 0) + np.asarray(sizes)[:, None]
    return Rounds(
        table.sum(axis=1), ratio, seed, replacement=replacement, strata=table, manifest=TableManifest(strata)
    )


def membership(rounds, t, n):
    """bool (n, 10): which entries of each replica round t takes."""
    marks = []
    for shard, count in enumerate(rounds.counts):
        mark = np.zeros(count, bool)
        mark[rounds.members(t, shard)] = True
        marks.append(mark.reshape(n, -1))
    return np.concatenate(marks, axis=1)


@pytest.mark.parametrize(("ratio", "k"), [("0.3", 3), ("0.7", 7), ("0.4", 4)])
def test_each_round_is_a_uniform_subset(ratio, k):
    """All C(10, k) subsets equally often, so all pairs too; rounds 3 and 6 straddle passes."""
    n = 12_000
    rounds = replicas(n, 11, ratio)
    for t in (0, 2, 3, 5, 6, 13):
        mark = membership(rounds, t, n)
        assert (mark.sum(axis=1) == k).all()
        observed = np.unique(mark @ (1 << np.arange(10)), return_counts=True)[1]
        assert len(observed) == math.comb(10, k)
        assert stats.chisquare(observed).pvalue > 1e-4, t
        pairs = (mark[:, :, None] & mark[:, None, :]).sum(axis=0)[np.triu_indices(10, 1)]
        expected = n * k * (k - 1) / 90
        assert np.abs(pairs - expected).max() < 5 * math.sqrt(expected)


def test_rounds_with_replacement_are_independent_of_each_other():
    n = 12_000
    rounds = replicas(n, 12, "0.3", replacement=True)
    marks = [membership(rounds, t, n) for t in range(3)]
    expected = n * stats.hypergeom(10, 3, 3).pmf(np.arange(4))
    for a, b in ((0, 1), (1, 2), (0, 2)):
        overlaps = np.bincount((marks[a] & marks[b]).sum(axis=1), minlength=4)
        assert stats.chisquare(overlaps, expected).pvalue > 1e-4


def test_rounds_of_one_pass_do_not_meet_and_make_the_whole_pool():
    rounds = Rounds(np.full(16, 50), "0.25", 3)
    for first in (0, 4, 8):
        for shard in range(16):
            taken = np.concatenate([rounds.members(t, shard) for t in range(first, first + 4)])
            assert sorted(taken.tolist()) == list(range(50))


def test_copies_are_entries_and_uids_repeat_with_them():
    manifest = TableManifest([[0, 0, 0], [0, 0]], copies=[[1, 3, 0], [2, 1]])
    rounds = Rounds([4, 3], 1, 0, manifest=manifest)
    uids = rounds.uids(0)
    expected = np.concatenate([manifest.rows(s).uids.repeat(manifest.rows(s).copies) for s in (0, 1)])
    assert uids.tolist() == sorted(expected.tolist())
    used = np.zeros(7, int)
    half = Rounds([4, 3], "0.43", 5, manifest=manifest)
    for t in range(7):
        for shard, positions in half.all_members(t):
            used[positions + 4 * shard] += 1
    assert used.tolist() == [3] * 7


def test_shards_name_the_rows_and_bytes_to_read():
    rounds = Rounds([5, 0, 4], "0.5", 2, manifest=TableManifest([[0] * 5, [], [0] * 4]))
    for members in rounds.shards(1):
        assert members.path == f"{members.index:08d}.tar"
        assert members.rows.image_offset.tolist() == (members.positions * 1024 + 512).tolist()
        assert members.rows.key == [f"{p:05d}" for p in members.positions]
        assert rounds.shard(1, members.index).positions.tolist() == members.positions.tolist()


@pytest.mark.parametrize("t", [-1, 2**32])
def test_rounds_are_numbered_in_32_bits(t):
    with pytest.raises(ValueError, match="t="):
        Rounds([10], 0.5, 0).members(t, 0)


def test_counts_that_contradict_the_manifest_are_an_error_naming_the_shard():
    rounds = Rounds([5], "0.5", 2, manifest=TableManifest([[0] * 4]))
    with pytest.raises(ValueError, match=r"00000000.tar: the manifest has 4 entries"):
        rounds.shard(0, 0)


@pytest.mark.parametrize(
    "arguments", [{"counts": []}, {"counts": [-1, 3]}, {"counts": [0, 0]}, {"counts": [2], "strata": [[1]]}]
)
def test_counts_that_cannot_be_are_refused(arguments):
    with pytest.raises(ValueError, match=r"counts=|strata:"):
        Rounds(ratio=0.5, seed=0, **arguments)


def test_one_shard_of_a_pool_of_a_hundred_million():
    rounds = Rounds(np.full(10_000, 10_000), "0.3", 1)
    taken = np.concatenate([rounds.members(t, 1234) for t in range(10)])
    assert np.unique(np.bincount(taken, minlength=10_000)).tolist() == [3]


def test_draws_have_not_changed_since_rounds_were_first_published():
    """If this fails, rounds on record can no longer be made again: FORMAT in round_files changes too."""
    digest = hashlib.sha256()
    for rounds in (Rounds([40, 2, 0, 77], "0.3", 5), Rounds([40, 2, 0, 77], "0.3", 5, replacement=True)):
        for t in range(8):
            for shard in range(4):
                digest.update(rounds.members(t, shard).astype("<i8").tobytes())
    digest.update(Rounds(np.full(1_280_000, 10_000), "0.1", 9).members(4, 77).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "ba9b9a8ad6787ab2"

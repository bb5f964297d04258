"""Rounds on disk: the uid file in DataComp's layout, and the few lines that make the rounds again."""

import json

import numpy as np
import pytest

from selection.manifest_rows import UID, ShardRows
from selection.round_files import load, save, write_uids
from selection.rounds import Rounds


class Uids:
    """A manifest of random uids and nothing else, `per_shard` to a shard, in two strata."""

    def __init__(self, shards, per_shard):
        self.shards = [f"{i:08d}.tar" for i in range(shards)]
        self.per_shard = per_shard

    def rows(self, shard):
        rng = np.random.default_rng(shard)
        n = self.per_shard
        return ShardRows(
            uid_hi=rng.integers(0, 2**64, n, np.uint64) >> np.uint64(3 * (shard % 2)),
            uid_lo=rng.integers(0, 2**64, n, np.uint64),
            key=[str(i) for i in range(n)],
            copies=np.ones(n, np.int64),
            stratum=np.arange(n) % 2,
            image_offset=np.zeros(n, np.int64),
            image_size=np.zeros(n, np.int64),
        )


@pytest.fixture
def rounds():
    return Rounds(np.full(6, 200), "0.3", 8, manifest=Uids(6, 200))


@pytest.mark.parametrize("memory", [1 << 20, 1 << 11])
def test_a_round_file_is_sorted_whole_and_alike_in_little_memory(rounds, tmp_path, memory):
    path = tmp_path / "00003.npy"
    write_uids(rounds, 3, str(path), memory)
    uids = np.load(path)
    assert uids.dtype == UID
    assert uids.shape == (rounds.k,)
    assert uids.tolist() == sorted(uids.tolist()) == rounds.uids(3).tolist()


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("stratified", [False, True])
def test_rounds_come_back_from_their_description(tmp_path, replacement, stratified):
    manifest = Uids(6, 200)
    rounds = Rounds(
        np.full(6, 200),
        "0.07",
        2**64 - 1,
        replacement=replacement,
        strata=np.full((6, 2), 100) if stratified else None,
        manifest=manifest,
    )
    path = str(tmp_path / "rounds.json")
    save(rounds, path)
    again = load(path, manifest)
    for t in (0, 14, 15):
        assert again.uids(t).tolist() == rounds.uids(t).tolist()
    assert json.loads((tmp_path / "rounds.json").read_text())["round_size"] == 84


def test_other_counts_than_described_are_an_error(rounds, tmp_path):
    save(rounds, str(tmp_path / "rounds.json"))
    np.save(tmp_path / "rounds.counts.npy", np.full(6, 201))
    with pytest.raises(ValueError, match=r"rounds.counts.npy: not the counts"):
        load(str(tmp_path / "rounds.json"))


def test_another_format_is_an_error(rounds, tmp_path):
    path = tmp_path / "rounds.json"
    save(rounds, str(path))
    path.write_text(path.read_text().replace("winnow-rounds-1", "winnow-rounds-0"))
    with pytest.raises(ValueError, match="winnow-rounds-0"):
        load(str(path))

"""Subset algebra against multisets of Python, and the command."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import curate, subsets
from pipeline import subset_algebra
from pipeline.subset_algebra import combine, sorted_subset
from pipeline.uids import SUBSET
from tests.build import call, halves, jpeg, make_shard, sample, uid, work_in_process

UIDS = st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 2**64 - 1]))


def save(path: Path, uids: list[tuple[int, int]]) -> str:
    np.save(path, np.array(uids, SUBSET))
    return str(path)


@given(st.lists(UIDS, max_size=30), st.lists(UIDS, max_size=30), st.integers(1, 7))
def test_operations_are_those_of_multisets(
    tmp_path_factory: pytest.TempPathFactory, a: list[tuple[int, int]], b: list[tuple[int, int]], block: int
) -> None:
    folder = tmp_path_factory.mktemp("algebra")
    files = [save(folder / "a.npy", a), save(folder / "b.npy", sorted(b))]
    left, right = Counter(a), Counter(b)
    expected = {"union": left | right, "intersect": left & right, "minus": left - right}
    with pytest.MonkeyPatch.context() as patch, sorted_subset(files[0]) as x, sorted_subset(files[1]) as y:
        patch.setattr(subset_algebra, "BLOCK", block)
        for operation, wanted in expected.items():
            overlap = combine(x, y, operation, str(folder / "out.npy"))
            found = np.load(folder / "out.npy")
            assert found.dtype == SUBSET
            assert found.tolist() == sorted(wanted.elements())
            assert (overlap.entries["result"], overlap.unique["result"]) == (wanted.total(), len(wanted))
            assert (overlap.entries["a"], overlap.unique["b"]) == (len(a), len(right))
            assert overlap.entries["both"] == (left & right).total()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs over one pool: captions of at least 7 words, and pictures whose short side is at least 10."""
    folder = tmp_path_factory.mktemp("finished")
    samples = [
        sample(
            n,
            txt=b"a picture of a red ball here" if n < 6 else b"just three words",
            jpg=jpeg((12, 12 if n % 2 else 9), n),
        )
        for n in range(12)
    ]
    make_shard(folder / "pool" / "00000.tar", samples[:7])
    make_shard(folder / "pool" / "00001.tar", samples[7:])
    base = [f"pool.shards={folder}/pool/*.tar", f"out={folder}/out", "scorer=none"]
    with pytest.MonkeyPatch.context() as patch:
        work_in_process(patch.setattr)
        long = ["filters=[caption]", "filters.caption.languages=null", "filters.caption.min_words=7"]
        assert call(curate, *base, *long, "run=long") == 0
        assert call(curate, *base, "filters=[image]", "filters.image.min_side=10", "run=large") == 0
    return folder


def test_runs_by_name_and_by_folder(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = subsets.named(["intersect", "long", f"{finished}/out/runs/large", f"out={finished}/out"])
    assert words[:3] == ["op=intersect", "a=long", f"b={finished}/out/runs/large"]
    assert call(subsets, *words, f"to={tmp_path}/both.npy") == 0
    assert np.load(tmp_path / "both.npy").tolist() == sorted(halves(uid(n)) for n in (1, 3, 5))
    text = capfd.readouterr().out
    assert [line.split()[-2:] for line in text.splitlines()[1:5]] == [
        ["6", "6"],
        ["6", "6"],
        ["3", "3"],
        ["3", "3"],
    ]
    assert "overlap   50.0% of A, 50.0% of B; Jaccard 0.3333" in text


def test_compare_tells_how_the_columns_differ(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(subsets, "op=compare", "a=long", "b=large", f"out={finished}/out") == 0
    rows = {line[:22].strip(): line[22:].split() for line in capfd.readouterr().out.splitlines()}
    assert rows["samples"] == ["3", "3", "3"]
    assert rows["caption words"] == ["7", "(7)", "7", "(7)", "3", "(3)"]
    assert rows["short side"] == ["9", "(9)", "12", "(12)", "12", "(12)"]
    assert rows["language en"][0] == "100.00%"


def test_compare_two_files(finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a, b = (save(tmp_path / f"{n}.npy", [halves(uid(n)), halves(uid(5))]) for n in (1, 2))
    assert call(subsets, "op=compare", f"a={a}", f"b={b}") == 0
    assert "columns are compared when" in capfd.readouterr().out
    assert call(subsets, "op=compare", f"a={a}", f"b={b}", f"out={finished}/out") == 0
    assert "caption characters" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["op=xor"], "op=xor: must be union, intersect, minus or compare"),
        (["op=compare", "to=/tmp/x.npy"], "compare makes no subset"),
        (["a=/nowhere.npy"], "/nowhere.npy: no subset file"),
        (["a=other"], "no finished run there (runs: large, long)"),
        (["a=/nowhere"], "no finished run there (runs: none)"),
        (["b={folder}/flat.npy"], "dtype int64 (3,); a subset file is 1-D u8,u8"),
    ],
)
def test_refusals(
    finished: Path, tmp_path: Path, overrides: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "flat.npy", np.arange(3))
    capfd.readouterr()
    base = ["op=union", "a=long", "b=large", f"out={finished}/out"]
    assert call(subsets, *base, *(o.format(folder=tmp_path) for o in overrides)) == 2
    err = capfd.readouterr().err.strip().splitlines()
    assert len(err) == 1, err
    assert says in err[0]

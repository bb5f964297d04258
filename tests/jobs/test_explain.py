"""Explanations of single samples: verdicts, duplicates, rounds and picture, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from jobs import curate, explain, rounds
from pipeline.lookup import Place, find_samples, rows_of
from pipeline.manifest import Run
from tests.build import call, halves, jpeg, make_pool, make_shard, sample, uid, work_in_process


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept, dropped, found a copy, met a uid twice, and could not read one sample."""
    folder = tmp_path_factory.mktemp("finished")
    make_pool(folder / "pool", 2, 4)
    odd = [
        sample(20, jpg=b"junk"), sample(21, txt=b"no"), sample(1_000, jpg=jpeg(seed=1)),
        sample(22, record={"uid": uid(0)}),
    ]  # fmt: skip
    make_shard(folder / "pool" / "00002.tar", odd)
    with pytest.MonkeyPatch.context() as patch:
        work_in_process(patch.setattr)
        done = call(
            curate, f"pool.shards={folder}/pool/*.tar", f"out={folder}/out", "scorer=none", "filters=[caption]",
            "filters.caption.languages=null", "dedup=exact",
        )  # fmt: skip
    assert done == 0
    return folder


def said(finished: Path, capfd: pytest.CaptureFixture[str], *more: str) -> str:
    capfd.readouterr()
    assert call(explain, f"out={finished}/out", *more) == 0
    return capfd.readouterr().out


def test_kept_with_all_that_is_known(
    finished: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = said(finished, capfd, f"uid={uid(2)}", f"to={tmp_path}/it.png")
    assert f"{uid(2)}: kept" in text
    assert f"{finished}/pool/00000.tar" in text
    assert "key '00002', row 2" in text
    assert "'a picture of thing number 2'" in text
    assert "filters: kept" in text
    assert "dedup: kept" in text
    assert np.array_equal(np.asarray(Image.open(tmp_path / "it.png")), decoded(2))


def decoded(n: int) -> np.ndarray:
    import io

    return np.asarray(Image.open(io.BytesIO(jpeg(seed=n))))


def test_dropped_rejected_and_duplicates(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rejected, short = said(finished, capfd, f"uid=[{uid(20)},{uid(21)}]").split(f"\n{uid(21)}")
    assert "out: undecodable_image" in rejected
    assert "undecodable_image: the bytes are not an image" in rejected
    assert "filters: caption_words (1 against a cut of 2): the caption has too few or too many words" in short
    assert "dedup: was out already" in short
    stays, gone = sorted([uid(1), uid(1_000)])  # no scores: the lower uid
    pair = ", similarity 1.0000 (exact_duplicate)"
    assert f"duplicate of {stays}{pair}" in said(finished, capfd, f"uid={gone}")
    assert f"stands for 1 samples that were dropped for it\n    {gone}{pair}" in said(
        finished, capfd, f"uid={stays}"
    )


def test_a_uid_that_the_pool_uses_twice(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = said(finished, capfd, f"uid={uid(0)}")
    assert f"{uid(0)}: kept" in text
    assert f"{uid(0)}: out: duplicate_uid" in text


@pytest.mark.usefixtures("in_process")
def test_rounds_and_influence_when_there_are_some(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = finished / "out/runs/default"
    assert call(rounds, f"out={finished}/out", "ratio=0.4", "rounds=5") == 0
    held = {t: np.load(run / f"rounds/{t:05d}.npy").tolist() for t in range(5)}
    hi, lo = halves(uid(3))
    table = {"uid_hi": [hi], "uid_lo": [lo], "delta_if_removed_utility": [-0.25]}
    path = run / "stages/01-dedup/influence.parquet"
    pl.DataFrame(table, schema_overrides={"uid_hi": pl.UInt64, "uid_lo": pl.UInt64}).write_parquet(path)
    text = said(finished, capfd, f"uid={uid(3).upper()}")
    shown = [str(t) for t in range(5) if halves(uid(3)) in held[t]]
    assert f"rounds    {', '.join(shown)}\n" in text
    assert 1 <= len(shown) <= 4
    assert "influence delta_if_removed_utility -0.25" in text
    assert "rounds    none" in said(finished, capfd, f"uid={uid(21)}")


def test_the_picture_is_drawn_in_half_blocks() -> None:
    rows = explain.draw(Image.new("RGB", (8, 4), (255, 0, 9)), 4).splitlines()
    assert [r.count("▀") for r in rows] == [4]
    assert rows[0].count("38;2;255;0;9m") == 4


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"uid={uid(77)}"], f"uid={uid(77)}: not in the pool"),
        (["uid=12345678901234567890123456789012"], "uid=12345678901234567890123456789012: not in the pool"),
        (["uid=12e4"], "is not 32 hex digits"),
        ([f"uid=[{uid(1)},{uid(2)}]", "to=/nowhere/x.png"], "one file for 2 samples; name a folder"),
        ([f"uid={uid(1)}", "run=other"], "no finished run there (runs: default)"),
        ([], "uid: must be given"),
    ],
)
def test_refusals(finished: Path, overrides: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert call(explain, f"out={finished}/out", *overrides) == 2
    err = capfd.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert says in err[0]


def test_lookup_stops_at_the_shard_that_has_the_last_uid(finished: Path) -> None:
    run = Run(str(finished / "out"), "default")
    ids = sorted(p.stem for p in (finished / "out/features").glob("*/0*.parquet"))
    wanted = [halves(uid(1)), halves(uid(6))]
    places = {wanted[0]: [Place(ids[0], 1)], wanted[1]: [Place(ids[1], 2)]}
    assert find_samples(run.tables(), ids, wanted) == places
    assert (
        find_samples(run.tables(), [*ids[:2], *["gone"] * 40], wanted) == places
    )  # those are never asked for


def test_rows_of_a_sorted_table(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    hi = np.sort(np.random.default_rng(0).integers(0, 1 << 63, 5000, dtype=np.uint64)) * 2
    frame = pl.DataFrame({"uid_hi": hi, "uid_lo": np.arange(5000, dtype=np.uint64)})
    frame.write_parquet(path, row_group_size=100)
    assert rows_of(str(path), (int(hi[4321]), 4321)) == ([{"uid_hi": int(hi[4321]), "uid_lo": 4321}], 1)
    assert rows_of(str(path), (int(hi[4321]), 4)) == ([], 0)
    assert rows_of(str(path), (1, 4), "kept_") == ([], 0)
    assert rows_of(str(tmp_path / "absent"), (1, 4)) == ([], 0)

"""Verification: a whole run passes, and each thing that can be wrong with one is found and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from jobs import curate, reshard, verify
from tests.build import call, make_pool, make_shard, sample

RUN = Path("out/runs/default")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pool of three shards, a run over it and its training shards."""
    from tests.conftest import run_in_process

    folder = tmp_path_factory.mktemp("finished")
    make_pool(folder / "pool", 3, 6)
    make_shard(folder / "pool" / "00003.tar", [sample(30, jpg=b"junk"), sample(31), sample(32, txt=b"no")])
    with pytest.MonkeyPatch.context() as patch:
        run_in_process(patch)
        done = call(
            curate, f"pool.shards={folder}/pool/*.tar", f"out={folder}/out", "scorer=none", "filters=[caption]",
            "filters.caption.languages=null",
        )  # fmt: skip
        assert done == 0
        assert call(reshard, f"out={folder}/out", f"to={folder}/train", "shard_size=8") == 0
    return folder


@pytest.fixture
def here(finished: Path, tmp_path: Path, in_process: None) -> Path:
    """A copy of it to spoil. The pool stays where it was scanned; time stamps are kept."""
    shutil.copytree(finished / "out", tmp_path / "out")
    shutil.copytree(finished / "train", tmp_path / "train")
    return tmp_path


def found(here: Path, capfd: pytest.CaptureFixture[str], *more: str) -> str:
    """What verification says of a run that is not whole."""
    capfd.readouterr()
    assert call(verify, f"out={here}/out", *more) == 1
    err = [line for line in capfd.readouterr().err.splitlines() if line.startswith("winnow: ")]
    assert len(err) == 1
    return err[0].removeprefix("winnow: ")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()  # it may be a hard link
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("deep", ["false", "true"])
def test_a_whole_run_passes(here: Path, deep: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(verify, f"out={here}/out", f"shards={here}/train", f"deep={deep}") == 0
    said = capfd.readouterr().out
    for part in (
        "receipt: 21 samples",
        "manifest.parquet: 19 rows",
        "pool: 4 shards",
        "19 samples in 3 shards",
    ):
        assert part in said


@pytest.mark.parametrize("name", ["manifest.parquet", "subset.npy", "accounting.parquet"])
def test_a_flipped_byte_in_an_output(here: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = here / RUN / name
    flip(path, path.stat().st_size // 2)
    assert f"{path}: sha256 is" in found(here, capfd)


def test_decisions_missing_changed_or_too_many(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = sorted((here / RUN / "decisions").iterdir())[:2]
    content = first.read_bytes()
    first.unlink()
    assert found(here, capfd) == f"{first}: is missing"
    pl.read_parquet(content)[:-1].write_parquet(first)
    assert f"{first}: sha256 is" in found(here, capfd)
    first.write_bytes(content)
    stray = first.with_name("stray.parquet")
    shutil.copy(second, stray)
    assert f"{stray}: belongs to no shard" in found(here, capfd)


def test_a_missing_decision_is_found_though_its_digest_were_right(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = sorted((here / RUN / "decisions").iterdir())[0]
    frame = pl.read_parquet(path)[:-1]
    path.unlink()
    frame.write_parquet(path)
    rehash(here, path)
    assert f"{path}: the count of rows is 5, the feature table says 6" in found(here, capfd)


def rehash(here: Path, decisions: Path) -> None:
    """Make every digest fit what now lies there, as a faulty writer would."""
    from pipeline.storage import sha256

    accounting = here / RUN / "accounting.parquet"
    digest = pl.when(pl.col("id") == decisions.stem).then(pl.lit(sha256(str(decisions))))
    pl.read_parquet(accounting).with_columns(
        decisions_sha256=digest.otherwise("decisions_sha256")
    ).write_parquet(accounting)
    renew(here, "accounting.parquet")


def renew(here: Path, name: str) -> None:
    from pipeline.storage import sha256

    edit(here / RUN / "receipt.json", lambda r: r["outputs"].update({name: sha256(str(here / RUN / name))}))


def test_receipts_that_do_not_add_up(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = here / RUN / "receipt.json"
    whole = path.read_bytes()
    edit(path, lambda r: r.update(kept=r["kept"] + 1))
    assert "does not add up: 20 kept + 1 dropped + 1 rejected of 21 samples" in found(here, capfd)
    path.write_bytes(whole)
    edit(path, lambda r: r["pool"].update(samples=22, shards=4) or r["dropped"].update(caption_words=2))
    assert "accounting.parquet: the sum of samples is 21, the receipt says 22" in found(here, capfd)
    path.write_bytes(whole)
    edit(path, lambda r: r.update(dropped={"caption_chars": 1}))
    assert "the count of caption_chars is 0, the receipt says 1" in found(here, capfd)
    path.write_bytes(whole[:-9])
    assert f"{path}: cannot be read" in found(here, capfd)
    path.unlink()
    assert call(verify, f"out={here}/out") == 2


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("subset.npy", lambda p: np.save(p, np.load(p)[::-1]), "entry 0 is not the manifest's"),
        ("subset.npy", lambda p: np.save(p, np.load(p)[1:]), "the count of uids is 18"),
        (
            "manifest.parquet",
            lambda p: pl.read_parquet(p).with_columns(copies=pl.lit(2, pl.UInt32)).write_parquet(p),
            "copies of row 0 is 2, decisions and feature table says 1",
        ),
        ("manifest.parquet", lambda p: pl.read_parquet(p)[:-1].write_parquet(p), "the count of rows is 18"),
    ],
)
def test_outputs_that_disagree_though_their_digests_were_right(
    here: Path, name: str, spoil: Callable[[Path], object], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(here / RUN / name)
    renew(here, name)
    assert says in found(here, capfd)


def test_changed_tables(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = sorted((here / "out/features").glob("*/0*.parquet"))[1]
    whole = table.read_bytes()
    flip(table, len(whole) // 2)
    assert f"{table}: xxh3-128 is" in found(here, capfd)
    table.unlink()
    assert f"{table}: is missing" in found(here, capfd)


def test_changed_shards(here: Path, finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shard = finished / "pool" / "00001.tar"
    whole, stat = shard.read_bytes(), shard.stat()
    try:
        os.utime(shard, (1, 1))  # another time stamp alone is no change
        assert call(verify, f"out={here}/out") == 0
        flip(shard, 700)
        assert f"{shard}: xxh3-128 of its content is" in found(here, capfd)
        os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # hidden: only reading it tells
        assert call(verify, f"out={here}/out") == 0
        assert f"{shard}: xxh3-128 of its content is" in found(here, capfd, "deep=true")
        shard.unlink()
        assert found(here, capfd) == f"{shard}: is missing"
    finally:
        shard.write_bytes(whole)
        os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "at", "says"),
    [
        ("00000001.tar", 600, "the image of"),
        ("00000001.tar", 3, "a sample's key is"),
        ("sizes.json", 20, "sizes.json"),
        ("sample_ids.npy", 200, "sample_ids.npy: sha256"),
        ("00000002_stats.json", 17, "00000002_stats.json"),
    ],
)
def test_changed_training_shards(
    here: Path, name: str, at: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if name.endswith(".tar") and at == 3:  # rename a member: its header keeps a right checksum
        data = (here / "train" / name).read_bytes()
        (here / "train" / name).write_bytes(swap_digits(data))
    else:
        flip(here / "train" / name, at)
    assert says in found(here, capfd, f"shards={here}/train")


def swap_digits(tar: bytes) -> bytes:
    """The first sample's members under a key with two unlike digits swapped: same checksum, another name."""
    key = tar[: tar.index(b".")]
    i = next(i for i in range(len(key) - 1) if key[i] != key[i + 1])
    return tar.replace(key, key[:i] + key[i + 1 : i + 2] + key[i : i + 1] + key[i + 2 :])


def test_missing_training_shard_and_another_runs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "train" / "00000000.tar").unlink()
    assert "00000000.tar: is missing" in found(here, capfd, f"shards={here}/train")
    edit(here / "train" / ".reshard.json", lambda mark: mark.update(manifest="0"))
    assert "was not written from the manifest" in found(here, capfd, f"shards={here}/train")

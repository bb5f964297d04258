"""Duplicates and leakage through the command: who stays, recovery, workers, growth, odd input."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from jobs import curate
from tests.build import call, contents, halves, jpeg, make_shard, sample, uid

SHARDS, EACH, TOTAL = 3, 30, 90
SIZE = (96, 80)
# Copies in the pool: (row, of which row). Rows of another shard among them, and a copy of a copy.
BYTES = [(10, 2), (40, 2), (70, 33)]
NEAR = [(11, 3), (41, 4), (71, 34), (72, 34), (73, 5)]
KILLED = """
import os, signal, sys
from filters.duplicates.search import NearSearch
from jobs import curate
from tests.build import call, work_in_process
work_in_process(setattr)
setattr(NearSearch, sys.argv[1], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
call(curate, *sys.argv[2:])
"""


def picture(n: int) -> bytes:
    """From a range in which no two pictures come as close as near copies do."""
    return jpeg(SIZE, 800 + n)


def worse(data: bytes, quality: int = 70) -> bytes:
    """The picture saved again, a little smaller: a near copy."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(data)).resize((80, 66)).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def pictures() -> list[bytes]:
    data = [picture(n) for n in range(TOTAL)]
    for row, of in BYTES:
        data[row] = data[of]
    for row, of in NEAR:
        data[row] = worse(data[of], 70 + row % 10)
    return data


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, data = tmp_path_factory.mktemp("pool"), pictures()
    for s in range(SHARDS):
        rows = range(s * EACH, (s + 1) * EACH)
        make_shard(folder / f"{s:05d}.tar", [sample(n, jpg=data[n]) for n in rows])
    return folder


def curated(pool: Path | str, out: Path, *more: str) -> int:
    where = pool if isinstance(pool, str) else f"{pool}/*.tar"
    return call(curate, f"pool.shards={where}", f"out={out}", "filters=[]", *more)


@pytest.fixture(scope="module")
def scanned(pool: Path, tiny_scorer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with tables, deduplicated once."""
    out = tmp_path_factory.mktemp("scanned")
    with pytest.MonkeyPatch.context() as patch:
        from tests.build import work_in_process

        work_in_process(patch.setattr)
        assert curated(pool, out, f"scorer.weights={tiny_scorer}", "dedup=near") == 0
    return out


@pytest.fixture
def out(scanned: Path, tmp_path: Path) -> Path:
    """A new output folder that has the tables and nothing else."""
    shutil.copytree(scanned / "features", tmp_path / "out" / "features")
    return tmp_path / "out"


def stage(out: Path, run: str = "default", name: str = "dedup") -> Path:
    return next((out / "runs" / run / "stages").glob(f"*-{name}"))


def receipt(out: Path, run: str = "default") -> dict:
    return json.loads((out / "runs" / run / "receipt.json").read_text())


def found(out: Path, run: str = "default") -> dict:
    return json.loads((stage(out, run) / "duplicates.json").read_text())


def groups(out: Path, run: str = "default") -> set[frozenset[int]]:
    """Numbers of (dropped, kept) samples."""
    number = {halves(uid(n)): n for n in range(2 * TOTAL)}
    table = pl.read_parquet(stage(out, run) / "duplicates.parquet")
    rows = table.select("uid_hi", "uid_lo", "kept_uid_hi", "kept_uid_lo").rows()
    return {frozenset((number[a, b], number[c, d])) for a, b, c, d in rows}


def results(out: Path, run: str = "default") -> dict[str, bytes]:
    """What a run leaves, but for its receipt and times."""
    files = contents(out / "runs" / run)
    return {n: b for n, b in files.items() if n != "receipt.json" and not n.endswith("stage.json")}


def test_copies_are_dropped_by_reason_and_the_best_stays(scanned: Path) -> None:
    assert receipt(scanned)["dropped"] == {"exact_duplicate": 3, "near_duplicate": 5}
    assert receipt(scanned)["adds_up"]
    families = [{2, 10, 40}, {33, 70}, {3, 11}, {4, 41}, {34, 71, 72}, {5, 73}]
    pairs = groups(scanned)
    assert len(pairs) == 8
    assert all(any(pair <= family for family in families) for pair in pairs)
    tables = pl.concat(pl.read_parquet(p) for p in sorted((scanned / "features").glob("*/*.parquet")))
    decisions = [pl.read_parquet(p) for p in sorted((scanned / "runs/default/decisions").glob("*.parquet"))]
    kept = pl.concat(decisions)["kept"].to_list()
    order = tables.with_row_index("row").sort(
        "score_dfn", "uid_hi", "uid_lo", descending=[True, False, False]
    )
    rank = {row: place for place, row in enumerate(order["row"].to_list())}
    for family in families:
        assert [row for row in family if kept[row]] == [min(family, key=rank.__getitem__)]


def test_summary_holds_recall_groups_and_least_similar_pairs(scanned: Path) -> None:
    summary = found(scanned)
    assert summary["exact"] == {"sha256": 3, "pixel_hash": 0, "url": 0}
    near = summary["near"]
    assert (near["rows"], near["unusable"], near["dropped"]) == (TOTAL - 3, 0, 5)
    assert near["recall"]["low"] <= 1.0 == near["recall"]["high"]
    assert near["largest_groups"][0]["size"] == 3
    similarity = [pair["similarity"] for pair in near["least_similar"]]
    assert len(similarity) == 5
    assert similarity == sorted(similarity)
    assert summary["losing_sources"] == []


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("where", ["_spill", "_recall"])
def test_killed_inside_the_stage_and_resumed(
    scanned: Path, out: Path, pool: Path, tiny_scorer: Path, where: str
) -> None:
    arguments = [f"pool.shards={pool}/*.tar", f"out={out}", "filters=[]", "dedup=near"]
    arguments.append(f"scorer.weights={tiny_scorer}")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.run([sys.executable, "-c", KILLED, where, *arguments], env=environment, timeout=200)
    assert child.returncode == -signal.SIGKILL
    assert bool(list(out.rglob("pairs-??????"))) == (where == "_recall")
    assert not list(out.rglob("done.json"))
    assert call(curate, *arguments) == 0
    assert results(out) == results(scanned)
    assert contents(out / "duplicates") == contents(scanned / "duplicates")


@pytest.mark.usefixtures("ray_cluster")
def test_one_worker_against_two(out: Path, scanned: Path, pool: Path, tiny_scorer: Path) -> None:
    for number in (1, 2):
        more = (
            f"scorer.weights={tiny_scorer}",
            "dedup=near",
            f"cluster.workers={number}",
            f"run=with{number}",
        )
        assert curated(pool, out, *more) == 0
        assert results(out, f"with{number}") == results(scanned)
        shutil.rmtree(out / "duplicates")


@pytest.mark.usefixtures("in_process")
def test_new_shards_are_compared_without_redoing_the_old(
    out: Path, scanned: Path, pool: Path, tiny_scorer: Path
) -> None:
    more = (f"scorer.weights={tiny_scorer}", "dedup=near")
    assert curated(f"{pool}/{{00000..00001}}.tar", out, *more, "run=first") == 0
    assert receipt(out, "first")["dropped"] == {"exact_duplicate": 2, "near_duplicate": 2}
    [home] = (out / "duplicates").iterdir()
    old = contents(home / "generation-0000")
    assert curated(pool, out, *more) == 0
    # The summary holds the recall of what was searched last.
    both = {name for name in results(out) if not name.endswith("duplicates.json")}
    assert {n: results(out)[n] for n in both} == {n: results(scanned)[n] for n in both}
    assert contents(home / "generation-0000") == old
    entered = json.loads((home / "generation-0001.json").read_text())["shards"]
    assert [entry["shard"][:5] for entry in entered] == ["00002"]
    # Fewer shards than have entered: what is not in this run is no duplicate of anything.
    assert curated(f"{pool}/{{00000..00001}}.tar", out, *more, "run=fewer") == 0
    assert receipt(out, "fewer")["dropped"] == receipt(out, "first")["dropped"]
    assert groups(out, "fewer") == groups(out, "first")
    assert not (home / "generation-0002").exists()


@pytest.mark.usefixtures("in_process")
def test_a_shard_that_was_replaced_is_searched_anew(pool: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(pool, mine)
    more = ("scorer=none", "dedup=near", "dedup.method=phash")
    assert curated(mine, tmp_path / "out", *more) == 0
    before = groups(tmp_path / "out")
    fresh = [sample(TOTAL + n, jpg=picture(TOTAL + n)) for n in range(EACH)]
    make_shard(mine / "00002.tar", fresh)
    assert curated(mine, tmp_path / "out", *more) == 0
    after = groups(tmp_path / "out")
    assert {frozenset((3, 11)), frozenset((4, 41))} <= before & after
    assert not any(max(pair) >= 2 * EACH for pair in after)


@pytest.mark.usefixtures("in_process")
def test_nan_and_zero_embeddings_never_enter(out: Path, pool: Path, tiny_scorer: Path) -> None:
    [path] = (out / "features").glob("*/00001-*.image.npy")
    vectors = np.load(path)
    vectors[11], vectors[20] = np.nan, 0  # row 41 is a near copy of 4
    np.save(path, vectors)
    assert curated(pool, out, f"scorer.weights={tiny_scorer}", "dedup=near") == 0
    assert found(out)["near"]["unusable"] == 2
    assert receipt(out)["dropped"] == {"exact_duplicate": 3, "near_duplicate": 4}
    assert frozenset((4, 41)) not in groups(out)


@pytest.mark.usefixtures("in_process")
def test_without_a_network_the_hash_alone_decides(pool: Path, tmp_path: Path, capfd) -> None:
    assert curated(pool, tmp_path, "scorer=none", "dedup=near") == 2
    assert (
        "dedup.method=agree: scorer=none leaves no embeddings; set dedup.method=phash"
        in capfd.readouterr().err
    )
    assert curated(pool, tmp_path, "scorer=none", "dedup=near", "dedup.method=phash") == 0
    assert receipt(tmp_path)["dropped"] == {"exact_duplicate": 3, "near_duplicate": 5}


@pytest.mark.usefixtures("in_process")
def test_duplicates_by_a_scorer_of_their_own(pool: Path, out: Path, tiny_scorer: Path) -> None:
    own = ("+scorer@dedup.scorer=open_clip", f"dedup.scorer.weights={tiny_scorer}")
    assert curated(pool, out, "scorer=none", "dedup=near", *own, "dedup.scorer.precision=cube") == 2
    assert curated(pool, out, "scorer=none", "dedup=near", *own) == 0
    assert receipt(out)["dropped"] == {"exact_duplicate": 3, "near_duplicate": 5}
    assert receipt(out)["scorer"]["fingerprint"] is None


@pytest.mark.usefixtures("in_process")
def test_both_embeddings_keep_one_picture_under_two_captions(
    out: Path, pool: Path, tiny_scorer: Path
) -> None:
    [path] = (out / "features").glob("*/00000-*.text.npy")
    captions = np.load(path)
    captions[3], captions[11] = np.eye(2, captions.shape[1])  # of the near copies 3 and 11
    captions[5] = 1 / np.sqrt(captions.shape[1])
    np.save(path, captions)
    more = ("dedup=near", "dedup.embedding=both", "dedup.similarity=0.9")
    assert curated(pool, out, f"scorer.weights={tiny_scorer}", *more) == 0
    assert frozenset((3, 11)) not in groups(out)
    assert frozenset((4, 41)) in groups(out)


@pytest.mark.usefixtures("in_process")
def test_a_shard_that_is_a_copy_of_another_is_a_warning(pool: Path, tmp_path: Path, caplog) -> None:
    mine, data = tmp_path / "mine", pictures()
    shutil.copytree(pool, mine)
    make_shard(mine / "00003.tar", [sample(TOTAL + n, jpg=data[n]) for n in range(EACH)])
    assert curated(mine, tmp_path / "out", "scorer=none", "dedup=exact") == 0
    lost = found(tmp_path / "out")["losing_sources"]
    assert {loss["kind"] for loss in lost} == {"shard"}
    assert all(loss["dropped"] > EACH / 2 for loss in lost)
    said = f"shard {lost[0]['source']} loses {lost[0]['dropped']} of {EACH} samples"
    assert any(said in message for message in caplog.messages)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("method", ["agree", "phash"])
def test_planted_evaluation_images_leak_and_no_other(
    pool: Path, out: Path, tiny_scorer: Path, tmp_path: Path, method: str
) -> None:
    data = pictures()
    images = tmp_path / "images" / "a class"
    images.mkdir(parents=True)
    for n in (7, 45, 80):
        (images / f"val.{n}.jpg").write_bytes(worse(data[n]))
    (images / "other.jpg").write_bytes(picture(1000))
    scorer = "scorer=none" if method == "phash" else f"scorer.weights={tiny_scorer}"
    more = (scorer, f"leakage.method={method}", f"+leakage.sets.val={tmp_path / 'images'}")
    assert curated(pool, out, *more) == 0
    assert receipt(out)["dropped"] == {"leaks_val": 3}
    leaks = pl.read_parquet(stage(out, name="leakage") / "leaks.parquet")
    expected = {(halves(uid(n)), f"val_{n}_jpg") for n in (7, 45, 80)}
    pairs = leaks.select("uid_hi", "uid_lo", "evaluation").rows()
    assert {((hi, lo), name.rsplit("a class_")[-1]) for hi, lo, name in pairs} == expected
    # Another image in the set: the same command sees it.
    (images / "more.jpg").write_bytes(worse(data[50]))
    assert curated(pool, out, *more) == 0
    assert receipt(out)["dropped"] == {"leaks_val": 4}

"""The demo pool: known faults in stated numbers, the same bytes each time, and nothing half built."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from jobs.demo_drawings import GROUPS, named_drawings
from jobs.demo_pool import BACKGROUNDS, KINDS, DemoPool, DemoPoolConfig, build

TINY = DemoPoolConfig(
    drawings=48,
    trusted_pairs=90,
    pool_pairs=200,
    shard_size=40,
    truncated_image=0.05,
    undecodable_image=0.03,
    empty_caption=0.02,
    missing_caption=0.015,
)
PICTURES = ("jpg", "png", "webp")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DemoPool:
    return build(TINY, tmp_path_factory.mktemp("demo") / "made")


@pytest.fixture(scope="module")
def truth(made: DemoPool) -> pl.DataFrame:
    return pl.read_parquet(made.truth)


@pytest.fixture(scope="module")
def pool(made: DemoPool) -> dict[str, dict[str, bytes]]:
    return samples(made.pool)


def samples(part: Path) -> dict[str, dict[str, bytes]]:
    """Members by extension of each whole sample, under "<shard>/<key>", as far as each tar can be read."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(part.glob("*.tar")):
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    key, _, extension = member.name.partition(".")
                    data = tar.extractfile(member)
                    assert data is not None
                    found.setdefault(f"{path.name}/{key}", {})[extension] = data.read()
        except tarfile.ReadError:
            continue
    return {name: members for name, members in found.items() if "json" in members}


def picture(members: dict[str, bytes]) -> bytes:
    (data,) = (members[extension] for extension in PICTURES if extension in members)
    return data


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_same_config_gives_the_same_bytes_whatever_the_hash_seed(made: DemoPool, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from jobs.demo_pool import *; "
        f"build({TINY!r}, Path({str(tmp_path / 'again')!r}))"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root), "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=root)
    assert digest(tmp_path / "again") == digest(made.pool.parent)


def test_another_seed_gives_other_pictures(made: DemoPool, tmp_path: Path) -> None:
    other = build(replace(TINY, seed=1), tmp_path / "other")
    assert digest(other.pool).keys() == digest(made.pool).keys()
    assert not set(digest(other.pool).values()) & {
        value for name, value in digest(made.pool).items() if name.endswith(".tar")
    }


def test_counts_by_kind_are_the_stated_shares(made: DemoPool, truth: pl.DataFrame) -> None:
    expected = {
        "mismatch": 60,
        "exact_dup": 10,
        "near_dup": 10,
        "truncated_image": 10,
        "undecodable_image": 6,
        "empty_caption": 4,
        "missing_caption": 3,
        "lost_in_truncated_shard": 16,
        "clean": 81,
    }
    assert dict(Counter(truth["kind"])) == expected == made.counts
    assert tuple(made.counts) == KINDS
    assert truth["uid"].n_unique() == len(truth) == TINY.pool_pairs


def test_truth_names_every_sample_that_can_be_read_and_no_other(
    truth: pl.DataFrame, pool: dict[str, dict[str, bytes]]
) -> None:
    present = truth.filter(pl.col("kind") != "lost_in_truncated_shard")
    by_name = {f"{row['shard']}/{row['key']}": row for row in present.iter_rows(named=True)}
    assert by_name.keys() == pool.keys()
    for name, row in by_name.items():
        record = json.loads(pool[name]["json"])
        assert record == {"uid": row["uid"], "label": row["group"]}
        assert re.fullmatch(r"[0-9a-f]{32}", row["uid"])
        caption = pool[name].get("txt")
        assert (None if caption is None else caption.decode()) == row["caption"]
        assert (row["kind"] == "missing_caption") == (caption is None)
        assert (row["kind"] == "empty_caption") == (caption == b"")


def test_pictures_decode_unless_damaged(truth: pl.DataFrame, pool: dict[str, dict[str, bytes]]) -> None:
    for row in truth.filter(pl.col("kind") != "lost_in_truncated_shard").iter_rows(named=True):
        data = picture(pool[f"{row['shard']}/{row['key']}"])
        if row["kind"] == "undecodable_image":
            with pytest.raises(OSError, match="cannot identify"):
                Image.open(io.BytesIO(data))
            continue
        image = Image.open(io.BytesIO(data))
        if row["kind"] == "truncated_image":
            with pytest.raises(OSError, match="truncated"):
                image.load()
        else:
            image.load()
            assert image.mode == "RGB"
            assert 44 <= image.width == image.height <= 96


def test_duplicates_copy_clean_samples(truth: pl.DataFrame, pool: dict[str, dict[str, bytes]]) -> None:
    rows = {row["uid"]: row for row in truth.iter_rows(named=True)}
    originals = []
    for row in rows.values():
        if row["kind"] not in ("exact_dup", "near_dup"):
            continue
        original = rows[row["of"]]
        originals.append(row["of"])
        assert original["kind"] == "clean"
        assert (row["drawing"], row["background"]) == (original["drawing"], original["background"])
        assert row["caption"] != original["caption"]
        assert any(name in row["caption"] for name in row["names"])
        same = picture(pool[f"{row['shard']}/{row['key']}"]) == picture(
            pool[f"{original['shard']}/{original['key']}"]
        )
        assert same == (row["kind"] == "exact_dup")
    assert len(set(originals)) == len(originals)


def test_swapped_captions_fit_the_other_sample_and_not_this_one(truth: pl.DataFrame) -> None:
    rows = {row["uid"]: row for row in truth.iter_rows(named=True)}
    for row in rows.values():
        if row["kind"] == "mismatch":
            other = rows[row["of"]]
            assert other["kind"] in ("clean", "mismatch")
            assert any(name in row["caption"] for name in other["names"])
            own = set(re.findall(r"\w{3,}", " ".join(row["names"]).lower())) - {"with", "the", "and"}
            assert not own & set(re.findall(r"\w+", " ".join(other["names"]).lower()))
        elif row["kind"] == "clean":
            assert any(name in row["caption"] for name in row["names"])
            assert row["of"] is None


def test_trusted_is_clean_and_shares_no_picture_with_the_pool(
    made: DemoPool, truth: pl.DataFrame, pool: dict[str, dict[str, bytes]]
) -> None:
    trusted = samples(made.trusted)
    assert len(trusted) == TINY.trusted_pairs
    for members in trusted.values():
        Image.open(io.BytesIO(picture(members))).load()
        assert members["txt"]
    trusted_pictures = {picture(members) for members in trusted.values()}
    assert len(trusted_pictures) == len(trusted)
    assert not trusted_pictures & {picture(members) for members in pool.values()}
    uids = [json.loads(members["json"])["uid"] for members in trusted.values()]
    assert len(set(uids)) == len(uids)
    assert not set(uids) & set(truth["uid"])
    colours = truth.group_by("drawing").agg(pl.col("background").n_unique())["background"].to_list()
    assert max(colours) <= len(BACKGROUNDS) // 2


def test_two_shards_are_damaged_and_the_rest_are_whole(made: DemoPool, truth: pl.DataFrame) -> None:
    lost = truth.filter(pl.col("kind") == "lost_in_truncated_shard")
    damaged = sorted(lost["shard"].unique())
    assert [len(lost.filter(pl.col("shard") == shard)) for shard in damaged] == [8, 8]
    sizes = json.loads((made.pool / "sizes.json").read_text())
    assert sizes == {f"{number:05d}.tar": 40 for number in range(5)}
    assert json.loads((made.trusted / "sizes.json").read_text()) == {
        "00000.tar": 40,
        "00001.tar": 40,
        "00002.tar": 10,
    }
    for shard in sizes:
        blob = (made.pool / shard).read_bytes()
        if shard not in damaged:
            assert blob.endswith(bytes(1024))  # the end-of-archive blocks
    with tarfile.open(made.pool / damaged[0]) as tar, pytest.raises(tarfile.ReadError, match="end of data"):
        tar.getmembers()
    with tarfile.open(made.pool / damaged[1]) as tar:
        keys = {member.name.partition(".")[0] for member in tar}
    assert len(keys) == 32
    assert not (made.pool / damaged[1]).read_bytes().endswith(bytes(1024))


def test_a_second_build_returns_what_is_there(made: DemoPool) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.pool.parent.rglob("*")}
    assert build(TINY, made.pool.parent) == made
    assert {path: path.stat().st_mtime_ns for path in made.pool.parent.rglob("*")} == before


def test_another_config_replaces_the_build(tmp_path: Path) -> None:
    small = replace(TINY, trusted_pairs=10, pool_pairs=40, lost=0)
    build(small, tmp_path / "demo")
    made = build(replace(small, trusted_pairs=12), tmp_path / "demo")
    assert len(samples(made.trusted)) == 12
    assert os.listdir(tmp_path) == ["demo"]


def test_an_interrupted_build_leaves_nothing_that_passes_for_one(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > TINY.drawings:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(TINY, tmp_path / "demo", progress=stop)
    assert os.listdir(tmp_path) == []


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="name an empty or a new folder"):
        build(TINY, tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_progress_counts_up_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    small = replace(TINY, trusted_pairs=10, pool_pairs=40, lost=0)
    build(small, tmp_path / "demo", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (98, 98)


def test_attribution_names_the_licence(made: DemoPool) -> None:
    text = made.attribution.read_text(encoding="utf-8")
    assert "designed by OpenMoji" in text
    assert "CC BY-SA 4.0" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drawings": 3}, "drawings=3: 16 or more"),
        (
            {"drawings": 20, "trusted_pairs": 100, "pool_pairs": 141},
            "pool_pairs=141: 1 to 7 x drawings = 140",
        ),
        ({"trusted_pairs": 0}, "trusted_pairs=0: 1 to"),
        ({"shard_size": 1}, "shard_size=1: 2 to 10000"),
        ({"mismatch": 0.6}, r"mismatch=0\.6: 0 to 0\.5"),
        ({"mismatch": -0.1}, r"mismatch=-0\.1: 0 to 0\.5"),
        ({"shard_size": 9000}, r"lost=0\.2: 0 with fewer than two full shards"),
        ({"mismatch": 0.5, "exact_dup": 0.2, "near_dup": 0.2}, "would stay clean"),
    ],
)
def test_config_out_of_range_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemoPoolConfig(**changes)


def test_more_drawings_than_there_are_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = named_drawings()[:30]
    monkeypatch.setattr("jobs.demo_pool.named_drawings", lambda: list(few))
    with pytest.raises(ValueError, match=r"drawings=48: at most \d\d, which is all there are"):
        build(TINY, tmp_path / "demo")


def test_drawings_have_names_and_groups_and_no_skin_tones() -> None:
    drawings = {drawing.code: drawing for drawing in named_drawings()}
    assert drawings["1F34E"].names == ("red apple", "apple")
    assert drawings["1F34E"].group == "food"
    assert drawings["1F1F5-1F1EA"].names == ("flag of Peru", "Peru flag")
    assert drawings["1F3F4-200D-2620-FE0F"].names == ("pirate flag",)
    assert drawings["1F692"].group == "vehicle"
    assert "1F44D-1F3FD" not in drawings  # thumbs up, medium skin tone
    assert "E001" not in drawings  # private use: no name
    assert {drawing.group for drawing in drawings.values()} == set(GROUPS)
    for drawing in drawings.values():
        assert all(drawing.names)
        assert len(set(drawing.names)) == len(drawing.names)

"""Finding shards, and an index that sees every break."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pipeline.errors import Refused
from pipeline.shards import CountFiles, ShardIndex, expand, missing, open_shard
from tests.build import make_pool, make_shard, sample, tar, tar_of


def index(path: Path, promised: tuple[int, str] | None = None) -> ShardIndex:
    with open_shard(str(path)) as shard:
        return shard.index(promised)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def keys(found: ShardIndex) -> list[str]:
    return [s.key for s in found.samples]


def headers(data: bytes) -> list[tarfile.TarInfo]:
    return tarfile.open(fileobj=io.BytesIO(data)).getmembers()


FIVE = tar(map(sample, range(5)))
HEADERS = headers(FIVE)  # three members a sample: jpg, txt, json


def test_whole_shard_has_no_reason_and_every_byte(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", FIVE)
    found = index(path)
    assert (found.reason, found.lost, found.duplicate_members, keys(found)) == (
        None,
        0,
        0,
        ["00000", "00001", "00002", "00003", "00004"],
    )
    with open_shard(str(path)) as shard:
        for raw, (_, members) in zip(found.samples, map(sample, range(5))):
            assert {m.suffix: shard.read(m) for m in raw.members} == members


def test_cut_inside_a_members_data(tmp_path: Path) -> None:
    cut = HEADERS[9].offset_data + 10  # in the jpg of sample 3
    found = index(written(tmp_path / "a.tar", FIVE[:cut]))
    assert found.reason == "truncated_shard"
    assert found.incomplete == {"00003"}
    assert keys(found) == ["00000", "00001", "00002", "00003"]
    assert f"ends at byte {cut}, inside '00003.jpg'" in found.detail


def test_cut_inside_a_header(tmp_path: Path) -> None:
    found = index(written(tmp_path / "a.tar", FIVE[: HEADERS[9].offset + 200]))
    assert (found.reason, keys(found)) == ("truncated_shard", ["00000", "00001", "00002"])
    assert found.incomplete == set()


def test_cut_at_a_sample_boundary_is_told_by_the_missing_end(tmp_path: Path) -> None:
    found = index(written(tmp_path / "a.tar", FIVE[: HEADERS[9].offset]))
    assert (found.reason, len(found.samples)) == ("truncated_shard", 3)
    assert "no end-of-archive block" in found.detail


def test_cut_between_members_leaves_no_half_sample(tmp_path: Path) -> None:
    found = index(written(tmp_path / "a.tar", FIVE[: HEADERS[11].offset]))  # before the json of sample 3
    assert (found.reason, found.incomplete) == ("truncated_shard", {"00003"})


def test_bad_checksum_midway(tmp_path: Path) -> None:
    broken = bytearray(FIVE)
    broken[HEADERS[9].offset + 148] ^= 0x07
    found = index(written(tmp_path / "a.tar", bytes(broken)))
    assert (found.reason, keys(found)) == ("truncated_shard", ["00000", "00001", "00002"])
    assert "damaged header" in found.detail


def test_count_file_counts_what_was_lost(tmp_path: Path) -> None:
    found = index(written(tmp_path / "a.tar", FIVE[: HEADERS[9].offset]), (5, "a_stats.json"))
    assert (found.reason, found.lost) == ("truncated_shard", 2)
    cleanly_short = written(tmp_path / "b.tar", tar(map(sample, range(3))))
    found = index(cleanly_short, (5, "sizes.json"))
    assert (found.reason, found.lost, found.detail) == (
        "truncated_shard",
        2,
        "sizes.json says 5 samples, 3 found",
    )
    assert index(cleanly_short, (2, "sizes.json")).passed_over == {"beyond_count_file": 1}


def test_count_files_are_read(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, 2, 2)
    (tmp_path / "00000_stats.json").write_text(json.dumps({"successes": 7}))
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3, "00001.tar": 9}))
    first, second = expand(pool)
    counts = CountFiles()
    assert counts.promised(first) == (7, "00000_stats.json")
    assert counts.promised(second) == (9, "sizes.json")


@pytest.mark.parametrize(
    ("data", "looks"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html><html>404</html>" * 40, "a web page"),
        (b"PAR1" + bytes(2000), "a parquet file"),
        (b"PK\x03\x04" + b"x" * 2000, "a zip archive"),
        (b"\x28\xb5\x2f\xfd" + b"x" * 2000, "a zstd stream"),
        (b'{"error": "quota"}', "JSON"),
        (b"x" * 2000, "no tar header"),
    ],
)
def test_no_tar_at_all(tmp_path: Path, data: bytes, looks: str) -> None:
    found = index(written(tmp_path / "a.tar", data))
    assert (found.reason, found.samples) == ("unreadable_shard", [])
    assert looks in found.detail


def test_valid_tar_without_samples(tmp_path: Path) -> None:
    found = index(written(tmp_path / "a.tar", tar([])))
    assert (found.reason, found.samples) == (None, [])


def test_gzip_named_tar(tmp_path: Path) -> None:
    found = index(written(tmp_path / "a.tar", gzip.compress(FIVE)))
    assert (found.reason, len(found.samples)) == (None, 5)


def test_cut_gzip_is_a_cut_shard(tmp_path: Path) -> None:
    packed = gzip.compress(FIVE, 1)
    found = index(written(tmp_path / "a.tar", packed[: len(packed) * 2 // 3]))
    assert found.reason == "truncated_shard"
    assert 1 <= len(found.samples) < 5


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_damaged_gzip_stream_never_passes_for_whole(tmp_path: Path, at: float) -> None:
    packed = bytearray(gzip.compress(FIVE, 1))
    middle = int(len(packed) * at)
    packed[middle : middle + 40] = bytes(40)
    found = index(written(tmp_path / "a.tar", bytes(packed)))
    assert found.reason in ("truncated_shard", "unreadable_shard")


def test_gzip_with_a_wrong_checksum_is_reported(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(FIVE))
    packed[-8] ^= 0xFF
    found = index(written(tmp_path / "a.tar", bytes(packed)))
    assert found.reason == "truncated_shard"
    assert "gzip" in found.detail


FULL_DISK = """
import resource, sys
from pipeline.shards import open_shard
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with open_shard(sys.argv[1]) as shard:
    print("read", len(shard.index().samples))
"""


def test_a_full_disk_is_no_cut_shard(tmp_path: Path) -> None:
    """What fails on this machine while unzipping must stop the scan, not cost samples."""
    path = written(tmp_path / "a.tar", gzip.compress(FIVE + bytes(1 << 22)))
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "OSError" in ended.stderr
    assert "File too large" in ended.stderr


def test_interleaved_members_are_regrouped(tmp_path: Path) -> None:
    (a, first), (b, second) = sample(0, json=None), sample(1, json=None)
    files = [
        (f"{a}.jpg", first["jpg"]),
        (f"{b}.jpg", second["jpg"]),
        (f"{a}.txt", first["txt"]),
        (f"{b}.txt", second["txt"]),
    ]
    path = written(tmp_path / "a.tar", tar_of(files))
    found = index(path)
    assert [(s.key, [m.suffix for m in s.members]) for s in found.samples] == [
        ("00000", ["jpg", "txt"]),
        ("00001", ["jpg", "txt"]),
    ]
    with open_shard(str(path)) as shard:
        assert shard.read(found.samples[1].members[1]) == second["txt"]


def test_same_member_twice_first_wins(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", tar_of([("0.jpg", b"x"), ("0.txt", b"one"), ("0.txt", b"two")]))
    found = index(path)
    assert found.duplicate_members == 1
    with open_shard(str(path)) as shard:
        assert shard.read(found.samples[0].members[1]) == b"one"


LONG = "long" * 40


@pytest.mark.parametrize(
    ("name", "key", "suffix"),
    [
        ("0.jpeg", "0", "jpeg"),
        ("0.JPG", "0", "jpg"),
        ("0.webp", "0", "webp"),
        ("Track 2.0 (x).jpg", "Track 2", "0 (x).jpg"),
        ("train.v1/0001.jpg", "train.v1/0001", "jpg"),
        (f"{LONG}.jpg", LONG, "jpg"),
        ("Straße/猫.jpg", "Straße/猫", "jpg"),
        ("../../x.jpg", "../../x", "jpg"),
    ],
)
@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names(tmp_path: Path, name: str, key: str, suffix: str, format: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as archive:
        info = tarfile.TarInfo(name)
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    found = index(written(tmp_path / "a.tar", buffer.getvalue()))
    assert [(s.key, s.members[0].suffix) for s in found.samples] == [(key, suffix)]
    assert found.samples[0].members[0].ext == suffix.rpartition(".")[2]
    assert found.reason is None


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    data = tar_of([("caf\udce9.jpg", b"x")])
    found = index(written(tmp_path / "a.tar", data))
    assert keys(found) == ["caf\ufffd"]


def test_what_is_no_sample_is_passed_over_and_counted(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in [
            ("folder", tarfile.DIRTYPE),
            ("1.jpg", tarfile.SYMTYPE),
            ("2.jpg", tarfile.LNKTYPE),
            ("._0.jpg", tarfile.REGTYPE),
            ("__MACOSX/0.jpg", tarfile.REGTYPE),
            ("_meta.json", tarfile.REGTYPE),
            ("README", tarfile.REGTYPE),
            (".hidden", tarfile.REGTYPE),
            ("0.jpg", tarfile.REGTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "0.jpg"
            archive.addfile(info)
    found = index(written(tmp_path / "a.tar", buffer.getvalue()))
    assert keys(found) == ["0"]
    assert found.passed_over == {
        "directory": 1,
        "link_or_device": 2,
        "macos_metadata": 2,
        "underscore": 1,
        "no_extension": 2,
    }


def test_joined_archives_are_read_through(tmp_path: Path) -> None:
    joined = tar([sample(0)]) + tar([sample(1)])
    found = index(written(tmp_path / "a.tar", joined))
    assert (found.reason, len(found.samples)) == (None, 2)


def test_data_after_the_end_is_reported(tmp_path: Path) -> None:
    found = index(written(tmp_path / "a.tar", tar([sample(0)]) + b"junk" * 200))
    assert (found.reason, len(found.samples)) == ("truncated_shard", 1)
    assert "after the end" in found.detail


# ---------------------------------------------------------------- finding


def test_expand_takes_paths_globs_braces_folders_and_lists(tmp_path: Path) -> None:
    make_pool(tmp_path, 3, 1)
    names = [str(tmp_path / f"0000{i}.tar") for i in range(3)]
    assert expand(str(tmp_path)) == names
    assert expand(str(tmp_path / "*.tar")) == names
    assert expand(str(tmp_path / "{00000..00002}.tar")) == names
    assert expand([names[2], names[0]]) == [names[2], names[0]]
    assert expand(f"file://{tmp_path}/*.tar") == [f"file://{n}" for n in names]


def test_expand_refuses_nothing_and_repetition(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nothing found there"):
        expand(str(tmp_path / "*.tar"))
    make_pool(tmp_path, 1, 1)
    with pytest.raises(Refused, match=r"names 1 files twice, .*00000\.tar"):
        expand([str(tmp_path), str(tmp_path / "00000.tar")])


def test_missing_lists_absent_shards_gaps_and_promises(tmp_path: Path) -> None:
    make_pool(tmp_path, 4, 1)
    (tmp_path / "00002.tar").unlink()
    assert missing(expand(str(tmp_path))) == [str(tmp_path / "00002.tar")]
    assert missing(expand(str(tmp_path / "{00000..00005}.tar"))) == [
        str(tmp_path / f"{n}.tar") for n in ("00002", "00004", "00005")
    ]
    (tmp_path / "sizes.json").write_text(json.dumps({f"0000{i}.tar": 1 for i in range(5)}))
    assert missing(expand(str(tmp_path))) == [str(tmp_path / f"{n}.tar") for n in ("00002", "00004")]
    assert missing([str(tmp_path / "00000.tar")]) == []  # a part picked from a pool is no gap


def test_numbers_far_apart_are_no_series(tmp_path: Path) -> None:
    shards = [make_shard(tmp_path / f"{n}.tar", []) for n in (1690000000, 1700000000, 1710000000)]
    assert missing(shards) == []

"""What a sample reads as: uid, caption, label, metadata, and the reason when it cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.samples import PoolConfig, Sample, clean_text, format_uid, parse_uid, read_sample, synthetic_uid
from pipeline.shards import open_shard
from tests.build import halves, jpeg, make_shard, uid

IMAGE = {"jpg": b"not decoded here"}


def read(folder: Path, members: Mapping[str, bytes], **pool: Any) -> Sample:
    path = make_shard(folder / "a.tar", [("k", members)])
    with open_shard(path) as shard:
        return read_sample(shard, "a.tar", shard.index().samples[0], PoolConfig(shards=path, **pool))


def record(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("members", "status"),
    [
        ({"txt": b"a cat"}, "missing_image"),
        ({**IMAGE}, "missing_caption"),
        ({**IMAGE, "json": record(url="x")}, "missing_caption"),
        ({**IMAGE, "json": record(caption=None)}, "missing_caption"),
        ({**IMAGE, "json": record(caption=5)}, "missing_caption"),
        ({**IMAGE, "txt": b""}, "empty_caption"),
        ({**IMAGE, "txt": b" \n\t"}, "empty_caption"),
        ({**IMAGE, "json": record(caption="")}, "empty_caption"),
        ({**IMAGE, "txt": b"a cat"}, "ok"),
        ({**IMAGE, "json": record(caption="a cat")}, "ok"),
        ({"webp": b"x", "txt": b"a cat"}, "ok"),
        ({"gif": b"x", "txt": b"a cat"}, "missing_image"),
    ],
)
def test_status(tmp_path: Path, members: Mapping[str, bytes], status: str) -> None:
    assert read(tmp_path, members).status == status


def test_txt_comes_before_json_and_the_field_is_configurable(tmp_path: Path) -> None:
    both = {**IMAGE, "txt": b"from txt", "json": record(caption="from json", alt="from alt")}
    assert read(tmp_path, both).caption == "from txt"
    del both["txt"]
    assert read(tmp_path, both).caption == "from json"
    assert read(tmp_path, both, caption_field="alt").caption == "from alt"


@pytest.mark.parametrize(
    ("data", "caption", "repaired"),
    [
        (b"caf\xe9 noir", "caf\ufffd noir", True),
        (b"a\0b", "a\ufffdb", True),
        (b"\xed\xa0\x80 lone", "\ufffd\ufffd\ufffd lone", True),
        ("Straße 猫 🙂".encode(), "Straße 猫 🙂", False),
        (b"two\nlines\r\n", "two\nlines\r\n", False),
        (b"null", "null", False),
        (b"None", "None", False),
        (b"NA", "NA", False),
        (b"nan", "nan", False),
    ],
)
def test_captions_that_readers_trip_on(tmp_path: Path, data: bytes, caption: str, repaired: bool) -> None:
    found = read(tmp_path, {**IMAGE, "txt": data})
    assert (found.caption, found.repaired, found.status) == (caption, repaired, "ok")
    assert clean_text(data) == (caption, repaired)


def test_lone_surrogate_in_json_is_replaced(tmp_path: Path) -> None:
    found = read(tmp_path, {**IMAGE, "json": b'{"caption": "a \\ud800 b", "url": "\\udfff"}'})
    assert found.repaired
    assert found.caption is not None
    found.caption.encode()
    found.metadata["url"].encode()


def test_uid_from_json_in_either_case(tmp_path: Path) -> None:
    for spelling in (uid(1), uid(1).upper()):
        found = read(tmp_path, {**IMAGE, "txt": b"a cat", "json": record(uid=spelling)})
        assert (found.uid, found.status) == (halves(uid(1)), "ok")
    assert format_uid(*parse_uid(uid(1).upper())) == uid(1)


@pytest.mark.parametrize("given", ["abc", "", 17, "g" * 32, uid(1) + "0", f" {uid(1)}", ["x"]])
def test_uid_that_is_not_32_hex_digits(tmp_path: Path, given: Any) -> None:
    members = {**IMAGE, "txt": b"a cat", "json": record(uid=given)}
    assert read(tmp_path, members).status == "invalid_uid"
    kept = read(tmp_path, members, invalid_uid="synthesise")
    assert (kept.status, kept.uid) == ("ok", synthetic_uid("a.tar", "k"))


@pytest.mark.parametrize(
    "broken", [None, b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"uid": null}']
)
def test_no_usable_json_means_a_synthesised_uid(tmp_path: Path, broken: bytes | None) -> None:
    members = {**IMAGE, "txt": b"a cat", **({} if broken is None else {"json": broken})}
    found = read(tmp_path, members)
    assert (found.status, found.uid) == ("ok", synthetic_uid("a.tar", "k"))
    assert found.uid != synthetic_uid("b.tar", "k")


def test_json_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, {**IMAGE, "json": b"\xef\xbb\xbf" + record(caption="a cat", uid=uid(3))})
    assert (found.caption, found.uid) == ("a cat", halves(uid(3)))


def test_metadata_is_kept_with_its_declared_type_or_not_at_all(tmp_path: Path) -> None:
    fields = {"n": "int", "x": "float", "s": "str", "b": "bool"}
    sent = record(n=3, x=2, s="t", b=True)
    assert read(tmp_path, {"json": sent}, json_fields=fields).metadata == {
        "n": 3,
        "x": 2.0,
        "s": "t",
        "b": True,
    }
    sent = record(n="3", x="2", s=1, b=1)
    assert set(read(tmp_path, {"json": sent}, json_fields=fields).metadata.values()) == {None}
    sent = record(n=True, x=True)
    assert read(tmp_path, {"json": sent}, json_fields={"n": "int", "x": "float"}).metadata == {
        "n": None,
        "x": None,
    }


def test_an_integer_that_no_column_holds_is_null(tmp_path: Path) -> None:
    sent = record(original_width=10**30, original_height=-(2**63))
    found = read(tmp_path, {"json": sent}).metadata
    assert (found["original_width"], found["original_height"]) == (None, -(2**63))
    huge = read(tmp_path, {"json": b'{"x": 1' + b"0" * 400 + b"}"}, json_fields={"x": "float"})
    assert huge.metadata["x"] is None


def test_label_from_cls_or_json(tmp_path: Path) -> None:
    assert read(tmp_path, {**IMAGE, "cls": b" 7\n", "json": record(label=8)}).label == "7"
    assert read(tmp_path, {**IMAGE, "json": record(label=8)}).label == "8"
    assert read(tmp_path, {**IMAGE, "json": record(kind="dog")}, label_field="kind").label == "dog"
    assert read(tmp_path, IMAGE).label is None


def test_the_plain_member_is_picked_before_one_with_a_longer_suffix(tmp_path: Path) -> None:
    found = read(tmp_path, {"seg.png": b"mask", "jpg": jpeg(), "depth.txt": b"1.0", "txt": b"a cat"})
    assert found.image is not None
    assert (found.image.suffix, found.caption) == ("jpg", "a cat")

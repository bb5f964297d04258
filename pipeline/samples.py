"""What a sample is: uid, image member, caption, label and the metadata kept with it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.shards import Member, RawSample, Shard

IMAGE_EXTS = ("jpg", "jpeg", "png", "webp")
JSON_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
HEX_UID = re.compile(r"[0-9a-f]{32}")


@dataclass(kw_only=True)
class PoolConfig:
    """Where the pool is and how its samples are to be read.

    shards: path, glob, braces, folder, URL, or a list of these.
    metadata: the same for metadata parquet files (with their npz beside them), in place of shards: a pool that is
        decided upon without reading a shard. Files that lie beside shards are found without it.
    missing: `error` lists absent shards and stops; `skip` goes on without them.
    caption_field, label_field: json fields that stand in for a txt / cls member.
    default_caption: what samples without any caption get (labelled images); null rejects them.
    invalid_uid: a json uid that is not 32 hex digits is rejected, or replaced by a synthesised one.
    json_fields: json fields kept as metadata columns, with their types (str, int, float, bool). A column of
        `<stem>.parquet` beside the shard takes precedence.
    """

    shards: Any = None
    metadata: Any = None
    missing: str = "error"
    caption_field: str = "caption"
    default_caption: str | None = None
    label_field: str = "label"
    invalid_uid: str = "reject"
    json_fields: dict[str, str] = field(
        default_factory=lambda: {"url": "str", "original_width": "int", "original_height": "int"}
    )

    def __post_init__(self) -> None:
        if not self.shards and not self.metadata:
            raise ValueError("shards: give a path, glob, braces, folder or URL, or a list of these")
        if self.shards and self.metadata:
            raise ValueError(
                "metadata: give it or shards, not both; metadata beside shards is found by itself"
            )
        if self.missing not in ("error", "skip"):
            raise ValueError(f"missing={self.missing}: must be error or skip")
        if self.invalid_uid not in ("reject", "synthesise"):
            raise ValueError(f"invalid_uid={self.invalid_uid}: must be reject or synthesise")
        for key, kind in self.json_fields.items():
            if kind not in JSON_TYPES:
                raise ValueError(f"json_fields.{key}={kind}: must be one of {', '.join(JSON_TYPES)}")

    def reading(self) -> dict[str, Any]:
        """The settings that decide what a sample reads as (not where the pool lies)."""
        return {k: v for k, v in asdict(self).items() if k not in ("shards", "metadata", "missing")}


@dataclass(slots=True)
class Sample:
    """One sample as its shard tells it, before any pixel is decoded.

    uid: 128 bits, high and low half. status: `ok` or a reason from `pipeline.reasons.REJECTED`.
    repaired: the caption held bytes or characters that had to be replaced by U+FFFD.
    unreadable_json: the json member is no JSON object, and was passed over.
    """

    key: str
    uid: tuple[int, int]
    members: list[Member]
    image: Member | None = None
    caption: str | None = None
    label: str | None = None
    status: str = "ok"
    repaired: bool = False
    unreadable_json: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


def synthetic_uid(shard_name: str, key: str) -> tuple[int, int]:
    """blake2b-128 of `shard basename / key`, for samples that carry no uid."""
    digest = hashlib.blake2b(f"{shard_name}/{key}".encode("utf-8", "replace"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def parse_uid(text: str) -> tuple[int, int]:
    """High and low 64 bits of 32 hex digits, either case. Raises ValueError for anything else."""
    normal = text.lower()
    if not HEX_UID.fullmatch(normal):
        raise ValueError(f"uid {text!r} is not 32 hex digits")
    return int(normal[:16], 16), int(normal[16:], 16)


def format_uid(hi: int, lo: int) -> str:
    return f"{hi:016x}{lo:016x}"


def read_sample(shard: Shard, shard_name: str, raw: RawSample, pool: PoolConfig) -> Sample:
    """Read everything of a sample but its pixels. Never raises for bad content: see `status`."""
    sample = Sample(raw.key, synthetic_uid(shard_name, raw.key), raw.members)
    sample.image = pick(raw.members, IMAGE_EXTS)
    record = _read_json(sample, shard)
    if not _take_uid(sample, record, pool):
        sample.status = "invalid_uid"
    _take_caption(sample, shard, record, pool)
    _take_label(sample, shard, record, pool)
    sample.metadata = {k: _typed(record.get(k), JSON_TYPES[kind]) for k, kind in pool.json_fields.items()}
    if sample.status != "ok":
        pass
    elif sample.image is None:
        sample.status = "missing_image"
    elif sample.caption is None:
        sample.status = "missing_caption"
    elif not sample.caption.strip():
        sample.status = "empty_caption"
    return sample


def pick(members: Sequence[Member], exts: Sequence[str]) -> Member | None:
    """The member whose whole suffix is one of `exts`, else the first whose last part is."""
    exact = [m for m in members if m.suffix in exts]
    loose = [m for m in members if m.ext in exts]
    return next(iter(exact or loose), None)


def _read_json(sample: Sample, shard: Shard) -> dict[str, Any]:
    member = pick(sample.members, ["json"])
    if member is None:
        return {}
    try:
        value = json.loads(shard.read(member).decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        value = None
    sample.unreadable_json = not isinstance(value, dict)
    return value if isinstance(value, dict) else {}


def _typed(value: Any, kind: type) -> Any:
    """`value` when it is of the declared type (an int serves as a float) and a column can hold it, else None."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        return None
    return clean_text(str(value).encode("utf-8", "surrogatepass"))[0] if kind is str else value


def _take_uid(sample: Sample, record: dict[str, Any], pool: PoolConfig) -> bool:
    given = record.get("uid")
    if given is None:
        return True
    try:
        sample.uid = parse_uid(given if isinstance(given, str) else "")
    except ValueError:
        return pool.invalid_uid == "synthesise"
    return True


def _take_caption(sample: Sample, shard: Shard, record: dict[str, Any], pool: PoolConfig) -> None:
    member = pick(sample.members, ["txt"])
    if member is not None:
        sample.caption, sample.repaired = clean_text(shard.read(member))
    elif isinstance(record.get(pool.caption_field), str):
        sample.caption, sample.repaired = clean_text(
            record[pool.caption_field].encode("utf-8", "surrogatepass")
        )
    else:
        sample.caption = pool.default_caption


def _take_label(sample: Sample, shard: Shard, record: dict[str, Any], pool: PoolConfig) -> None:
    member = pick(sample.members, ["cls"])
    value = record.get(pool.label_field)
    if member is not None:
        sample.label = clean_text(shard.read(member))[0].strip()
    elif isinstance(value, (str, int)):
        sample.label = clean_text(str(value).encode("utf-8", "surrogatepass"))[0]


def clean_text(data: bytes) -> tuple[str, bool]:
    """Decode as UTF-8; invalid bytes, lone surrogates and NUL become U+FFFD. Also: was anything replaced?"""
    text = data.decode("utf-8", "replace").replace("\0", "\ufffd")
    return text, text.encode() != data

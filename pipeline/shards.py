"""Shards: find them, index their members, verify that nothing is missing.

The usual tar readers stop in silence at a damaged header or a cut file. The index here reads every
header itself, so that it knows where a shard breaks, why, and what was lost.
"""

from __future__ import annotations

import contextlib
import glob as globbing
import gzip
import os
import re
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import braceexpand

from pipeline import storage
from pipeline.errors import Refused

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
BLOCK = tarfile.BLOCKSIZE
SPARSEST = 10  # numbers that are spread wider than this times their count do not count shards


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a sample: `suffix` is the lower-cased name after the key, bytes as in the (unzipped) tar."""

    suffix: str
    offset: int
    size: int

    @property
    def ext(self) -> str:
        """What follows the last dot: `jpg` for the suffixes `jpg` and `0 (x).jpg` alike."""
        return self.suffix.rpartition(".")[2]


@dataclass(slots=True)
class RawSample:
    """The members that share one key, in order of first appearance."""

    key: str
    members: list[Member]


@dataclass
class ShardIndex:
    """What a shard holds and what is wrong with it.

    `lost` counts samples that are known to have been in the shard but cannot be read: those a count file
    promises beyond the ones found. `incomplete` are keys of samples that the damage cut short.
    """

    samples: list[RawSample] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)
    duplicate_members: int = 0
    reason: str | None = None  # None, "truncated_shard" or "unreadable_shard"
    detail: str = ""
    lost: int = 0
    incomplete: set[str] = field(default_factory=set)


# ---------------------------------------------------------------- finding shards


def expand(spec: str | Sequence[str]) -> list[str]:
    """Shard paths for a path, glob, `{00000..00127}` braces, folder or URL, or a list of these.

    Globs and folders come sorted, lists in the order given. Raises Refused when nothing matches or a
    shard is named twice. Brace expressions name shards that may not exist: see `missing`.
    """
    patterns = [spec] if isinstance(spec, str) else list(spec)
    found: list[str] = []
    for pattern in patterns:
        for path in braceexpand.braceexpand(pattern) if "{" in pattern else [pattern]:
            found += _match(storage.absolute(path, "pool.shards"))
    repeated = [p for p, n in Counter(found).items() if n > 1]
    if repeated:
        raise Refused(f"pool.shards names {len(repeated)} shards twice, {repeated[0]} among them")
    if not found:
        raise Refused(f"pool.shards={spec}: no shard found there (looked for {', '.join(SHARD_SUFFIXES)})")
    return found


def _match(path: str) -> list[str]:
    fs, p = storage.resolve(path)
    if globbing.has_magic(p) and not fs.exists(p):
        return sorted(_spell(path, q) for q in fs.glob(p))
    if not p.endswith(SHARD_SUFFIXES) and fs.isdir(p):
        return sorted(_spell(path, q) for q in fs.ls(p, detail=False) if q.endswith(SHARD_SUFFIXES))
    return [path]


def _spell(pattern: str, path: str) -> str:
    """A path that a filesystem returned, with the protocol the user wrote put back."""
    protocol, sep, _ = pattern.partition("://")
    return f"{protocol}://{path.removeprefix(protocol + '://')}" if sep else path


def missing(shards: Sequence[str]) -> list[str]:
    """Shards that are listed but absent, promised by a `sizes.json`, or gaps in a numbered series."""
    by_folder: dict[str, list[str]] = {}
    for path in shards:
        by_folder.setdefault(storage.parent(path), []).append(storage.name(path))
    absent: list[str] = []
    for folder, names in by_folder.items():
        present = set(storage.listdir(folder))
        wanted = set(names) | set(_gaps(names))
        if any(n in present for n in names):  # a folder that is gone altogether has no sizes.json either
            wanted |= _promised(folder, names, present)
        absent += [storage.join(folder, n) for n in sorted(wanted - present)]
    return absent


def _promised(folder: str, names: list[str], present: set[str]) -> set[str]:
    """Names in `sizes.json`, when the whole folder is the pool and not a part picked from it."""
    if "sizes.json" not in present:
        return set()
    whole = {n for n in present if n.endswith(SHARD_SUFFIXES)} <= set(names)
    return set(storage.read_json(storage.join(folder, "sizes.json"))) if whole else set()


def _gaps(names: list[str]) -> list[str]:
    """Names that would fill the holes of series such as 00000.tar, 00001.tar, 00003.tar."""
    series: dict[tuple[str, str, int], list[int]] = {}
    for n in names:
        if m := re.fullmatch(r"(.*?)(\d+)(\.[^\d].*)", n):
            series.setdefault((m[1], m[3], len(m[2])), []).append(int(m[2]))
    return [
        f"{head}{i:0{width}d}{tail}"
        for (head, tail, width), numbers in series.items()
        if max(numbers) - min(numbers) < SPARSEST * len(numbers)  # else they are dates or ids, not a count
        for i in sorted(set(range(min(numbers), max(numbers) + 1)) - set(numbers))
    ]


class CountFiles:
    """Sample counts that pools keep beside their shards: `<stem>_stats.json` and `sizes.json`."""

    def __init__(self) -> None:
        self._sizes: dict[str, dict[str, int]] = {}

    def promised(self, shard: str) -> tuple[int, str] | None:
        """(count, name of the file that says so), or None when no file counts this shard."""
        folder, base = storage.parent(shard), storage.name(shard)
        stats = storage.join(folder, f"{stem(shard)}_stats.json")
        if storage.exists(stats):
            value = storage.read_json(stats).get("successes")
            if isinstance(value, int):
                return value, storage.name(stats)
        if folder not in self._sizes:
            path = storage.join(folder, "sizes.json")
            self._sizes[folder] = storage.read_json(path) if storage.exists(path) else {}
        value = self._sizes[folder].get(base)
        return (value, "sizes.json") if isinstance(value, int) else None


def stem(shard: str) -> str:
    base = storage.name(shard)
    for suffix in SHARD_SUFFIXES:
        base = base.removesuffix(suffix)
    return base


# ---------------------------------------------------------------- reading one shard


class Shard:
    """An open shard: `index` for its samples, `read` for a member's bytes (safe from many threads).

    damage: what is known to be wrong with the file before its headers are read.
    """

    def __init__(self, local_path: str, damage: str = "") -> None:
        self.damage = damage
        self._fd = os.open(local_path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def read(self, member: Member) -> bytes:
        return os.pread(self._fd, member.size, member.offset)

    def fileno(self) -> int:
        """Of the plain tar."""
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def index(self, promised: tuple[int, str] | None = None) -> ShardIndex:
        """Read every header; memory is that of the headers, whatever the shard's size."""
        with open(self._fd, "rb", buffering=0, closefd=False) as f:
            index = _index(f, self.size)
        if self.damage and index.reason is None:
            _broken(index, self.damage)
        _check_count(index, promised)
        return index


@contextlib.contextmanager
def open_shard(path: str) -> Iterator[Shard]:
    """Open a plain or gzipped tar on any filesystem.

    Remote and gzipped shards are spooled to a temporary file first, so that samples whose members are
    apart in the archive are still read whole. Raises FileNotFoundError when it is absent.
    """
    with storage.local_copy(path) as local, _unzipped(local) as (plain, damage):
        shard = Shard(plain, damage)
        try:
            yield shard
        finally:
            shard.close()


@contextlib.contextmanager
def _unzipped(local: str) -> Iterator[tuple[str, str]]:
    """(file name of the plain tar, what is wrong with the gzip stream it came in). What precedes a break is there."""
    with open(local, "rb") as f:
        if f.read(2) != b"\x1f\x8b":
            yield local, ""
            return
    damage = ""
    with tempfile.NamedTemporaryFile(prefix="winnow-", suffix=".tar") as plain:
        with gzip.open(local, "rb") as source:
            try:
                while block := source.read1(1 << 16):
                    plain.write(block)
            except (EOFError, gzip.BadGzipFile, zlib.error) as e:
                damage = f"its gzip stream is damaged ({e})"
        plain.flush()
        yield plain.name, damage


class _Headers(tarfile.TarFile):
    """tarfile's header parser without its habit of ending at the first damaged header."""

    def next(self) -> None:
        return None


def _index(f: Any, size: int) -> ShardIndex:
    index = ShardIndex()
    if size == 0:
        return _unreadable(index, "the file is empty")
    headers = _Headers(fileobj=f, mode="r", errors="surrogateescape")
    samples: dict[str, RawSample] = {}
    offset, ended, last_key = 0, False, None
    while offset < size:
        f.seek(offset)
        try:
            info = tarfile.TarInfo.fromtarfile(headers)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros: the end, unless archives were joined
            ended = True
            offset = _next_content(f, offset + BLOCK, size)
            continue
        except (tarfile.HeaderError, UnicodeError, ValueError) as e:
            if offset == 0:
                return _unreadable(index, _looks_like(f, size))
            what = "data after the end of the archive" if ended else f"a damaged header ({e})"
            _broken(index, f"{what} at byte {offset} of {size}")
            break
        ended = False
        offset = headers.offset
        if info.offset_data + info.size > size and info.isreg():
            key = _add(index, samples, info, cut=True)
            index.incomplete |= {key} if key else set()
            _broken(index, f"the file ends at byte {size}, inside {info.name!r}")
            break
        last_key = _add(index, samples, info) or last_key
    else:
        if not ended:
            _broken(index, f"the file ends at byte {size} with no end-of-archive block")
    index.samples = list(samples.values())
    if index.reason and last_key and not index.incomplete:
        _suspect_last(index, samples, last_key)
    return index


def _add(
    index: ShardIndex, samples: dict[str, RawSample], info: tarfile.TarInfo, cut: bool = False
) -> str | None:
    """Put a member with its sample; returns the sample's key, or None when the member is passed over."""
    path = info.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    folder, slash, base = path.rpartition("/")
    key, dot, suffix = base.partition(".")
    kind = None
    if not info.isreg():
        kind = "directory" if info.isdir() else "link_or_device"
    elif base.startswith("._") or "__MACOSX" in folder.split("/"):
        kind = "macos_metadata"
    elif base.startswith("_"):
        kind = "underscore"
    elif not dot or not key or not suffix:
        kind = "no_extension"
    if kind:
        index.passed_over[kind] += 1
        return None
    key = folder + slash + key
    sample = samples.get(key)
    if sample is None:
        sample = samples[key] = RawSample(key, [])
    member = Member(suffix.lower(), info.offset_data, info.size)
    if any(m.suffix == member.suffix for m in sample.members):
        index.duplicate_members += 1
    elif not cut:
        sample.members.append(member)
    return key


def _suspect_last(index: ShardIndex, samples: dict[str, RawSample], last: str) -> None:
    """A break between members cuts the last sample if it has fewer kinds of members than its neighbour."""
    neighbours = [s for s in index.samples[-2:] if s.key != last]
    if neighbours:
        have = {m.ext for m in samples[last].members}
        if not {m.ext for m in neighbours[-1].members} <= have:
            index.incomplete.add(last)


def _next_content(f: Any, offset: int, size: int) -> int:
    """Offset of the first block at or after `offset` that is not all zeros, or `size`."""
    while offset < size:
        f.seek(offset)
        chunk = f.read(1 << 16)
        if not chunk:
            break
        if chunk.strip(b"\0"):
            return offset + (len(chunk) - len(chunk.lstrip(b"\0"))) // BLOCK * BLOCK
        offset += len(chunk)
    return size


def _unreadable(index: ShardIndex, detail: str) -> ShardIndex:
    index.reason, index.detail = "unreadable_shard", detail
    return index


def _broken(index: ShardIndex, detail: str) -> None:
    index.reason, index.detail = "truncated_shard", detail


def _check_count(index: ShardIndex, promised: tuple[int, str] | None) -> None:
    """Hold the index against a count file; what is promised and not found is lost."""
    if promised is None:
        return
    count, source = promised
    found = len(index.samples)
    if found < count:
        index.lost = count - found
        if index.reason is None:
            index.reason, index.detail = "truncated_shard", f"{source} says {count} samples, {found} found"
    elif found > count:
        index.passed_over["beyond_count_file"] = found - count


def _looks_like(f: Any, size: int) -> str:
    """A plain word for what a file that is no tar seems to be."""
    f.seek(0)
    head = f.read(512)
    magics = {
        b"PAR1": "a parquet file",
        b"PK\x03\x04": "a zip archive",
        b"\x28\xb5\x2f\xfd": "a zstd stream",
        b"BZh": "a bzip2 stream",
        b"\xfd7zXZ": "an xz stream",
        b"\xff\xd8\xff": "a JPEG image",
        b"\x89PNG": "a PNG image",
        b"\x93NUMPY": "a numpy array",
    }
    for magic, what in magics.items():
        if head.startswith(magic):
            return f"it looks like {what}"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it looks like a web page"
    if text.startswith((b"{", b"[")):
        return "it looks like JSON"
    return f"no tar header in its first block ({size} bytes)"

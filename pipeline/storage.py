"""Files on any fsspec path: open, list, commit by rename, lock.

Every file that Winnow writes goes through `commit`: it appears under its name whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import filelock
import fsspec
import polars as pl
import pyarrow as pa
import xxhash
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import Refused

LOCK_STALE_SECONDS = 300.0
LOCK_BEAT_SECONDS = 30.0


def resolve(path: str) -> tuple[Any, str]:
    """The filesystem of `path` and the path as that filesystem spells it."""
    return fsspec.core.url_to_fs(path)


def is_local(path: str) -> bool:
    return isinstance(resolve(path)[0], LocalFileSystem)


def absolute(path: str, key: str) -> str:
    """`path` made absolute; URLs pass unchanged.

    Raises Refused for a relative path inside a submitted Ray job, whose working directory is a
    temporary copy that vanishes with everything written there. `key` names the setting in the message.
    """
    if "://" in path:
        return path
    expanded = os.path.expanduser(path)
    if not os.path.isabs(expanded) and os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        raise Refused(
            f"{key}={path}: a submitted job runs in a temporary folder; give an absolute path or a URL"
        )
    return os.path.abspath(expanded)


def join(base: str, *parts: str) -> str:
    return "/".join([base.rstrip("/"), *parts])


def name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def parent(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[0] or "/"


def exists(path: str) -> bool:
    fs, p = resolve(path)
    return fs.exists(p)


def listdir(path: str) -> list[str]:
    """Names in the folder `path`, sorted; an absent folder is empty."""
    fs, p = resolve(path)
    try:
        return sorted(name(e) for e in fs.ls(p, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def signature(path: str) -> dict[str, Any]:
    """What changes when a file is replaced: its size, and its modification time or entity tag."""
    fs, p = resolve(path)
    return mark(fs.info(p))


def signatures(folder: str) -> dict[str, dict[str, Any]]:
    """`signature` of every entry of a folder by its name, in one listing."""
    fs, p = resolve(folder)
    return {name(info["name"]): mark(info) for info in fs.ls(p, detail=True)} if fs.exists(p) else {}


def mark(info: dict[str, Any]) -> dict[str, Any]:
    """The signature that a filesystem's own description of a file comes to."""
    stamp = info.get("mtime") or info.get("ETag") or info.get("etag") or info.get("LastModified")
    return {"size": int(info.get("size") or 0), "mark": str(stamp)}


def open_file(path: str, mode: str = "rb") -> IO[Any]:
    """Open for reading. Local files are plain unbuffered-by-fsspec files."""
    fs, p = resolve(path)
    return open(p, mode) if isinstance(fs, LocalFileSystem) else fs.open(p, mode)


@contextlib.contextmanager
def open_input(path: str, kind: str, key: str = "") -> Iterator[IO[Any]]:
    """Open a file that the user gave, to be read within the block as `kind` (parquet, npz, ...).

    key: the setting that names it, for messages. Raises Refused, with its name, when there is no such file and
    when the block's reader cannot make sense of it.
    """
    what = f"{key}={path}" if key else path
    try:
        with open_file(path) as f:
            yield f
    except FileNotFoundError:
        raise Refused(f"{what}: there is no such file") from None
    except (pa.ArrowException, pl.exceptions.PolarsError, zipfile.BadZipFile, EOFError, ValueError) as e:
        raise Refused(f"{what}: cannot be read as {kind}: {str(e).splitlines()[0]}") from None


def read_bytes(path: str) -> bytes:
    with open_file(path) as f:
        return f.read()


def digest(path: str, new: Callable[[], Any] = xxhash.xxh3_128) -> str:
    """Hex digest of a file's bytes: xxh3-128, or that of another hash object which `new` makes."""
    h = new()
    with open_file(path) as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def sha256(path: str) -> str:
    return digest(path, hashlib.sha256)


def read_json(path: str) -> Any:
    return json.loads(read_bytes(path))


def write_bytes(path: str, data: bytes) -> None:
    with commit(path) as tmp:
        Path(tmp).write_bytes(data)


def write_json(path: str, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def makedirs(path: str) -> None:
    fs, p = resolve(path)
    fs.makedirs(p, exist_ok=True)


def remove_tree(path: str) -> None:
    fs, p = resolve(path)
    if fs.exists(p):
        fs.rm(p, recursive=True)


@contextlib.contextmanager
def commit(path: str) -> Iterator[str]:
    """Yield a local file name to write; on success it becomes `path` in one step, else it is removed.

    Local targets: a file beside the target, flushed to disk and renamed over it. Other filesystems: a
    file in the temporary folder, uploaded under a temporary name and moved.
    """
    fs, p = resolve(path)
    if isinstance(fs, LocalFileSystem):
        os.makedirs(os.path.dirname(p), exist_ok=True)
        tmp = f"{p}.tmp-{uuid.uuid4().hex[:12]}"
        try:
            yield tmp
            with open(tmp, "rb") as f:
                os.fsync(f.fileno())
            os.replace(tmp, p)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(tmp)
        return
    with tempfile.TemporaryDirectory(prefix="winnow-") as folder:
        local = os.path.join(folder, name(p))
        yield local
        remote = f"{p}.tmp-{uuid.uuid4().hex[:12]}"
        fs.makedirs(parent(p), exist_ok=True)
        fs.put_file(local, remote)
        fs.mv(remote, p)


@contextlib.contextmanager
def commit_folder(path: str) -> Iterator[str]:
    """Yield a new folder to fill, on a local filesystem; on success it becomes `path` in one step, else it goes."""
    p = resolve(path)[1]
    tmp = f"{p}.tmp-{uuid.uuid4().hex[:12]}"
    os.makedirs(tmp)
    try:
        yield tmp
        for file in Path(tmp).iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        os.replace(tmp, p)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def remove_leftovers(folder: str) -> None:
    """Remove what killed writers left in a local folder that nobody else writes to."""
    for left in Path(resolve(folder)[1]).glob("*.tmp-*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """A local file name with the bytes of `path`: the file itself, or a spooled copy of a remote one."""
    fs, p = resolve(path)
    if isinstance(fs, LocalFileSystem):
        yield p
        return
    with tempfile.TemporaryDirectory(prefix="winnow-") as folder:
        local = os.path.join(folder, name(p))
        fs.get_file(p, local)
        yield local


def copy(source: str, target: str) -> None:
    with local_copy(source) as src, commit(target) as tmp:
        shutil.copyfile(src, tmp)


def link(source: str, target: str) -> None:
    """`target` with the bytes of `source`, without a second copy where the filesystem can."""
    fs, src = resolve(source)
    if isinstance(fs, LocalFileSystem):
        dst = resolve(target)[1]
        os.makedirs(os.path.dirname(dst), exist_ok=True)
        with contextlib.suppress(OSError):
            os.link(src, dst)
            return
    copy(source, target)


@dataclass
class _Beat:
    """Rewrites a lock object on storage that has no file locks, until stopped."""

    path: str
    owner: dict[str, Any]

    def __post_init__(self) -> None:
        self.stopped = threading.Event()
        self.write()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def write(self) -> None:
        fs, p = resolve(self.path)
        fs.pipe_file(p, json.dumps({**self.owner, "beat": time.time()}).encode())

    def run(self) -> None:
        while not self.stopped.wait(LOCK_BEAT_SECONDS):
            self.write()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        fs, p = resolve(self.path)
        fs.rm_file(p)


@contextlib.contextmanager
def lock(folder: str) -> Iterator[None]:
    """Hold `folder` for one writer. Raises Refused, naming the holder, when another process has it.

    Local folders use an advisory file lock that the system frees when its holder dies, SIGKILL
    included. Object stores use a lock object refreshed every 30 s and taken over after 5 min of silence.
    """
    path = join(folder, ".lock")
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    makedirs(folder)
    fs, p = resolve(path)
    if isinstance(fs, LocalFileSystem):
        held = filelock.FileLock(p)
        try:
            held.acquire(timeout=0)
        except filelock.Timeout:
            raise Refused(_busy(folder, p + ".owner")) from None
        try:
            Path(p + ".owner").write_text(json.dumps(owner))
            yield
        finally:
            held.release()
        return
    if fs.exists(p):
        seen = json.loads(fs.cat_file(p))
        if time.time() - seen["beat"] < LOCK_STALE_SECONDS:
            raise Refused(_busy(folder, path))
    beat = _Beat(path, owner)
    try:
        yield
    finally:
        beat.stop()


def _busy(folder: str, owner_file: str) -> str:
    try:
        owner = json.loads(read_bytes(owner_file))
        who = f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError):
        who = "another process"
    return f"{folder} is in use by {who}; wait for it to end, or choose another folder"

"""Commit, lock and list on local and other filesystems."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from pipeline import storage
from pipeline.errors import Refused
from tests import far


@pytest.fixture(params=["local", "file", "far", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    far.register()
    yield {
        "local": str(tmp_path),
        "file": f"file://{tmp_path}",
        "far": f"far:/{tmp_path}",
        "memory": f"memory://{tmp_path.name}",
    }[request.param]
    fsspec.filesystem("memory").store.clear()


def test_commit_writes_replaces_and_lists(base: str) -> None:
    path = storage.join(base, "a", "b.json")
    assert storage.listdir(storage.parent(path)) == []
    storage.write_json(path, {"x": 1})
    storage.write_json(path, {"x": 2})
    assert storage.read_json(path) == {"x": 2}
    assert storage.listdir(storage.parent(path)) == ["b.json"]
    assert storage.signature(path) == storage.signatures(storage.parent(path))["b.json"]
    storage.copy(path, storage.join(base, "c.json"))
    storage.link(path, storage.join(base, "d", "e.json"))
    for other in ("c.json", "d/e.json"):
        assert storage.read_bytes(storage.join(base, other)) == storage.read_bytes(path)
    storage.remove_tree(storage.join(base, "a"))
    assert not storage.exists(path)
    storage.remove_tree(storage.join(base, "a"))


def test_commit_that_fails_leaves_what_was_there(base: str) -> None:
    path = storage.join(base, "a.txt")
    storage.write_bytes(path, b"old")
    with pytest.raises(FileNotFoundError, match="nowhere"), storage.commit(path) as tmp:
        Path(tmp).write_bytes(Path("/nowhere").read_bytes())
    assert storage.read_bytes(path) == b"old"
    assert storage.listdir(base) == ["a.txt"]


def test_lock_names_its_holder_and_ends(base: str) -> None:
    with storage.lock(base):
        with pytest.raises(Refused, match=r"is in use by process \d+ on .*wait for it to end, or choose"):
            with storage.lock(base):
                pass
    with storage.lock(base):
        pass


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = f"import time\nfrom pipeline.storage import lock\nwith lock({str(tmp_path)!r}):\n print('held', flush=True)\n time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(Refused, match=f"process {child.pid} on"), storage.lock(str(tmp_path)):
        pass
    child.kill()
    child.wait()
    with storage.lock(str(tmp_path)):
        pass


def test_stale_lock_object_is_taken_over() -> None:
    fs = fsspec.filesystem("memory")
    owner = {"host": "gone", "pid": 1, "beat": time.time() - storage.LOCK_STALE_SECONDS - 1}
    fs.pipe_file("/stale/.lock", json.dumps(owner).encode())
    with storage.lock("memory://stale"):
        assert json.loads(fs.cat_file("/stale/.lock"))["host"] != "gone"
    assert not fs.exists("/stale/.lock")


def test_relative_paths_are_refused_inside_a_submitted_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage.absolute("x", "out") == str(Path.cwd() / "x")
    assert storage.absolute("s3://b/x", "out") == "s3://b/x"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert storage.absolute("/x", "out") == "/x"
    with pytest.raises(Refused, match=r"out=x: .*absolute path"):
        storage.absolute("x", "out")


def test_an_input_that_is_not_there_or_not_what_it_should_be_is_refused_by_name(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"xx")
    for path, reader, says in (
        (tmp_path / "none", pq.read_schema, f"truth={tmp_path}/none: there is no such file"),
        (bad, pq.read_schema, f"truth={bad}: cannot be read as parquet: "),
        (bad, lambda f: pl.read_parquet(f.read()), f"truth={bad}: cannot be read as parquet: "),
        (bad, np.load, f"truth={bad}: cannot be read as parquet: "),
    ):
        with pytest.raises(Refused) as refused, storage.open_input(str(path), "parquet", "truth") as f:
            reader(f)
        assert str(refused.value).startswith(says)

"""Rounds of a run as a user makes them, and that every later command reads the same manifest alike."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from jobs import curate, reshard, rounds
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import DECISION, Chain, run_chain
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.manifest import Run, write_outputs
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, scan
from selection.loader import LoaderConfig, RoundLoader
from selection.proxy import of_run
from selection.run_manifest import RunManifest
from selection.run_rounds import open_rounds, path_of
from tests.build import call, contents, jpeg, make_shard, sample

SHARDS, EACH = 4, 20


class Copies:
    """A stage that keeps row n of a shard n % 4 times (none when n % 4 is 0), of the third shard nothing."""

    name = "copies"

    def __init__(self, most: int = 3) -> None:
        self.most = most

    def identity(self) -> dict[str, int]:
        return {"most": self.most}

    def run(self, chain: Chain):
        for number, shard in enumerate(chain.ids):
            rows = chain.tables.read(shard, ["uid_hi", "uid_lo"])
            times = np.arange(len(rows)) % (self.most + 1) * (number != 2)
            yield (
                shard,
                rows.select(
                    "uid_hi", "uid_lo", kept=pl.Series(times > 0),
                    reason=pl.Series(["dfn_below_cut" if t == 0 else None for t in times], dtype=pl.String),
                    value=pl.lit(None, pl.Float64), cut=pl.lit(None, pl.Float64), copies=pl.Series(times),
                ).cast(DECISION),
            )  # fmt: skip


def make_run(out: Path, pool: Path, name: str = "default", most: int = 3) -> Run:
    spec = PoolConfig(shards=f"{pool}/*.tar")
    scanned = scan(str(out), spec, None, DecodeConfig(), ClusterConfig(workers=1), ErrorBudget())
    run = Run(str(out), name)
    last, results = run_chain(scanned, [Copies(most)], run.path("stages"))
    about = {"config": {}, "seconds": {"scan": 1.0}, "scanned_shards": scanned.scanned}
    write_outputs(run, scanned, last, results, about)
    return run


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third sample is a cat, the others are dogs, the last one of a shard has no label."""
    folder = tmp_path_factory.mktemp("pool")
    for s in range(SHARDS):
        samples = [
            sample(s * EACH + i, cls=None if i == EACH - 1 else b"dog" if i % 3 else b"cat")
            for i in range(EACH)
        ]
        make_shard(folder / f"{s:05d}.tar", samples)
    return folder


@pytest.fixture
def run(pool: Path, tmp_path: Path, in_process: None) -> Run:
    return make_run(tmp_path / "out", pool)


def args(run: Run, *more: str) -> list[str]:
    return [f"out={run.out}", f"run={run.name}", *more]


def entries(run: Run) -> Counter[tuple[int, int]]:
    """How often each uid stands in the manifest, by its copies."""
    rows = pl.read_parquet(run.path("manifest.parquet"))
    return Counter({(r["uid_hi"], r["uid_lo"]): r["copies"] for r in rows.iter_rows(named=True)})


def test_files_hold_the_rounds_and_a_pass_holds_every_entry_once(run: Run) -> None:
    assert call(rounds, *args(run, "ratio=0.25", "rounds=8", "batch_size=8")) == 0
    whole = entries(run)
    drawn = open_rounds(run)
    assert drawn.entries == whole.total() == 90
    files = [np.load(path_of(run, t)) for t in range(8)]
    for t, uids in enumerate(files):
        assert uids.dtype == np.dtype("u8,u8")
        assert len(uids) == drawn.k == 23
        assert uids.tolist() == drawn.uids(t).tolist()
    used = Counter(u for uids in files for u in uids.tolist())
    assert used.keys() == whole.keys()
    assert all(184 * n // 90 - 1 <= used[uid] <= 184 * n // 90 + n for uid, n in whole.items())
    told = json.loads(Path(run.path("rounds", "rounds.json")).read_text())
    assert (told["samples_per_round"], told["steps_per_round"], told["unique_entries"]) == (23, 3, 90)


def test_byte_ranges_are_those_of_the_chosen_images(run: Run, pool: Path) -> None:
    assert call(rounds, *args(run, "ratio=0.3", "rounds=3", "files=false")) == 0
    assert not Path(path_of(run, 0)).exists()
    data = {p: Path(p).read_bytes() for p in map(str, pool.glob("*.tar"))}
    for members in open_rounds(run).shards(2):
        for offset, size, key, caption in zip(
            members.rows.image_offset, members.rows.image_size, members.rows.key, members.rows.caption
        ):
            assert data[members.path][offset : offset + size] == jpeg(seed=int(key))
            assert caption == f"a picture of thing number {int(key)}"


def test_strata_keep_their_shares_and_an_empty_value_is_one(run: Run) -> None:
    assert call(rounds, *args(run, "ratio=0.2", "rounds=5", "stratify=label")) == 0
    drawn = open_rounds(run)
    labels = dict(labels_of(run))
    whole = Counter[str | None]()
    for uid, n in entries(run).items():
        whole[labels[uid]] += n
    assert set(whole) == {None, "cat", "dog"}
    for t in range(5):
        found = Counter(labels[u] for u in drawn.uids(t).tolist())
        assert all(abs(found[label] - 0.2 * n) < 1 for label, n in whole.items())


def labels_of(run: Run):
    for shard in run.shard_ids():
        for hi, lo, label in run.tables().read(shard, ["uid_hi", "uid_lo", "label"]).iter_rows():
            yield (hi, lo), label


def test_the_manifest_itself_may_hold_the_strata_in_any_row_groups(run: Run) -> None:
    manifest = pl.read_parquet(run.path("manifest.parquet"))
    manifest.write_parquet(run.path("manifest.parquet"), row_group_size=7)
    mixed = RunManifest(run, "copies")
    counts, strata, values = mixed.count()
    assert counts.tolist() == [30, 30, 30]
    assert values == [1, 2, 3]
    assert strata is not None
    assert strata.tolist() == [[5, 10, 15]] * 3


@pytest.mark.usefixtures("ray_cluster")
def test_bytes_do_not_depend_on_the_workers(pool: Path, tmp_path: Path) -> None:
    found = []
    for workers in (1, 2):
        run = make_run(tmp_path / str(workers), pool)
        more = ["ratio=0.3", "rounds=9", "stratify=label", "replacement=true", f"cluster.workers={workers}"]
        assert call(rounds, *args(run, *more)) == 0
        found.append(contents(Path(run.path("rounds"))))
    assert found[0] == found[1]
    assert len(found[0]) == 11


def test_a_killed_writing_goes_on_to_the_same_bytes(run: Run, pool: Path, tmp_path: Path) -> None:
    more = ["ratio=0.3", "rounds=300"]
    command = [sys.executable, "-m", "jobs.rounds", *args(run, *more, "cluster.workers=1")]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not Path(path_of(run, 3)).exists():
        assert child.poll() is None, child.stderr and child.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = {
        n: b for n, b in contents(Path(run.path("rounds"))).items() if ".tmp-" not in n
    }  # what is finished
    assert call(rounds, *args(run, *more)) == 0
    after = contents(Path(run.path("rounds")))
    assert {name: after[name] for name in done} == done
    other = make_run(tmp_path / "other", pool)
    assert call(rounds, *args(other, *more)) == 0
    assert after == contents(Path(other.path("rounds")))


def test_other_settings_replace_the_rounds_that_are_there(run: Run) -> None:
    assert call(rounds, *args(run, "ratio=0.3", "rounds=4")) == 0
    first = contents(Path(run.path("rounds")))
    assert call(rounds, *args(run, "ratio=0.3", "rounds=2", "seed=1")) == 0
    second = contents(Path(run.path("rounds")))
    assert sorted(second) == ["00000.npy", "00001.npy", "rounds.counts.npy", "rounds.json"]
    assert second["00000.npy"] != first["00000.npy"]


def test_more_rounds_of_the_same_draws_are_added_and_fewer_leave_the_first(run: Run) -> None:
    assert call(rounds, *args(run, "ratio=0.3", "rounds=2")) == 0
    written = [Path(path_of(run, t)).stat().st_mtime_ns for t in range(2)]
    assert call(rounds, *args(run, "ratio=0.3", "rounds=4", "batch_size=9")) == 0
    assert [Path(path_of(run, t)).stat().st_mtime_ns for t in range(2)] == written
    assert Path(path_of(run, 3)).exists()
    assert call(rounds, *args(run, "ratio=0.3", "rounds=1")) == 0
    assert sorted(contents(Path(run.path("rounds")))) == ["00000.npy", "rounds.counts.npy", "rounds.json"]


def test_rounds_of_a_run_made_anew_are_refused(run: Run, pool: Path) -> None:
    assert call(rounds, *args(run, "ratio=0.3", "rounds=1")) == 0
    make_run(Path(run.out), pool, most=2)
    with pytest.raises(Refused, match="changed since"):
        open_rounds(run)
    assert call(rounds, *args(run, "ratio=0.3", "rounds=1")) == 0
    assert open_rounds(run).uids(0).tolist() == np.load(path_of(run, 0)).tolist()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ratio=1.5", "ratio=1.5: above 0 and at most 1"),
        ("ratio=0", "ratio=0.0: above 0"),
        ("ratio=0.001", "a round of 90 entries would be empty"),
        ("rounds=0", "rounds=0: at least 1"),
        ("batch_size=0", "batch_size=0: at least 1"),
        ("stratify=colour", "stratify=colour: there is no such column"),
        ("stratify=score", "stratify=score: there is no such column"),
        ("stratify=members", "stratify=members: holds list"),
        ("run=other", "no finished run there"),
        ("ration=0.1", "ration: there is no such key"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    run: Run, capfd: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    capfd.readouterr()
    assert call(rounds, *args(run, override)) == 2
    told = capfd.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
    assert not Path(run.path("rounds")).exists()


@pytest.mark.usefixtures("in_process")
def test_curate_writes_rounds_last_when_asked(pool: Path, tmp_path: Path) -> None:
    base = [f"pool.shards={pool}/*.tar", f"out={tmp_path}/out", "scorer=none", "filters=[caption]"]
    assert call(curate, *base, "rounds.rounds=2", "rounds.ratio=0.5") == 0
    run = Run(f"{tmp_path}/out", "default")
    assert np.load(path_of(run, 1)).shape == (open_rounds(run).k,)
    assert call(curate, *base, "rounds.rounds=2", "rounds.ratio=2") == 2


def test_rounds_reshard_loader_and_proxy_read_one_manifest_alike(run: Run, tmp_path: Path) -> None:
    """uid, copies and order mean the same everywhere."""
    whole = entries(run)
    in_order = pl.read_parquet(run.path("manifest.parquet")).sort("order")
    assert call(reshard, *args(run, f"to={tmp_path}/to")) == 0
    ids = np.load(tmp_path / "to" / "sample_ids.npy")
    subset = np.load(run.path("subset.npy"))
    assert Counter(ids.tolist()) == Counter(subset.tolist()) == whole

    assert call(rounds, *args(run, "ratio=1", "rounds=1")) == 0
    drawn = open_rounds(run)
    assert Counter(drawn.uids(0).tolist()) == whole
    loader = RoundLoader(drawn, LoaderConfig(batch_size=8), transform=lambda b: torch.tensor(len(b)))
    captions = Counter(caption for _, batch in loader for caption in batch)
    assert sum(captions.values()) == whole.total()
    assert captions == Counter(
        {f"a picture of thing number {int(r['key'])}": r["copies"] for r in in_order.iter_rows(named=True)}
    )

    images = of_run(run)
    labels = dict(labels_of(run))
    expected = [u for u in in_order.select("uid_hi", "uid_lo").iter_rows() if labels[u] is not None]
    assert images.uids.tolist() == expected
    assert [whole[u] for u in expected] == images.copies.tolist()
    assert Counter(images.uids[images.entries()].tolist()) == Counter({u: whole[u] for u in expected})
    everything = of_run(run, whole_pool=True)
    assert len(everything) == SHARDS * (EACH - 1)
    assert everything.uids[everything.copies > 0].tolist() == expected


def test_remote_runs_have_rounds_too(run: Run) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in Path(run.out).rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            memory.pipe_file(f"/rounds-test/{path.relative_to(run.out)}", path.read_bytes())
    far = Run("memory://rounds-test", run.name)
    assert call(rounds, *args(far, "ratio=0.2", "rounds=2", "stratify=label")) == 0
    assert call(rounds, *args(run, "ratio=0.2", "rounds=2", "stratify=label")) == 0
    for t in (0, 1):
        assert storage.read_bytes(path_of(far, t)) == Path(path_of(run, t)).read_bytes()

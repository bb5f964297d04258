"""Judging filters: the trial of each, the table, and that nothing is done twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from filters.network.poison import poison_shards
from jobs import judge_contest, judge_filter
from pipeline.samples import PoolConfig
from tests.build import call, contents, uid
from tests.filters.test_network import COLOURS, square, write_shard

NAMES = list(COLOURS)[:4]


def write_pool(folder: Path, first: int, n: int, wrong: float) -> None:
    """Coloured squares, `wrong` of them under another colour's name, in shards of 60; and the truth of it."""
    rng = np.random.default_rng(first)
    truth, samples = [], []
    for i in range(n):
        colour = NAMES[i % len(NAMES)]
        mismatch = rng.random() < wrong
        named = NAMES[(i + 1 + rng.integers(len(NAMES) - 1)) % len(NAMES)] if mismatch else colour
        record = json.dumps({"uid": uid(first + i), "label": NAMES.index(colour)})
        samples.append(
            {"png": square(colour, rng), "txt": f"a {named} square".encode(), "json": record.encode()}
        )
        truth.append({"uid": uid(first + i), "kind": "mismatch" if mismatch else "clean"})
    folder.mkdir()
    for s in range(0, n, 60):
        write_shard(folder / f"{s:05d}.tar", samples[s : s + 60])
    pl.DataFrame(truth).write_parquet(folder / "truth.parquet")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    write_pool(folder / "trusted", 0, 240, 0.0)
    write_pool(folder / "pool", 1000, 240, 0.5)
    write_pool(folder / "test", 2000, 60, 0.0)
    return folder


def judge(data: Path, out: Path, *overrides: str) -> int:
    return call(
        judge_filter, f"pool.shards={data}/pool", f"trusted.shards={data}/trusted", f"out={out}",
        f"truth.path={data}/pool/truth.parquet", f"held_out.images={data}/test",
        f"held_out.class_names=[{','.join(NAMES)}]", "held_out.templates=['a {} square']", "seeds=1",
        "model=tiny-test", "train.samples_seen=1600", "train.batch_size=40", "steps=30", "proxy.width=4",
        "proxy.batch_size=40", "cluster.workers=1", *overrides,
    )  # fmt: skip


@pytest.fixture(scope="module")
def judged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judged")


def figures(out: Path) -> dict:
    return {row["filter"]: row for row in json.loads((out / "judge.json").read_text())["filters"]}


@pytest.mark.usefixtures("in_process")
def test_filters_are_told_apart_and_nothing_is_done_twice(
    data: Path, judged: Path, monkeypatch: pytest.MonkeyPatch
):
    assert judge(data, judged) == 0
    found = figures(judged)
    assert list(found) == ["trained", "unfiltered", "classifier", "random"]
    assert {row["kept"] for row in found.values()} == {120}
    assert found["trained"]["precision"] > 0.9
    assert found["trained"]["precision"] > found["random"]["precision"] + 0.2
    assert found["trained"]["auc"] > 0.9 > found["random"]["auc"]
    assert found["trained"]["own_accuracy"] > 0.8
    assert found["random"]["own_accuracy"] is found["classifier"]["own_accuracy"] is None
    assert all(row["accuracy"] > 0 for row in found.values())
    assert (judged / "judge.png").read_bytes().startswith(b"\x89PNG")
    before = (judged / "judge.json").read_bytes()
    for work in ("train_network", "train_proxy", "scan"):
        monkeypatch.setattr(judge_contest, work, lambda *_a, **_k: pytest.fail("done again"))
    assert judge(data, judged) == 0
    assert (judged / "judge.json").read_bytes() == before


@pytest.mark.usefixtures("in_process")
def test_poisoning_starts_from_the_network_that_is_there(data: Path, judged: Path):
    filters = "{poison_0: {poison: 0.0}, poison_100: {poison: 1.0}}"
    before = set(contents(judged / "networks"))
    overrides = ["experiment=poisoning", "~contestants", f"+contestants={filters}"]
    assert judge(data, judged, *overrides) == 0
    found = figures(judged)
    assert list(found) == ["poison_0", "poison_100"]
    assert found["poison_0"]["precision"] > found["poison_100"]["precision"]
    trained = {Path(name).parts[0] for name in set(contents(judged / "networks")) - before}
    assert len(trained) <= 1 + (not before)


def test_poisoned_shards(data: Path, tmp_path: Path):
    trusted, pool = PoolConfig(shards=str(data / "trusted")), PoolConfig(shards=str(data / "pool"))

    def uids(share: float) -> list[str]:
        folder = poison_shards(trusted, pool, share, 0, str(tmp_path / f"{share}"))
        return [n[:32] for p in sorted(Path(folder).glob("*.tar")) for n in names(p) if n.endswith(".json")]

    own, quarter, half, all_ = (uids(share) for share in (0, 0.25, 0.5, 1))
    assert own == [uid(i) for i in range(240)]
    assert all(len(x) == 240 for x in (quarter, half, all_))
    changed = [{i for i, (a, b) in enumerate(zip(own, x)) if a != b} for x in (quarter, half, all_)]
    assert changed[0] < changed[1] < changed[2]
    assert len(changed[2]) == len(set(all_)) == 240
    assert 40 < len(changed[0]) < 80


def names(path: Path) -> list[str]:
    import tarfile

    with tarfile.open(path) as tar:
        return tar.getnames()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["truth.path=null", "held_out.images=null"], "there is nothing to judge by"),
        (["trusted.shards=null"], "trusted.shards: must be given"),
        (["+contestants.trained.poison=2"], "contestants.trained.poison=2"),
        (["held_out.images=/nowhere"], "held_out.images=/nowhere: there is no such file or folder"),
        (["truth.path=/nowhere"], "truth.path=/nowhere: there is no such file"),
        (["held_out.class_names=null"], "held_out.class_names: give"),
        (["~contestants.trained", "~contestants.unfiltered"], "a classifier needs a network"),
    ],
)
@pytest.mark.usefixtures("in_process")
def test_what_cannot_be_judged_is_refused(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], complaint: str
):
    assert judge(data, tmp_path, *overrides) == 2
    assert complaint in capfd.readouterr().err
    assert not (tmp_path / "networks").exists()

"""Planning: an estimate that writes nothing, and every problem of a configuration at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jobs import curate, plan
from pipeline import probe
from tests.build import call, make_pool, make_shard, sample

SHARDS, EACH = 3, 8


@pytest.fixture
def pool(tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(probe, "SECONDS", 0.0)
    make_pool(tmp_path / "pool", SHARDS, EACH)
    return tmp_path / "pool"


def arguments(pool: Path, *more: str) -> list[str]:
    return [f"pool.shards={pool}/*.tar", f"out={pool.parent}/out", *more]


def said(pool: Path, capfd: pytest.CaptureFixture[str], *more: str) -> str:
    capfd.readouterr()
    code = call(plan, *arguments(pool, *more))
    out, err = capfd.readouterr()
    assert code == 0, err
    return out


def problems(pool: Path, capfd: pytest.CaptureFixture[str], *more: str) -> list[str]:
    capfd.readouterr()
    assert call(plan, *arguments(pool, *more)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith(f"winnow: {len(lines) - 1} to mend")
    return [line.removeprefix("problem: ") for line in lines[:-1]]


def test_an_estimate_writes_nothing(pool: Path, tiny_scorer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in pool.parent.rglob("*")}
    text = said(pool, capfd, f"scorer.weights={tiny_scorer}")
    assert "3 shards, 24 samples by the bytes of 00000.tar" in text
    assert f"8 samples of {pool}/00000.tar" in text
    for part in ("start", "scan", "filters", "outputs", "total"):
        assert re.search(rf"^{part} +\d+ s", text, re.M), text
    assert "dedup" not in text
    assert {p: p.stat().st_mtime_ns for p in pool.parent.rglob("*")} == before


def test_what_is_done_already_and_what_count_files_say(pool: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rules = ["scorer=none", "filters=[caption]", "filters.caption.languages=null"]
    assert call(curate, *arguments(pool, *rules)) == 0
    more = range(90, 90 + EACH)
    make_shard(pool / "00003.tar", map(sample, more))
    (pool / "sizes.json").write_text(json.dumps({f"{n:05d}.tar": EACH for n in range(4)}))
    (pool / "sizes.json").touch()
    text = said(pool, capfd, *rules, "dedup=near", "dedup.method=phash")
    assert "4 shards, 32 samples by its count files" in text
    assert re.search(r"^dedup .*reckoned for 32 rows", text, re.M)


def test_every_problem_at_once(pool: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = problems(
        pool, capfd, "scorer=none", "filters=[caption,basic]", "filters.basic.min_words=-1",
        "filters.caption.min_chars=-3", "decode.max_bytes=0", "decode.truncated=no", "pool.missing=never",
        "errors.max_fraction=2", "cluster.workers=-2", "run=a/b", "dedup=near", "dedup.similarity=2",
        "+leakage.sets.mine=/nowhere/at/all",
    )  # fmt: skip
    for part in (
        "filters.basic.min_words=-1", "filters.caption.min_chars=-3", "decode.max_bytes=0", "decode.truncated=no",
        "pool.missing=never", "errors.max_fraction=2", "cluster.workers=-2", "run=a/b", "dedup.similarity=2",
        "leakage.sets.mine=/nowhere/at/all: nothing is there", "leakage.sets: comparing with evaluation sets needs",
    ):  # fmt: skip
        assert sum(line.startswith(part) for line in found) == 1, (part, found)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["pool.shards=/nowhere/*.tar"], "/nowhere"),
        (["out=/proc/nowhere"], "out=/proc/nowhere"),
        (
            ["filters=[column]", "filters.column.column=beauty", "filters.column.threshold=1"],
            "no column 'beauty'",
        ),
        (["+filters.mine={_target_:filters.score.ScoreCut,column:url,threshold:1}"], "it must be numeric"),
        (["stages=[filter]"], "stages: 'filter' is not a stage"),
        (["dedup=near"], "dedup.method=agree: needs a scorer; set dedup.method=phash"),
    ],
)
def test_problems_that_only_looking_shows(
    pool: Path, overrides: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = ["scorer=none", "filters=[caption]", *overrides]
    assert any(says in line for line in problems(pool, capfd, *rules))
    assert not (pool.parent / "out").exists()


def test_weights_and_missing_shards(pool: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (pool / "00001.tar").unlink()
    assert "weights=/nowhere: no such folder or file" in problems(pool, capfd, "scorer.weights=/nowhere")[0]
    found = problems(pool, capfd, "scorer=none", "filters=[caption]")
    assert found == [
        f"1 shards of the pool are missing: {pool}/00001.tar; pool.missing=skip goes on without them"
    ]
    assert "2 shards" in said(pool, capfd, "scorer=none", "filters=[caption]", "pool.missing=skip")


def test_a_batch_that_does_not_fit_the_gpu() -> None:
    from pipeline.cluster import Workers

    here = probe.Probe(
        samples=1, in_shard=1, seconds=1, load_seconds=1, decoded=1, scored=1, peak=1,
        gpu_peak=6 << 30, gpu_total=8 << 30, report=None, table=b"",
    )  # fmt: skip
    assert plan._gpu(Workers(2, 4, 1.0), here, 256) == []
    (line,) = plan._gpu(Workers(2, 4, 0.5), here, 256)
    assert "2 workers a GPU need 12.9 GB, it has 8.6 GB; try 142" in line

"""The proof as a user runs it, on a tiny pool: labelled, and image-text."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from jobs import prove
from pipeline.manifest import Run
from selection.proof.arms import ARMS
from tests.build import call, jpeg
from tests.jobs.test_rounds import make_run, pool  # noqa: F401

SMALL = ["ratio=0.5", "epochs=2", "seeds=2", "evaluations=2"]
NET = ["proxy.width=4", "proxy.image_size=16", "proxy.batch_size=8", "proxy.crop=2"]


@pytest.fixture
def run(pool: Path, tmp_path: Path, in_process: None) -> Run:  # noqa: F811
    return make_run(tmp_path / "out", pool)


@pytest.fixture
def judged_on(tmp_path: Path) -> str:
    path = tmp_path / "test.parquet"
    rows = {
        "jpg": [jpeg(seed=i) for i in range(10)],
        "label": ["cat", "dog"] * 5,
        "captions": [[f"thing {i}", "another"] for i in range(10)],
    }
    pl.DataFrame(rows).write_parquet(path)
    return str(path)


def args(run: Run, *more: str) -> list[str]:
    return [f"out={run.out}", f"run={run.name}", *SMALL, *more]


def result(run: Run, name: str = "proof") -> dict:
    return json.loads(Path(run.path("proof", f"{name}.json")).read_text())


def test_every_arm_is_trained_and_the_result_written_three_ways(
    run: Run, judged_on: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(prove, *args(run, *NET, f"evaluate={judged_on}")) == 0
    told, found = capfd.readouterr().out, result(run)
    assert [c["arm"] for c in found["curves"]] == list(ARMS)
    assert found["verdict"] in told
    assert list(found["costs"]["selection"]) == ["scan"]
    assert found["costs"]["image"] > 0
    assert found["run"] == run.digest()
    samples = {c["arm"]: c["samples"][-1] for c in found["curves"]}
    assert samples.pop("all") == 152
    assert set(samples.values()) == {80}  # half of twice 76, in batches of 8
    unique = {c["arm"]: c["unique"][-1] for c in found["curves"]}
    assert (unique["all"], unique["rs2"], unique["static"], unique["subset"]) == (76, 76, 38, 42)
    assert Path(run.path("proof", "proof.png")).read_bytes()[:4] == b"\x89PNG"

    trained = {p: p.stat().st_mtime_ns for p in Path(run.path("proof", "trainings")).iterdir()}
    assert len(trained) == 14
    assert call(prove, *args(run, *NET, f"evaluate={judged_on}", "name=again")) == 0
    assert {p: p.stat().st_mtime_ns for p in trained} == trained
    assert result(run, "again")["curves"] == found["curves"]


@pytest.mark.parametrize("judge", ["retrieval", "zero_shot"])
def test_a_pool_of_captions_is_judged_by_a_small_clip(run: Run, judged_on: str, judge: str) -> None:
    more = ["arms=[subset,full_short]", "seeds=1", "epochs=1", "evaluations=1", "clip.batch_size=16"]
    evaluate = [] if judge == "retrieval" else [f"evaluate={judged_on}"]
    assert call(prove, *args(run, *more, f"judge={judge}", *evaluate)) == 0
    found = result(run)
    assert found["metric"] == judge.replace("_", "-")
    assert [c["samples"] for c in found["curves"]] == [[32]] * 2
    assert 0 <= found["target"] <= 1
    if judge == "retrieval":
        assert call(prove, *args(run, *more, "judge=retrieval", f"evaluate={judged_on}", "name=given")) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ratio=0", "ratio=0.0: above 0"),
        ("arms=[subset,best]", "arms=['subset', 'best']: each once, of all"),
        ("ratio=0.001", "ratio=0.001: a round of 76 entries would be empty"),
        ("judge=taste", "judge=taste: must be one of labels"),
        ("judge=labels", "evaluate: give a labelled test set"),
        ("labels={field: caption, classes: [zebra]}", "no image with a label there ({'no_text': 80})"),
        ("evaluate=/nowhere.parquet", "evaluate=/nowhere.parquet: there is no such file or folder"),
        ("proxy.width=0", "proxy.width=0: at least 1"),
        ("run=other", "no finished run there"),
        ("name=a/b", "name=a/b: must be a plain name"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Run, judged_on: str, capfd: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    evaluate = [] if override == "judge=labels" else [f"evaluate={judged_on}"]
    assert call(prove, *args(run, *evaluate, override)) == 2
    assert message in capfd.readouterr().err


def test_the_scan_counts_in_full_whichever_run_it_was_made_for(
    run: Run, judged_on: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path(run.tables().folder, "scans.json")
    path.write_text('[{"shards": 1, "seconds": 0.5}, {"shards": 2, "seconds": 4.0}]')  # the pool has 4
    more = args(run, *NET, f"evaluate={judged_on}", "arms=[subset]", "seeds=1")
    assert call(prove, *more) == 0
    assert result(run)["costs"]["selection"]["scan"] == 6.0
    path.unlink()
    assert call(prove, *more) == 2
    assert "it is not known what its scan took" in capfd.readouterr().err

"""`selection=influence` through the command: what goes, the files beside it, recovery, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from jobs import curate
from selection.influence import stage as influence_stage
from selection.influence.on_ray import ordered_map_on_ray
from tests.build import array, call, contents, encode, make_shard, sample, uid

COLOURS = ("red", "green", "blue")
SHARDS, EACH = 4, 60
TOTAL = SHARDS * EACH
WRONG = {n for n in range(TOTAL) if n % 6 == 0}
pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(autouse=True)
def passes_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over shards in this process; the test that compares workers has Ray."""
    monkeypatch.setattr(influence_stage, "shard_map", lambda _workers: map)


def coloured(n: int, seed: int) -> bytes:
    from PIL import Image

    pixels = array((12, 10), seed) // 3
    pixels[:, :, n % 3] += 120
    return encode(Image.fromarray(pixels))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red, green and blue pictures; every sixth has another colour in its caption and label."""
    folder = tmp_path_factory.mktemp("pool")
    for s in range(SHARDS):
        samples = []
        for n in range(s * EACH, (s + 1) * EACH):
            said = COLOURS[(n + (n in WRONG)) % 3]
            record = {"uid": uid(n), "label": said, "group": f"g{n % 2}"}
            text = f"a photo of a {said}".encode()
            samples.append(sample(n, jpg=coloured(n, n), txt=text, record=record))
        if s == 1:
            samples[7] = sample(EACH + 7, jpg=b"junk")
        make_shard(folder / f"{s:05d}.tar", samples)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures a colour, rightly named."""
    folder = tmp_path_factory.mktemp("target")
    for n in range(90):
        (folder / COLOURS[n % 3]).mkdir(exist_ok=True)
        (folder / COLOURS[n % 3] / f"{n}.jpg").write_bytes(coloured(n, 1000 + n))
    return folder


@pytest.fixture(scope="module")
def common(pool: Path, tiny_scorer: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that share one scan."""
    return [
        f"pool.shards={pool}/*.tar", f"out={tmp_path_factory.mktemp('out')}", f"scorer.weights={tiny_scorer}",
        "filters.dfn.top_fraction=1.0", "selection=influence", "selection.budget=0.2", "selection.l2=0.01",
        "+pool.json_fields.group=str",
    ]  # fmt: skip


def folder(common: list[str], run: str) -> Path:
    return Path(common[1][4:]) / "runs" / run


def result(common: list[str], run: str) -> tuple[dict, pl.DataFrame]:
    stage = folder(common, run) / "stages" / "01-influence"
    return json.loads((stage / "result.json").read_text()), pl.read_parquet(stage / "influence.parquet")


def numbers(table: pl.DataFrame) -> set[int]:
    by_uid = {(int(uid(n)[:16], 16), int(uid(n)[16:], 16)): n for n in range(TOTAL)}
    return {by_uid[row] for row in table.select("uid_hi", "uid_lo").rows()}


def test_captions_that_harm_a_task_are_dropped(
    common: list[str], target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["selection.labels=captions", "selection.classes=[red,green,blue]", f"selection.target={target}"]
    assert call(curate, *common, *more, "run=task") == 0
    found, table = result(common, "task")
    gone = numbers(table.filter("removed"))
    assert "influence: removed" in capfd.readouterr().out
    assert found["removed"] == len(gone) > 20
    assert len(gone & WRONG) / len(gone) > 0.9
    receipt = json.loads((folder(common, "task") / "receipt.json").read_text())
    assert receipt["dropped"] == {"harmful_influence": len(gone)}
    assert "estimated to help" in receipt["reasons"]["harmful_influence"]
    assert receipt["kept"] == TOTAL - 1 - len(gone)
    assert set(found["sets"]) == {"influence", "guard", "test"}
    test = found["sets"]["test"]
    assert test["after"]["log_loss"] < test["before"]["log_loss"]


def test_files_beside_the_decisions(common: list[str], target: Path) -> None:
    more = ["selection.classes=[red,green,blue]", f"selection.target={target}", "selection.rounds=2"]
    assert call(curate, *common, *more, "run=files") == 0
    found, table = result(common, "files")
    stage = folder(common, "files") / "stages" / "01-influence"
    assert table.columns == ["uid_hi", "uid_lo", "label", "delta_if_removed_utility", "removed"]
    assert (len(table), found["rows"], found["unlabelled"]) == (TOTAL - 1, TOTAL - 1, 0)
    decisions = pl.concat(pl.read_parquet(p) for p in stage.glob("0*.parquet"))
    dropped = decisions.filter(pl.col("reason") == "harmful_influence")
    assert numbers(dropped) == numbers(table.filter("removed"))
    assert (dropped["value"] < 0).all()
    assert (dropped["cut"] == 0).all()
    entry = found["objectives"]["utility"]
    assert {"predicted_change", "realised_change", "unit", "solve_residual"} <= set(entry)
    worst = entry["most_harmful"][0]
    assert worst["delta_if_removed"] == table["delta_if_removed_utility"].min()
    assert {"uid", "shard", "key", "caption", "label"} <= set(worst)
    assert entry["shown"] == len(entry["most_harmful"]) + len(entry["most_helpful"]) == 40
    for picture in ("samples_utility.png", "tree_utility.png"):
        assert (stage / picture).read_bytes()[:4] == b"\x89PNG"
    assert "R^2" in found["explanations"]["utility"]["verdict"]
    errors = pl.read_parquet(stage / "label_errors.parquet")
    assert found["label_error_candidates"] == len(errors)
    assert len(numbers(errors[:20]) & WRONG) > 8  # a sixth of all rows is wrong
    assert not list(stage.glob("work-*"))


def test_rows_of_the_pool_serve_where_no_target_is_given(common: list[str]) -> None:
    more = ["selection.labels=clusters", "selection.clusters=3", "selection.embedding=both"]
    assert call(curate, *common, *more, "run=clusters") == 0
    found, table = result(common, "clusters")
    assert found["held_out"] > 20
    assert found["held_out"] + found["rows"] == TOTAL - 1
    assert found["classes"] == ["cluster 0", "cluster 1", "cluster 2"]
    assert (
        call(curate, *common, "selection.labels=prompts", "selection.classes=[red,blue]", "run=prompts") == 0
    )
    found, table = result(common, "prompts")
    assert set(table["label"].unique()) <= {"red", "blue"}


def test_remove_nothing_is_said_plainly(common: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert call(curate, *common, "selection.budget=0.001", "run=nothing") == 0
    assert "influence: remove nothing: " in capfd.readouterr().out
    assert result(common, "nothing")[0]["removed"] == 0


def test_two_workers_or_none_interrupted_or_not_the_same_bytes(
    common: list[str], ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [
        "selection.objective=[utility,demographic_parity]",
        "selection.groups=group",
        "selection.group_floor=0.5",
    ]
    with monkeypatch.context() as on_ray:
        on_ray.setattr(influence_stage, "shard_map", lambda _workers: ordered_map_on_ray(2))
        assert call(curate, *common, *more, "run=two") == 0
    fit = influence_stage.select

    def stopped(*args, on_step, **kwargs):
        def once(weights: np.ndarray) -> None:
            on_step(weights)
            raise KeyboardInterrupt

        return fit(*args, on_step=once, **kwargs)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(influence_stage, "select", stopped)
        for _ in range(2):
            assert call(curate, *common, *more, "run=one") == 1
    assert list((folder(common, "one") / "stages").glob("01-influence/work-*/head.npy"))
    assert call(curate, *common, *more, "run=one") == 0
    one, two = (contents(folder(common, run) / "stages" / "01-influence") for run in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name] == two[name] for name in one if name != "stage.json")
    assert json.loads(one["result.json"])["objectives"].keys() == {"utility", "demographic_parity"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["selection.labels=nope"], "no such column"),
        (["selection.labels=prompts"], "selection.classes=null"),
        (["selection.objective=demographic_parity"], "selection.groups=null"),
        (["selection.embedding=audio"], "selection.embedding=audio"),
        (["selection.target=/nowhere"], "selection.target=/nowhere"),
        (["selection.classes=/nowhere.txt"], "no such file"),
        (["selection.budget=1000", "selection.guard=false"], "budget=1000"),
        (["selection.labels=key"], "no kept row"),
        (["scorer=none", "~filters.dfn", "filters=[]"], "needs a scorer"),
        (["stages=[selection]"], "put filters first"),
    ],
)
def test_what_cannot_be_worked_with_is_refused_in_one_line(
    common: list[str], overrides: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(curate, *common, "run=refused", *overrides) == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("winnow: ")
    assert message in line

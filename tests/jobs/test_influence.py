import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from jobs.influence import InfluenceConfig, run
from pipeline.errors import Refused

ROOT = Path(__file__).parents[2]
CONF = str(ROOT / "conf")
SCENARIOS = sorted(path.stem for path in (ROOT / "conf" / "influence_scenario").glob("*.yaml"))


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=5)
    data = {"l2": 1.0, "x_unlabelled": rng.normal(size=(50, 5))}
    for name, n in (("train", 600), ("val", 300), ("test", 200)):
        s = rng.integers(0, 2, n)
        x = rng.normal(size=(n, 5)).astype(np.float32)
        x[:, 0] += s
        y = (x @ truth + rng.logistic(size=n) / 2 > 0.5).astype(int)
        if name == "train":
            y = np.where(rng.random(n) < 0.15, 1 - y, y)
        data |= {f"x_{name}": x, f"y_{name}": y, f"s_{name}": s}
    path = tmp_path_factory.mktemp("influence") / "features.npz"
    np.savez(path, **data)
    return str(path)


def composed(*overrides):
    with initialize_config_dir(CONF, version_base="1.3"):
        config = OmegaConf.to_object(compose("influence", overrides=list(overrides)))
    assert isinstance(config, InfluenceConfig)
    return config


def test_files_hold_scores_and_changes_on_three_sets(features, tmp_path):
    out = tmp_path / "out"
    run(composed(f"features={features}", "objective=[utility,demographic_parity]", "rounds=2", f"out={out}"))
    table = pl.read_parquet(out / "influence.parquet")
    result = json.loads((out / "result.json").read_text())
    assert table.columns == [
        "row",
        "delta_if_removed_utility",
        "delta_if_removed_demographic_parity",
        "removed",
    ]
    assert table["row"].to_list() == list(range(600))
    assert table["removed"].sum() == result["removed"] == sum(r["removed"] for r in result["rounds"])
    assert set(result["sets"]) == {"influence", "guard", "test"}
    for entry in result["sets"].values():
        assert set(entry["before"]["gaps"]) == {"demographic_parity", "equal_opportunity", "equalized_odds"}
        assert 0 <= entry["after"]["robust_accuracy"] <= 1
    guard = result["sets"]["guard"]
    assert guard["after"]["accuracy"] >= guard["before"]["accuracy"]
    for entry in result["objectives"].values():
        assert {"predicted_change", "realised_change", "unit"} <= set(entry)
    assert (out / "tree_utility.png").read_bytes()[:4] == b"\x89PNG"
    assert result["label_error_candidates"] == pl.read_parquet(out / "label_errors.parquet").height > 0


def test_published_one_shot_removes_exactly_the_budget(features, tmp_path):
    run(composed(f"features={features}", "budget=0.05", "guard=false", f"out={tmp_path}", "explain_depth=0"))
    table = pl.read_parquet(tmp_path / "influence.parquet")
    lowest = table.sort("delta_if_removed_utility", maintain_order=True).head(30)
    assert table["removed"].sum() == 30
    assert lowest["removed"].all()
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["sets"]) == {"influence", "test"}
    assert "explanations" not in result


def test_same_input_same_bytes(features, tmp_path):
    for name in ("a", "b"):
        run(composed(f"features={features}", "rounds=2", f"out={tmp_path / name}"))
    names = sorted(path.name for path in (tmp_path / "a").iterdir() if not path.name.startswith("."))
    assert "result.json" in names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_scenario_runs(features, tmp_path, scenario):
    run(composed(f"features={features}", f"influence_scenario={scenario}", f"out={tmp_path}", "label_next=7"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rows"] == 600
    if scenario == "active_learning":
        table = pl.read_parquet(tmp_path / "label_next.parquet")
        assert table.height == table["row"].n_unique() == 7
    if scenario == "online":
        assert pl.read_parquet(tmp_path / "influence.parquet").height == 600


def test_settings_given_by_hand_win_over_the_scenario(features, tmp_path):
    config = composed(f"features={features}", "influence_scenario=poisoning", "rounds=2", f"out={tmp_path}")
    assert (config.rounds, config.class_floor) == (2, 0.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["label_next=3", "features=FEW"], "no unlabelled rows"),
        (["objective=demographic_parity", "features=FEW"], "no sensitive groups"),
        (["features=NOL2"], "l2=null"),
        (["guard_share=0.9999"], "validation rows are too few"),
        (["budget=600", "guard=false"], "budget=600"),
        (["group_floor=0.5", "guard=false", "features=FEW"], "needs the groups"),
    ],
)
def test_input_that_does_not_fit_is_refused(features, tmp_path, overrides, message):
    with np.load(features) as file:
        data = dict(file)
    plain = {k: v for k, v in data.items() if not k.startswith("s_") and k != "x_unlabelled"}
    np.savez(tmp_path / "few.npz", **plain)
    np.savez(tmp_path / "nol2.npz", **{k: v for k, v in data.items() if k != "l2"})
    places = {
        "features=FEW": f"features={tmp_path}/few.npz",
        "features=NOL2": f"features={tmp_path}/nol2.npz",
    }
    overrides = [f"features={features}", *(places.get(o, o) for o in overrides)]
    with pytest.raises(Refused, match=message):
        run(composed(*overrides, f"out={tmp_path}/out"))


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "jobs.influence", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_command_line_says_what_happened_and_how_it_ended(features, tmp_path):
    done = command(f"features={features}", f"out={tmp_path}", "explain_depth=0", "budget=10")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("removed ") or done.stdout.startswith("remove nothing")
    refused = command(f"features={features}", f"out={tmp_path}", "objective=nope")
    assert refused.returncode == 2
    assert "objective=nope" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1

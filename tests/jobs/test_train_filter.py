"""The command that trains a filter: recipes that compose, stages, and what is refused."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from jobs import train_filter
from jobs.launch import CONF, build
from jobs.train_filter import TrainFilterConfig
from tests.build import call
from tests.filters.test_network import COLOURS, labelled, trusted  # noqa: F401

NAMES = f"[{','.join(COLOURS)}]"


@pytest.mark.parametrize(("recipe", "steps"), [("dfn", 312_500), ("dfn_public", 78_125)])
def test_recipes_are_the_papers(recipe: str, steps: int):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        node = hydra.compose("train_filter", [f"recipe={recipe}", "pool.shards=/a", "out=/b"])
    config = build(node, "", TrainFilterConfig)
    assert (config.model, config.init, config.train.batch_size) == ("ViT-B-32", "openai", 16_384)
    assert config.train.steps == steps
    assert round(config.train.warmup * steps) == 2000
    assert config.finetune.train.steps > 1000
    assert (config.finetune.average, config.finetune.captions["class_names"]) == (0.5, "imagenet")


def train(out: Path, shards: Path, *overrides: str) -> int:
    small = ["train.samples_seen=96", "train.batch_size=48", "train.data.held_out=0.2", "model=tiny-test"]
    return call(train_filter, f"pool.shards={shards}", f"out={out}", "cluster.workers=1", *small, *overrides)


def test_a_labelled_second_stage(trusted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):  # noqa: F811
    stage = [
        f"finetune.pool.shards={labelled(tmp_path)}", f"finetune.captions.class_names={NAMES}",
        "finetune.train.samples_seen=32", "finetune.train.batch_size=16", "finetune.average=0.3",
    ]  # fmt: skip
    assert train(tmp_path / "out", trusted, *stage) == 0
    assert "128 pairs seen" in capfd.readouterr().out
    assert (tmp_path / "out" / "recipe.json").exists()
    assert (tmp_path / "out" / "finetuned" / "train.json").exists()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("finetune.average=1.5", "finetune.average=1.5"),
        ("captions.class_names=/no/file", "class_names=/no/file"),
        ("captions={class_names: [a], templates: [b]}", "captions.templates="),
        ("train.micro_batch=0", "train.micro_batch=0"),
        ("init=nothing", "weights=nothing"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    trusted: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    override: str,
    complaint: str,
):
    assert train(tmp_path / "out", trusted, override) == 2
    assert complaint in capfd.readouterr().err

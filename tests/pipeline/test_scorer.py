"""Scorers: fingerprints over all that decides a score, directions that do not exist, names that are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import open_clip
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file

from pipeline.errors import Refused
from pipeline.scorer import Scorer, ScorerConfig
from tests.build import array
from tests.conftest import save_scorer


def load(folder: Path, **kw: str) -> Scorer:
    return Scorer(ScorerConfig(weights=str(folder), **kw))  # type: ignore[arg-type]


def pixels(n: int) -> torch.Tensor:
    return torch.stack([torch.from_numpy(array((32, 32), seed)).permute(2, 0, 1) for seed in range(n)])


def changed(folder: Path, to: Path, **config: object) -> Path:
    """A copy of a scorer folder with parts of its config replaced."""
    shutil.copytree(folder, to)
    path = to / "open_clip_config.json"
    value = json.loads(path.read_text())
    for part in ("model_cfg", "preprocess_cfg"):
        value[part] |= {
            k: v for k, v in config.items() if k in value[part] or (part == "model_cfg" and k == "quick_gelu")
        }
    path.write_text(json.dumps(value))
    return to


def test_fingerprint_covers_weights_activation_preprocessing_and_precision(
    tiny_scorer: Path, tmp_path: Path
) -> None:
    (tmp_path / "seed").mkdir()
    variants = [
        load(tiny_scorer),
        load(save_scorer(tmp_path / "seed", seed=1)),
        load(tiny_scorer, precision="bf16"),
        load(changed(tiny_scorer, tmp_path / "gelu", quick_gelu=True)),
        load(changed(tiny_scorer, tmp_path / "mean", mean=[0.5, 0.5, 0.5])),
        load(changed(tiny_scorer, tmp_path / "mode", resize_mode="squash")),
    ]
    assert len({s.fingerprint for s in variants}) == len(variants)
    assert load(Path(shutil.copytree(tiny_scorer, tmp_path / "copy"))).fingerprint == variants[0].fingerprint


def test_a_zero_embedding_has_no_score(tiny_scorer: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_scorer, tmp_path / "zero"))
    weights = load_file(folder / "open_clip_model.safetensors")
    weights["text_projection"] = torch.zeros_like(weights["text_projection"])
    save_file(weights, folder / "open_clip_model.safetensors")
    image, text, score = load(folder).embed(pixels(2), ["a cat", "a dog"])
    assert np.isfinite(image).all()
    assert np.isnan(text).all()
    assert np.isnan(score).all()


def test_equal_captions_are_embedded_alike_and_in_place(tiny_scorer: Path) -> None:
    scorer = load(tiny_scorer)
    captions = ["b", "a", "b", "", "nan"]
    _, text, _ = scorer.embed(pixels(5), captions)
    np.testing.assert_array_equal(text[0], text[2])
    for row, caption in zip(text, captions):
        alone = scorer.embed(pixels(1), [caption])[1][0]
        np.testing.assert_allclose(row, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"weights": "/nowhere"}, "weights=/nowhere: no such folder or file, and no tag of ViT-B-32"),
        (
            {"weights": "openai", "model": "ViT-B-23"},
            "model=ViT-B-23 is not an open_clip model; close ones: ViT-B-32",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(config: dict[str, str], says: str) -> None:
    with pytest.raises(Refused, match=says):
        Scorer(ScorerConfig(**config))  # type: ignore[arg-type]


def test_an_empty_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refused) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_the_wanted_activation_is_given_or_the_network_refused(tiny_scorer: Path, tmp_path: Path) -> None:
    quick = changed(tiny_scorer, tmp_path / "quick", quick_gelu=True)
    assert load(tiny_scorer).identity["activation"] == "gelu"
    assert load(tiny_scorer, activation="quick_gelu").fingerprint == load(quick).fingerprint
    assert load(quick, activation="quick_gelu").fingerprint == load(quick).fingerprint
    with pytest.raises(Refused, match=r"activation=gelu: .* has quick_gelu"):
        load(quick, activation="gelu")
    with pytest.raises(ValueError, match="activation=relu"):
        load(quick, activation="relu")


def published() -> list[tuple[str, DictConfig]]:
    files = sorted((Path(__file__).parents[2] / "conf" / "scorer").glob("*.yaml"))
    found = [(f.stem, OmegaConf.load(f)) for f in files if f.stem not in ("none", "open_clip")]
    return [(name, config) for name, config in found if isinstance(config, DictConfig)]


@pytest.mark.parametrize(("name", "config"), published())
def test_published_scorers_exist_and_name_their_activation(name: str, config: DictConfig) -> None:
    scorer = ScorerConfig(**config)
    assert scorer.name == name
    if not scorer.weights.startswith("hf-hub:"):
        tag = open_clip.get_pretrained_cfg(scorer.model, scorer.weights)
        assert tag, "no such tag of the model"
        assert scorer.activation == ("quick_gelu" if tag.get("quick_gelu") else "gelu")
    assert (scorer.activation == "quick_gelu") == name.startswith(("dfn", "openai"))


@pytest.mark.parametrize("name", ["dfn_public", "openai_b32"])
def test_weights_that_cannot_be_fetched_are_told_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    config = ScorerConfig(**dict(published())[name])
    with pytest.raises(Refused) as caught:
        Scorer(config)
    line = str(caught.value)
    assert line.startswith(f"cannot load model={config.model} weights={config.weights}: ")
    assert "fetched by hand" in line
    assert "\n" not in line

"""Labels of pool rows, and draws by uid."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.errors import Refused
from pipeline.scorer import Scorer, ScorerConfig
from selection.influence.pool_labels import (
    UNKNOWN,
    Coder,
    ColumnLabels,
    TrueLabels,
    cluster_labels,
    prompt_labels,
)
from selection.influence.sheet import Tile, draw_sheet
from tests.build import jpeg, make_shard, sample, tar


def none(tower: str) -> np.ndarray:
    raise AssertionError(tower)


def test_a_label_is_a_name_or_the_number_of_one() -> None:
    rule = ColumnLabels("label", Coder(("cat", "dog")))
    frame = pl.DataFrame({"label": ["dog", "0", None, "cow", "1", "2", "cat"]})
    assert rule.label(frame, none).tolist() == [1, 0, UNKNOWN, UNKNOWN, 1, UNKNOWN, 0]
    numbers = pl.DataFrame({"label": [1, 0, 7]})
    assert rule.label(numbers, none).tolist() == [1, 0, UNKNOWN]


def test_values_of_a_column_are_classes_in_their_order() -> None:
    assert Coder.of_values("x", {"10", "9", "2"}).names == ("2", "9", "10")
    assert Coder.of_values("x", {"b", "10", "a"}).names == ("10", "a", "b")
    with pytest.raises(Refused, match="at least 2"):
        Coder.of_values("x", {"a"})
    with pytest.raises(Refused, match="name no classes"):
        Coder.of_values("x", {str(i) for i in range(10_001)})


def test_nearest_prompts_and_clusters_label_each_row() -> None:
    directions = {"a photo of a cat": [1, 0], "cat": [1, 0.5], "a photo of a dog": [0, 1], "dog": [0, 1]}
    rule = prompt_labels(
        "image", ["cat", "dog"], ["a photo of a {}", "{}"],
        lambda prompts: np.array([directions[p] for p in prompts], np.float32),
    )  # fmt: skip
    np.testing.assert_allclose(np.linalg.norm(rule.points, axis=1), 1, rtol=1e-6)
    x = np.array([[1, 0.1], [0.1, 1], [np.nan, 1]], np.float16)
    assert rule.label(pl.DataFrame(), lambda tower: x).tolist() == [0, 1, UNKNOWN]
    true = TrueLabels(rule, Coder(("cat", "dog")))
    assert true.label(pl.DataFrame({"label": ["dog", None, None]}), lambda tower: x).tolist() == [
        1,
        1,
        UNKNOWN,
    ]
    points = np.repeat([[0.0, 0], [5, 5], [9, 0]], 20, axis=0) + np.random.default_rng(0).normal(size=(60, 2))
    found = cluster_labels("image", points, 3, seed=0).label(pl.DataFrame(), lambda tower: points)
    assert [len(set(found[i : i + 20])) for i in (0, 20, 40)] == [1, 1, 1]
    assert len(set(found)) == 3
    with pytest.raises(Refused, match="only 60 rows"):
        cluster_labels("image", points, 61, seed=0)


def test_text_is_embedded_as_with_its_image(tiny_scorer: Path) -> None:
    import torch

    scorer = Scorer(ScorerConfig(weights=str(tiny_scorer)))
    captions = ["a cat", "a dog"]
    pixels = torch.zeros((2, 3, 32, 32), dtype=torch.uint8)
    np.testing.assert_allclose(scorer.embed_text(captions), scorer.embed(pixels, captions)[1], atol=1e-5)


def test_sheet_shows_what_can_be_fetched(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "0.tar", [sample(0)])
    data = jpeg(seed=0)
    offset = tar([sample(0)]).index(data)
    tiles = [
        Tile(shard, offset, len(data), ("good", "caf\u00e9 \u732b")),
        Tile(shard, 0, 400, ("not an image",)),
        Tile(str(tmp_path / "gone.tar"), 0, 9, ("gone",)),
    ]
    assert draw_sheet(tmp_path / "sheet.png", [("first", tiles), ("none", [])]) == 1
    assert Image.open(tmp_path / "sheet.png").size[0] > 1_000

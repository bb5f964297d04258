"""Evaluation sets as shards: images keep their bytes, labels come along."""

from __future__ import annotations

import tarfile
from pathlib import Path

import polars as pl

from pipeline.evaluation import as_shards
from tests.build import jpeg


def members(folder: str) -> dict[str, bytes]:
    with tarfile.open(Path(folder) / "00000.tar") as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def test_a_parquet_file_brings_its_labels(tmp_path: Path) -> None:
    images = [jpeg(seed=n) for n in range(3)]
    pl.DataFrame({"jpg": images, "label": [4, None, 2]}).write_parquet(tmp_path / "set.parquet")
    found = members(as_shards(str(tmp_path / "set.parquet"), str(tmp_path / "shards")))
    assert found == {
        "0.jpg": images[0], "0.cls": b"4", "1.jpg": images[1], "2.jpg": images[2], "2.cls": b"2"
    }  # fmt: skip


def test_the_folder_of_an_image_is_its_label(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "dog/1.jpg", "0.jpg"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(jpeg())
    found = members(as_shards(str(tmp_path / "set"), str(tmp_path / "shards")))
    assert {k: v for k, v in found.items() if k.endswith("cls")} == {
        "cat_1_jpg.cls": b"cat", "dog_1_jpg.cls": b"dog"
    }  # fmt: skip

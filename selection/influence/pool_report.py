"""What the influence stage leaves beside its decisions: every row's influence, and what explains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.samples import format_uid
from selection.influence.explain import explain
from selection.influence.labels import label_errors
from selection.influence.pool import PoolRows
from selection.influence.report import LISTED, selection_report
from selection.influence.rows import Rows
from selection.influence.score import LEVERAGE_CLASSES
from selection.influence.select import Selection
from selection.influence.sheet import Tile, draw_sheet

if TYPE_CHECKING:
    from selection.influence.stage import InfluenceStageConfig

MOST_LABEL_ERRORS = 100_000
TREE_ROWS, TREE_SHARDS = 20_000, 64  # what the explaining tree sees of a large pool
MOST_LABEL_FEATURES = 20
PLACE = ("uid_hi", "uid_lo", "shard", "key", "offset", "size", "caption")


def write_report(
    folder: str,
    pool: PoolRows,
    rows: Rows,
    selection: Selection,
    names: Sequence[str],
    counts: dict[str, int],
    config: InfluenceStageConfig,
) -> None:
    """Write influence.parquet, label_errors.parquet (up to 100 classes), the pictures, and result.json last.

    names: of the classes. counts: rows that take no part, by why.
    """
    labels = rows.labels()
    _write_scores(storage.join(folder, "influence.parquet"), pool, selection, labels, names)
    result = selection_report(selection) | {"classes": list(names), **counts}
    result["label_error_candidates"] = None
    if len(names) <= LEVERAGE_CLASSES:
        result["label_error_candidates"] = _write_label_errors(folder, pool, rows, selection, names)
    for name in selection.influence.names:
        entry = result["objectives"][name]
        extremes = {
            side: _samples(pool, selection, name, np.array(entry[f"most_{side}"], np.int64), labels, names)
            for side in ("harmful", "helpful")
        }
        entry |= {f"most_{side}": found.drop("offset", "size").to_dicts() for side, found in extremes.items()}
        entry["shown"] = _show(storage.join(folder, f"samples_{name}.png"), name, extremes)
    if config.explain_depth and rows.n >= 20:
        result["explanations"] = _explain(folder, pool, rows, selection, labels, names, config)
    storage.write_json(storage.join(folder, "result.json"), result)


def _write_scores(
    path: str, pool: PoolRows, selection: Selection, labels: np.ndarray, names: Sequence[str]
) -> None:
    with storage.commit(path) as tmp:
        writer = None
        for table in _score_tables(pool, selection, labels, names):
            arrow = table.to_arrow()
            writer = writer or pq.ParquetWriter(tmp, arrow.schema, compression="zstd")
            writer.write_table(arrow)
        assert writer is not None
        writer.close()


def _score_tables(
    pool: PoolRows, selection: Selection, labels: np.ndarray, names: Sequence[str]
) -> Iterator[pl.DataFrame]:
    """uid, label, `delta_if_removed_<objective>` (negative = harmful) and `removed`, one shard at a time."""
    scores, classes = selection.influence, pl.Series(names)
    tables = pool.features.tables.stream([part.shard for part in pool.parts], ["uid_hi", "uid_lo"])
    for part, start, (_, frame) in zip(pool.parts, pool.starts, tables):
        mine = slice(start, start + part.train)
        yield frame[part.read("rows").tolist()].with_columns(
            label=classes[labels[mine].tolist()],
            **{f"delta_if_removed_{n}": pl.Series(scores.column(n)[mine]) for n in scores.names},
            removed=pl.Series(selection.removed[mine]),
        )


def _write_label_errors(
    folder: str, pool: PoolRows, rows: Rows, selection: Selection, names: Sequence[str]
) -> int:
    """The rows whose label all other rows contradict, least probable first; returns how many there are."""
    found, classes = label_errors(rows, selection.base), pl.Series(names)
    some = slice(0, MOST_LABEL_ERRORS)
    table = pool.gather(found.row[some], ["uid_hi", "uid_lo"]).with_columns(
        given=classes[found.given[some].tolist()],
        suggested=classes[found.suggested[some].tolist()],
        confidence=pl.Series(found.confidence[some]),
    )
    with storage.commit(storage.join(folder, "label_errors.parquet")) as tmp:
        table.write_parquet(tmp)
    return len(found.row)


def _samples(
    pool: PoolRows,
    selection: Selection,
    name: str,
    rows: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
) -> pl.DataFrame:
    """Where some samples lie, their caption, label and influence."""
    found = pool.gather(rows, PLACE)
    return found.select(
        uid=pl.Series([format_uid(*u) for u in found.select("uid_hi", "uid_lo").rows()], dtype=pl.String),
        shard="shard",
        key="key",
        offset="offset",
        size="size",
        caption="caption",
        label=pl.Series([names[i] for i in labels[rows]], dtype=pl.String),
        delta_if_removed=pl.Series(selection.influence.column(name)[rows], dtype=pl.Float64),
    )


def _show(path: str, name: str, extremes: dict[str, pl.DataFrame]) -> int:
    """The contact sheet of one objective; returns how many images could be fetched."""
    blocks = [
        (
            f"most {side} for {name}, delta_if_removed (negative: removing it helps), label, caption",
            [
                Tile(r["shard"], r["offset"], r["size"], (f"{r['delta_if_removed']:+.3g}", r["label"], r["caption"] or ""))
                for r in found.iter_rows(named=True)
            ],
        )
        for side, found in extremes.items()
    ]  # fmt: skip
    with storage.commit(path) as tmp:
        return draw_sheet(tmp, blocks)


def _explain(
    folder: str,
    pool: PoolRows,
    rows: Rows,
    selection: Selection,
    labels: np.ndarray,
    names: Sequence[str],
    config: InfluenceStageConfig,
) -> dict[str, dict[str, Any]]:
    """A tree over what a reader knows of a sample, for each objective."""
    chosen = _tree_rows(pool, config.seed)
    features = _named_features(pool, rows, selection, chosen, labels, names)
    entries = {}
    for name in selection.influence.names:
        tree = explain(
            name,
            features.to_numpy(),
            selection.influence.column(name)[chosen],
            features.columns,
            depth=config.explain_depth,
            seed=config.seed,
        )
        picture = f"tree_{name}.png"
        with storage.commit(storage.join(folder, picture)) as tmp:
            tree.draw(tmp)
        entries[name] = {"r2": tree.r2, "verdict": tree.verdict, "rules": tree.text, "picture": picture}
    return entries


def _tree_rows(pool: PoolRows, seed: int) -> np.ndarray:
    """At most TREE_ROWS row numbers out of at most TREE_SHARDS shards, in ascending order."""
    rng, starts = np.random.default_rng(seed), pool.starts
    parts = np.sort(rng.permutation(len(pool.parts))[:TREE_SHARDS])
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in parts])
    return np.sort(rng.permutation(rows)[:TREE_ROWS])


def _named_features(
    pool: PoolRows,
    rows: Rows,
    selection: Selection,
    chosen: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
) -> pl.DataFrame:
    """Float columns with names: the label and its probability, the score, caption and image sizes."""
    schema = pool.features.tables.identity().get("source") or {}
    score = [f"score_{schema['name']}"] if "name" in schema else []
    table = pool.gather(chosen, ["caption", "width", "height", *score])
    y = labels[chosen]
    probability = selection.base.probabilities(rows.take(chosen))[np.arange(len(y)), y]
    if len(names) <= MOST_LABEL_FEATURES:
        label = [pl.Series(f"label is {n}", y == i).cast(pl.Float64) for i, n in enumerate(names)]
    else:
        label = [pl.Series("label", y)]
    caption = pl.col("caption").fill_null("")
    return table.select(
        *label,
        pl.Series("probability of its label", probability),
        *score,
        caption.str.len_chars().alias("caption letters"),
        caption.str.count_matches(r"\S+").alias("caption words"),
        "width",
        "height",
        (pl.max_horizontal("width", "height") / pl.min_horizontal("width", "height")).alias("aspect"),
    ).cast(pl.Float64)

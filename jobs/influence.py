"""python -m jobs.influence features=FILE objective=NAME out=DIR: which rows help, which harm, by how much.

Writes into `out`: influence.parquet (row, delta_if_removed_<objective>, removed), result.json, a picture of
the explaining tree for each objective, label_errors.parquet (up to 100 classes), and label_next.parquet in
the active-learning scenario.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, register
from pipeline.errors import Refused
from pipeline.storage import absolute, commit, join, lock, write_json
from selection.influence import HeldOut, Influence, Rows, SelectionConfig, combine, fit_head, select
from selection.influence.active import predicted_influence
from selection.influence.explain import explain
from selection.influence.files import FeatureFile, read_features
from selection.influence.labels import label_errors
from selection.influence.online import select_online
from selection.influence.report import online_report, score_table, selection_report
from selection.influence.score import LEVERAGE_CLASSES


@dataclass(kw_only=True)
class InfluenceConfig(SelectionConfig):
    """Settings of the command, beside those of `SelectionConfig`.

    Attributes:
        features: a `.npz` or parquet file (see `selection.influence.files`).
        out: output folder.
        l2: the head's penalty on (1/2)||w||^2 beside summed losses; None takes it from the file.
        guard_share: share of the validation rows that become the guard set when the file has none.
        explain_depth: levels of the explaining tree; 0 for none.
        batch_rows: above 0 the training rows come as a stream of batches of this size (online).
        label_next: how many unlabelled rows to propose for labelling (active learning).
        seed: draws the guard set and the rows of the explaining tree.
    """

    features: str = MISSING
    out: str = MISSING
    l2: float | None = None
    guard_share: float = 0.5
    explain_depth: int = 3
    batch_rows: int = 0
    label_next: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.guard_share < 1:
            raise ValueError(f"guard_share={self.guard_share}: a share between 0 and 1")
        for name in ("explain_depth", "batch_rows", "label_next"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more")
        if self.l2 is not None and not self.l2 > 0:
            raise ValueError(f"l2={self.l2}: greater than 0, or null to take it from the file")


def run(config: InfluenceConfig) -> None:
    """Score, select and write. Raises `Refused` for input it cannot use, before any fitting."""
    out = absolute(config.out, "out")
    file = read_features(absolute(config.features, "features"))
    l2 = config.l2 if config.l2 is not None else file.l2
    if l2 is None:
        raise Refused(
            "l2=null: the file holds no l2; set l2 to the penalty beside the summed losses, e.g. l2=1"
        )
    if config.label_next and file.unlabelled is None:
        raise Refused(f"label_next={config.label_next}: the file holds no unlabelled rows (x_unlabelled)")
    sets = held_out_sets(file, config)
    with lock(out):
        try:
            scenario = run_online if config.batch_rows else run_whole
            result = scenario(file, sets, config, l2, out)
        except ValueError as error:  # the library's word for input that it cannot use
            raise Refused(str(error)) from error
        write_json(join(out, "result.json"), result)
    print(result["verdict"])


def held_out_sets(file: FeatureFile, config: InfluenceConfig) -> dict[str, HeldOut]:
    """The sets "influence", "guard" (with the guard on) and "test" (when the file has one), disjoint."""
    sets = dict(file.held)
    held = sets.pop("val")
    if config.guard and "guard" not in sets:
        order = np.random.default_rng(config.seed).permutation(len(held.y))
        cut = round(config.guard_share * len(order))
        if not 0 < cut < len(order):
            raise Refused(
                f"guard_share={config.guard_share}: {len(order)} validation rows are too few to split"
            )
        sets["guard"], held = held.take(np.sort(order[:cut])), held.take(np.sort(order[cut:]))
    if not config.guard:
        sets.pop("guard", None)
    return {"influence": held, **sets}


def run_whole(
    file: FeatureFile, sets: dict[str, HeldOut], config: InfluenceConfig, l2: float, out: str
) -> dict[str, Any]:
    """The usual scenario: all training rows at once."""
    rows = Rows.from_arrays(file.train.x, file.train.y)
    selection = select(
        rows,
        sets["influence"],
        config,
        l2=l2,
        guard=sets.get("guard"),
        groups=file.train.s,
        others={name: part for name, part in sets.items() if name not in ("influence", "guard")},
        classes=classes_of(file),
    )
    scores = selection.influence
    write_table(out, "influence.parquet", score_table(scores, selection.removed))
    result = selection_report(selection)
    if config.explain_depth:
        result["explanations"] = draw_explanations(file, scores, config, out)
    if classes_of(file) <= LEVERAGE_CLASSES:
        candidates = pl.DataFrame(asdict(label_errors(rows, selection.base, delta=scores.utility)))
        write_table(out, "label_errors.parquet", candidates)
        result["label_error_candidates"] = len(candidates)
    if config.label_next and file.unlabelled is not None:
        value = predicted_influence(
            file.train.x, combine(scores, config.weights), file.unlabelled, config.seed
        )
        order = np.argsort(-value, kind="stable")[: config.label_next]
        proposed = pl.DataFrame({"row": order, "predicted_influence": value[order]})
        write_table(out, "label_next.parquet", proposed)
        result["label_next"] = len(proposed)
    return result


def run_online(
    file: FeatureFile, sets: dict[str, HeldOut], config: InfluenceConfig, l2: float, out: str
) -> dict[str, Any]:
    """The training rows as a stream of batches, each trimmed as it arrives."""
    x, y = file.train.x, file.train.y
    size, classes = config.batch_rows, classes_of(file)
    batches = ((x[i : i + size], y[i : i + size]) for i in range(0, len(y), size))
    steps, tables = [], []
    for step in select_online(
        batches, sets["influence"], config, l2=l2, classes=classes, guard=sets.get("guard")
    ):
        steps.append(step)
        tables.append(score_table(step.selection.influence, step.selection.removed).tail(len(step.kept)))
    stream = pl.concat(tables).with_columns(row=pl.int_range(pl.len()))
    write_table(out, "influence.parquet", stream)
    untrimmed = fit_head(Rows.from_arrays(x, y), l2=l2, classes=classes)
    return online_report(steps, untrimmed, sets, config.positive)


def draw_explanations(
    file: FeatureFile, scores: Influence, config: InfluenceConfig, out: str
) -> dict[str, dict[str, Any]]:
    """A tree over the features and the label for each objective: picture, rules and held-out R^2."""
    features = np.column_stack([file.train.x, file.train.y])
    entries = {}
    for name in scores.names:
        tree = explain(
            name,
            features,
            scores.column(name),
            (*file.names, "label"),
            depth=config.explain_depth,
            seed=config.seed,
        )
        picture = f"tree_{name}.png"
        with commit(join(out, picture)) as temporary:
            tree.draw(temporary)
        entries[name] = {"r2": tree.r2, "verdict": tree.verdict, "rules": tree.text, "picture": picture}
    return entries


def classes_of(file: FeatureFile) -> int:
    """Classes that any set names: a class met only in validation still needs its weights."""
    return max(2, *(int(part.y.max()) + 1 for part in (file.train, *file.held.values())))


def write_table(out: str, name: str, table: pl.DataFrame) -> None:
    with commit(join(out, name)) as temporary:
        table.write_parquet(temporary)


def start(node: DictConfig) -> None:
    config = build(node, "", InfluenceConfig)
    run(config)


register("influence", InfluenceConfig)

if __name__ == "__main__":
    launch("influence", start)

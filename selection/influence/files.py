"""Feature files of the user's own: `.npz` or parquet into training rows and held-out sets.

`.npz`: `x_<set>`, `y_<set>` and optionally `s_<set>` (sensitive groups) for the sets train, val, test and
optionally guard and unlabelled (features only); optionally the scalar `l2` and `feature_names`.
Parquet: columns `split` (those set names), `y`, optionally `s`; every other numeric column is a feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import polars as pl

from pipeline.errors import Refused
from pipeline.storage import open_input
from selection.influence.objectives import HeldOut

SETS = ("train", "val", "guard", "test", "unlabelled")


@dataclass(frozen=True)
class FeatureFile:
    """What a feature file holds; `unlabelled` is (u, d) float or None."""

    train: HeldOut
    held: dict[str, HeldOut]
    unlabelled: np.ndarray | None
    l2: float | None
    names: tuple[str, ...]


def read_features(path: str) -> FeatureFile:
    """Read a feature file.

    Raises:
        Refused: not `.npz` or `.parquet`, no training or validation rows, widths that differ, values that are
            not finite, or labels that are not 0, 1, 2, ...
    """
    kind = path.rpartition(".")[2]
    if kind not in ("npz", "parquet"):
        raise Refused(f"features={path}: give a .npz or a .parquet file")
    with open_input(path, kind, "features") as f:
        parts, l2, names = _read_npz(f) if kind == "npz" else _read_parquet(f, path)
    for needed in ("train", "val"):
        if needed not in parts:
            raise Refused(f"features={path}: no {needed} rows; it needs x_train, y_train, x_val, y_val")
    width = parts["train"]["x"].shape[1]
    for name, part in parts.items():
        _check(path, name, part, width)
    if names and len(names) != width:
        raise Refused(f"features={path}: {len(names)} feature names for {width} features")
    unlabelled = parts.pop("unlabelled", None)
    sets = {
        name: HeldOut(part["x"], part["y"].astype(np.int64), part.get("s")) for name, part in parts.items()
    }
    return FeatureFile(
        train=sets.pop("train"),
        held=sets,
        unlabelled=None if unlabelled is None else unlabelled["x"],
        l2=l2,
        names=names or tuple(f"x{i}" for i in range(width)),
    )


Parts = dict[str, dict[str, np.ndarray]]


def _read_npz(f: IO[Any]) -> tuple[Parts, float | None, tuple[str, ...]]:
    parts: Parts = {}
    with np.load(f) as file:
        for name in SETS:
            part = {key: file[f"{key}_{name}"] for key in "xys" if f"{key}_{name}" in file.files}
            if "x" in part:
                parts[name] = part
        l2 = float(file["l2"]) if "l2" in file.files else None
        names = tuple(str(n) for n in file["feature_names"]) if "feature_names" in file.files else ()
    return parts, l2, names


def _read_parquet(f: IO[Any], path: str) -> tuple[Parts, float | None, tuple[str, ...]]:
    frame = pl.read_parquet(f.read())
    missing = [column for column in ("split", "y") if column not in frame.columns]
    if missing:
        raise Refused(f"{path}: no column {' or '.join(missing)}; it needs split, y and numeric features")
    features = [
        name for name, kind in frame.schema.items() if kind.is_numeric() and name not in ("split", "y", "s")
    ]
    parts: Parts = {}
    for (name,), rows in frame.partition_by("split", as_dict=True, maintain_order=True).items():
        if name not in SETS:
            raise Refused(f"{path}: split {name!r}; one of {', '.join(SETS)}")
        part = {"x": rows.select(features).to_numpy().astype(np.float32)}
        if name != "unlabelled":
            part["y"] = rows["y"].to_numpy()
        if "s" in rows.columns:
            part["s"] = rows["s"].to_numpy()
        parts[str(name)] = part
    return parts, None, tuple(features)


def _check(path: str, name: str, part: dict[str, np.ndarray], width: int) -> None:
    x = part["x"]
    if x.ndim != 2 or x.shape[1] != width:
        raise Refused(f"features={path}: {name} rows have shape {x.shape}, expected (rows, {width})")
    if not np.isfinite(x).all():
        bad = int((~np.isfinite(x).all(axis=1)).sum())
        raise Refused(f"features={path}: {bad} {name} rows hold NaN or infinite features; drop those rows")
    if name == "unlabelled":
        return
    for key in ("y", "s"):
        if key in part and part[key].shape != (len(x),):
            raise Refused(f"features={path}: {key}_{name} has shape {part[key].shape}, expected ({len(x)},)")
    y = part.get("y")
    numeric = y is not None and len(y) > 0 and np.issubdtype(y.dtype, np.number)
    if y is None or not numeric or (y != np.floor(y)).any() or y.min() < 0:
        raise Refused(f"features={path}: y_{name} must hold a class number (0, 1, 2, ...) for each row")

import numpy as np
import polars as pl
import pytest

from pipeline.errors import Refused
from selection.influence.files import read_features


def arrays(seed=0, sets=("train", "val", "test"), n=30, groups=True):
    rng = np.random.default_rng(seed)
    out = {}
    for name in sets:
        out[f"x_{name}"] = rng.normal(size=(n, 4)).astype(np.float32)
        out[f"y_{name}"] = rng.integers(0, 2, n).astype(np.int8)
        if groups:
            out[f"s_{name}"] = rng.integers(0, 2, n).astype(np.int8)
    return out


def save(tmp_path, data):
    path = tmp_path / "features.npz"
    np.savez(path, **data)
    return str(path)


def test_npz_and_parquet_hold_the_same_things(tmp_path):
    data = arrays()
    names = ["age", "hours", "gain", "loss"]
    npz = read_features(
        save(tmp_path, {**data, "l2": 2.5, "feature_names": names, "x_unlabelled": np.ones((3, 4))})
    )
    frames = [
        pl.DataFrame(data[f"x_{part}"], schema=names).with_columns(
            split=pl.lit(part),
            y=pl.Series(data[f"y_{part}"]),
            s=pl.Series(data[f"s_{part}"]),
            note=pl.lit(""),
        )
        for part in ("train", "val", "test")
    ]
    pl.concat(frames).write_parquet(tmp_path / "features.parquet")
    parquet = read_features(str(tmp_path / "features.parquet"))
    assert npz.names == parquet.names == tuple(names)
    assert (npz.l2, parquet.l2) == (2.5, None)
    assert npz.unlabelled is not None
    assert npz.unlabelled.shape == (3, 4)
    assert list(npz.held) == list(parquet.held) == ["val", "test"]
    for one, other in ((npz.train, parquet.train), *zip(npz.held.values(), parquet.held.values())):
        assert np.array_equal(one.x, other.x)
        assert np.array_equal(one.y, other.y)
        assert np.array_equal(one.s, other.s)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_val": None}, "no val rows"),
        ({"x_test": np.zeros((30, 3))}, r"test rows have shape \(30, 3\), expected \(rows, 4\)"),
        ({"x_train": np.full((30, 4), np.inf)}, "30 train rows hold NaN"),
        ({"y_train": np.zeros(29)}, r"y_train has shape \(29,\)"),
        ({"y_train": np.full(30, 0.5)}, "y_train must hold a class number"),
        ({"y_val": np.full(30, -1)}, "y_val must hold a class number"),
        ({"y_val": None}, "y_val must hold a class number"),
        ({"feature_names": ["a"]}, "1 feature names for 4 features"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(tmp_path, change, message):
    data = {k: v for k, v in (arrays() | change).items() if v is not None}
    with pytest.raises(Refused, match=message):
        read_features(save(tmp_path, data))


def test_other_formats_and_splits_are_refused(tmp_path):
    with pytest.raises(Refused, match="or a \\.parquet"):
        read_features(str(tmp_path / "a.csv"))
    pl.DataFrame({"a": [1.0], "y": [0]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(Refused, match="no column split"):
        read_features(str(tmp_path / "a.parquet"))
    pl.DataFrame({"a": [1.0], "y": [0], "split": ["dev"]}).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(Refused, match="split 'dev'"):
        read_features(str(tmp_path / "b.parquet"))

"""Pools and test sets on which condensation is judged: scikit-learn's digits, and CIFAR-10 from parquet files.

python -m benchmarks.condense_pools digits FOLDER
python -m benchmarks.condense_pools cifar10 FOLDER --train TRAIN.parquet --test TEST.parquet --classes 5

The commands that then judge them, and what they gave: docs/condense.md.
"""

from __future__ import annotations

import argparse
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl
from PIL import Image
from sklearn.datasets import load_digits

from pipeline.evaluation import IMAGE_COLUMNS

TEST_DIGITS = 500
Labelled = Iterable[tuple[bytes, str]]


def write(path: Path, images: Labelled) -> None:
    """A shard of (PNG or JPEG file, label)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, (data, label) in enumerate(images):
            for ext, content in (("png", data), ("cls", label.encode())):
                info = tarfile.TarInfo(f"{key:05d}.{ext}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def digits(folder: Path, seed: int) -> None:
    """1,297 digits as the pool, 500 others as the test set, 8 x 8. seed: decides which."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    for name, rows in (("test", order[:TEST_DIGITS]), ("pool", order[TEST_DIGITS:])):
        write(
            folder / name / "00000.tar",
            ((_png(data.images[r] * 255 / 16), str(data.target[r])) for r in rows),
        )


def cifar10(folder: Path, train: str, test: str, classes: int, each: int) -> None:
    """The first `each` images of the first `classes` classes; all test images of these classes."""
    for name, source, most in (("pool", train, each), ("test", test, 1 << 30)):
        frame = pl.read_parquet(source)
        image = next(c for c in frame.columns if c in IMAGE_COLUMNS)
        frame = frame.filter(pl.col("label") < classes).group_by("label", maintain_order=True).head(most)
        rows = zip(frame[image].to_list(), frame["label"].to_list())
        write(
            folder / name / "00000.tar",
            ((v["bytes"] if isinstance(v, dict) else v, str(label)) for v, label in rows),
        )


def _png(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.round(values).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("digits", "cifar10"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train")
    parser.add_argument("--test")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--each", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the split of digits")
    a = parser.parse_args()
    if a.what == "digits":
        digits(a.folder, a.seed)
    else:
        cifar10(a.folder, a.train, a.test, a.classes, a.each)


if __name__ == "__main__":
    main()

"""scikit-learn's digits as a pool and a test set, for `jobs.judge_condensed`.

python -m benchmarks.condense_digits /tmp/digits
python -m jobs.judge_condensed pool.shards=/tmp/digits/pool test=/tmp/digits/test to=/tmp/digits/judged \
    image_size=8 factor=1 depth=2 width=32 outer=40 real_batch=32 net_images=128 \
    'tune=[0.03,0.1,0.3]' judge.proxy.crop=1 judge.proxy.flip=false
"""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

TEST = 500


def main(folder: Path) -> None:
    """<folder>/pool/00000.tar, 1,297 digits, and <folder>/test/00000.tar, 500 others; 8x8 PNGs with labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    for name, rows in (("test", order[:TEST]), ("pool", order[TEST:])):
        path = folder / name / "00000.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for key, row in enumerate(rows):
                pixels = np.round(digits.images[row] * 255 / 16).astype(np.uint8)
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG")
                label = str(digits.target[row]).encode()
                for ext, data in (("png", buffer.getvalue()), ("cls", label)):
                    info = tarfile.TarInfo(f"{key:05d}.{ext}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

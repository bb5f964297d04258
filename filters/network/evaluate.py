"""How well a network tells right pairs from wrong ones, on pairs it was not trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HeldOut:
    """auc: probability that a true pair's cosine exceeds that of an image with another pair's (unequal)
    caption; chance is 0.5. None when there is no such pair.
    accuracy: share of images whose nearest caption, among those of the `pairs`, is their own;
    chance is about 1 in the number of `captions` that differ."""

    pairs: int
    captions: int
    auc: float | None
    accuracy: float


def judge(image: np.ndarray, text: np.ndarray, captions: np.ndarray) -> HeldOut:
    """image, text: float (n, d), unit rows, row i of both is pair i. captions: int (n,)."""
    cosine = image @ text.T
    other = captions[:, None] != captions[None, :]
    nearest = captions[cosine.argmax(1)]
    return HeldOut(
        pairs=len(image),
        captions=len(np.unique(captions)),
        auc=auc(cosine.diagonal(), cosine[other]) if other.any() else None,
        accuracy=float((nearest == captions).mean()),
    )


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Area under the ROC curve, ties counted half."""
    ranked = np.sort(negative)
    below, upto = (np.searchsorted(ranked, positive, side) for side in ("left", "right"))
    return float((below + upto).mean() / 2 / len(negative))

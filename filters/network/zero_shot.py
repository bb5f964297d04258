"""A network's own accuracy: naming labelled images by the nearest sentence (Radford et al. 2021, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.scorer import Scorer

BATCH = 256


def class_embeddings(scorer: Scorer, names: Sequence[str], templates: Sequence[str]) -> np.ndarray:
    """Unit embeddings of the classes, float32 (classes, d): the mean direction over the templates with `{}`."""
    rows = []
    for name in names:
        mean = scorer.embed_text([t.replace("{}", name) for t in templates]).mean(0)
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


def zero_shot_accuracy(
    scorer: Scorer, images: np.ndarray, labels: np.ndarray, names: Sequence[str], templates: Sequence[str]
) -> float:
    """Share of the images whose nearest class is their own, in [0, 1].

    images: uint8 (n, 3, H, W) at the model's input size. labels: int (n,), places in `names`.
    """
    import torch

    classes = class_embeddings(scorer, names, templates)
    right = 0
    for start in range(0, len(images), BATCH):
        part = torch.from_numpy(np.ascontiguousarray(images[start : start + BATCH]))
        nearest = (scorer.embed_images(part) @ classes.T).argmax(1)
        right += int((nearest == labels[start : start + BATCH]).sum())
    return right / len(images)

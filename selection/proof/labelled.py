"""The judge of a labelled pool: a small convolutional network and its accuracy on a test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import numpy as np

from selection.draws import Ints
from selection.proxy import LabelledImages, Point, ProxyConfig, train_proxy


class ProxyJudge:
    """images: the pool, `copies` telling what the run chose. test: whose accuracy counts."""

    metric = "accuracy"

    def __init__(self, images: LabelledImages, test: LabelledImages, config: ProxyConfig) -> None:
        self.images, self.test, self.config = images, test, config
        self.pool, self.subset, self.batch_size = len(images), images.entries(), config.batch_size

    def identity(self, chosen: bool) -> dict[str, Any]:
        parts = [self.images.uids, self.images.labels, self.test.uids, self.test.labels]
        if chosen:
            parts.append(self.subset)
        return {"proxy": asdict(self.config), "data": [digest(part) for part in parts]}

    def train(
        self, rows: Iterator[Ints], steps: int, seed: int, evaluations: int, on_step: Callable[[int], None]
    ) -> list[Point]:
        trained = train_proxy(
            self.images,
            rows,
            steps,
            seed=seed,
            config=self.config,
            test=self.test,
            evaluations=evaluations,
            on_step=on_step,
        )
        return trained.points


def digest(array: np.ndarray) -> str:
    """Of an array's bytes, in hex."""
    return blake2b(array.tobytes(), digest_size=16).hexdigest()

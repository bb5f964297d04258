"""Steps under a clock that counts the drawing of batches and stops for evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from selection.draws import Ints


@dataclass(frozen=True)
class Point:
    """An evaluation.

    step, samples: taken and seen until then. unique: distinct rows among them. seconds: of training until then,
    evaluations left out. loss: mean since the last point. accuracy: what is judged, in [0, 1].
    """

    step: int
    samples: int
    unique: int
    seconds: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Clocked:
    """points: the evaluations, in order. step_seconds: float64 (steps,). unique: distinct rows seen in all."""

    points: list[Point]
    step_seconds: np.ndarray
    unique: int


def run_steps(
    order: Iterable[Ints],
    steps: int,
    train: Callable[[Ints, int], torch.Tensor],
    evaluate: Callable[[], float] | None,
    *,
    rows: int,
    evaluations: int = 1,
    on_step: Callable[[int], None] | None = None,
) -> Clocked:
    """Take `steps` batches of row numbers (int64 arrays, below `rows`) from `order` and train on each.

    train: from a batch and the number of the step to its loss, a scalar tensor. evaluate: called at `evaluations`
    steps spread evenly, the last one among them. on_step: called with the number of steps taken. Raises
    ValueError when the order ends early.
    """
    points: list[Point] = []
    seconds = np.zeros(steps)
    seen, distinct = 0, np.zeros(rows, bool)
    batches, losses = iter(order), []
    for step in range(steps):
        started = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"order: it ended after {step} of {steps} steps")
        losses.append(train(batch, step))
        due = (step + 1) * evaluations // steps > step * evaluations // steps
        if due and torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[step] = time.perf_counter() - started
        seen += len(batch)
        distinct[batch] = True
        if due and evaluate is not None:
            loss = torch.stack(losses).mean().item()
            points.append(Point(step + 1, seen, int(distinct.sum()), float(seconds.sum()), loss, evaluate()))
            losses.clear()
        if on_step is not None:
            on_step(step + 1)
    return Clocked(points, seconds, int(distinct.sum()))

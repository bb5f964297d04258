"""Online selection: a stream of labelled batches, each trimmed of its harmful rows as it arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from selection.influence.config import SelectionConfig
from selection.influence.head import Head
from selection.influence.objectives import HeldOut
from selection.influence.rows import ArrayShard, Rows
from selection.influence.select import Selection, select


@dataclass(frozen=True)
class OnlineStep:
    """One batch: (b,) bool of its rows that were kept, and the selection that decided it.

    The selection's rows are those kept earlier followed by the batch.
    """

    kept: np.ndarray
    selection: Selection


def select_online(
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    held: HeldOut,
    config: SelectionConfig,
    *,
    l2: float,
    classes: int,
    guard: HeldOut | None = None,
) -> Iterator[OnlineStep]:
    """Trim each batch by its influence on a head fitted to all rows kept so far and the batch.

    A batch is judged once: rows kept before stay. The budget, when a share, is a share of the batch. The head
    of one step starts the fit of the next. Kept rows stay in memory.

    Args:
        batches: pairs x (b, d), y (b,).
        The rest as for `select`; `class_floor` counts over all rows so far, `group_floor` has no groups here.
    """
    kept: list[ArrayShard] = []
    head: Head | None = None
    for x, y in batches:
        x, y = np.asarray(x), np.asarray(y)
        rows = Rows([*kept, ArrayShard(x, y)])
        removable = np.arange(rows.n) >= rows.n - len(y)
        step = select(
            rows, held, config, l2=l2, guard=guard, classes=classes, removable=removable, start=head
        )
        mask = step.kept[rows.n - len(y) :]
        kept.append(ArrayShard(x[mask], y[mask]))
        head = step.after
        yield OnlineStep(mask, step)

"""The arms of the comparison: what each is trained on, and for how many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from selection.draws import Ints
from selection.proxy.order import epochs, rounds_order
from selection.rounds import Rounds

ARMS = {
    "all": "the whole pool, in full",
    "full_short": "the whole pool, cut to the same steps",
    "static": "one random share of the pool",
    "rs2": "RS2 over the pool, without replacement",
    "rs2_replacement": "RS2 over the pool, with replacement",
    "subset": "what the run chose",
    "subset_rs2": "RS2 over what the run chose",
}
SELECTED = ("subset", "subset_rs2")
"""Arms that had to pay for the run: scoring and selecting."""

BLOCK = 10_000  # entries that rounds treat as one shard


@dataclass(kw_only=True)
class ProofConfig:
    """What is compared.

    ratio, epochs: a round is this share of what it is drawn from, and every arm but `all` takes as many steps
    as `epochs` rounds of the pool have; `all` takes those of `epochs` passes over the pool, 1 / ratio times as
    many. Each has its own cosine schedule over the steps that it takes. `full_short` spends the steps of the
    short arms on the whole pool: RS2 has to be seen beside it.
    arms: which of them (`selection.proof.arms.ARMS`). seeds: trainings of each arm, at least 3 to be believed.
    target: the accuracy to be reached; null: what `all` (without it, `full_short`) reaches in the mean at its
    end. evaluations: points of each curve.
    """

    ratio: float = 0.1
    epochs: int = 20
    seeds: int = 3
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    target: float | None = None
    evaluations: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio}: above 0 and at most 1")
        for key in ("epochs", "seeds", "evaluations"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: at least 1")
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms={list(self.arms)}: each once, of {', '.join(ARMS)}")
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError(f"target={self.target}: an accuracy above 0 and at most 1, or null")

    @property
    def exact_ratio(self) -> Fraction:
        return Fraction(str(self.ratio))

    def steps(self, arm: str, pool: int, batch_size: int) -> int:
        """Optimiser steps of an arm, at least one. pool: samples in it."""
        samples = self.epochs * pool * (1 if arm == "all" else self.exact_ratio)
        return max(1, round(samples / batch_size))


def order(arm: str, ratio: float, pool: int, subset: Ints, seed: int) -> Iterator[Ints]:
    """What the arm is shown, without end: arrays of rows of the pool.

    pool: rows in it. subset: int64, the row of each entry that the run chose (a row stands as often as it has
    copies).
    """
    everything = np.arange(pool)
    if arm in ("all", "full_short"):
        return epochs(everything, seed)
    if arm == "static":
        return epochs(_first_round(everything, ratio, seed), seed)
    if arm == "subset":
        return epochs(subset, seed)
    rows = subset if arm == "subset_rs2" else everything
    return rounds_order(_rounds(rows, ratio, seed, replacement=arm == "rs2_replacement"), rows, seed)


def _first_round(rows: Ints, ratio: float, seed: int) -> Ints:
    """A uniform random share: a round on its own is one."""
    rounds = _rounds(rows, ratio, seed, replacement=False)
    blocks = [BLOCK * block + members for block, members in rounds.all_members(0)]
    return rows[np.concatenate(blocks)]


def _rounds(rows: Ints, ratio: float, seed: int, *, replacement: bool) -> Rounds:
    whole, rest = divmod(len(rows), BLOCK)
    return Rounds([BLOCK] * whole + [rest] * (rest > 0), ratio, seed, replacement=replacement)

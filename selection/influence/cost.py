"""What a selection costs before it is run: floating-point operations, bytes read, memory.

Counted from the passes over the rows that `fit_head`, `Curvature.solve`, `score_rows` and `select` make. How
many Newton steps and conjugate-gradient iterations a fit takes is known only afterwards: those are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from selection.influence.head import DENSE_STEP_LIMIT
from selection.influence.logistic import columns_for
from selection.influence.rows import BLOCK_VALUES
from selection.influence.score import scoring_cost
from selection.influence.solve import EXACT_LIMIT

FIT_STEPS, REFIT_STEPS = 10, 3  # Newton steps from zero, and from the head before a removal
ITERATIONS = 30  # conjugate-gradient iterations to a relative residual of 1e-6


@dataclass(frozen=True)
class SelectionCost:
    """FLOPs by part; bytes read of features, in `passes` passes; bytes held by the driver and by a worker."""

    fit_flops: float
    solve_flops: float
    score_flops: float
    passes: int
    read_bytes: float
    driver_bytes: float
    worker_bytes: float

    @property
    def flops(self) -> float:
        return self.fit_flops + self.solve_flops + self.score_flops

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"about {self.flops:.2g} FLOPs (fit {self.fit_flops:.2g}, solve {self.solve_flops:.2g}, score"
            f" {self.score_flops:.2g}), {_size(self.read_bytes)} of features read in {self.passes} passes,"
            f" {_size(self.driver_bytes)} of memory here and {_size(self.worker_bytes)} a worker"
        )


def _size(count: float) -> str:
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def selection_cost(
    *,
    rows: int,
    d: int,
    classes: int,
    objectives: int = 1,
    iterations: int = ITERATIONS,
    rounds: int = 1,
    leverage: bool = True,
    itemsize: int = 2,
    shard_rows: int = 10_000,
) -> SelectionCost:
    """Cost of `select` on `rows` rows of width d, features stored at `itemsize` bytes a value.

    iterations: conjugate-gradient iterations assumed for a system that is not solved exactly.
    """
    columns = columns_for(classes)
    size, product = columns * d, 4.0 * rows * d * columns  # a gradient, or a Hessian product: two GEMMs
    factors = 2.0 * rows * d * d
    dense = 2.0 * rows * size * size + size**3 / 3
    if size <= DENSE_STEP_LIMIT:
        step, step_passes = product + dense, 2
    else:  # inexact Newton steps are solved to a tenth and better: half of the iterations on average
        step, step_passes = product * (1 + iterations / 2) + factors, 2 + iterations // 2
    exact = size <= EXACT_LIMIT
    solve = dense if exact else product * objectives * (iterations + 1) + factors
    solve_passes = 1 if exact else iterations + 2
    score = scoring_cost(
        n=rows, d=d, classes=classes, objectives=objectives, itemsize=itemsize, leverage=leverage
    )
    steps = FIT_STEPS + REFIT_STEPS * rounds
    passes = 2 + steps * step_passes + rounds * (solve_passes + 1)
    return SelectionCost(
        fit_flops=steps * step,
        solve_flops=rounds * solve,
        score_flops=rounds * score.flops,
        passes=passes,
        read_bytes=passes * score.bytes,
        driver_bytes=rows * (8.0 * objectives + 40) + 24.0 * size * size * exact,
        worker_bytes=shard_rows * d * itemsize + 4.0 * 8 * BLOCK_VALUES,
    )

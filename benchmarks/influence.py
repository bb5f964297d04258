"""Speed and exactness of influence scores: `python benchmarks/influence.py`.

1. Scoring 1,000,000 x 512 float32 rows, 2 classes, 4 objectives, against the one GEMM it needs (same blocks,
   same precision), alternating in one run; median of the ratios. Target: at most 1.5.
2. The same influence by pyDVL and dattri where they are installed (install them into an environment of their
   own), on a size they finish: seconds from a fitted head to a score for every row, and agreement with exact
   leave-one-out refits. A peer that is not installed is named and passed over.
3. Fitting and solving for many classes: seconds, conjugate-gradient iterations and residual.
4. Rates at 768 features and 1,000 classes, and what 10,000,000 such rows take at them (docs/scale.md).

`--rows` and `--width` shrink part 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from selection.influence import Curvature, Head, HeldOut, Rows, fit_head, influence, objective, score_rows
from selection.influence.rows import block_rows
from selection.influence.solve import hessian_products

PEER_ROWS, PEER_WIDTH, PEER_HELD, REFITS = 2_000, 64, 500, 300
L2 = 1.0


def scoring(rows: int, width: int, repeats: int) -> bool:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, width), dtype=np.float32)
    y = (x[:, 0] + rng.standard_normal(rows, dtype=np.float32) > 0).astype(np.int64)
    s = (x[:, 1] > 0).astype(np.int64)
    head = fit_head(Rows.from_arrays(x[:20_000], y[:20_000]), l2=L2, classes=2)
    held = HeldOut(x[:5_000], y[:5_000], s[:5_000])
    names = ("utility", "demographic_parity", "equal_opportunity", "robustness")
    gradients = np.stack([objective(name, held, head).gradient(head) for name in names])
    v = Curvature(Rows.from_arrays(x[:20_000], y[:20_000]), head.weights, L2).solve(gradients).v
    stacked = np.concatenate([head.weights[None], v]).reshape(-1, width).astype(np.float32)
    table, step = Rows.from_arrays(x, y), block_rows(width)

    def gemm() -> None:
        for start in range(0, rows, step):
            x[start : start + step] @ stacked.T

    score_rows(table, head, v)
    ratios, scores, gemms = [], [], []
    for _ in range(repeats):
        gemms.append(seconds(gemm)[0])
        scores.append(seconds(lambda: score_rows(table, head, v))[0])
        ratios.append(scores[-1] / gemms[-1])
    ratio = statistics.median(ratios)
    print(f"1. scoring {rows:,} x {width}, 2 classes, 4 objectives, float32, blocks of {step}")
    print(f"   one GEMM {statistics.median(gemms):.3f} s, scoring {statistics.median(scores):.3f} s", end=" ")
    print(f"({rows / statistics.median(scores) / 1e6:.2f} M rows/s); median ratio {ratio:.2f}, target <= 1.5")
    return ratio <= 1.5


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


class Problem:
    """One logistic head and its exact leave-one-out changes of the summed held-out loss."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        truth = rng.normal(size=PEER_WIDTH)
        self.x = rng.normal(size=(PEER_ROWS, PEER_WIDTH))
        self.held_x = rng.normal(size=(PEER_HELD, PEER_WIDTH))
        self.y = (self.x @ truth + 4 * rng.logistic(size=PEER_ROWS) > 0).astype(np.int64)
        self.held_y = (self.held_x @ truth + 4 * rng.logistic(size=PEER_HELD) > 0).astype(np.int64)
        self.rows = Rows.from_arrays(self.x, self.y)
        self.head = fit_head(self.rows, l2=L2, classes=2, tolerance=1e-12)
        self.term = objective("utility", HeldOut(self.held_x, self.held_y), self.head)
        self.chosen = np.sort(rng.choice(PEER_ROWS, REFITS, replace=False))
        self.exact = np.array([self.refit(row) for row in self.chosen])

    def refit(self, row: int) -> float:
        keep = np.arange(PEER_ROWS) != row
        head = fit_head(self.rows.where(keep), l2=L2, classes=2, start=self.head, tolerance=1e-12)
        return self.term.value(head) - self.term.value(self.head)

    def report(self, name: str, took: float, delta: np.ndarray, ours: float) -> None:
        estimate = delta[self.chosen]
        pearson = np.corrcoef(estimate, self.exact)[0, 1]
        slope = np.polyfit(estimate, self.exact, 1)[0]
        print(f"   {name:34s} {took:9.4f} s  {took / ours:8.1f} x  Pearson {pearson:.4f}  slope {slope:+.3f}")


def against_peers() -> None:
    print(f"2. {PEER_ROWS:,} x {PEER_WIDTH} rows, {PEER_HELD} held out; exact leave-one-out of {REFITS} rows")
    problem = Problem()
    influence(problem.rows, problem.head, [problem.term])
    runs = [seconds(lambda: influence(problem.rows, problem.head, [problem.term])) for _ in range(5)]
    ours = statistics.median(took for took, _ in runs)
    for leverage in (True, False):
        score = partial(influence, problem.rows, problem.head, [problem.term], leverage=leverage)
        took, scores = seconds(score)
        problem.report(
            f"winnow, leverage {'on' if leverage else 'off'}",
            ours if leverage else took,
            scores.column("utility"),
            ours,
        )
    for name, peer in (("pyDVL", pydvl_runs), ("dattri", dattri_runs)):
        try:
            for label, took, delta in peer(problem):
                problem.report(label, took, delta, ours)
        except ImportError as error:
            print(f"   {name}: not installed here ({error})")


def torch_parts(problem: Problem):
    """A linear model with one output that holds the fitted weights, its mean loss, and loaders."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(PEER_WIDTH, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(problem.head.weights))

    def loader(x: np.ndarray, y: np.ndarray):
        data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y).double()[:, None])
        # One batch: dattri adds up the inverses of the batches' Hessians, which is right for one batch only.
        return torch.utils.data.DataLoader(data, batch_size=len(y))

    return model, loader(problem.x, problem.y), loader(problem.held_x, problem.held_y)


def pydvl_runs(problem: Problem):
    import torch
    from pydvl.influence.torch import CgInfluence, DirectInfluence

    model, train, held = torch_parts(problem)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    tensors = [torch.cat([batch[i] for batch in part]) for part in (held, train) for i in (0, 1)]
    # pyDVL's Hessian is of the mean loss: the penalty is divided by the rows, and the answer too.
    for label, build in (
        ("pyDVL DirectInfluence", lambda: DirectInfluence(model, loss, regularization=L2 / PEER_ROWS)),
        (
            "pyDVL CgInfluence",
            lambda: CgInfluence(
                model, loss, regularization=L2 / PEER_ROWS, rtol=1e-8, solve_simultaneously=True
            ),
        ),
    ):

        def go(build=build):
            return build().fit(train).influences(*tensors, mode="up")

        took, matrix = seconds(go)
        yield label, took, matrix.sum(0).detach().numpy() / PEER_ROWS


def dattri_runs(problem: Problem):
    import torch
    from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorExplicit
    from dattri.task import AttributionTask

    model, train, held = torch_parts(problem)

    def loss(params, data):
        x, y = data
        z = torch.func.functional_call(model, params, x.reshape(-1, PEER_WIDTH))
        return torch.nn.functional.binary_cross_entropy_with_logits(z, y.reshape(-1, 1))

    task = AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())
    for label, build in (
        ("dattri explicit", lambda: IFAttributorExplicit(task, regularization=L2 / PEER_ROWS)),
        ("dattri CG", lambda: IFAttributorCG(task, regularization=L2 / PEER_ROWS, max_iter=50)),
    ):

        def go(build=build):
            attributor = build()
            attributor.cache(train)
            return attributor.attribute(train, held)

        took, matrix = seconds(go)
        yield label, took, matrix.sum(1).detach().numpy() / PEER_ROWS


def many_classes(rows: int, width: int, classes: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((rows, width), dtype=np.float32) + 0.5
    x *= np.linspace(0.1, 1.5, width, dtype=np.float32)
    truth = rng.standard_normal((width, classes), dtype=np.float32)
    y = (2 * x @ truth / width**0.5 + rng.gumbel(size=(rows, classes))).argmax(axis=1)
    table = Rows.from_arrays(x, y)
    took, head = seconds(lambda: fit_head(table, l2=L2, classes=classes))
    assert isinstance(head, Head)
    term = objective("utility", HeldOut(x[:2_000], y[:2_000]), head)
    curvature = Curvature(table, head.weights, L2)
    solved, solution = seconds(lambda: curvature.solve(term.gradient(head)[None], tolerance=1e-6))
    print(
        f"3. {rows:,} x {width}, {classes} classes ({classes * width:,} weights): fit {took:.1f} s", end=", "
    )
    print(f"{head.iterations} Newton steps; solve {solved:.1f} s by {solution.method}", end=", ")
    print(f"{solution.iterations} iterations, residual {solution.residual[0]:.1e}")


def rates(rows: int, width: int = 768, classes: int = 1_000, objectives: int = 4) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, width), dtype=np.float32).astype(np.float16)
    table = Rows.from_arrays(x, rng.integers(0, classes, rows))
    head = Head(rng.normal(size=(classes, width)) / width, L2, classes)
    v = rng.normal(size=(objectives, classes, width))
    scored, _ = seconds(lambda: score_rows(table, head, v))
    product, _ = seconds(lambda: hessian_products(table, head.weights, L2, v[:1]))
    print(f"4. {rows:,} x {width} float16, {classes:,} classes, {objectives} objectives", end=": ")
    flops = 2.0 * rows * width * classes
    print(
        f"scoring {scored:.1f} s ({flops * (objectives + 1) / scored / 1e9:.0f} GFLOP/s, float32)", end=", "
    )
    print(f"one Hessian product {product:.1f} s ({flops * 3 / product / 1e9:.0f} GFLOP/s, float64)")
    hours = 1e7 / rows / 3600
    print(f"   10,000,000 rows: scoring {hours * scored:.1f} h, 30 products for one objective", end=" ")
    print(f"{hours * product * 30:.0f} h, on the cores that this run had")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    fast = scoring(arguments.rows, arguments.width, arguments.repeats)
    against_peers()
    many_classes(10_000, 128, 70)
    rates(10_000)
    return 0 if fast else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the trainings say: mean curves, the first time at the target, the verdict; as table, picture and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from selection.proof.arms import ARMS, SELECTED
from selection.proxy.clock import Point


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds beside the training steps.

    selection: of each part of scoring and selecting, by name; the arms of the run pay for all of it before
    their first step. image: of reading and decoding one image; every arm pays it for each distinct one it
    sees.
    """

    selection: Mapping[str, float]
    image: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An arm in the mean over its seeds; one entry a point of evaluation.

    seconds: everything counted, evaluations apart. accuracy, deviation: mean and standard deviation (n - 1) over
    the seeds. reached: seconds at the first point whose mean accuracy is at least the target, or None.
    """

    arm: str
    samples: list[int]
    unique: list[float]
    seconds: list[float]
    accuracy: list[float]
    deviation: list[float]
    reached: float | None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """target: the accuracy to be reached, and `target_is` where it comes from."""

    metric: str
    seeds: int
    target: float
    target_is: str
    costs: Costs
    curves: list[Curve]

    @property
    def verdict(self) -> str:
        """One plain line: did the selection pay for itself?"""
        chosen = [c for c in self.curves if c.arm in SELECTED]
        if not chosen:
            return "No arm of the run was trained: nothing is said about its selection."
        spent = sum(self.costs.selection.values())
        best, rival = _earliest(chosen), _earliest([c for c in self.curves if c.arm not in SELECTED])
        goal = f"{self.metric} {self.target:.1%}"
        if best is None or best.reached is None:
            top = max(chosen, key=lambda c: c.accuracy[-1])
            end = f"its best arm ({top.arm}) ended at {top.accuracy[-1]:.1%}"
            return f"The selection did not pay for itself: it never reached {goal}; {end}."
        told = f"{best.arm} reached {goal} after {best.reached:.0f} s, {spent:.0f} s of them scoring and selecting"
        if rival is None or rival.reached is None:
            return f"The selection paid for itself: {told}; without it no arm got there."
        other = f"{rival.arm} ({ARMS[rival.arm]}) after {rival.reached:.0f} s"
        if best.reached < rival.reached:
            return f"The selection paid for itself: {told}; {other}."
        return f"The selection did not pay for itself: {told}; without it, {other}."

    def table(self) -> str:
        """A row an arm, at the end of its training."""
        lines = [
            f"{'arm':<16}{self.metric:>12}{'+-':>7}{'samples':>12}{'distinct':>12}{'seconds':>10}{'at target':>11}"
        ]
        for c in self.curves:
            reached = "never" if c.reached is None else f"{c.reached:.1f}"
            spread = f"{100 * c.deviation[-1]:.1f}" if self.seeds > 1 else "-"
            lines.append(
                f"{c.arm:<16}{c.accuracy[-1]:>12.1%}{spread:>7}{c.samples[-1]:>12,}"
                f"{c.unique[-1]:>12,.0f}{c.seconds[-1]:>10.1f}{reached:>11}"
            )
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.costs.selection.items())
        lines.append(
            f"target: {self.target:.1%}, {self.target_is}; mean of {self.seeds} seeds, +- their standard deviation\n"
            f"scoring and selecting: {spent or 'nothing'}; reading an image: {1e3 * self.costs.image:.2f} ms"
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    def figure(self) -> Figure:
        """Mean accuracy over seconds, one line an arm, the spread as a band."""
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for c in self.curves:
            accuracy, deviation = np.asarray(c.accuracy), np.asarray(c.deviation)
            (line,) = axes.plot(c.seconds, accuracy, "o-", markersize=3, label=f"{c.arm}: {ARMS[c.arm]}")
            axes.fill_between(
                c.seconds, accuracy - deviation, accuracy + deviation, alpha=0.15, color=line.get_color()
            )
        axes.axhline(self.target, color="grey", linestyle="--", linewidth=1)
        axes.set(xlabel="seconds, scoring, selecting and loading included", ylabel=self.metric, xscale="log")
        axes.legend(fontsize="small")
        return figure


def summarise(
    trainings: Mapping[str, Sequence[Sequence[Point]]], costs: Costs, metric: str, target: float | None
) -> Proof:
    """trainings: for each arm the points of each seed. target: null for what the reference arm ends at."""
    seeds = len(next(iter(trainings.values())))
    target_is = "as asked for"
    if target is None:
        reference = next((arm for arm in ("all", "full_short") if arm in trainings), next(iter(trainings)))
        target = float(np.mean([points[-1].accuracy for points in trainings[reference]]))
        target_is = f"the mean end of {reference}"
    curves = [_curve(arm, points, costs, target) for arm, points in trainings.items()]
    return Proof(metric=metric, seeds=seeds, target=target, target_is=target_is, costs=costs, curves=curves)


def _curve(arm: str, seeds: Sequence[Sequence[Point]], costs: Costs, target: float) -> Curve:
    fixed = sum(costs.selection.values()) if arm in SELECTED else 0.0
    accuracy = np.asarray([[p.accuracy for p in points] for points in seeds])
    seconds = np.asarray([[p.seconds + costs.image * p.unique for p in points] for points in seeds])
    mean, clock = accuracy.mean(axis=0), fixed + seconds.mean(axis=0)
    there = np.flatnonzero(mean >= target)
    return Curve(
        arm=arm,
        samples=[p.samples for p in seeds[0]],
        unique=np.mean([[p.unique for p in points] for points in seeds], axis=0).tolist(),
        seconds=clock.tolist(),
        accuracy=mean.tolist(),
        deviation=(accuracy.std(axis=0, ddof=1) if len(seeds) > 1 else np.zeros_like(mean)).tolist(),
        reached=float(clock[there[0]]) if len(there) else None,
    )


def _earliest(curves: Sequence[Curve]) -> Curve | None:
    there = [c for c in curves if c.reached is not None]
    return min(there, key=lambda c: c.reached or 0.0, default=None)

"""The funnel of a run: samples after each step, and by which reasons they went between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline import storage
from pipeline.manifest import Run

TITLES = {
    "filters": "after the filters",
    "leakage": "after leakage",
    "dedup": "after duplicates",
    "influence": "after influence",
}


@dataclass(frozen=True)
class Loss:
    reason: str
    kind: str  # rejected or dropped
    count: int
    explanation: str


@dataclass(frozen=True)
class Step:
    """What is left (`count`) once the losses listed with it are gone."""

    title: str
    count: int
    losses: list[Loss] = field(default_factory=list)


def funnel(run: Run, receipt: Mapping[str, Any]) -> list[Step]:
    """From the pool to the manifest. What each step lost adds up to the difference of its counts."""
    total = receipt["pool"]["samples"]
    rejected = receipt["rejected"]
    left = total - sum(rejected.values())
    steps = [Step("in the pool", total)]
    if rejected:
        steps.append(Step("readable", left, _losses(receipt, rejected, "rejected")))
    before: dict[str, int] = dict(rejected)
    for name, dropped in _dropped_by_stage(run, receipt):
        here = {r: n - before.get(r, 0) for r, n in dropped.items() if r not in rejected}
        here = {r: n for r, n in here.items() if n}
        left -= sum(here.values())
        steps.append(Step(TITLES.get(name, f"after {name}"), left, _losses(receipt, here, "dropped")))
        before |= dropped
    steps[-1] = Step("kept", steps[-1].count, steps[-1].losses)
    return steps


def _dropped_by_stage(run: Run, receipt: Mapping[str, Any]) -> list[tuple[str, dict[str, int]]]:
    """(stage, totals dropped after it by reason); all in one step when the stages' files are gone."""
    found = []
    for folder in storage.listdir(run.path("stages")):
        path = run.path("stages", folder, "stage.json")
        if storage.exists(path):
            stage = storage.read_json(path)
            found.append((stage["name"], stage["dropped"]))
    names = [s["name"] for s in receipt["stages"]]
    if [name for name, _ in found] != names:
        return [("stages", receipt["dropped"])]
    return found


def _losses(receipt: Mapping[str, Any], counts: Mapping[str, int], kind: str) -> list[Loss]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [Loss(reason, kind, n, receipt["reasons"].get(reason, "")) for reason, n in ranked]

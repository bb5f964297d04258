"""Algebra of subsets: union, intersect, minus, compare. A and B are subset files, folders of runs, or names of runs.

python -m jobs.subsets union /data/winnow/runs/a /data/other.npy to=/data/union.npy
python -m jobs.subsets compare a b out=/data/winnow
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import polars as pl
from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.subset_algebra import OPERATIONS, Overlap, combine, sorted_subset
from pipeline.subset_compare import compare_columns, table

WORDS = ("op", "a", "b")


@dataclass(kw_only=True)
class SubsetsConfig:
    """op: union, intersect, minus (what is in A and not in B) or compare. a, b: a `u8,u8` file, a run's folder, or
    with `out` a run's name. Copies count: union takes the larger number, intersect the smaller, minus subtracts.

    to: the file for the result; without it the counts are only printed. out: the folder whose runs are meant, and
    whose feature tables tell how A and B differ in their columns.
    """

    op: str = MISSING
    a: str = MISSING
    b: str = MISSING
    to: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        if self.op not in (*OPERATIONS, "compare"):
            raise ValueError(f"op={self.op}: must be {', '.join(OPERATIONS)} or compare")
        if self.op == "compare" and self.to:
            raise ValueError(f"to={self.to}: compare makes no subset; use union, intersect or minus")


def run(node: DictConfig) -> None:
    config = build(node, "", SubsetsConfig)
    to = storage.absolute(config.to, "to") if config.to else None
    with contextlib.ExitStack() as stack:
        (a, run_a), (b, run_b) = (_subset(stack, config, key) for key in ("a", "b"))
        operation = config.op if config.op in OPERATIONS else None
        print(_describe(combine(a, b, operation, to), config.op))
        if to:
            print(f"{to} holds the result")
        if config.op == "compare":
            run_ = run_a or run_b or _any_run(config)
            if run_ is None:
                print("columns are compared when A or B is a run, or out= names the folder of one")
            else:
                ids = pl.read_parquet(storage.read_bytes(run_.path("accounting.parquet")), columns=["id"])[
                    "id"
                ]
                print("\n" + table(compare_columns(a, b, run_.tables(), ids.to_list())))


def _subset(stack: contextlib.ExitStack, config: SubsetsConfig, key: str) -> tuple[Any, Run | None]:
    """The sorted uids that `a` or `b` names, and the run if it is one."""
    given = getattr(config, key)
    path = storage.absolute(given, key)
    if config.out and "/" not in given and not given.endswith(".npy"):
        path = Run(storage.absolute(config.out, "out"), given).folder
    run_ = None
    if not path.endswith(".npy"):
        run_ = Run(storage.parent(storage.parent(path)), storage.name(path))
        run_.receipt()  # refuses a run that has not finished
        path = run_.path("subset.npy")
    return stack.enter_context(sorted_subset(path)), run_


def _any_run(config: SubsetsConfig) -> Run | None:
    """A finished run of `out`: all runs over one pool see the same samples."""
    if not config.out:
        return None
    out = storage.absolute(config.out, "out")
    runs = [Run(out, n) for n in storage.listdir(storage.join(out, "runs"))]
    finished = [r for r in runs if storage.exists(r.path("receipt.json"))]
    if not finished:
        raise Refused(f"out={config.out}: no finished run there")
    return finished[0]


def _describe(overlap: Overlap, op: str) -> str:
    names = {"a": "A", "b": "B", "both": "in both"} | ({"result": op} if op in OPERATIONS else {})
    lines = [f"{'':10}{'uids':>16}{'with copies':>16}"]
    lines += [f"{name:10}{overlap.unique[k]:>16,}{overlap.entries[k]:>16,}" for k, name in names.items()]
    shares = [f"{overlap.unique['both'] / max(overlap.unique[k], 1):.1%} of {k.upper()}" for k in ("a", "b")]
    return "\n".join([*lines, f"overlap   {', '.join(shares)}; Jaccard {overlap.jaccard:.4f}"])


def named(arguments: list[str]) -> list[str]:
    """`union A B` as `op=union a=A b=B`; what is a key already, or an option, stays."""
    words = iter(WORDS)
    found = []
    for argument in arguments:
        key = None if argument.startswith("-") or "=" in argument else next(words, None)
        found.append(f"{key}={argument}" if key else argument)
    return found


register("subsets", SubsetsConfig)

if __name__ == "__main__":
    sys.argv[1:] = named(sys.argv[1:])
    launch("subsets", run)

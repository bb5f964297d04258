"""A run's outputs vouch for each other, or fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.cluster import ClusterConfig
from pipeline.decisions import Chain, Decisions, run_chain
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused, WinnowError
from pipeline.manifest import Run, write_outputs
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, Scan, scan
from tests.build import halves, make_pool, uid

pytestmark = pytest.mark.usefixtures("in_process")


class EveryOther:
    """A stage that keeps every other sample twice; counts how often it runs."""

    name = "other"

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.runs = offset, 0

    def identity(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def run(self, chain: Chain) -> Iterator[tuple[str, pl.DataFrame]]:
        self.runs += 1
        for shard, frame in chain.tables.stream(chain.ids, ["uid_hi", "uid_lo"]):
            kept = (pl.int_range(pl.len()) + self.offset) % 2 == 0
            yield shard, frame.with_columns(
                kept=kept, reason=pl.when(~kept).then(pl.lit("odd")), value=pl.lit(None, pl.Float64),
                cut=pl.lit(None, pl.Float64), copies=kept.cast(pl.UInt32) * 2,
            )  # fmt: skip


@pytest.fixture
def scanned(tmp_path: Path) -> Scan:
    spec = make_pool(tmp_path / "pool", 2, 4)
    return scan(
        str(tmp_path / "out"), PoolConfig(shards=spec), None, DecodeConfig(), ClusterConfig(), ErrorBudget()
    )


def test_outputs_of_a_stage_with_copies(tmp_path: Path, scanned: Scan) -> None:
    run = Run(str(tmp_path / "out"), "default")
    with pytest.raises(Refused, match=r"no finished run there \(runs: none\)"):
        run.receipt()
    last, results = run_chain(scanned, [EveryOther()], run.path("stages"))
    receipt = write_outputs(run, scanned, last, results, {"seed": 1})
    assert (receipt["kept"], receipt["entries"], receipt["dropped"], receipt["adds_up"]) == (
        4,
        8,
        {"odd": 4},
        True,
    )
    subset = np.load(run.path("subset.npy"))
    assert subset.tolist() == sorted(halves(uid(n)) for n in (0, 2, 4, 6) for _ in range(2))
    manifest = pl.read_parquet(run.path("manifest.parquet"))
    assert manifest["copies"].to_list() == [2, 2, 2, 2]
    accounting = pl.read_parquet(run.path("accounting.parquet"))
    assert (
        accounting.select("samples", "kept", "dropped", "rejected", "entries").rows() == [(4, 2, 2, 0, 4)] * 2
    )
    assert run.tables().folder == scanned.tables.folder


def test_a_stage_runs_again_only_for_other_settings(tmp_path: Path, scanned: Scan) -> None:
    folder = str(tmp_path / "stages")
    stage = EveryOther()
    first, _ = run_chain(scanned, [stage], folder)
    run_chain(scanned, [stage], folder)
    assert stage.runs == 1
    other = EveryOther(offset=1)
    again, _ = run_chain(scanned, [other], folder)
    assert other.runs == 1
    assert again.read(scanned.ids[0])["kept"].to_list() == [False, True, False, True]
    assert first.folder == again.folder


def test_decisions_that_do_not_fit_the_tables_fail(tmp_path: Path, scanned: Scan) -> None:
    run = Run(str(tmp_path / "out"), "default")
    last, results = run_chain(scanned, [EveryOther()], run.path("stages"))
    for damage in (lambda f: f[:-1], lambda f: f.reverse()):
        frame = last.read(scanned.ids[1])
        Decisions(last.folder).write(scanned.ids[1], damage(frame))
        with pytest.raises(WinnowError, match="its rows are not those of the feature table"):
            write_outputs(run, scanned, last, results, {})
        assert not Path(run.path("receipt.json")).exists()
        last.write(scanned.ids[1], frame)


def test_numbers_that_do_not_add_up_fail(tmp_path: Path, scanned: Scan) -> None:
    run = Run(str(tmp_path / "out"), "default")
    last, results = run_chain(scanned, [EveryOther()], run.path("stages"))
    lossy = replace(scanned, reports=[scanned.reports[0], replace(scanned.reports[1], rows=5)])
    with pytest.raises(WinnowError, match="does not add up"):
        write_outputs(run, lossy, last, results, {})
    undecided = last.read(scanned.ids[0]).with_columns(reason=pl.lit(None, pl.String))
    last.write(scanned.ids[0], undecided)
    with pytest.raises(WinnowError, match="does not add up"):
        write_outputs(run, scanned, last, results, {})

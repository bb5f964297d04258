"""The scan of a pool on Ray: what is scanned, what is reused, what is refused."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import ClusterConfig
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused, WinnowError
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, Scan, scan
from pipeline.scorer import ScorerConfig
from pipeline.tables import ShardReport
from tests import far
from tests.build import contents, make_pool, make_shard, sample, tar
from tests.conftest import save_scorer

in_process = pytest.mark.usefixtures("in_process")
on_ray = pytest.mark.usefixtures("ray_cluster")
LENIENT = ErrorBudget(max_fraction=1.0)


def run(out: Path | str, shards: Any, scorer: ScorerConfig | None = None, **kw: Any) -> Scan:
    errors = kw.pop("errors", LENIENT)
    decode = kw.pop("decode", DecodeConfig())
    workers = kw.pop("workers", ClusterConfig(workers=1))
    return scan(str(out), PoolConfig(shards=shards, **kw), scorer, decode, workers, errors)


@in_process
def test_damage_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 2, 3)
    whole = tar(map(sample, range(10, 13)))
    (tmp_path / "pool" / "00002.tar").write_bytes(whole[: whole.index(b"00012.jpg") + 520])
    (tmp_path / "pool" / "00003.tar").write_bytes(b"")
    make_shard(tmp_path / "pool" / "00004.tar", [])
    found = run(tmp_path / "out", pool)
    assert [(r.rows, r.damage) for r in found.reports] == [
        (3, None),
        (3, None),
        (3, "truncated_shard"),
        (0, "unreadable_shard"),
        (0, None),
    ]
    assert (found.samples, found.rejected(), found.scanned) == (9, {"truncated_shard": 1}, 5)


@in_process
def test_only_new_and_changed_shards_are_opened(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 3, 2)
    assert run(tmp_path / "out", pool).scanned == 3
    assert run(tmp_path / "out", pool).scanned == 0
    make_shard(tmp_path / "pool" / "00003.tar", map(sample, (90, 91)))
    make_shard(tmp_path / "pool" / "00001.tar", [sample(92)])
    found = run(tmp_path / "out", pool)
    assert (found.scanned, found.samples) == (2, 7)


@in_process
def test_a_count_file_that_changes_is_held_against_its_shard_again(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 2, 2)
    assert run(tmp_path / "out", pool).samples == 4
    (tmp_path / "pool" / "00001_stats.json").write_text('{"successes": 5}')
    found = run(tmp_path / "out", pool)
    assert (found.scanned, found.samples, found.rejected()) == (1, 7, {"truncated_shard": 3})
    assert run(tmp_path / "out", pool).scanned == 0


@in_process
def test_tables_serve_when_the_pool_has_gone(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 2, 2)
    for spec in (pool, str(tmp_path / "pool"), str(tmp_path / "pool" / "{00000..00001}.tar")):
        first = run(tmp_path / "out", spec)
        (tmp_path / "pool").rename(tmp_path / "away")
        again = run(tmp_path / "out", spec)
        assert (again.reports, again.scanned) == (first.reports, 0)
        (tmp_path / "away").rename(tmp_path / "pool")
    shutil.rmtree(tmp_path / "pool")
    with pytest.raises(Refused, match="none of 1 shards exists"):
        run(tmp_path / "elsewhere", pool)


@in_process
def test_missing_shards_are_listed_or_skipped(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 4, 1)
    (tmp_path / "pool" / "00002.tar").unlink()
    with pytest.raises(Refused, match=r"1 shards of the pool are missing: .*00002\.tar; pool\.missing=skip"):
        run(tmp_path / "out", pool)
    assert run(tmp_path / "out", pool, missing="skip").samples == 3


@in_process
def test_a_pool_of_which_nothing_can_be_read_is_an_error(tmp_path: Path) -> None:
    make_shard(tmp_path / "pool" / "a.tar", [sample(0, jpg=b"junk")])
    (tmp_path / "pool" / "b.tar").write_bytes(b"<html>")
    with pytest.raises(
        Refused, match=r"no sample .* can be read: 1 undecodable_image; b\.tar: it looks like a web page"
    ):
        run(tmp_path / "out", str(tmp_path / "pool"))
    make_shard(tmp_path / "empty" / "a.tar", [])
    with pytest.raises(Refused, match="the shards hold none"):
        run(tmp_path / "out", str(tmp_path / "empty"))


@in_process
def test_error_budget(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 1, 3)
    bad = make_shard(tmp_path / "pool" / "00001.tar", [sample(7, jpg=b"junk"), sample(8, txt=b"")])
    with pytest.raises(WinnowError, match=r"1 of 5 samples are rejected as \w+, .*max_fraction=0\.1"):
        run(tmp_path / "out", pool, errors=ErrorBudget(max_fraction=0.1))
    strict = ErrorBudget(max_fraction=0.5, by_reason={"empty_caption": 0.0})
    with pytest.raises(
        WinnowError, match=rf"empty_caption.*{bad} \(1\).*\+errors\.by_reason\.empty_caption="
    ):
        run(tmp_path / "out", pool, errors=strict)
    assert run(tmp_path / "out", pool, errors=ErrorBudget(max_fraction=0.2)).samples == 5


@in_process
@in_process
def test_error_budget_counts_what_a_count_file_lost() -> None:
    report = ShardReport(
        shard="/a.tar", id="a", signature={}, rows=6, status={"ok": 6}, lost=4, damage="truncated_shard"
    )
    counts = Counter(report.rejected())
    ErrorBudget(max_fraction=0.4).check(counts, report.samples, [report])
    with pytest.raises(WinnowError, match="4 of 10 samples are rejected as truncated_shard"):
        ErrorBudget(max_fraction=0.39).check(counts, report.samples, [report])


@in_process
def test_tables_of_scorers_and_settings_never_mix(tmp_path: Path, tiny_scorer: Path) -> None:
    pool = make_pool(tmp_path / "pool", 1, 2)
    (tmp_path / "other").mkdir()
    other = save_scorer(tmp_path / "other", seed=1)
    folders = [
        run(tmp_path / "out", pool, ScorerConfig(name="a", weights=str(tiny_scorer))),
        run(tmp_path / "out", pool, ScorerConfig(name="a", weights=str(other))),
        run(tmp_path / "out", pool),
        run(tmp_path / "out", pool, decode=DecodeConfig(truncated="keep")),
        run(tmp_path / "out", pool, caption_field="alt"),
    ]
    assert len({f.tables.folder for f in folders}) == 5
    moved = shutil.copytree(tiny_scorer, tmp_path / "moved")
    again = run(tmp_path / "out", pool, ScorerConfig(name="a", weights=str(moved)))
    assert (again.tables.folder, again.scanned) == (folders[0].tables.folder, 0)


@in_process
def test_two_score_names_over_one_model_do_not_share_a_table(tmp_path: Path, tiny_scorer: Path) -> None:
    pool = make_pool(tmp_path / "pool", 1, 2)
    for name in ("a", "b"):
        found = run(tmp_path / "out", pool, ScorerConfig(name=name, weights=str(tiny_scorer)))
        assert f"score_{name}" in found.tables.columns(found.ids[0])


@on_ray
def test_a_pool_and_tables_on_another_filesystem(tmp_path: Path) -> None:
    far.register()
    make_pool(tmp_path / "pool", 3, 2)
    local = run(tmp_path / "near", str(tmp_path / "pool"))
    remote = run(f"far:/{tmp_path}/out", f"far:/{tmp_path}/pool/*.tar", workers=ClusterConfig(workers=2))
    assert [r.status for r in remote.reports] == [r.status for r in local.reports]
    assert run(f"far:/{tmp_path}/out", f"far:/{tmp_path}/pool/*.tar").scanned == 0
    columns = [c for c in local.tables.columns(local.ids[0]) if c != "shard"]
    for a, b in zip(local.ids, remote.ids):
        assert local.tables.read(a, columns).equals(remote.tables.read(b, columns))


@in_process
def test_gzipped_and_plain_shards_give_the_same_rows(tmp_path: Path) -> None:
    import gzip

    plain = make_shard(tmp_path / "a" / "0.tar", map(sample, range(3)))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.tar").write_bytes(gzip.compress(Path(plain).read_bytes()))
    one, two = (run(tmp_path / "out", str(tmp_path / n)) for n in ("a", "b"))
    columns = [c for c in one.tables.columns(one.ids[0]) if c != "shard"]
    assert one.tables.read(one.ids[0], columns).equals(two.tables.read(two.ids[0], columns))


@on_ray
def test_an_error_in_a_worker_names_the_shard(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", 1, 2)
    (tmp_path / "pool" / "00000.parquet").write_bytes(b"not parquet")
    with pytest.raises(WinnowError, match=r"00000\.parquet: cannot be read as parquet: \w"):
        run(tmp_path / "out", pool)
    os.unlink(tmp_path / "pool" / "00000.parquet")
    assert run(tmp_path / "out", pool).samples == 2
    assert contents(tmp_path / "out", ".tmp") == {}

"""The scan of one shard, in this process: damaged content is a row with a reason, never an exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pipeline.decode import DecodeConfig
from pipeline.errors import Refused, WinnowError
from pipeline.samples import PoolConfig
from pipeline.scorer import Scorer, ScorerConfig
from pipeline.tables import TableSet
from tests.build import contents, encode, halves, jpeg, make_shard, picture, sample, scan_shard, tar, uid


def statuses(table: pl.DataFrame) -> list[str]:
    return table["status"].cast(pl.String).to_list()


def test_every_sample_has_a_row_and_a_reason(tmp_path: Path) -> None:
    noisy = encode(picture((96, 96), 3), quality=95)
    cases: list[tuple[str, Any]] = [
        ("ok", sample(0)),
        ("missing_image", sample(1, jpg=None)),
        ("missing_caption", sample(2, txt=None)),
        ("empty_caption", sample(3, txt=b"  ")),
        ("invalid_uid", sample(4, record={"uid": "17"})),
        ("truncated_image", sample(5, jpg=noisy[: len(noisy) // 2])),
        ("undecodable_image", sample(6, jpg=b"<html>gone</html>")),
        ("undecodable_image", sample(7, jpg=b"")),
        ("ok", sample(8, jpg=encode(picture(seed=8), "WEBP"))),
        ("ok", sample(9, jpg=encode(picture(seed=9), "PNG"))),
        ("extreme_aspect", sample(10, jpg=encode(picture((400, 2)), "PNG"))),
        ("image_too_large", sample(11, jpg=jpeg((70, 70)))),
        ("ok", sample(12, txt=b"caf\xe9")),
    ]
    shard = make_shard(tmp_path / "a.tar", [s for _, s in cases])
    report, table = scan_shard(
        shard, tmp_path / "out", decode=DecodeConfig(max_pixels=4000), batch_size=4, threads=2
    )
    assert statuses(table) == [
        # the cut picture is 96x96, past this pixel limit: the header is judged first
        "image_too_large" if reason == "truncated_image" else reason
        for reason, _ in cases
    ]
    report, table = scan_shard(shard, tmp_path / "out2", decode=DecodeConfig(max_pixels=10_000), batch_size=4)
    expected = ["ok" if r == "image_too_large" else r for r, _ in cases]
    assert statuses(table) == expected
    assert report.rows == len(cases)
    assert report.status == {r: expected.count(r) for r in sorted(set(expected))}
    assert report.notes == {"repaired_caption": 1}
    assert table["uid_hi"].to_list()[:4] == [halves(uid(n))[0] for n in range(4)]
    assert table.filter(pl.col("status") != "ok")["phash"].null_count() == sum(e != "ok" for e in expected)


def test_json_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0, json=b"{oops"), sample(1, json=b"[1]"), sample(2)])
    report, table = scan_shard(shard, tmp_path / "out")
    assert statuses(table) == ["ok"] * 3
    assert report.notes == {"unreadable_json": 2}


def test_truncated_images_can_be_kept(tmp_path: Path) -> None:
    noisy = encode(picture((96, 96), 3), quality=95)
    shard = make_shard(tmp_path / "a.tar", [sample(0, jpg=noisy[: len(noisy) // 2])])
    assert statuses(scan_shard(shard, tmp_path / "drop")[1]) == ["truncated_image"]
    keep = DecodeConfig(truncated="keep")
    try:
        assert statuses(scan_shard(shard, tmp_path / "keep", decode=keep)[1]) == ["ok"]
    finally:
        assert statuses(scan_shard(shard, tmp_path / "again")[1]) == ["truncated_image"]


def test_image_file_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0, jpg=jpeg() + bytes(5000))])
    _, table = scan_shard(shard, tmp_path / "out", decode=DecodeConfig(max_bytes=4000))
    assert statuses(table) == ["image_too_large"]


def test_sample_cut_short_by_the_shard(tmp_path: Path) -> None:
    data = tar([sample(0), sample(1)])
    (tmp_path / "a.tar").write_bytes(data[: data.rindex(b"00001.txt") + 100])
    report, table = scan_shard(str(tmp_path / "a.tar"), tmp_path / "out", promised=(4, "sizes.json"))
    assert statuses(table) == ["ok", "truncated_shard"]
    assert (report.damage, report.lost, report.samples) == ("truncated_shard", 2, 4)
    assert report.rejected() == {"truncated_shard": 3}


@pytest.mark.parametrize("content", [b"", b"<html></html>" * 99, tar([])])
def test_shards_without_samples_give_an_empty_table(
    tmp_path: Path, tiny_scorer: Path, content: bytes
) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    scorer = Scorer(ScorerConfig(name="tiny", weights=str(tiny_scorer)))
    report, table = scan_shard(str(tmp_path / "a.tar"), tmp_path / "out", scorer=scorer)
    assert (report.rows, len(table), report.samples) == (0, 0, 0)
    assert report.damage == (None if content == tar([]) else "unreadable_shard")
    (tmp_path / "out" / "set.json").write_text(json.dumps({"scorer": scorer.identity}))
    assert TableSet(str(tmp_path / "out")).embeddings(report.id, "image").shape == (0, 256)


def test_table_is_the_same_for_any_number_of_threads(tmp_path: Path, tiny_scorer: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(n, jpg=jpeg((40 + n, 50), n)) for n in range(20)])
    scorer = Scorer(ScorerConfig(name="tiny", weights=str(tiny_scorer)))
    for threads in (1, 3):
        scan_shard(shard, tmp_path / str(threads), scorer=scorer, batch_size=4, threads=threads)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_embeddings_are_unit_and_score_is_their_cosine(tmp_path: Path, tiny_scorer: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0), sample(1, jpg=b"junk"), sample(2)])
    scorer = Scorer(ScorerConfig(name="tiny", weights=str(tiny_scorer)))
    report, table = scan_shard(shard, tmp_path / "out", scorer=scorer)
    (tmp_path / "out" / "set.json").write_text(json.dumps({"scorer": scorer.identity}))
    tables = TableSet(str(tmp_path / "out"))
    image, text = (np.array(tables.embeddings(report.id, t), np.float32) for t in ("image", "text"))
    assert np.isnan(image[1]).all()
    assert np.isnan(text[1]).all()
    np.testing.assert_allclose(np.linalg.norm(image[[0, 2]], axis=1), 1, atol=2e-3)
    score = table["score_tiny"].to_numpy()
    np.testing.assert_allclose((image * text).sum(1)[[0, 2]], score[[0, 2]], atol=2e-3)
    assert np.isnan(score[1])


def test_embeddings_of_another_width_are_refused_with_both(tmp_path: Path, tiny_scorer: Path) -> None:
    scorer = Scorer(ScorerConfig(name="tiny", weights=str(tiny_scorer)))
    report, _ = scan_shard(make_shard(tmp_path / "a.tar", [sample(0)]), tmp_path / "out", scorer=scorer)
    (tmp_path / "out" / "set.json").write_text(json.dumps({"scorer": scorer.identity}))
    np.save(tmp_path / "out" / f"{report.id}.image.npy", np.zeros((1, 512), np.float16))
    with pytest.raises(WinnowError, match=r"image\.npy.*512.*256"):
        TableSet(str(tmp_path / "out")).embeddings(report.id, "image")


# ---------------------------------------------------------------- metadata beside the shard


def sidecar(folder: Path, columns: dict[str, Any]) -> None:
    pl.DataFrame(columns).write_parquet(folder / "a.parquet")


def test_sidecar_by_uid_in_either_case(tmp_path: Path) -> None:
    shard = make_shard(
        tmp_path / "a.tar", [sample(0, record={"uid": uid(0), "original_width": 1}), sample(1), sample(2)]
    )
    sidecar(
        tmp_path,
        {
            "uid": [uid(1), uid(0).upper(), uid(9)],
            "original_width": [641, 640, 9],
            "score_b32": [0.2, 0.3, 0.1],
        },
    )
    report, table = scan_shard(shard, tmp_path / "out")
    assert table["original_width"].to_list() == [640, 641, None]
    assert table["score_b32"].to_list() == [0.3, 0.2, None]
    assert report.notes == {"metadata_without_sample": 1, "sample_without_metadata": 1}
    listed = json.loads((tmp_path / "out" / f"{report.id}.unmatched.json").read_text())
    assert listed == {"metadata_without_sample": [uid(9)], "sample_without_metadata": [uid(2)]}


def test_sidecar_by_key(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0), sample(1)])
    sidecar(tmp_path, {"key": ["00001", "00000"], "punsafe": [0.5, 0.25]})
    report, table = scan_shard(shard, tmp_path / "out")
    assert (table["punsafe"].to_list(), report.notes) == ([0.25, 0.5], {})


def test_sidecar_never_overwrites_what_the_scan_found(tmp_path: Path) -> None:
    """img2dataset writes columns of its own under the names key, status, caption, width, height, sha256."""
    shard = make_shard(tmp_path / "a.tar", [sample(0)])
    plain = scan_shard(shard, tmp_path / "plain")[1]
    sidecar(
        tmp_path,
        {"uid": [uid(0)], "key": ["other"], "status": ["success"], "caption": ["other"], "width": [9],
         "height": [9], "sha256": ["00ff"], "error_message": ["none"]},
    )  # fmt: skip
    report, table = scan_shard(shard, tmp_path / "out")
    assert report.status == {"ok": 1}
    assert table.select(plain.columns).equals(plain)
    assert table["error_message"].to_list() == ["none"]


def test_sidecar_holds_any_column_type(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0)])
    frame = pl.DataFrame({"uid": [uid(0)]}).with_columns(
        big=pl.lit(2**64 - 1, pl.UInt64), small=pl.lit(3, pl.UInt8), flag=pl.lit(True), money=pl.lit("1.25").cast(pl.Decimal(9, 2)),
        day=pl.date(2026, 1, 1), boxes=pl.lit([[0.5]]), kind=pl.lit("cat").cast(pl.Categorical), nothing=pl.lit(None),
    )  # fmt: skip
    frame.write_parquet(tmp_path / "a.parquet")
    _, table = scan_shard(shard, tmp_path / "out")
    row = table.row(0, named=True)
    assert (row["big"], row["small"], row["flag"], row["money"]) == (2**64 - 1, 3, True, 1.25)


def test_sidecar_without_names_is_refused(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0)])
    sidecar(tmp_path, {"url": ["x"]})
    with pytest.raises(Refused, match=r"a\.parquet: no uid and no key column"):
        scan_shard(shard, tmp_path / "out")


def test_npz_with_fewer_rows_than_its_parquet_is_refused_with_both(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0), sample(1)])
    sidecar(tmp_path, {"uid": [uid(0), uid(1)]})
    np.savez(tmp_path / "a.npz", b32_img=np.zeros((2, 4)), b32_txt=np.zeros((1, 4)))
    with pytest.raises(Refused, match=r"a\.npz: b32_txt has 1 rows, a\.parquet has 2"):
        scan_shard(shard, tmp_path / "out")


def test_a_rescan_leaves_nothing_of_the_scan_before(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0)])
    sidecar(tmp_path, {"uid": [uid(9)], "x": [1]})
    scan_shard(shard, tmp_path / "out")
    sidecar(tmp_path, {"uid": [uid(0)], "x": [1]})
    report, _ = scan_shard(shard, tmp_path / "out")
    assert report.notes == {}
    assert not list((tmp_path / "out").glob("*unmatched*"))


def test_a_touched_shard_keeps_its_table_and_a_changed_one_does_not(tmp_path: Path) -> None:
    shard = make_shard(tmp_path / "a.tar", [sample(0)])
    scan_shard(shard, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.parquet")}
    make_shard(tmp_path / "a.tar", [sample(0)])
    scan_shard(shard, tmp_path / "out")
    assert {p: p.stat().st_mtime_ns for p in before} == before
    make_shard(tmp_path / "a.tar", [sample(1)])
    _, table = scan_shard(shard, tmp_path / "out")
    assert table["uid_hi"].to_list() == [halves(uid(1))[0]]


def test_members_keep_their_place_for_resharding(tmp_path: Path) -> None:
    name, members = sample(0, cls=b"3")
    shard = make_shard(tmp_path / "a.tar", [(name, members)])
    _, table = scan_shard(shard, tmp_path / "out", pool=PoolConfig(shards=shard))
    data = Path(shard).read_bytes()
    found = {m["suffix"]: data[m["offset"] : m["offset"] + m["size"]] for m in table["members"][0]}
    assert found == members
    assert data[table["offset"][0] :][: table["size"][0]] == members["jpg"]

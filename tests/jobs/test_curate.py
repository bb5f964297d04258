"""Curation and resharding as a user runs them: exit codes, accounting, recovery, bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from jobs import curate, reshard
from pipeline import storage
from pipeline.samples import IMAGE_EXTS, format_uid, synthetic_uid
from pipeline.uids import SUBSET
from tests.build import call, contents, halves, jpeg, make_pool, make_shard, sample, tar, uid

SHARDS, EACH = 6, 24
TOTAL = SHARDS * EACH


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean pool but for two samples that cannot be read and one repeated uid; 300-pixel photos take a while."""
    folder = tmp_path_factory.mktemp("pool")
    for s in range(SHARDS):
        samples = [sample(n, jpg=jpeg((300, 280), n)) for n in range(s * EACH, (s + 1) * EACH)]
        if s == 0:
            samples[5] = sample(5, jpg=b"junk")
            samples[6] = sample(6, txt=b"")
        if s == 1:
            samples[3] = sample(EACH + 3, record={"uid": uid(0)})
        make_shard(folder / f"{s:05d}.tar", samples)
    return folder


def arguments(pool: Path, out: Path, scorer: Path, *more: str) -> list[str]:
    return [
        f"pool.shards={pool}/*.tar", f"out={out}", f"scorer.weights={scorer}", "filters.dfn.top_fraction=0.5", *more
    ]  # fmt: skip


def start(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jobs.curate", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def undisturbed(pool: Path, tiny_scorer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run in a process of its own, with two workers."""
    out = tmp_path_factory.mktemp("undisturbed")
    child = start(arguments(pool, out, tiny_scorer, "cluster.workers=2"))
    stdout, stderr = child.communicate(timeout=200)
    assert child.returncode == 0, stderr
    assert "dropped: dfn_below_cut" in stdout
    return out


def receipt(out: Path, run: str = "default") -> dict:
    return json.loads((out / "runs" / run / "receipt.json").read_text())


def test_receipt_accounts_for_every_sample(undisturbed: Path) -> None:
    found = receipt(undisturbed)
    readable = TOTAL - 3
    kept = (readable + 1) // 2
    assert found["pool"]["samples"] == TOTAL
    assert found["rejected"] == {"empty_caption": 1, "undecodable_image": 1}
    assert found["dropped"] == {"duplicate_uid": 1, "dfn_below_cut": readable - kept}
    assert (found["kept"], found["entries"], found["adds_up"]) == (kept, kept, True)
    assert set(found["reasons"]) == {*found["rejected"], *found["dropped"]}
    assert found["config"]["filters"]["dfn"]["top_fraction"] == 0.5
    assert len(found["scorer"]["fingerprint"]) == 16
    assert (found["pool"]["shards"], found["pool"]["damaged_shards"], found["scanned_shards"]) == (
        SHARDS,
        [],
        SHARDS,
    )


def test_outputs_agree_with_a_full_sort_of_the_scores(undisturbed: Path) -> None:
    run = undisturbed / "runs" / "default"
    tables = pl.concat(pl.read_parquet(p) for p in sorted((undisturbed / "features").glob("*/*.parquet")))
    first = tables.filter(pl.col("status") == "ok").unique(
        ["uid_hi", "uid_lo"], keep="first", maintain_order=True
    )
    best = first.sort("score_dfn", "uid_hi", "uid_lo", descending=[True, False, False])[
        : receipt(undisturbed)["kept"]
    ]
    expected = np.array(sorted(best.select("uid_hi", "uid_lo").rows()), SUBSET)
    subset = np.load(run / "subset.npy")
    assert subset.dtype == SUBSET
    np.testing.assert_array_equal(subset, expected)
    manifest = pl.read_parquet(run / "manifest.parquet")
    assert sorted(manifest.select("uid_hi", "uid_lo").rows()) == expected.tolist()
    assert manifest["order"].to_list() == list(range(len(manifest)))
    decisions = pl.concat(pl.read_parquet(p) for p in (run / "decisions").glob("*.parquet"))
    assert (len(decisions), int(decisions["kept"].sum())) == (TOTAL, len(manifest))


def reports(out: Path) -> int:
    return len([p for p in (out / "features").glob("*/0*.json") if "unmatched" not in p.name])


@pytest.mark.usefixtures("ray_cluster")
def test_killed_and_resumed_with_one_worker_equals_undisturbed_with_two(
    pool: Path, tiny_scorer: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    child = start(arguments(pool, out, tiny_scorer, "cluster.workers=1"))
    until = time.monotonic() + 150
    while reports(out) < 2 and time.monotonic() < until and child.poll() is None:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert not (out / "runs" / "default" / "receipt.json").exists()
    assert call(curate, *arguments(pool, out, tiny_scorer, "cluster.workers=1")) == 0
    assert receipt(out)["scanned_shards"] < SHARDS
    run = Path("runs") / "default"
    for name in ("subset.npy", "manifest.parquet", "accounting.parquet"):
        assert (out / run / name).read_bytes() == (undisturbed / run / name).read_bytes()
    assert contents(out / run / "decisions") == contents(undisturbed / run / "decisions")
    assert contents(out / "features", ".npy") == contents(undisturbed / "features", ".npy")
    for n, folder in enumerate((out, undisturbed)):
        done = call(
            reshard, f"out={folder}", f"to={tmp_path}/train{n}", "shard_size=20",
            f"cluster.workers={n + 1}",
        )  # fmt: skip
        assert done == 0
    assert contents(tmp_path / "train0") == contents(tmp_path / "train1")


@pytest.mark.usefixtures("in_process")
def test_another_threshold_opens_no_shard_and_needs_no_pool(
    pool: Path, tiny_scorer: Path, undisturbed: Path
) -> None:
    before = receipt(undisturbed)
    away = pool.rename(pool.with_name("away"))
    try:
        again = arguments(pool, undisturbed, tiny_scorer, "filters.dfn.top_fraction=0.25", "run=tighter")
        assert call(curate, *again) == 0
    finally:
        away.rename(pool)
    tighter = receipt(undisturbed, "tighter")
    assert (tighter["scanned_shards"], tighter["kept"]) == (0, 35)
    assert tighter["scorer"]["fingerprint"] == before["scorer"]["fingerprint"]
    assert receipt(undisturbed) == before


def small(tmp_path: Path) -> list[str]:
    """Arguments of a run over a small pool with the caption filter alone."""
    spec = make_pool(tmp_path / "pool", 3, 4)
    return [
        f"pool.shards={spec}",
        f"out={tmp_path}/out",
        "scorer=none",
        "filters=[caption]",
        "filters.caption.languages=null",
    ]


@pytest.mark.usefixtures("in_process")
def test_damaged_shards_stand_in_the_receipt(tmp_path: Path) -> None:
    overrides = small(tmp_path)
    whole = tar(map(sample, range(50, 53)))
    (tmp_path / "pool" / "00003.tar").write_bytes(whole[: whole.index(b"00052.jpg") + 520])
    (tmp_path / "pool" / "00004.tar").write_bytes(b"<html>404")
    make_shard(tmp_path / "pool" / "00005.tar", [])
    (tmp_path / "pool" / "00003_stats.json").write_text('{"successes": 4}')
    assert call(curate, *overrides) == 0
    found = receipt(tmp_path / "out")
    assert (found["kept"], found["rejected"], found["adds_up"]) == (14, {"truncated_shard": 2}, True)
    assert found["pool"]["samples"] == 16
    assert [(Path(d["shard"]).name, d["reason"], d["lost"]) for d in found["pool"]["damaged_shards"]] == [
        ("00003.tar", "truncated_shard", 1),
        ("00004.tar", "unreadable_shard", 0),
    ]
    assert [Path(s).name for s in found["pool"]["empty_shards"]] == ["00005.tar"]


@pytest.mark.usefixtures("in_process")
def test_loss_in_a_late_shard_of_a_long_clean_pool_is_counted(tmp_path: Path) -> None:
    overrides = small(tmp_path)
    make_pool(tmp_path / "pool", 110, 1)
    make_shard(tmp_path / "pool" / "00109.tar", [sample(109, txt=b""), sample(110)])
    assert call(curate, *overrides) == 0
    assert receipt(tmp_path / "out")["rejected"] == {"empty_caption": 1}


@pytest.mark.usefixtures("in_process")
def test_a_filter_that_keeps_nothing_adds_up_and_cannot_be_resharded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(curate, *small(tmp_path), "filters.caption.min_words=99") == 0
    assert (receipt(tmp_path / "out")["kept"], len(np.load(tmp_path / "out/runs/default/subset.npy"))) == (
        0,
        0,
    )
    assert call(reshard, f"out={tmp_path}/out", f"to={tmp_path}/to") == 2
    assert "kept no sample" in capfd.readouterr().err


# ---------------------------------------------------------------- refusals


def refusal(err: str) -> str:
    """The one line of a refusal."""
    lines = [x for x in err.splitlines() if x and not x.startswith("scan: ")]
    assert "Traceback" not in err
    assert len(lines) == 1, err
    return lines[0].removeprefix("winnow: ")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("filters.dfn.top_fraction=1.5", "filters.dfn.top_fraction=1.5: must lie in (0, 1]"),
        ("filters.dfn.top_fraction=0", "filters.dfn.top_fraction=0"),
        ("filters.dfn.top_fraction=nan", "must lie in (0, 1]"),
        ("filters.dfn.top_fraction=many", "filters.dfn.top_fraction"),
        ("filters.dfn.threshold=0.3", "give one and set the other to null"),
        ("filters.dfn.similarity=2", "filters.dfn.similarity: there is no such key"),
        ("+filters.dfn.similarity=2", "filters.dfn.similarity"),
        ("+leakage.sets.mine=/nowhere", "leakage.sets.mine=/nowhere: there is no such file or folder"),
        (
            "filters=[dnf]",
            "choose from basic, caption, classifier, clip_score, column, dfn, image, image_based, laion2b, random",
        ),
        ("+filters.mine.min_words=3", "filters.mine"),
        ("+filters.mine={_target_:filters.rules.Rulez}", "filters.mine._target_=filters.rules.Rulez"),
        ("filters.dfn=null", "filters.dfn: must be a mapping with a _target_"),
        ("pol.shards=x", "pol.shards: there is no such key"),
        ("pool.missing=ignore", "pool.missing=ignore: must be error or skip"),
        ("pool.invalid_uid=drop", "pool.invalid_uid=drop: must be reject or synthesise"),
        (
            "+pool.json_fields.likes=number",
            "pool.json_fields.likes=number: must be one of str, int, float, bool",
        ),
        ("pool.shards=/nowhere/at/all/*.tar", "/nowhere/at/all"),
        ("decode.truncated=maybe", "decode.truncated=maybe: must be drop or keep"),
        ("decode.max_pixels=0", "decode.max_pixels=0: must be at least 1"),
        ("decode.max_aspect=0.5", "decode.max_aspect=0.5: must be at least 1"),
        ("decode.max_bytes=ten", "decode.max_bytes"),
        ("cluster.workers=-1", "cluster.workers=-1: must be 0 (automatic) or more"),
        ("cluster.gpus_per_worker=1.5", "cluster.gpus_per_worker=1.5: must be null"),
        ("cluster.gpus_per_worker=-1", "cluster.gpus_per_worker=-1"),
        ("cluster.gpus_per_worker=inf", "cluster.gpus_per_worker=inf"),
        ("errors.max_fraction=2", "errors.max_fraction=2.0: must lie in [0, 1]"),
        ("+errors.by_reason.blurry=0.1", "errors.by_reason.blurry: no such reason"),
        ("scorer.precision=int4", "scorer.precision=int4: must be auto, fp32, fp16, bf16"),
        ("scorer.batch_size=0", "scorer.batch_size=0: must be at least 1"),
        ("scorer.name=a-b", "scorer.name=a-b: must be letters, digits and underscores"),
        ("scorer.weights=/nowhere", "weights=/nowhere: no such folder or file"),
        (
            "filters=[basic] filters.basic.min_words=-1",
            "filters.basic.min_words=-1: must be null or at least 0",
        ),
        (
            "filters=[image] filters.image.max_aspect=0.5",
            "filters.image.max_aspect=0.5: must be null or at least 1",
        ),
        ("filters=[column] filters.column.threshold=1", "filters.column.column: must be given"),
        ("stages=[filter]", "stages: 'filter' is not a stage; known: filters, leakage, dedup"),
        ("stages=[]", "stages: name at least one"),
        ("run=a/b", "run=a/b: must be a plain name"),
        ("run=..", "run=..: must be a plain name"),
        ("out=???", "out"),
    ],
)
def test_wrong_overrides_are_refused_in_one_line_before_any_work(
    override: str, says: str, pool: Path, tiny_scorer: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], in_process: None,
) -> None:  # fmt: skip
    base = [
        a
        for a in arguments(pool, tmp_path / "out", tiny_scorer)
        if not a.startswith("filters") or "[" not in override
    ]
    code = call(curate, *base, *override.split(" "))
    err = capfd.readouterr().err
    assert code == 2, err
    assert says in refusal(err)
    assert not (tmp_path / "out" / "features").exists()
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.usefixtures("in_process")
def test_a_score_cut_without_a_scorer(pool: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [f"pool.shards={pool}/*.tar", f"out={tmp_path}/out", "scorer=none"]
    assert call(curate, *overrides) == 2
    assert "scorer.name" in refusal(capfd.readouterr().err)


def test_refusal_of_the_real_command(pool: Path, tmp_path: Path) -> None:
    child = start([f"pool.shards={pool}/*.tar", f"out={tmp_path}/out"])
    stdout, stderr = child.communicate(timeout=100)
    assert (child.returncode, stdout) == (2, "")
    assert "scorer.weights: must be given" in refusal(stderr)


@pytest.mark.usefixtures("in_process")
def test_failures_are_one_line_and_code_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = small(tmp_path)
    make_shard(tmp_path / "pool" / "00000.tar", [sample(n, txt=b"") for n in range(6)])
    assert call(curate, *overrides) == 1
    assert "6 of 14 samples are rejected as empty_caption" in refusal(capfd.readouterr().err)
    assert call(curate, *overrides, f"out={tmp_path}/pool/00000.tar/x") == 1
    assert "00000.tar" in refusal(capfd.readouterr().err)


@pytest.mark.usefixtures("in_process")
def test_two_runs_into_one_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = small(tmp_path)
    with storage.lock(str(tmp_path / "out")):
        assert call(curate, *overrides) == 2
    assert f"out is in use by process {os.getpid()}" in refusal(capfd.readouterr().err)


# ---------------------------------------------------------------- training shards


def written(to: Path) -> list[tuple[str, dict[str, bytes]]]:
    """(key, members) of every sample in a folder of training shards, in order."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(to.glob("*.tar")):
        with tarfile.open(path) as archive:
            for info in archive:
                key, _, ext = info.name.partition(".")
                member = archive.extractfile(info)
                assert member is not None
                found.setdefault(f"{path.name}/{key}", {})[ext] = member.read()
    return list(found.items())


@pytest.fixture
def curated(tmp_path: Path, in_process: None) -> Path:
    assert call(curate, *small(tmp_path)) == 0
    return tmp_path


def test_training_shards_hold_the_stored_bytes(curated: Path) -> None:
    to = curated / "train"
    assert call(reshard, f"out={curated}/out", f"to={to}", "shard_size=5") == 0
    found = written(to)
    assert [(key, members) for key, members in found] == [
        (f"{n // 5:08d}.tar/{uid(n)}-0", sample(n)[1]) for n in range(12)
    ]
    assert json.loads((to / "sizes.json").read_text()) == {
        "00000000.tar": 5,
        "00000001.tar": 5,
        "00000002.tar": 2,
    }
    assert json.loads((to / "00000002_stats.json").read_text()) == {"successes": 2}
    meta = json.loads((to / "meta.json").read_text())
    assert (meta["output_shard_count"], meta["output_shard_format"]) == (3, "{:08d}.tar")
    np.testing.assert_array_equal(
        np.load(to / "sample_ids.npy"), np.load(curated / "out/runs/default/subset.npy")
    )


def test_shards_load_in_open_clips_own_loader(curated: Path) -> None:
    import open_clip
    from open_clip_train.data import get_wds_dataset

    to = curated / "train"
    assert call(reshard, f"out={curated}/out", f"to={to}", "shard_size=4") == 0
    args = Namespace(
        train_data=f"{to}/{{00000000..00000002}}.tar", train_num_samples=None, dataset_resampled=False,
        train_data_upsampling_factors=None, seed=0, batch_size=4, world_size=1, workers=0,
    )  # fmt: skip
    _, _, preprocess = open_clip.create_model_and_transforms("small")
    info = get_wds_dataset(args, preprocess, is_train=True, tokenizer=open_clip.get_tokenizer("small"))
    seen = Counter(tuple(row.tolist()) for _, texts in info.dataloader for row in texts)
    captions = [f"a picture of thing number {n}" for n in range(12)]
    assert info.dataloader.num_samples == 12
    assert seen == Counter(tuple(row.tolist()) for row in open_clip.get_tokenizer("small")(captions))


@pytest.mark.usefixtures("in_process")
def test_names_and_captions_of_the_wild_are_written_safely(tmp_path: Path) -> None:
    overrides = small(tmp_path)
    make_shard(
        tmp_path / "pool" / "00003.tar",
        [
            sample(70, key="../../escape"),
            sample(71, key="Straße.v1/猫", txt=b"caf\xe9 by night\0"),
            sample(72, txt=None, record={"uid": uid(72).upper(), "caption": "null and nan"}),
            sample(73, json=None),
        ],
    )
    assert call(curate, *overrides) == 0
    assert call(reshard, f"out={tmp_path}/out", f"to={tmp_path}/train") == 0
    found = {k.partition("/")[2]: m for k, m in written(tmp_path / "train")}
    assert found[f"{uid(70)}-0"]["txt"] == sample(70)[1]["txt"]
    assert found[f"{uid(71)}-0"]["txt"].decode() == "caf\ufffd by night\ufffd"
    assert found[f"{uid(72)}-0"]["txt"] == b"null and nan"
    made = format_uid(*synthetic_uid("00003.tar", "00073"))
    assert set(found[f"{made}-0"]) == {"jpg", "txt"}
    assert not list(tmp_path.rglob("*escape*"))


def subset_file(path: Path, numbers: list[int]) -> Path:
    np.save(path, np.array([halves(uid(n)) for n in numbers], SUBSET))
    return path


def test_subset_of_ones_own_unsorted_and_with_copies(curated: Path) -> None:
    chosen = subset_file(curated / "mine.npy", [11, 2, 7, 2, 0, 2])
    to = curated / "train"
    done = call(reshard, f"out={curated}/out", f"to={to}", f"subset={chosen}", "shard_size=2")
    assert done == 0
    found = written(to)
    assert Counter(key.partition("/")[2] for key, _ in found) == Counter(
        [f"{uid(n)}-0" for n in (0, 2, 7, 11)] + [f"{uid(2)}-1", f"{uid(2)}-2"]
    )
    copies = [key.partition("/")[0] for key, _ in found if uid(2) in key]
    assert len(set(copies)) > 1
    for key, members in found:
        assert next(m for e, m in members.items() if e in IMAGE_EXTS)
        assert json.loads(members["json"])["uid"] == key.partition("/")[2].partition("-")[0]
    ids = np.load(to / "sample_ids.npy")
    assert ids.tolist() == sorted(halves(uid(n)) for n in (0, 2, 2, 2, 7, 11))


def test_subset_with_unknown_uids(curated: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = subset_file(curated / "mine.npy", [1, 99, 3])
    overrides = [f"out={curated}/out", f"to={curated}/train", f"subset={chosen}"]
    capfd.readouterr()
    assert call(reshard, *overrides) == 2
    assert "the pool lacks 1 of its uids" in refusal(capfd.readouterr().err)
    assert (curated / "out/runs/default/subsets/mine/missing.txt").read_text() == uid(99) + "\n"
    assert call(reshard, *overrides, "allow_missing=true") == 0
    assert [k.partition("/")[2] for k, _ in written(curated / "train")] == [f"{uid(1)}-0", f"{uid(3)}-0"]
    assert len(np.load(curated / "train" / "sample_ids.npy")) == 2


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["shard_size=0"], "shard_size=0: must lie in [1, 10000]"),
        (["shard_size=10001"], "shard_size=10001"),
        (["run=other"], "no finished run there (runs: default)"),
        (["subset=/nowhere.npy"], "subset=/nowhere.npy"),
    ],
)
def test_reshard_refuses(
    overrides: list[str], says: str, curated: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert call(reshard, f"out={curated}/out", f"to={curated}/train", *overrides) == 2
    assert says in refusal(capfd.readouterr().err)


def test_reshard_into_a_folder_of_something_else(curated: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (curated / "train").mkdir()
    (curated / "train" / "notes.txt").write_text("mine")
    base = [f"out={curated}/out", f"to={curated}/train"]
    assert call(reshard, *base) == 2
    (curated / "train" / "notes.txt").unlink()
    assert call(reshard, *base) == 0
    assert call(reshard, *base, "shard_size=3") == 2
    assert "another selection or shard size" in capfd.readouterr().err


def test_interrupted_reshard_goes_on_and_a_changed_pool_is_noticed(
    curated: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = [f"out={curated}/out", "shard_size=5"]
    assert call(reshard, *base, f"to={curated}/whole") == 0
    assert call(reshard, *base, f"to={curated}/part") == 0
    for lost in ("00000001_stats.json", "00000001.tar", "sizes.json", "00000002_stats.json"):
        (curated / "part" / lost).unlink()
    assert call(reshard, *base, f"to={curated}/part") == 0
    assert contents(curated / "part") == contents(curated / "whole")
    make_shard(curated / "pool" / "00001.tar", map(sample, range(40, 44)))
    capfd.readouterr()
    assert call(reshard, *base, f"to={curated}/late") == 1
    assert "is not the one that was scanned; scan again" in refusal(capfd.readouterr().err)
    (curated / "pool" / "00001.tar").unlink()
    assert call(reshard, *base, f"to={curated}/late") == 2
    assert "the shard is gone" in refusal(capfd.readouterr().err)

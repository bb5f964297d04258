"""jobs.condense and jobs.judge_condensed from the command line, on a tiny pool."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jobs import condense, judge_condensed
from selection.ranked import load_ranked
from tests.build import call, contents, encode, make_shard, picture, sample

LABELS = ("cat", "dog")
QUICK = ("image_size=8", "width=4", "depth=2", "outer=2", "inner=2", "select_every=1", "real_batch=4", "net_images=8", "images_per_class=2")  # fmt: skip


def labelled_pool(folder: Path, first: int, each: int = 24) -> str:
    samples = [
        sample(n, jpg=None, png=encode(picture((8, 8), seed=n), "PNG"), cls=LABELS[n % 2].encode())
        for n in range(first, first + each)
    ]
    return make_shard(folder / "00000.tar", samples)


@pytest.fixture
def pool(tmp_path):
    return labelled_pool(tmp_path / "pool", 0)


def members(folder: Path) -> dict[str, bytes]:
    with tarfile.open(folder / "00000000.tar") as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}


@pytest.mark.parametrize("method", ["mdc", "idc", "dm"])
def test_condensed_set_is_written_in_rank_order(pool, tmp_path, in_process, method):
    to = tmp_path / "to"
    assert call(condense, f"pool.shards={pool}", f"to={to}", f"method={method}", "factor=2", *QUICK) == 0
    files = members(to)
    assert [n for n in files if n.endswith("png")] == [f"{i:08d}.png" for i in range(4)]
    records = [json.loads(files[f"{i:08d}.json"]) for i in range(4)]
    assert [(r["rank"], r["label"]) for r in records] == [(0, "cat"), (0, "dog"), (1, "cat"), (1, "dog")]
    meta = json.loads((to / "meta.json").read_text())
    assert (meta["method"], meta["factor"], meta["classes"]) == (method, 2, ["cat", "dog"])
    assert {"normalisation", "evaluation", "condensed"} <= meta.keys()
    assert {"contact_sheet.png", "learnable.png", "trace.json", "cost.json"} <= {p.name for p in to.iterdir()}
    assert not (to / "work").exists()
    assert json.loads((to / "cost.json").read_text())["flops"] > 0


def test_first_gives_prefixes_of_stored_and_of_training_images(pool, tmp_path, in_process):
    to = tmp_path / "to"
    assert call(condense, f"pool.shards={pool}", f"to={to}", "factor=2", *QUICK) == 0
    whole = load_ranked(str(to))
    stored = [np.asarray(Image.open(io.BytesIO(d))) for n, d in members(to).items() if n.endswith("png")]
    assert np.array_equal(whole.images.images, np.stack(stored))  # nothing was lost on the way
    part = whole.first(1)
    assert part.images.labels.tolist() == [0, 1]
    images, few = whole.training_images(), part.training_images()
    assert len(images) == 2 * 2 * 4
    assert np.array_equal(images.images[: len(few)], few.images)
    assert images.labels.tolist() == [0, 1] * 8
    with pytest.raises(ValueError, match=r"s=3: must lie in 1 \.\. 2"):
        whole.first(3)


def test_one_and_two_ray_workers_give_the_same_bytes(pool, tmp_path, ray_cluster):
    for number in (1, 2):
        more = ("classes_per_group=1", f"cluster.workers={number}", f"to={tmp_path / str(number)}")
        assert call(condense, f"pool.shards={pool}", *QUICK, *more) == 0
    one, two = (
        {k: v for k, v in contents(tmp_path / n).items() if not k.startswith("pool/")} for n in ("1", "2")
    )
    one.pop("cost.json"), two.pop("cost.json")  # it tells the seconds
    assert one == two


def test_a_finished_set_is_left_alone_and_another_refused(pool, tmp_path, in_process, capfd):
    command = [f"pool.shards={pool}", f"to={tmp_path / 'to'}", *QUICK]
    assert call(condense, *command) == 0
    assert call(condense, *command) == 0
    assert "already" in capfd.readouterr().out
    assert call(condense, *command, "method=idc") == 2
    assert "choose another folder" in capfd.readouterr().err


@pytest.mark.parametrize("method", ["random", "kmeans", "herding", "prototypes_easy", "prototypes_hard"])
def test_coresets_keep_bytes_and_captions_of_real_samples(pool, tmp_path, in_process, method):
    to = tmp_path / "to"
    assert call(condense, f"pool.shards={pool}", f"to={to}", f"method={method}", *QUICK) == 0
    files, ranked = members(to), load_ranked(str(to))
    with tarfile.open(pool) as tar:
        pool_images = {tar.extractfile(m).read() for m in tar if m.name.endswith("png")}
    assert {d for n, d in files.items() if n.endswith("png")} <= pool_images
    assert files["00000000.txt"].startswith(b"a picture of thing number")
    assert ranked.images.labels.tolist() == [0, 1, 0, 1]
    uids = {json.loads(d)["uid"] for n, d in files.items() if n.endswith("json")}
    subset = np.load(to / "subset.npy")
    assert {f"{int(u['f0']):016x}{int(u['f1']):016x}" for u in subset} == uids
    assert len(uids) == 4


def test_a_pool_without_labels_is_covered_by_embeddings(tmp_path, in_process, tiny_scorer):
    shard = make_shard(tmp_path / "pool" / "00000.tar", map(sample, range(12)))
    given = [f"pool.shards={shard}", "scorer=open_clip", f"scorer.weights={tiny_scorer}", "method=kmeans"]
    to = tmp_path / "none"
    assert call(condense, *given, f"to={to}", "labels=none", "images_per_class=5", "image_size=8") == 0
    meta = json.loads((to / "meta.json").read_text())
    assert (meta["classes"], meta["features"], meta["candidates"]) == (["all"], "embeddings", 12)
    assert len(load_ranked(str(to)).images) == 5
    to = tmp_path / "clusters"
    assert call(condense, *given, f"to={to}", "labels=clusters", "clusters=2", "images_per_class=1") == 0
    assert json.loads((to / "meta.json").read_text())["classes"] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give either out=... run=... (a finished run) or pool.shards=..."),
        (("pool.shards=POOL", "method=mcd"), "method=mcd: must be mdc, idc, dm"),
        (("pool.shards=POOL", "images_per_class=20"), "class 'cat' has 12 images, 80 are needed"),
        (
            ("pool.shards=POOL", "images_per_class=20", "method=herding"),
            "class 'cat' has 12 samples, 20 are wanted",
        ),
        (("pool.shards=POOL", "labels=none"), "labels=none: method=mdc needs classes"),
        (("pool.shards=POOL", "labels=clusters"), "the run has no embeddings"),
        (("out=/nowhere",), "no finished run there"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(pool, tmp_path, in_process, capfd, arguments, says):
    given = [a.replace("POOL", pool) for a in arguments]
    assert call(condense, f"to={tmp_path / 'to'}", *QUICK, *given) == 2
    error = capfd.readouterr().err.strip()
    assert says in error.splitlines()[-1]


def test_judging_prints_a_row_a_method_and_goes_on_where_it_stopped(pool, tmp_path, in_process, capfd):
    labelled_pool(tmp_path / "test", 100)
    to = tmp_path / "judged"
    command = [
        f"pool.shards={pool}", f"test={tmp_path / 'test'}", f"to={to}", *QUICK, "judge.steps=2", "factor=1",
        "tune=[0.1,1.0]", "judge.seeds=2", "held_out=0.3",
    ]  # fmt: skip
    assert call(judge_condensed, *command, "rows=[random,C]") == 0
    assert call(judge_condensed, *command, "rows=[A,B,C,mdc,random,kmeans,herding]") == 0
    out = capfd.readouterr().out
    told = json.loads((to / "judged.json").read_text())
    assert list(told["rows"]) == ["A", "B", "C", "mdc", "random", "kmeans", "herding"]
    assert np.array(told["rows"]["mdc"]["accuracy"]).shape == (2, 2)
    assert told["rows"]["C"]["image_lr"] in (0.1, 1.0)
    assert told["rows"]["C"]["flops"] > 0
    assert told["rows"]["random"]["flops"] is None
    assert "s=1" in out
    assert "FLOPs" in out
    assert (to / "judged.png").exists()
    capfd.readouterr()
    labelled_pool(tmp_path / "test", 90)
    assert call(judge_condensed, *command, "rows=[random]") == 2
    assert "holds a set of other settings" in capfd.readouterr().err
    assert call(judge_condensed, *command, "rows=[random]", "test=/nowhere") == 2
    assert "test=/nowhere: there is no such file or folder" in capfd.readouterr().err

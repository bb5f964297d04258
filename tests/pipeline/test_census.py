"""The census against brute counts, on every kind of source."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from jobs import census, curate
from pipeline.census.count import PERSONAL, CensusConfig, quantiles, take_census
from pipeline.census.near import near_captions
from pipeline.census.source import Metadata
from pipeline.census.tally import Tally
from tests.build import call, jpeg, make_pool, make_shard, sample, uid, work_in_process

WORDS = ["dog", "Dog", "it's", "a", "the", "RED", "red", "ball", "plays", "ünder", "7"]


@pytest.fixture(scope="module")
def captions() -> list[str]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, 900)
    some = [" ".join(rng.choice(WORDS, n, p=np.arange(11, 0, -1) / 66)) for n in lengths]
    return [*some, *some[:40], *some[:9], "Ball, red! (ball)", ""]


@pytest.fixture(scope="module")
def metadata(captions: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("metadata") / "pool.parquet"
    n = len(captions)
    pl.DataFrame(
        {
            "uid": [uid(i) for i in range(n)],
            "text": captions,
            "url": [f"https://user@Host{i % 7}.example:80/{i}.jpg" for i in range(n)],
            "original_width": list(range(100, 100 + n)),
            "original_height": [300] * n,
        }
    ).write_parquet(path, row_group_size=300)
    return path


def ranked(counts: Counter[str], least: bool = False) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda x: (x[1] if least else -x[1], x[0]))


def test_counts_equal_a_brute_count(
    captions: list[str], metadata: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.census.source.ROWS", 250)  # several chunks
    found = take_census(Metadata([str(metadata)]), CensusConfig(top=15))
    words = [re.findall(r"\w+(?:'\w+)*", c.lower()) for c in captions]
    brute = {
        "caption": Counter(captions),
        "word": Counter(w for ws in words for w in ws),
        "gram2": Counter(" ".join(p) for ws in words for p in pairwise(ws)),
        "gram3": Counter(" ".join(ws[i : i + 3]) for ws in words for i in range(len(ws) - 2)),
        "domain": Counter(f"host{i % 7}.example" for i in range(len(captions))),
    }
    for kind, counts in brute.items():
        kindly = found["values"][kind]
        assert [(r["value"], r["count"]) for r in kindly["most_common"]] == ranked(counts)[:15], kind
        assert [(r["value"], r["count"]) for r in kindly["least_common"]] == ranked(counts, True)[:15], kind
        assert (kindly["distinct"], kindly["total"]) == (len(counts), counts.total())
        assert kindly["once"] == sum(n == 1 for n in counts.values())
    repeated = [n for n in brute["caption"].values() if n > 1]
    assert found["exact_duplicate_captions"] == {
        "groups": len(repeated),
        "copies": sum(repeated) - len(repeated),
    }
    assert dict(map(tuple, found["histograms"]["words"]["all"])) == Counter(map(len, words))
    assert dict(map(tuple, found["histograms"]["characters"]["all"])) == Counter(map(len, captions))
    assert found["by_group"]["all"]["words_total"] == sum(map(len, words))
    assert found["values"]["language"]["total"] == len(captions) - 1  # the empty caption has none


@pytest.mark.parametrize(
    ("kind", "text", "holds"),
    [
        ("email", "write to jo.doe+x@mail.example.com now", True),
        ("email", "an @ sign, a@b, and example.com", False),
        ("phone", "call (555) 123-4567!", True),
        ("phone", "call +1 555.123.4567", True),
        ("phone", "isbn 978-3-16-148410-0 and 12345678901", False),
        ("ip", "at 192.168.0.255.", False),
        ("ip", "at 192.168.0.255", True),
        ("ip", "version 1.2.3 or 300.1.1.1", False),
    ],
)
def test_personal_data(kind: str, text: str, holds: bool) -> None:
    assert pl.Series([text]).str.contains(PERSONAL[kind])[0] is holds


def test_near_captions_are_those_of_all_pairs() -> None:
    rng = np.random.default_rng(1)
    texts = [" ".join(f"w{w}" for w in rng.choice(400, 12, replace=False)) for _ in range(300)]
    texts += [f"{t} more" for t in texts[:25]] + [" ".join(t.split()[:-1]) for t in texts[20:30]]
    found = near_captions(
        [(texts[:200], [1] * 200), (texts[200:], [2] * (len(texts) - 200))], len(texts), 1000, 0.8, 5
    )
    sets = [set(t.split()) for t in texts]
    near = {
        (i, j)
        for i in range(len(texts))
        for j in range(i)
        if len(sets[i] & sets[j]) >= 0.8 * len(sets[i] | sets[j])
    }
    assert found["captions"] == len({i for pair in near for i in pair}) == 65
    assert (found["groups"], found["looked_at"], found["one_in"]) == (30, len(texts), 1)
    assert [g["captions"] for g in found["largest"]] == [3, 3, 3, 3, 3]
    few = near_captions([(texts, [1] * len(texts))], len(texts), 100, 0.8, 5)
    assert few["one_in"] == 4
    assert 0 < few["looked_at"] < 200


def test_tally_compares_groups() -> None:
    frame = pl.DataFrame(
        {"group": [0] * 60 + [1] * 60, "v": ["a"] * 40 + ["b"] * 20 + ["a"] * 20 + ["c"] * 40}
    )
    with Tally(("kept", "dropped"), 256 << 20) as tally:
        tally.add("v", pl.col("v"), frame.cast({"group": pl.UInt8}))
        tally.merge("v")
        assert tally.most("v", 1) == [{"value": "a", "count": 60, "kept": 40, "dropped": 20}]
        telling = tally.telling("v", 5)
        assert [r["value"] for r in telling["kept"]] == ["b", "a"]
        assert telling["kept"][0]["z"] == 4.47  # (1 - .5) / sqrt(.25 / 20)
        assert [r["value"] for r in telling["dropped"]] == ["c"]


def test_quantiles() -> None:
    assert quantiles([[1, 5], [2, 5]], (0.05, 0.5, 0.51, 1.0)) == [1, 1, 2, 2]


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    make_pool(folder / "pool", 2, 6)
    odd = [sample(20, jpg=b"junk"), sample(21, txt=b"short"), sample(22, jpg=None, png=jpeg((30, 9)))]
    make_shard(folder / "pool" / "00002.tar", odd)
    with pytest.MonkeyPatch.context() as patch:
        work_in_process(patch.setattr)
        rules = ["scorer=none", "filters=[caption]", "filters.caption.languages=null"]
        assert call(curate, f"pool.shards={folder}/pool/*.tar", f"out={folder}/out", *rules) == 0
    return folder


def test_kept_against_dropped(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(census, f"out={finished}/out", "run=default") == 0
    text = capfd.readouterr().out
    assert re.search(r"kept +dropped\n", text)
    folder = finished / "out/runs/default/census"
    found = json.loads((folder / "census.json").read_text())
    assert (found["samples"], found["unreadable"], found["shards"]) == (15, 1, 3)
    assert [found["by_group"][g]["samples"] for g in ("kept", "dropped")] == [13, 1]
    (thing,) = (r for r in found["values"]["word"]["most_common"] if r["value"] == "thing")
    assert thing == {"value": "thing", "count": 13, "kept": 13, "dropped": 0}
    assert {r["value"]: r["count"] for r in found["values"]["format"]["most_common"]} == {"jpg": 13, "png": 1}
    assert sorted(p.stem for p in folder.glob("*.png")) == [
        "aspect_x100",
        "characters",
        "long_side",
        "short_side",
        "words",
    ]


def test_bare_shards_tell_what_tables_do(finished: Path, tmp_path: Path) -> None:
    assert call(census, f"pool.shards={finished}/pool/*.tar", f"to={tmp_path}/bare") == 0
    assert call(census, f"out={finished}/out", f"to={tmp_path}/scan") == 0
    bare, scan = (json.loads((tmp_path / n / "census.json").read_text()) for n in ("bare", "scan"))
    assert (bare["samples"], bare["unreadable"]) == (15, 0)  # no pixel was decoded
    assert scan["unreadable"] == 1
    formats = {r["value"]: r["count"] for r in bare["values"]["format"]["most_common"]}
    assert formats == {"jpeg": 14, "unknown (.jpg)": 1}  # by their bytes, not their names
    assert (
        bare["histograms"]["long_side"]["all"] == scan["histograms"]["long_side"]["all"] == [[8, 13], [30, 1]]
    )


def test_search_names_samples(finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    phrase = "search=THING number 1"
    assert call(census, f"out={finished}/out", "run=default", phrase, f"to={tmp_path}") == 0
    text = capfd.readouterr().out
    assert f"{uid(1)}  kept  {finished}/pool/00000.tar 00001  'a picture of thing number 1'" in text
    assert "1 captions hold" in text  # and not number 10
    matches = pl.read_parquet(tmp_path / "matches.parquet")
    assert matches.select("key", "group").rows() == [("00001", "kept")]
    assert call(census, f"pool.shards={finished}/pool/*.tar", "search=thing.number") == 0
    assert "0 captions hold" in capfd.readouterr().out


def test_overlap_with_evaluation_captions(
    metadata: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval.txt").write_text("BALL red ball\nnever seen before\n")
    assert (
        call(census, f"pool.metadata={metadata}", f"evaluation={tmp_path}/eval.txt", "count.ngrams=[]") == 0
    )
    assert "1 of 2 evaluation captions are in the pool" in capfd.readouterr().out
    pl.DataFrame({"captions": [["a dog", "Ball; red, ball?"]]}).write_parquet(tmp_path / "eval.parquet")
    assert call(census, f"pool.metadata={metadata}", f"evaluation={tmp_path}/eval.parquet") == 0
    assert re.search(r"equal an evaluation caption +[1-9]", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "pool: give pool.shards or pool.metadata for a pool as it lies, or out="),
        (["pool.shards=x.tar", "out=/x"], "or out= for a scanned one"),
        (["out=/nowhere"], "out=/nowhere: no finished scan there"),
        (["out=/nowhere", "run=default"], "no finished run there"),
        (["pool.shards=/nowhere/*.tar"], "/nowhere"),
        (["pool.shards=/nowhere/a.tar"], "1 files are missing"),
        (["count.top=0"], "count.top=0: at least 1"),
        (["count.ngrams=[1]"], "count.ngrams=[1]"),
        (["count.similarity=1"], "count.similarity=1.0"),
        (["count.memory=5"], "count.memory=5"),
        (["evaluation=/nowhere.txt"], "evaluation=/nowhere.txt: there is no such file"),
        (["search=''"], "search: give a phrase"),
    ],
)
def test_refusals(finished: Path, overrides: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    base = [f"out={finished}/out"] if overrides and overrides[0][:4] not in ("pool", "out=") else []
    capfd.readouterr()
    assert call(census, *base, *overrides) == 2
    err = capfd.readouterr().err.strip().splitlines()
    assert len(err) == 1, err
    assert says in err[0]

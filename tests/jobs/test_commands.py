"""Every command: its help, and one line with exit code 2 for whatever cannot be meant."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from jobs.launch import CONF
from tests.build import call

NAMES = sorted(p.stem for p in CONF.glob("*.yaml") if p.stem != "quiet")
JOBS: dict[str, ModuleType] = {name: importlib.import_module(f"jobs.{name}") for name in NAMES}

# What each command needs to get as far as its own checks.
GIVEN = {
    "census": ["pool.shards=/nowhere/*.tar"],
    "curate": ["pool.shards=/nowhere/*.tar", "out={tmp}/out", "scorer.weights=/nowhere"],
    "demo": ["out={tmp}/out"],
    "explain": ["out={tmp}", "uid=0123456789abcdef0123456789abcdef"],
    "influence": ["features=/nowhere.npz", "out={tmp}/out"],
    "plan": ["pool.shards=/nowhere/*.tar", "out={tmp}/out", "scorer.weights=/nowhere"],
    "prove": ["out={tmp}/out"],
    "report": ["out={tmp}"],
    "reshard": ["out={tmp}", "to={tmp}/to"],
    "rounds": ["out={tmp}"],
    "subsets": ["op=union", "a={tmp}/a.npy", "b={tmp}/b.npy"],
    "train_filter": ["pool.shards=/nowhere/*.tar", "out={tmp}/out"],
    "verify": ["out={tmp}"],
}
# Slips that any command must catch, and what the line says.
SLIPS = [
    ("nosuch=1", "nosuch: there is no such key"),
    ("+nosuch=1", "nosuch: there is no such key"),
    ("nosuch", "nosuch: must be KEY=VALUE"),
    ("=3", "=3: must be KEY=VALUE"),
]
MORE_SLIPS = [("nosuch.key=1", "nosuch.key: there is no such key"), ("~nosuch", "nosuch"), ("out=[", "out=[")]
WRONG = [
    ("census", "count.top=many", "count.top"),
    ("census", "count.ngrams=[2,2]", "count.ngrams=[2, 2]: different numbers from 2 to 10"),
    ("census", "pool.missing=never", "pool.missing=never: must be error or skip"),
    ("curate", "filters.dfn.top_fraction=1.5", "filters.dfn.top_fraction=1.5: must lie in (0, 1]"),
    ("curate", "filters.dnf.top_fraction=0.5", "filters.dnf.top_fraction: there is no such key"),
    ("curate", "dedup=nearly", "choose from exact, near, none"),
    ("curate", "cluster.workers=two", "cluster.workers"),
    ("demo", "pool.seed=x", "pool.seed"),
    ("explain", "uid=xyz", "uid: uid 'xyz' is not 32 hex digits"),
    ("explain", "run=../x", "no finished run there"),
    ("influence", "budget=-1", "budget=-1"),
    ("influence", "objective=happiness", "happiness"),
    ("plan", "decode.max_bytes=0", "decode.max_bytes=0: must be at least 1"),
    ("plan", "scorer.precision=int4", "scorer.precision=int4: must be auto"),
    ("reshard", "shard_size=0", "shard_size=0: must lie in [1, 10000]"),
    ("reshard", "run=nosuch", "no finished run there"),
    ("rounds", "ratio=2", "ratio=2.0: above 0 and at most 1"),
    ("report", "run=nosuch", "no finished run there"),
    ("subsets", "op=xor", "op=xor: must be union, intersect, minus or compare"),
    ("subsets", "a=/nowhere.npy", "/nowhere.npy: no subset file"),
    ("train_filter", "model=giant", "model=giant"),
    ("train_filter", "train.batch_size=0", "train.batch_size=0"),
    ("verify", "deep=maybe", "deep"),
    ("verify", "run=nosuch", "no finished run there"),
]


def refusal(name: str, capfd: pytest.CaptureFixture[str], tmp: Any, *overrides: str) -> str:
    """The last line of what a command that refuses prints; the others only list problems."""
    given = [g.format(tmp=tmp) for g in GIVEN.get(name, ())]
    capfd.readouterr()
    code = call(JOBS[name], *given, *overrides)
    out, err = capfd.readouterr()
    assert code == 2, f"{name} {overrides}: {code}\n{err}"
    assert out == ""
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert lines[-1].startswith("winnow: ")
    assert all(line.startswith("problem: ") for line in lines[:-1]), err
    return err


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_a_command_does_and_what_it_takes(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(JOBS[name], "--help") == 0
    text = capfd.readouterr().out
    assert f"python -m jobs.{name}" in text
    for part in ("KEYS", "VALUES", "--cfg job"):
        assert part in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert "hydra" not in text.lower()


@pytest.mark.parametrize("name", NAMES)
def test_slips_that_any_command_catches(
    name: str, tmp_path: Any, capfd: pytest.CaptureFixture[str], in_process: None
) -> None:
    for override, says in [*SLIPS, *(MORE_SLIPS if name == "verify" else [])]:
        assert says in refusal(name, capfd, tmp_path, override)


@pytest.mark.parametrize(("name", "override", "says"), WRONG)
def test_wrong_overrides_get_one_line(
    name: str, override: str, says: str, tmp_path: Any, capfd: pytest.CaptureFixture[str], in_process: None
) -> None:
    err = refusal(name, capfd, tmp_path, override)
    assert says in err
    assert name == "plan" or len(err.strip().splitlines()) == 1
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith(".lock")]

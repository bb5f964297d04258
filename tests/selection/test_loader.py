"""The loader over real tars: every sample of a round once, on any ranks and workers, from any step."""

import io
import tarfile
from argparse import Namespace
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from selection.loader import Division, Line, LoaderConfig, RoundLoader
from selection.manifest_rows import ShardRows
from selection.rounds import Rounds


class Tars:
    """The manifest of a folder of tars, read from the tars themselves."""

    def __init__(self, paths, captions_in_manifest=False):
        self.shards = paths
        self._captions_in_manifest = captions_in_manifest

    def rows(self, shard):
        with tarfile.open(self.shards[shard]) as tar:
            members = {m.name: m for m in tar}
            keys = sorted({name.partition(".")[0] for name in members})
            images = [members[f"{key}.png"] for key in keys]
            texts = [members[f"{key}.txt"] for key in keys]
            captions = [tar.extractfile(text).read().decode() for text in texts]
        return ShardRows(
            uid_hi=np.full(len(keys), shard, np.uint64),
            uid_lo=np.arange(len(keys), dtype=np.uint64),
            key=keys,
            copies=np.ones(len(keys), np.int64),
            image_offset=np.asarray([m.offset_data for m in images]),
            image_size=np.asarray([m.size for m in images]),
            caption=captions if self._captions_in_manifest else None,
            caption_offset=np.asarray([m.offset_data for m in texts]),
            caption_size=np.asarray([m.size for m in texts]),
        )


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


SIZES = (9, 0, 14, 1, 11, 13)


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    paths = []
    for shard, size in enumerate(SIZES):
        paths.append(str(folder / f"{shard:08d}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for i in range(size):
                image = io.BytesIO()
                Image.new("RGB", (8, 8), (shard, i, 0)).save(image, "png")
                add(tar, f"{i:04d}.json", b"{}")
                add(tar, f"{i:04d}.png", image.getvalue())
                add(tar, f"{i:04d}.txt", f"{shard}/{i} é".encode())
    return paths


def pixels(data):
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(data))).copy()).permute(2, 0, 1).float()


def tokens(caption):
    return torch.tensor([int(part) for part in caption.removesuffix(" é").split("/")])


def make(tars, ratio="0.5", seed=1, **config):
    rounds = Rounds(SIZES, ratio, seed, manifest=Tars(tars))
    return RoundLoader(
        rounds, LoaderConfig(**({"batch_size": 4} | config)), transform=pixels, tokenize=tokens
    )


def samples(batches):
    return [tuple(row) for _, texts in batches for row in texts.tolist()]


def expected(rounds, t):
    return Counter((shard, p) for shard, positions in rounds.all_members(t) for p in positions.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_each_chosen_sample_comes_once_with_its_own_image_and_caption(tars, workers):
    loader = make(tars, workers=workers)
    for t in range(3):
        batches = list(loader)
        assert len(batches) == len(loader) == loader.num_batches == loader.rounds.steps(t, 4)
        assert Counter(samples(batches)) == expected(loader.rounds, t)
        for images, texts in batches:
            assert images[:, :2, 0, 0].tolist() == texts.tolist()


def test_workers_change_nothing_and_rounds_are_shuffled(tars):
    orders = [samples(make(tars, workers=workers)) for workers in (0, 1, 2)]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] != sorted(orders[0])
    loader = make(tars, ratio=1)
    assert samples(loader) != samples(loader)


def test_shards_may_be_anywhere_fsspec_reaches(tars):
    remote = fsspec.filesystem("memory")
    for path in tars:
        remote.pipe_file(path, Path(path).read_bytes())
    loader = make(tars)
    rows = loader.rounds.manifest.rows
    loader.rounds.manifest = Tars([f"memory://{path}" for path in tars])
    loader.rounds.manifest.rows = rows
    assert samples(loader) == samples(make(tars))


def test_captions_may_come_from_the_manifest(tars):
    rounds = Rounds(SIZES, "0.5", 1, manifest=Tars(tars, captions_in_manifest=True))
    loader = RoundLoader(rounds, LoaderConfig(batch_size=4), transform=pixels, tokenize=tokens)
    assert samples(loader) == samples(make(tars))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_round_goes_on_at_the_step_where_it_was_left(tars, workers):
    whole = samples(make(tars))
    first = make(tars)
    batches = iter(first)
    seen = samples([next(batches) for _ in range(2)])
    later = make(tars, workers=workers)
    later.load_state_dict(first.state_dict())
    later.set_epoch(0)
    assert seen + samples(later) == whole
    assert (later.round, later.step) == (1, 0)
    later.set_epoch(0)
    assert samples(later) == whole


def test_resuming_with_other_batches_is_refused(tars):
    with pytest.raises(ValueError, match="batch_size=5"):
        make(tars, batch_size=5).load_state_dict(make(tars).state_dict())


def test_a_shard_that_changed_is_named(tars, tmp_path):
    moved = str(tmp_path / "moved.tar")
    with open(tars[0], "rb") as source, open(moved, "wb") as target:
        target.write(b"x" * 100 + source.read())
    loader = make(tars, ratio=1)
    loader.rounds.manifest.rows = Tars(tars).rows
    loader.rounds.manifest.shards = [moved, *tars[1:]]
    with pytest.raises(
        ValueError, match=r"moved.tar: no member of \d+ bytes at byte \d+; the shard has changed"
    ):
        list(loader)


def test_a_failing_transform_names_shard_and_key(tars):
    loader = RoundLoader(make(tars).rounds, LoaderConfig(batch_size=4), transform=lambda data: 1 / 0)
    with pytest.raises(RuntimeError, match=r"\.tar: sample \d{4}: division by zero"):
        next(iter(loader))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.integers(1, 9), st.integers(2, 40), st.sampled_from(["keep", "drop"]))
def test_ranks_share_a_round_evenly_with_no_empty_step(entries, world_size, batch_size, remainder):
    config = LoaderConfig(batch_size=batch_size, remainder=remainder)
    if entries < world_size:
        with pytest.raises(ValueError, match="batch_size="):
            Division.of(entries, world_size, config)
        return
    division = Division.of(entries, world_size, config)
    assert division.size == (entries if remainder == "keep" else entries - entries % world_size)
    places = []
    for rank in range(world_size):
        sizes = [len(division.batch(rank, step)) for step in range(division.steps)]
        assert 1 <= min(sizes) <= max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        places += [p for step in range(division.steps) for p in division.batch(rank, step)]
        if remainder == "drop":
            assert sizes == [len(division.batch(0, step)) for step in range(division.steps)]
    assert places == list(range(division.size))


def test_batches_of_one_that_do_not_divide_evenly_are_refused():
    with pytest.raises(ValueError, match="without a sample in some step"):
        Division.of(5, 4, LoaderConfig(batch_size=1))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1).filter(sum), st.integers(1, 50), st.integers(1, 30))
def test_the_line_holds_every_entry_once_however_it_is_cut(sizes, shuffle, piece):
    line = Line(np.asarray(sizes), 3, 2, shuffle)
    total = sum(sizes)
    pieces = [line.at(range(start, min(start + piece, total))) for start in range(0, total, piece)]
    found = [pair for shards, numbers in pieces for pair in zip(shards.tolist(), numbers.tolist())]
    assert sorted(found) == [(shard, i) for shard, size in enumerate(sizes) for i in range(size)]


@pytest.mark.parametrize("field", [{"batch_size": 0}, {"workers": -1}, {"shuffle": 0}, {"remainder": "pad"}])
def test_config_out_of_range_is_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        LoaderConfig(**({"batch_size": 4} | field))


def train_one_process(rank, tars, folder):
    torch.set_num_threads(1)
    # A spawned process would spawn its loader workers too, importing everything again for each round.
    torch.multiprocessing.set_start_method("fork", force=True)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    loader = make(tars, ratio="0.48", workers=2)  # 23 of 48: odd, so the ranks differ by one sample
    seen = [samples(loader) for _ in range(2)]
    torch.save((loader.num_batches, seen, [23, loader.rounds.k]), f"{folder}/seen{rank}.pt")
    steps = train_open_clip(rank, make(tars, ratio="0.48", workers=2, remainder="drop"))
    torch.save(steps, f"{folder}/steps{rank}.pt")
    torch.distributed.destroy_process_group()


def train_open_clip(rank, loader):
    """Two epochs of open_clip_train's own loop on a tiny CLIP; the learning-rate steps it asked for."""
    from open_clip import ClipLoss
    from open_clip.model import CLIP
    from open_clip_train.train import train_one_epoch

    torch.manual_seed(0)
    model = CLIP(
        8,
        {"image_size": 8, "layers": 1, "width": 16, "head_width": 8, "patch_size": 4},
        {"context_length": 2, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1},
        output_dict=True,
    )
    model = torch.nn.parallel.DistributedDataParallel(model)
    args = Namespace(
        device="cpu",
        precision="fp32",
        distill=False,
        accum_freq=1,
        skip_scheduler=False,
        grad_clip_norm=None,
        horovod=False,
        log_every_n_steps=100,
        batch_size=loader.batch_size,
        world_size=2,
        rank=rank,
        local_rank=rank,
        log_local=False,
        wandb=False,
    )
    loss = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = []
    for epoch in range(2):
        train_one_epoch(model, {"train": loader}, loss, epoch, optimizer, None, steps.append, None, args)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return steps, weights, loader.num_samples


def test_two_processes_of_two_workers_see_every_sample_once_and_train_open_clip(tars, tmp_path):
    torch.multiprocessing.spawn(train_one_process, (tars, str(tmp_path)), nprocs=2)
    rounds = Rounds(SIZES, "0.48", 1)
    results = [torch.load(tmp_path / f"seen{rank}.pt") for rank in (0, 1)]
    for t in range(2):
        ranks = [seen[t] for _, seen, _ in results]
        assert Counter(ranks[0] + ranks[1]) == expected(rounds, t)
        assert sorted(map(len, ranks)) == [11, 12]
    assert [steps for steps, _, _ in results] == [3, 3]
    trained = [torch.load(tmp_path / f"steps{rank}.pt") for rank in (0, 1)]
    for steps, weights, samples_of_round in trained:
        assert steps == list(range(6))
        assert samples_of_round == 22
        assert torch.equal(weights, trained[0][1])

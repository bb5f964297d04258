"""Training on several workers: one loss, one batch norm, the same curve, and a worker's death changes nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss
from timm.layers import BatchNormAct2d
from torch.nn.functional import normalize

from filters.network.batchnorm import synchronise
from filters.network.config import TrainConfig
from filters.network.data import Position
from filters.network.loop import CHECKPOINT
from filters.network.loss import contrastive_loss
from filters.network.towers import Towers, gradients
from filters.network.train import train_network
from filters.network.world import Rows, World
from pipeline.cluster import ClusterConfig
from pipeline.errors import Refused
from tests.filters.test_network import TINY, spec, stream, trained, trusted  # noqa: F401

PARTS = [[0, 3, 4], [1, 2, 5, 6, 7]]  # rows of a batch on two workers


def unit(n: int, seed: int) -> torch.Tensor:
    return normalize(torch.randn(n, 16, generator=torch.Generator().manual_seed(seed)), dim=1)


def norms() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), BatchNormAct2d(4))
    return net, torch.randn(8, 3, 6, 6) * 3 + 1


def member(rank: int, port: int, folder: str) -> None:
    """What one of two processes sees of a loss and of a network with batch norm, saved to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    world, at = World(), torch.tensor(PARTS[rank])
    rows = Rows(at, 8)
    image, text = unit(8, 0)[at].requires_grad_(), unit(8, 1)[at].requires_grad_()
    scale = torch.tensor(5.0, requires_grad=True)
    loss = contrastive_loss(image, text, torch.tensor([0, 1, 2, 3, 0, 1, 4, 5])[at], scale, world, rows)
    loss.backward()
    whole = world.gather(unit(8, 0)[at], rows)
    net, x = norms()
    synchronise(net, world)
    x = x[at].requires_grad_()
    y = net(x)
    (y * y.sin()).sum().backward()
    world.add_gradients(net.parameters())
    state = {
        "loss": loss.detach(), "image": image.grad, "text": text.grad, "scale": scale.grad, "whole": whole,
        "y": y.detach(), "x": x.grad, "net": [p.grad for p in net.parameters()], "state": net.state_dict(),
        "words": world.exchange(f"from {rank}"),
    }  # fmt: skip
    torch.save(state, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    import socket

    folder = tmp_path_factory.mktemp("members")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(member, (port, str(folder)), nprocs=2, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def joined(members: list[dict], key: str) -> torch.Tensor:
    """Rows of both workers in the batch's order."""
    return torch.cat([m[key] for m in members])[np.argsort(np.concatenate(PARTS))]


def test_parts_of_the_loss_add_up_and_so_do_their_gradients(members: list[dict]):
    image, text = unit(8, 0).requires_grad_(), unit(8, 1).requires_grad_()
    scale = torch.tensor(5.0, requires_grad=True)
    loss = contrastive_loss(image, text, torch.tensor([0, 1, 2, 3, 0, 1, 4, 5]), scale)
    loss.backward()
    torch.testing.assert_close(members[0]["loss"] + members[1]["loss"], loss.detach())
    torch.testing.assert_close(members[0]["scale"] + members[1]["scale"], scale.grad)
    torch.testing.assert_close(joined(members, "image"), image.grad)
    torch.testing.assert_close(joined(members, "text"), text.grad)
    for m in members:
        torch.testing.assert_close(m["whole"], unit(8, 0), rtol=0, atol=0)
        assert m["words"] == ["from 0", "from 1"]


def test_batch_norm_is_that_of_the_whole_batch(members: list[dict]):
    net, x = norms()
    x.requires_grad_()
    y = net(x)
    (y * y.sin()).sum().backward()
    torch.testing.assert_close(joined(members, "y"), y.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(joined(members, "x"), x.grad, rtol=1e-4, atol=1e-4)
    for m in members:
        for ours, theirs in zip(m["net"], net.parameters()):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-4, atol=1e-3)
        for key, value in net.state_dict().items():
            torch.testing.assert_close(m["state"][key], value, rtol=1e-4, atol=1e-5)


def test_loss_of_distinct_captions_is_clip_loss():
    image, text, scale = unit(12, 0), unit(12, 1), torch.tensor(14.3)
    torch.testing.assert_close(
        contrastive_loss(image, text, torch.arange(12), scale), ClipLoss()(image, text, scale)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pieces_give_the_gradients_of_the_whole_batch(checkpointing: bool):
    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    model.visual.preprocess_cfg = {"size": 32, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    model.set_grad_checkpointing(checkpointing)
    towers = Towers(model, torch.device("cpu"), "fp32", 16, batch_norm=False)
    images = torch.rand(10, 3, 32, 32) * 255
    tokens = open_clip.get_tokenizer("tiny-test")([f"number {i % 7}" for i in range(10)])

    def run(pieces: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        cut = list(zip(images.tensor_split(pieces), tokens.tensor_split(pieces)))
        loss = gradients(
            lambda i: towers.embed(*cut[i]),
            pieces,
            lambda image, text: contrastive_loss(image, text, tokens, model.logit_scale.exp()),
        )
        return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, whole = run(1)
    for pieces in (3, 12):  # of the twelve, two are empty
        again, parts = run(pieces)
        torch.testing.assert_close(again, loss)
        for a, b in zip(parts, whole):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


class Member(World):
    """One of `size` workers that read one after the other in this process; `heard` is what the others said."""

    def __init__(self, rank: int, size: int, heard: list[list]) -> None:
        super().__init__()
        self.rank, self.size, self.said, self.heard = rank, size, [], heard

    def exchange(self, word: object) -> list:
        self.said.append(word)
        turn = len(self.said) - 1
        return [self.said[turn] if r == self.rank else said[turn] for r, said in enumerate(self.heard)]


@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_workers_draw_the_same_batches_and_share_them_out(trusted: Path, cache_bytes: int):  # noqa: F811
    def reading(world: World) -> list:
        pairs = stream(trusted, window=90, cache_bytes=cache_bytes)
        pairs.world = world
        held_out = pairs.held_out()
        batches = pairs.batches(32, Position())
        found = [held_out, *(next(batches)[0] for _ in range(9))]
        batches.close()
        return [*found, pairs.report()]

    alone = reading(World())
    said = [[whole_words(trusted, rank, n) for n in range(4)] for rank in range(3)]
    shares = [reading(Member(rank, 3, said)) for rank in range(3)]
    for k, batch in enumerate(alone[:-1]):
        at = torch.cat([s[k].rows.at for s in shares])
        order = at.argsort()
        assert at[order].tolist() == list(range(batch.rows.n))
        assert torch.equal(torch.cat([s[k].pairs.images for s in shares])[order], batch.pairs.images)
        assert torch.equal(torch.cat([s[k].pairs.tokens for s in shares])[order], batch.pairs.tokens)
        assert {s[k].largest for s in shares} == {max(len(s[k].rows.at) for s in shares)}
    assert all(s[-1] == alone[-1] for s in shares)


def whole_words(folder: Path, rank: int, number: int) -> list:
    """What worker `rank` of three says of a shard: the fates of its samples."""
    pairs = stream(folder, window=90)
    world = Member(rank, 3, [[[0] * 99] * 9] * 3)
    pairs.world = world
    pairs._count = lambda _n, _i, own: world.said.append(own)  # type: ignore[method-assign]
    pairs._read(number)
    return world.said[0]


def kill_a_worker(out: Path) -> None:
    """SIGKILL one of this Ray's training workers once there is a checkpoint to go on from."""
    import ray

    session = ray._private.worker._global_node.get_session_dir_path()
    while not (out / CHECKPOINT).exists():
        time.sleep(0.02)
    for process in Path("/proc").iterdir():
        try:
            if b"RayTrainWorker" in (process / "cmdline").read_bytes() and session in os.readlink(
                process / "fd" / "1"
            ):
                os.kill(int(process.name), signal.SIGKILL)
                return
        except OSError:
            continue
    raise AssertionError("no worker to kill")


@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_of_which_one_is_killed_give_the_curve_of_one(
    trained,  # noqa: F811
    trusted: Path,  # noqa: F811
    tmp_path: Path,
):
    config = TrainConfig(
        samples_seen=96 * 24, batch_size=96, lr=1e-3, warmup=0.2, checkpoint_steps=8, data=TINY.data
    )
    one = spec(tmp_path / "one", trusted, config, init=str(trained[0]))
    two = replace(one, out=str(tmp_path / "two"))
    alone = train_network(one)
    killer = threading.Thread(target=kill_a_worker, args=(tmp_path / "two",))
    killer.start()
    both = train_network(two, ClusterConfig(workers=2, gpus_per_worker=0.0))
    killer.join()
    curves = [np.genfromtxt(tmp_path / n / "curve.csv", delimiter=",", skip_header=1) for n in ("one", "two")]
    np.testing.assert_allclose(curves[1][:, 3], curves[0][:, 3], rtol=1e-4)
    assert (both.workers, both.steps, both.pairs) == (2, 24, alone.pairs)
    assert both.held_out.auc == pytest.approx(alone.held_out.auc, abs=0.01)
    assert not (tmp_path / "two" / ".ray").exists()
    with pytest.raises(Refused, match="other settings"):
        train_network(replace(two, config=TINY), ClusterConfig(workers=2))

"""Condensation: order of decoded images, shared gradients, the subset, freezing, resuming."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from pipeline.cluster import ClusterConfig
from selection.condense import CondenseConfig, condense
from selection.condense.augment import augment
from selection.condense.group import ClassGroup, GroupState, normalised
from selection.condense.images import decode, shrink, to_bytes, to_unit
from selection.condense.run import Chunk, choices, group_workers
from selection.condense.subset import Subset, most_learnable, subset_of
from selection.proxy import LabelledImages, pixels

SMALL = CondenseConfig(
    images_per_class=3, factor=2, image_size=8, outer=4, inner=2, select_every=1, width=4, depth=2, real_batch=5,
    net_images=12, net_batch=6, image_lr=1.0, seed=3,
)  # fmt: skip
CLASSES = ("a", "b", "c")


def labelled(each: int = 12) -> LabelledImages:
    rng = np.random.default_rng(0)
    n = each * len(CLASSES)
    return LabelledImages(
        rng.integers(0, 256, (n, 8, 8, 3), dtype=np.uint8), np.arange(n) % len(CLASSES), CLASSES,
        np.zeros(n, "u8,u8"), np.ones(n, np.int64),
    )  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path) -> str:
    real = labelled()
    texts = [CLASSES[c] for c in real.labels]
    pixels.kept(
        str(tmp_path / "images"), lambda: pixels.Images(real.images, texts, real.uids, real.copies, {}, 0.0)
    )
    return str(tmp_path / "images")


def test_decoded_images_are_image_major_and_prefixes_decode_to_prefixes():
    stored = torch.rand(4, 3, 3, 8, 8)
    whole = decode(stored, 2)
    assert whole.shape == (16, 3, 3, 8, 8)
    for s in range(1, 5):
        assert torch.equal(decode(stored[:s], 2), whole[: s * 4])
    flat = torch.zeros(2, 1, 3, 8, 8)
    flat[1, :, :, :4, 4:] = 1  # the second tile of the second image
    assert decode(flat, 2).mean((1, 2, 3, 4)).tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


def test_shrinking_is_undone_by_decoding_smooth_images():
    images = torch.linspace(0, 1, 8).view(1, 1, 1, 8).expand(4, 3, 8, 8)
    sheets = shrink(images, 2)
    assert sheets.shape == (1, 3, 8, 8)
    assert (decode(sheets[:, None], 2)[:, 0] - images).abs().max() < 0.11


def test_one_augmentation_is_shared_by_all_images_of_a_class():
    x = torch.rand(1, 2, 3, 8, 8).expand(5, 2, 3, 8, 8)
    draws = np.random.default_rng(0).random((2, 7))
    y = augment(x, draws)
    assert torch.allclose(y, y[:1].expand_as(y))
    assert torch.allclose(augment(x[:, 1:], draws[1:]), y[:, 1:])
    assert (y == 0).flatten(2).any(2).all()  # the cutout
    same = np.full((2, 7), 0.5)  # nothing changes but for a hole in the middle
    assert torch.allclose(augment(x, same)[..., :2, :], x[..., :2, :], atol=1e-6)


def by_loop(group, net, images, first, weight, t, i):
    """The same losses a class at a time, each with gradients of its own, as one would write them first."""
    real, draws = group.real_batch(t, i)
    weights = [layer.weight for layer in net.body if isinstance(layer, torch.nn.Conv2d)]
    images = images.clone().requires_grad_()
    total = 0
    for k, c in enumerate(group.classes):

        def gradients(x, k=k, c=c, **how):
            x = augment(normalised(x), draws[k : k + 1])[:, 0]
            return torch.autograd.grad(cross_entropy(net(x), torch.full((len(x),), c)), weights, **how)

        target = gradients(real[:, k : k + 1])
        decoded = decode(images[:, k : k + 1], group.config.factor)
        for part, scale in ((decoded, 1.0), (decoded[:first], weight)):
            made = gradients(part, create_graph=True)
            total = total + scale * sum((a - b).square().sum() for a, b in zip(made, target))
    return torch.autograd.grad(total, images)[0]


def test_batched_gradient_equals_the_loop_over_classes():
    group = ClassGroup(labelled(), range(3), SMALL)
    net, images = group.network(1, 0), group.start().images
    batched, _, _ = group.image_gradient(net, images, Subset(2, 0), 1, 1)
    looped = by_loop(group, net, images, 8, 2 / 3, 1, 1)
    assert (batched - looped).abs().max() <= 1e-5 * looped.abs().max()


def test_single_images_know_nothing_of_each_other():
    group = ClassGroup(labelled(), range(3), replace(SMALL, method="single"))
    net, images = group.network(0, 0), group.start().images
    one, _, _ = group.image_gradient(net, images, Subset(3, 0), 0, 0)
    other = images.clone()
    other[1:] = 0.5
    two, _, _ = group.image_gradient(net, other, Subset(3, 0), 0, 0)
    assert torch.allclose(one[0], two[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", ["mdc", "dm"])
def test_frozen_pixels_are_unchanged_and_the_others_move(method):
    group = ClassGroup(labelled(), range(3), replace(SMALL, method=method))
    before = group.start()
    after = group.run(before, Subset(3, 2), 0, 1)
    assert torch.equal(after.images[:2], before.images[:2])
    assert not torch.equal(after.images[2], before.images[2])
    assert after.images.min() >= 0
    assert after.images.max() <= 1


def test_a_group_does_not_depend_on_the_other_groups():
    real = labelled()
    alone = ClassGroup(real, [1], SMALL)
    batch, draws = alone.real_batch(2, 1)
    whole, all_draws = ClassGroup(real, range(3), SMALL).real_batch(2, 1)
    assert torch.equal(batch[:, 0], whole[:, 1])
    assert np.array_equal(draws[0], all_draws[1])


def test_most_learnable_subset_is_where_the_distance_moves_most():
    assert most_learnable(np.array([3.0, 2.0, 1.0]), np.array([2.9, 1.5, 1.2])) == 2
    assert most_learnable(np.array([1.0, 1.0]), np.array([0.0, 2.0])) == 1  # the smaller of equals


def test_subset_starts_at_one_and_freezes_the_largest_earlier_one_below():
    assert subset_of([]) == Subset(1, 0)
    assert subset_of([1, 1]) == Subset(1, 0)
    assert subset_of([1, 4]) == Subset(4, 1)
    assert subset_of([4, 2]) == Subset(2, 1)
    assert subset_of([3, 5, 7, 6]) == Subset(6, 5)


def test_choices_are_made_at_the_end_of_whole_intervals():
    chunks = [
        Chunk(0, 2, 0, [4, 4], 1, 0),
        Chunk(2, 4, 0, [4, 2], 1, 0),  # first interval: 4, 3
        Chunk(4, 8, 0, [4, 1], 1, 0),
        Chunk(8, 10, 0, [0, 1], 2, 1),
    ]
    assert choices(chunks[:2], 4) == []
    assert choices(chunks[:3], 4) == [2]
    assert choices(chunks, 4) == [2]


def test_interval_and_chunks_do_not_cross_a_choice():
    assert replace(SMALL, outer=2000, select_every=0).interval == 100
    assert list(replace(SMALL, outer=30, select_every=12).chunks()) == [(0, 10), (10, 12), (12, 22), (22, 24), (24, 30)]  # fmt: skip


class Stopped(Exception):
    pass


def test_resuming_equals_an_undisturbed_run(kept, tmp_path, in_process, monkeypatch):
    with group_workers(ClusterConfig(), 2) as pool:
        config = replace(SMALL, classes_per_group=2)
        whole = condense(kept, str(tmp_path / "whole"), CLASSES, config, pool)
        assert whole.images.shape == (3, 3, 3, 8, 8)
        run, calls = ClassGroup.run, []

        def stops(self, *args):
            calls.append(args)
            if len(calls) == 4:  # in the second group of the second chunk
                raise Stopped
            return run(self, *args)

        monkeypatch.setattr(ClassGroup, "run", stops)
        with pytest.raises(Stopped):
            condense(kept, str(tmp_path / "broken"), CLASSES, config, pool)
        again = condense(kept, str(tmp_path / "broken"), CLASSES, config, pool)
    assert len(calls) == 1 + 2 * 4  # nothing that was committed is computed again
    assert whole.images.numpy().tobytes() == again.images.numpy().tobytes()
    assert whole.chunks == again.chunks


def test_state_survives_its_file():
    state = ClassGroup(labelled(), range(2), SMALL).start()
    back = GroupState.from_bytes(state.to_bytes())
    assert torch.equal(back.images, state.images)
    assert back.to_bytes() == state.to_bytes()


def test_pixels_survive_quantisation():
    data = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    assert np.array_equal(to_bytes(to_unit(data)), data)


def test_a_class_with_too_few_images_is_named():
    with pytest.raises(ValueError, match="class 'a' has 2 images, 12 are needed"):
        ClassGroup(labelled(2), range(3), SMALL)


@pytest.mark.parametrize(
    "wrong", [{"method": "mcd"}, {"image_size": 9}, {"outer": 0}, {"image_lr": 0.0}, {"depth": 9}]
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong)) if 'depth' not in wrong else 'depth'}="):
        replace(SMALL, **wrong)

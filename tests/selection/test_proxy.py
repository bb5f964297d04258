"""The proxy: what it reads as labelled images, in which order it is shown them, that it learns and repeats."""

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from pipeline.errors import Refused
from selection.proxy import (
    LabelConfig,
    LabelledImages,
    ProxyConfig,
    accuracy,
    augment,
    batches,
    build_net,
    epochs,
    load_images,
    rounds_order,
    train_proxy,
)
from selection.rounds import Rounds
from tests import build

CONFIG = ProxyConfig(width=4, batch_size=16, image_size=16, crop=2)


def coloured(n, classes=3, seed=0):
    """Images whose class is their brightest channel."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    images = rng.integers(0, 160, (n, 16, 16, 3), dtype=np.uint8)
    images[np.arange(n), :, :, labels] += 60
    uids = np.zeros(n, "u8,u8")
    return LabelledImages(images, labels, ("red", "green", "blue"), uids, np.ones(n, np.int64))


def trained(images, seed=0, steps=30, **options):
    order = batches(epochs(np.arange(len(images)), seed), CONFIG.batch_size)
    return train_proxy(images, order, steps, seed=seed, config=CONFIG, **options)


def test_it_learns_counts_what_it_saw_and_repeats_to_the_bit():
    images, test = coloured(200), coloured(100, seed=1)
    one = trained(images, test=test, evaluations=3)
    assert [(p.step, p.samples, p.unique) for p in one.points] == [
        (10, 160, 160),
        (20, 320, 200),
        (30, 480, 200),
    ]
    assert one.points[-1].accuracy == accuracy(one.model, test) > 0.8
    assert one.unique == 200
    assert len(one.step_seconds) == 30
    assert one.points[-1].seconds == pytest.approx(one.seconds)
    two, other = trained(images), trained(images, seed=1)
    weights = [torch.cat([p.flatten() for p in t.model.parameters()]) for t in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_training_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trained(coloured(50), steps=2)
    assert torch.equal(torch.rand(3), expected)


def test_what_does_not_fit_is_refused():
    images = coloured(40)
    with pytest.raises(ValueError, match="ended after 2 of 5 steps"):
        train_proxy(images, batches([np.arange(40)], 16), 5, seed=0, config=CONFIG)
    with pytest.raises(ValueError, match="image_size=32: the images are 16x16"):
        train_proxy(images, [], 1, seed=0)
    with pytest.raises(ValueError, match="no images to judge with"):
        accuracy(trained(images, steps=1).model, images.take([]))


@pytest.mark.parametrize(
    "wrong", [{"arch": "vit"}, {"width": 0}, {"lr": 0}, {"momentum": 1}, {"crop": 32}, {"weight_decay": -1}]
)
def test_config_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        ProxyConfig(**wrong)


@pytest.mark.parametrize("arch", ["resnet9", "convnet"])
def test_networks_give_logits_at_any_size(arch):
    for side in (16, 32):
        net = build_net(arch, classes=7, width=4, image_size=side)
        assert net(torch.zeros(2, 3, side, side)).shape == (2, 7)


def test_batches_join_epochs_and_every_epoch_has_every_row_once():
    stream = batches(epochs(np.arange(10), 3), 4)
    seen = np.concatenate([next(stream) for _ in range(5)])
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()


def test_rounds_order_shows_each_round_whole():
    rounds = Rounds([5, 8, 7], "0.3", 4)
    stream = rounds_order(rounds, np.arange(100, 120), 4)
    first = {0: 100, 1: 105, 2: 113}
    for t in range(5):
        expected = [first[s] + m for s, members in rounds.all_members(t) for m in members.tolist()]
        assert sorted(next(stream).tolist()) == expected


def test_augmentation_shifts_and_mirrors_without_inventing_pixels():
    pixels = coloured(64).images
    assert np.array_equal(augment(pixels, 0, False, np.random.default_rng(0)), pixels)
    mirrored = augment(pixels, 0, True, np.random.default_rng(0))
    for before, after in zip(pixels, mirrored):
        assert np.array_equal(before, after) or np.array_equal(before[:, ::-1], after)
    shifted = augment(pixels, 3, False, np.random.default_rng(0))
    for before, after in zip(pixels, shifted):
        inner = after[3:-3, 3:-3]
        found = [
            (i, j)
            for i in range(7)
            for j in range(7)
            if np.array_equal(before[i : i + 10, j : j + 10], inner)
        ]
        assert found


def shard(path, rows):
    """rows: (caption, label or None), one sample each."""
    samples = []
    for n, (caption, label) in enumerate(rows):
        record = {"uid": build.uid(n)} | ({} if label is None else {"label": label})
        samples.append(build.sample(n, record=record, txt=caption.encode()))
    return build.make_shard(path, samples)


def test_labels_come_from_the_label_field_or_from_the_caption(tmp_path):
    path = shard(
        tmp_path / "0.tar", [("a cat", 1), ("A DOG and a cat-fish", 0), ("catty", 1), ("a hot dog", None)]
    )
    by_label = load_images(path, image_size=16)
    assert by_label.classes == ("0", "1")
    assert by_label.labels.tolist() == [1, 0, 1]
    assert by_label.skipped == {"no_text": 1}
    assert by_label.images.shape == (3, 16, 16, 3)
    assert by_label.uids[0].item() == build.halves(build.uid(0))
    names = LabelConfig(field="caption", classes=["cat", "dog", "hot dog", "cat-fish"])
    by_caption = load_images(path, names, image_size=16)
    assert [by_caption.classes[i] for i in by_caption.labels] == ["cat", "cat-fish", "hot dog"]
    named = load_images(path, LabelConfig(classes=["dog", "cat"]))
    assert [named.classes[i] for i in named.labels] == ["cat", "dog", "cat"]


def test_tables_and_folders_of_images_have_labels_too(tmp_path):
    path = tmp_path / "test.parquet"
    pl.DataFrame({"jpg": [build.jpeg(seed=i) for i in range(3)], "label": [2, 0, 10]}).write_parquet(path)
    table = load_images(str(path))
    assert table.classes == ("0", "2", "10")
    assert table.labels.tolist() == [1, 0, 2]
    for i, name in enumerate(["dog", "cat"]):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9), (i, 0, 0)).save(tmp_path / "set" / name / f"x{i}.png")
    folder = load_images(str(tmp_path / "set"), known=("cat", "dog", "horse"))
    assert folder.classes == ("cat", "dog", "horse")
    assert folder.labels.tolist() == [0, 1]
    with pytest.raises(Refused, match="label '0' is none of the classes"):
        load_images(str(path), known=("cat", "dog"))


def test_a_damaged_image_is_counted_and_a_set_without_labels_is_refused(tmp_path):
    good = build.sample(0, cls=b"x")
    bad = build.sample(1, cls=b"x", jpg=build.jpeg()[:200])
    path = build.make_shard(tmp_path / "0.tar", [good, bad])
    images = load_images(path)
    assert len(images) == 1
    assert sum(images.skipped.values()) == 1
    path = build.make_shard(tmp_path / "1.tar", [build.sample(0)])
    with pytest.raises(Refused, match="no image with a label"):
        load_images(path)

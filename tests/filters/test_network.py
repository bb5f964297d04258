"""Training a filter network: loss, schedule, stream, resume, result folder, and that it learns."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from open_clip.loss import ClipLoss
from open_clip.transform import PreprocessCfg
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import normalize

from filters.network import loop as training
from filters.network.augment import AugmentConfig, augment
from filters.network.captions import Captioner, CaptionsConfig
from filters.network.config import TrainConfig, TrainSpec
from filters.network.data import DataConfig, Position, TrustedPairs
from filters.network.evaluate import auc, judge
from filters.network.loop import CHECKPOINT
from filters.network.loss import contrastive_loss
from filters.network.optim import adamw, learning_rate
from filters.network.recipe import Finetune, train_recipe
from filters.network.result import WEIGHTS
from filters.network.train import train_network
from pipeline.decode import DecodeConfig, Decoder
from pipeline.errors import Refused, WinnowError
from pipeline.samples import PoolConfig
from pipeline.scorer import Scorer, ScorerConfig

ROOT = Path(__file__).parents[2]
TINY_MODEL = {
    "embed_dim": 32,
    "vision_cfg": {
        "timm_model_name": "test_resnet", "timm_model_pretrained": False, "timm_pool": "avg",
        "timm_proj": "linear", "image_size": 32,
    },
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}  # fmt: skip
with tempfile.TemporaryDirectory() as configs:
    (Path(configs) / "tiny-test.json").write_text(json.dumps(TINY_MODEL))
    open_clip.add_model_config(configs)
COLOURS = {
    "red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 50, 220), "yellow": (230, 220, 30),
    "white": (240, 240, 240), "black": (15, 15, 15), "pink": (240, 130, 190), "brown": (120, 70, 30),
}  # fmt: skip
TINY = TrainConfig(
    samples_seen=32 * 8, batch_size=32, warmup=0.2, checkpoint_steps=2, data=DataConfig(held_out=0.2)
)


def square(colour: str, rng: np.random.Generator) -> bytes:
    """A PNG of a coloured square somewhere on grey noise."""
    pixels = rng.integers(90, 150, (32, 32, 3))
    y, x = rng.integers(0, 16, 2)
    pixels[y : y + 16, x : x + 16] = np.clip(COLOURS[colour] + rng.normal(0, 12, 3), 0, 255)
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def write_shard(path: Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, members in enumerate(samples):
            for ext, data in members.items():
                info = tarfile.TarInfo(f"{i:06d}.{ext}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 coloured squares in four shards; the last shard also holds four samples that cannot be read."""
    folder, rng = tmp_path_factory.mktemp("trusted"), np.random.default_rng(0)
    names = list(COLOURS)
    for s in range(4):
        samples = []
        for i in range(60):
            colour = names[(i + s) % len(names)]
            samples.append({"png": square(colour, rng), "txt": f"a {colour} square".encode()})
        if s == 3:
            samples += [
                {"png": square("red", rng)[:200], "txt": b"cut"}, {"txt": b"no image"},
                {"png": square("red", rng), "txt": b" "}, {"png": square("red", rng)},
            ]  # fmt: skip
        write_shard(folder / f"{s:05d}.tar", samples)
    return folder


def spec(out: Path, shards: Path | str, config: TrainConfig = TINY, init: str | None = None) -> TrainSpec:
    return TrainSpec(
        out=str(out), pool=PoolConfig(shards=str(shards)), decode=DecodeConfig(), model="tiny-test", init=init,
        config=config,
    )  # fmt: skip


def train(out: Path, shards: Path | str, config: TrainConfig = TINY, init: str | None = None):
    return train_network(spec(out, shards, config, init))


@pytest.fixture(scope="module")
def trained(trusted: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("trained")
    return out, train(out, trusted, TrainConfig(samples_seen=64 * 40, batch_size=64, data=TINY.data))


def weights(folder: Path) -> bytes:
    return (folder / "open_clip_model.safetensors").read_bytes()


# ---------------------------------------------------------------- loss


def unit(n: int, seed: int) -> torch.Tensor:
    return normalize(torch.randn(n, 16, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_loss_is_clip_loss_when_captions_differ():
    image, text, scale = unit(12, 0).requires_grad_(), unit(12, 1).requires_grad_(), torch.tensor(14.3)
    ours = contrastive_loss(image, text, torch.arange(12), scale)
    theirs = ClipLoss()(image, text, scale)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours, (image, text)), torch.autograd.grad(theirs, (image, text))):
        torch.testing.assert_close(a, b)


def test_equal_captions_are_positives():
    image, text = unit(4, 0), unit(4, 1)
    text[2] = text[0]
    logits = 10 * image @ text.T
    rows, columns = logits.log_softmax(1), logits.log_softmax(0)
    expected = 0.0
    for i, positives in enumerate([[0, 2], [1], [0, 2], [3]]):
        expected -= sum((rows[i, p] + columns[p, i]) / len(positives) for p in positives) / 8
    tokens = torch.tensor([[5, 1], [6, 1], [5, 1], [6, 2]])
    torch.testing.assert_close(contrastive_loss(image, text, tokens, torch.tensor(10.0)), expected)


# ---------------------------------------------------------------- schedule, optimiser, augmentation, figures


def test_learning_rate_rises_then_falls_to_zero():
    rates = [learning_rate(t, 100, 0.1, 2.0) for t in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert 0 < rates[99] < 0.001
    assert np.argmax(rates) == 9
    assert np.all(np.diff(rates[10:]) <= 0)
    assert learning_rate(0, 1, 0.0, 2.0) == 2.0


def test_no_weight_decay_on_norms_biases_and_scale():
    model = open_clip.create_model("tiny-test")
    decayed, free = adamw(model, 0.1).param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert free["weight_decay"] == 0
    assert {"logit_scale", "ln_final.weight", "visual.trunk.bn1.weight"} <= {
        names[id(p)] for p in free["params"]
    }
    assert {"token_embedding.weight", "visual.head.proj.weight"} <= {names[id(p)] for p in decayed["params"]}
    assert len(decayed["params"]) + len(free["params"]) == len(names)


def test_augmentation_off_is_identity_and_flip_mirrors():
    images = torch.rand(3, 3, 8, 8) * 255
    assert augment(images, AugmentConfig(min_area=1, flip=0)) is images
    torch.testing.assert_close(
        augment(images, AugmentConfig(min_area=1, flip=1)), images.flip(3), atol=0.01, rtol=0
    )


def test_crops_stay_inside_the_frame():
    ramp = torch.linspace(0, 255, 64).expand(200, 3, 64, 64).clone()
    torch.manual_seed(0)
    out = augment(ramp, AugmentConfig(min_area=0.25, flip=0))
    span = out[:, 0, 0, -1] - out[:, 0, 0, 0]
    assert (out.diff(dim=3) > -1e-3).all()
    assert span.min() > 255 * 0.4
    assert span.min() < 255 * 0.7


def test_auc_and_accuracy():
    assert auc(np.array([3.0, 1.0]), np.array([0.0, 1.0, 2.0])) == pytest.approx((3 + 1.5) / 6)
    eye = np.eye(4)
    figures = judge(eye, eye[[0, 1, 3, 2]], np.array([0, 1, 2, 3]))
    assert (figures.accuracy, figures.pairs, figures.captions) == (0.5, 4, 4)
    assert judge(eye, eye, np.zeros(4, int)).auc is None


# ---------------------------------------------------------------- stream


def stream(folder: Path, **config) -> TrustedPairs:
    decoder = Decoder(DecodeConfig(), PreprocessCfg(size=32))
    return TrustedPairs(
        PoolConfig(shards=str(folder)), decoder, open_clip.get_tokenizer("tiny-test"), DataConfig(**config)
    )


def drawn(pairs: TrustedPairs, size: int, n: int, position: Position = Position()):  # noqa: B008
    batches = pairs.batches(size, position)
    out = [next(batches) for _ in range(n)]
    batches.close()
    return [hash(b.pairs.images.numpy().tobytes() + b.pairs.tokens.numpy().tobytes()) for b, _ in out], [
        p for _, p in out
    ]


@pytest.mark.parametrize("cache_bytes", [0, 300_000, 1 << 30])
def test_stream_is_the_same_from_memory_and_disk_and_from_any_position(trusted: Path, cache_bytes: int):
    whole, positions = drawn(stream(trusted, window=90, cache_bytes=1 << 30), 32, 18)
    pairs = stream(trusted, window=90, cache_bytes=cache_bytes)
    again, _ = drawn(pairs, 32, 18)
    assert again == whole
    assert len(set(whole)) == 18
    assert sum(p.nbytes for p in pairs._cache.values()) <= cache_bytes
    for k in (1, 6, 13):
        rest, _ = drawn(stream(trusted, window=90, cache_bytes=cache_bytes), 32, 18 - k, positions[k - 1])
        assert rest == whole[k:]


def test_an_epoch_takes_each_pair_once_and_never_a_held_out_one(trusted: Path):
    pairs = stream(trusted, held_out=0.3)
    held_out = pairs.held_out()
    batch, position = next(pairs.batches(1000, Position()))
    assert position == Position(epoch=1)
    images = {x.numpy().tobytes() for x in batch.pairs.images}
    kept_apart = {x.numpy().tobytes() for x in held_out.pairs.images}
    report = pairs.report()
    assert len(images) == len(batch.pairs.images) == report["trained_on"]
    assert len(kept_apart) == len(held_out.pairs.images) == report["held_out"]
    assert not images & kept_apart
    assert 45 < len(kept_apart) < 100
    assert len(stream(trusted, held_out=0.3, held_out_limit=30).held_out().pairs.images) == 30
    assert stream(trusted, held_out=0).held_out() is None


def test_rejected_samples_are_counted_by_reason(trusted: Path):
    pairs = stream(trusted, held_out=0)
    next(pairs.batches(100, Position()))
    report = pairs.report()
    assert report["rejected"] == {
        "empty_caption": 1, "missing_caption": 1, "missing_image": 1, "truncated_image": 1
    }  # fmt: skip
    assert report["trained_on"] == 240
    assert report["damaged_shards"] == {}


def test_damaged_and_missing_shards(trusted: Path, tmp_path: Path):
    for s in (0, 1, 3):
        (tmp_path / f"{s:05d}.tar").write_bytes((trusted / f"{s:05d}.tar").read_bytes())
    with pytest.raises(Refused, match=r"1 shards are missing.*00002\.tar"):
        stream(tmp_path)
    (tmp_path / "00002.tar").write_bytes(b"<html>not found</html>")
    cut = (trusted / "00000.tar").read_bytes()
    (tmp_path / "00000.tar").write_bytes(cut[: len(cut) // 2 // 512 * 512 + 100])
    (tmp_path / "sizes.json").write_text(json.dumps({f"{s:05d}.tar": 60 + 4 * (s == 3) for s in range(4)}))
    pairs = stream(tmp_path, held_out=0)
    next(pairs.batches(1000, Position()))
    report = pairs.report()
    assert report["rejected"]["unreadable_shard"] == 60
    assert report["trained_on"] + sum(report["rejected"].values()) == 244
    assert [Path(p).name for p in report["damaged_shards"]] == ["00000.tar", "00002.tar"]


def test_nothing_to_train_on_is_an_error(tmp_path: Path):
    write_shard(tmp_path / "0.tar", [{"txt": b"no image"}])
    with pytest.raises(WinnowError, match="missing_image"):
        train(tmp_path / "out", tmp_path / "0.tar")


# ---------------------------------------------------------------- training


def test_it_learns_colours(trained):
    out, result = trained
    assert result.held_out.auc > 0.95
    assert result.held_out.captions == 8
    curve = [row.split(",") for row in (out / "curve.csv").read_text().splitlines()[1:]]
    measured = {int(row[0]): float(row[5]) for row in curve if row[5]}
    assert result.held_out.auc == max(measured.values()) == measured[result.weights_of_step]
    assert result.pairs["rejected"]["missing_image"] == 1


def test_result_folder_is_open_clips(trained, trusted: Path):
    out, result = trained
    assert {"open_clip_config.json", "curve.csv", "curve.png", "train.json"} <= set(os.listdir(out))
    assert CHECKPOINT not in os.listdir(out)
    curve = (out / "curve.csv").read_text().splitlines()
    assert curve[0] == "step,samples_seen,learning_rate,loss,logit_scale,held_out_auc"
    assert curve[-1].startswith(f"{result.steps},{result.samples_seen},")
    pixels = stream(trusted, held_out=0.3).held_out().pairs.images[:20]
    captions = ["a red square", "a blue square"] * 10
    image, text, cosine = Scorer(ScorerConfig(weights=str(out), precision="fp32")).embed(pixels, captions)
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{out}")
    model.eval()
    with torch.no_grad():
        frames = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pixels]
        theirs = model.encode_image(torch.stack([preprocess(f) for f in frames]), normalize=True)
        words = model.encode_text(open_clip.get_tokenizer(f"local-dir:{out}")(captions), normalize=True)
    np.testing.assert_allclose(image, theirs.numpy(), atol=1e-5)
    np.testing.assert_allclose(text, words.numpy(), atol=1e-5)
    np.testing.assert_allclose(cosine, (theirs * words).sum(1).numpy(), atol=1e-5)


def test_a_complete_folder_is_left_alone_and_other_settings_are_refused(trained, trusted: Path):
    out, result = trained
    before = weights(out)
    config = TrainConfig(samples_seen=64 * 40, batch_size=64, data=TINY.data)
    assert train(out, trusted, config).request == result.request
    with pytest.raises(Refused, match="other settings"):
        train(out, trusted, TINY)
    assert weights(out) == before


def test_init_from_a_result_folder(trained, trusted: Path, tmp_path: Path):
    out, _ = trained
    config = TrainConfig(samples_seen=64, batch_size=64, lr=1e-9, weight_decay=0, data=TINY.data)
    result = train(tmp_path, trusted, config, init=str(out))
    assert result.held_out.auc > 0.9


def test_a_set_smaller_than_a_batch(trusted: Path, tmp_path: Path):
    result = train(tmp_path, trusted / "00000.tar", TrainConfig(samples_seen=2000, batch_size=1000))
    assert result.steps == 2
    assert result.samples_seen == 2 * result.pairs["trained_on"]
    assert result.pairs["trained_on"] + result.pairs["held_out"] == 60


KILLED = """
import os, sys
from pathlib import Path
from filters.network.loop import Loop
from tests.filters import test_network
save = Loop._save
def save_and_tell(self):
    save(self)
    print(self.step, flush=True)
    if self.step == 4:
        sys.stdin.read()  # until the test kills this process
Loop._save = save_and_tell
test_network.train(Path(sys.argv[1]), sys.argv[2])
"""


def test_killed_and_restarted_gives_the_same_weights(trusted: Path, tmp_path: Path):
    undisturbed = train(tmp_path / "a", trusted)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "b"), str(trusted)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert [child.stdout.readline().strip() for _ in range(2)] == ["2", "4"]
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "b" / "train.json").exists()
    resumed = train(tmp_path / "b", trusted)
    assert weights(tmp_path / "b") == weights(tmp_path / "a")
    assert (tmp_path / "b" / "curve.csv").read_bytes() == (tmp_path / "a" / "curve.csv").read_bytes()
    assert resumed.held_out == undisturbed.held_out
    assert resumed.pairs == undisturbed.pairs


@pytest.mark.parametrize(
    ("key", "complaint"), [("request", "other settings"), ("shards", "shards have changed")]
)
def test_a_checkpoint_of_something_else_is_refused(
    trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, complaint: str
):
    monkeypatch.setattr(training.result, "write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, trusted)
    state = torch.load(tmp_path / CHECKPOINT)
    torch.save(state | {key: {"model": "other"}}, tmp_path / CHECKPOINT)
    with pytest.raises(Refused, match=complaint):
        train(tmp_path, trusted)


def interrupted(*_args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 1),
        ("samples_seen", 10),
        ("lr", 0.0),
        ("warmup", 1.0),
        ("precision", "fp16"),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_name_themselves(key: str, value):
    with pytest.raises(ValueError, match=f"{key}={value}"):
        TrainConfig(**{key: value})


# ---------------------------------------------------------------- captions, stages


def labelled(folder: Path) -> Path:
    """Squares with a label in place of a caption; every fifth has no label either."""
    rng, names = np.random.default_rng(3), list(COLOURS)
    samples = []
    for i in range(60):
        label = {} if i % 5 == 4 else {"cls": str(i % len(names)).encode()}
        samples.append({"png": square(names[i % len(names)], rng)} | label)
    write_shard(folder / "labelled.tar", samples)
    return folder / "labelled.tar"


def test_labels_become_sentences(tmp_path: Path):
    config = CaptionsConfig(class_names=list(COLOURS), templates=["a {} square", "{}, painted"])
    decoder, tokenizer = Decoder(DecodeConfig(), PreprocessCfg(size=32)), open_clip.get_tokenizer("tiny-test")
    pool, data = PoolConfig(shards=str(labelled(tmp_path))), DataConfig(held_out=0)
    pairs = TrustedPairs(pool, decoder, tokenizer, data, captioner=Captioner(config))
    batch, _ = next(pairs.batches(100, Position()))
    sentences = tokenizer([t.format(c) for c in COLOURS for t in ("a {} square", "{}, painted")])
    seen = {tuple(row.tolist()) for row in batch.pairs.tokens}
    assert seen <= {tuple(row.tolist()) for row in sentences}
    assert len(seen) > len(COLOURS)
    assert pairs.report()["rejected"] == {"missing_caption": 12}


def test_class_names_and_templates(tmp_path: Path):
    assert len(CaptionsConfig(class_names="imagenet").names()) == 1000
    assert len(CaptionsConfig(class_names="imagenet").sentences()) == 80
    (tmp_path / "names.txt").write_text("cat\n\nsea lion\n")
    captioner = Captioner(CaptionsConfig(class_names=str(tmp_path / "names.txt"), templates="simple"))
    assert [captioner.label(x) for x in ("0", "sea lion", "2", None)] == [0, 1, None, None]
    with pytest.raises(Refused, match="neither imagenet nor a file"):
        CaptionsConfig(class_names="/no/such/file").names()
    with pytest.raises(ValueError, match="each must have"):
        CaptionsConfig(class_names=["cat"], templates=["a photo"])


def test_stages_and_their_average(trained, trusted: Path, tmp_path: Path):
    first = spec(tmp_path, trusted, replace(TINY, samples_seen=320, lr=1e-3), init=str(trained[0]))
    captions = CaptionsConfig(class_names=list(COLOURS), templates=["a {} square"])
    second = replace(
        first, pool=PoolConfig(shards=[str(trusted), str(labelled(tmp_path))]), captions=captions,
        config=replace(TINY, samples_seen=320, lr=1e-3),
    )  # fmt: skip
    result = train_recipe(first, Finetune(spec=second, average=0.25))
    a, b, mixed = (load_file(tmp_path / f / WEIGHTS) for f in ("pretrained", "finetuned", "."))
    for key in ("visual.head.proj.weight", "token_embedding.weight", "logit_scale"):
        torch.testing.assert_close(mixed[key], 0.75 * a[key] + 0.25 * b[key])
    assert result.steps == 20
    figures = json.loads((tmp_path / "recipe.json").read_text())["held_out_of_finetuning"]
    assert figures["average"]["auc"] == result.held_out.auc > 0.9
    assert figures.keys() == {"pretrained", "finetuned", "average"}
    before = weights(tmp_path)
    assert train_recipe(first, Finetune(spec=second, average=0.25)).held_out == result.held_out
    assert weights(tmp_path) == before
    with pytest.raises(Refused, match=r"other settings \(average\)"):
        train_recipe(first, Finetune(spec=second, average=0.5))

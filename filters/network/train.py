"""Training a data filtering network (Fang et al., ICLR 2024, section 3): a CLIP model on trusted pairs.

Everything random in step t is a function of (seed, t), and the stream of batches can be entered at any
position. A training that is killed and started again therefore ends with the weights of an undisturbed
one: to the bit on a CPU, on a GPU as far as its kernels are deterministic.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
from open_clip.transform import PreprocessCfg
from torch.nn.functional import normalize

from filters.network import result
from filters.network.augment import AugmentConfig, augment
from filters.network.data import DataConfig, Pairs, Position, Tally, TrustedPairs
from filters.network.evaluate import HeldOut, judge
from filters.network.loss import contrastive_loss
from filters.network.optim import adamw, clamp_logit_scale, learning_rate
from filters.network.result import CurvePoint, TrainResult
from pipeline import storage
from pipeline.decode import DecodeConfig, Decoder
from pipeline.errors import Refused, WinnowError
from pipeline.progress import Progress
from pipeline.samples import PoolConfig
from pipeline.scorer import PRECISIONS, fetched, load_open_clip

CHECKPOINT = "checkpoint.pt"
CURVE_POINTS = 100
EVALUATIONS = 20
LR_FROM_RANDOM, LR_FROM_INIT = 2e-3, 1e-5


@dataclass(kw_only=True)
class TrainConfig:
    """How long and how the network is trained.

    samples_seen: pairs drawn in all, each as often as it takes; this, and not the size of the trusted set,
    is what training costs. batch_size: pairs a step, or all where they are fewer; every other caption of
    the batch is a negative.
    lr: peak of the learning rate; null is 2e-3 from random weights and 1e-5 from `init`. warmup: share of
    the steps in which it rises. weight_decay: what counts is lr * weight_decay * steps, so take less (CLIP:
    0.2) for runs of many thousand steps. clip_norm: bound of the gradient's norm.
    precision: auto is bf16 on a GPU and fp32 on a CPU. checkpoint_steps: a killed training goes on from
    the last multiple of these.
    """

    samples_seen: int = 160_000
    batch_size: int = 256
    lr: float | None = None
    weight_decay: float = 1.0
    warmup: float = 0.05
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "auto"
    checkpoint_steps: int = 250
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 2, one pair has no negatives")
        if self.samples_seen < self.batch_size:
            raise ValueError(
                f"samples_seen={self.samples_seen}: must be at least batch_size={self.batch_size}"
            )
        if self.lr is not None and not 0 < self.lr <= 1:
            raise ValueError(f"lr={self.lr}: must be above 0 and at most 1, or null")
        if not 0 <= self.weight_decay <= 10:
            raise ValueError(f"weight_decay={self.weight_decay}: must be between 0 and 10")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup}: must be at least 0 and below 1 (a share of the steps)")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}: must be above 0 (inf: no bound)")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be at least 0")
        if self.precision not in ("auto", *PRECISIONS) or self.precision == "fp16":
            raise ValueError(f"precision={self.precision}: must be auto, fp32 or bf16")
        if self.checkpoint_steps < 1:
            raise ValueError(f"checkpoint_steps={self.checkpoint_steps}: must be at least 1")

    @property
    def steps(self) -> int:
        return self.samples_seen // self.batch_size


def train_network(
    out: str, *, pool: PoolConfig, decode: DecodeConfig, model: str, init: str | None, config: TrainConfig
) -> TrainResult:
    """Train on the trusted pairs of `pool` and leave the network in the folder `out` (see `result`).

    The result are the weights of the evaluation with the best held-out AUC, since a small trusted set is
    soon known by heart; those of the last step where no pairs are held out.

    model: an open_clip model name. init: None (random weights), an open_clip tag of `model`, a file, or a
    folder or `hf-hub:org/repo`, which bring their own architecture. A folder that is already complete is
    returned as it is; one with a checkpoint is gone on with. Raises Refused when either belongs to other
    settings, when shards are missing or the model cannot be had; WinnowError when the loss diverges or
    nothing can be read. Seeds torch's global generator.
    """
    out = storage.absolute(out, "out")
    request = _request(pool, decode, model, init, config)
    if done := result.read_summary(out):
        _same(out, request, done.request)
        return done
    with storage.lock(out):
        training = _Training(out, request, pool, decode, model, init, config)
        try:
            return training.run()
        finally:
            training.pairs.close()


def _request(
    pool: PoolConfig, decode: DecodeConfig, model: str, init: str | None, config: TrainConfig
) -> dict[str, Any]:
    """All settings that decide the weights, as plain values."""
    settings = asdict(config)
    del settings["checkpoint_steps"], settings["data"]["cache_bytes"]
    return {
        "shards": pool.shards,
        "pool": pool.reading(),
        "decode": asdict(decode),
        "model": model,
        "init": init,
        "train": settings,
    }


def _same(out: str, request: dict[str, Any], found: dict[str, Any]) -> None:
    if request != found:
        changed = sorted(k for k in request if request[k] != found.get(k))
        raise Refused(
            f"out={out} holds a training with other settings ({', '.join(changed)}); choose another folder"
        )


class _Best(NamedTuple):
    """The weights (on the CPU) that did best on the held-out pairs so far."""

    step: int = 0
    auc: float = 0.0
    weights: dict[str, torch.Tensor] | None = None


class _Training:
    """One network in training: model, optimiser, stream of pairs, and where in it the next step is."""

    def __init__(
        self, out: str, request: dict[str, Any], pool: PoolConfig, decode: DecodeConfig, model: str,
        init: str | None, config: TrainConfig,
    ) -> None:  # fmt: skip
        self.out, self.request, self.config = out, request, config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.precision = config.precision
        if self.precision == "auto":
            self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        torch.manual_seed(config.seed)
        torch.backends.cudnn.deterministic = True
        with contextlib.ExitStack() as stack:
            weights = stack.enter_context(fetched(init)) if init else None
            network: Any
            network, self.architecture, self.tokenizer = load_open_clip(model, weights)
        self.model = network.to(self.device).to(memory_format=torch.channels_last)
        self.optimizer = adamw(self.model, config.weight_decay)
        self.peak = config.lr or (LR_FROM_INIT if init else LR_FROM_RANDOM)
        preprocess = PreprocessCfg(**network.visual.preprocess_cfg)
        self.mean, self.std = (
            torch.tensor(v, device=self.device).view(1, -1, 1, 1) * 255
            for v in (preprocess.mean, preprocess.std)
        )
        decoder = Decoder(decode, preprocess)
        self.pairs = TrustedPairs(pool, decoder, self.tokenizer, config.data, config.seed)
        self.held_out = self.pairs.held_out()
        self.step, self.seen, self.position, self.seconds = 0, 0, Position(), 0.0
        self.curve: list[CurvePoint] = []
        self.best = _Best()
        self._losses: list[float] = []
        self._began = time.monotonic()

    def run(self) -> TrainResult:
        self._resume()
        steps = self.config.steps
        batches = self.pairs.batches(self.config.batch_size, self.position)
        with contextlib.closing(batches), Progress("train", steps, "step", self.step) as progress:
            while self.step < steps:
                batch, self.position = next(batches)
                loss = self._update(batch)
                progress.step(len(batch.images), note=f"loss {loss:.3f}")
                if self.step % self.config.checkpoint_steps == 0 and self.step < steps:
                    self._save()
        return self._finish()

    def _update(self, batch: Pairs) -> float:
        """One step of the optimiser; returns its loss."""
        config, step = self.config, self.step
        rate = learning_rate(step, config.steps, config.warmup, self.peak)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(int(np.random.SeedSequence([config.seed, step]).generate_state(1)[0]))
        self.model.train()
        image, text = self._embed(batch, config.augment)
        loss = contrastive_loss(image, text, batch.tokens.to(self.device), self.model.logit_scale.exp())
        value = loss.item()
        if not math.isfinite(value):
            raise WinnowError(f"the loss is {value} at step {step}: lower train.lr={self.peak:g}")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        clamp_logit_scale(self.model)
        self.step += 1
        self.seen += len(batch.images)
        self._losses.append(value)
        self._record(rate)
        return value

    def _embed(self, batch: Pairs, config: AugmentConfig | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit image and text embeddings, float32 (n, d); equal captions go through the text tower once."""
        distinct, inverse = torch.unique(batch.tokens, dim=0, return_inverse=True)
        images = batch.images.to(self.device, non_blocking=True).float()
        if config is not None:
            images = augment(images, config)
        images = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        dtype = PRECISIONS[self.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            image = self.model.encode_image(images)
            text = self.model.encode_text(distinct.long().to(self.device))
        return normalize(image.float(), dim=1), normalize(text.float(), dim=1)[inverse.to(self.device)]

    def _record(self, rate: float) -> None:
        """Add a point to the curve when one is due; every fifth or so also measures the held-out AUC."""
        steps = self.config.steps
        if not _due(self.step, steps, CURVE_POINTS):
            return
        figures = self._judge() if _due(self.step, steps, EVALUATIONS) else None
        if figures and figures.auc is not None and figures.auc >= self.best.auc:
            self.best = _Best(self.step, figures.auc, _on_cpu(self.model))
        self.curve.append(
            CurvePoint(
                step=self.step,
                samples_seen=self.seen,
                learning_rate=rate,
                loss=float(np.mean(self._losses)),
                logit_scale=self.model.logit_scale.exp().item(),
                held_out_auc=figures.auc if figures else None,
            )
        )
        self._losses.clear()

    def _judge(self) -> HeldOut | None:
        if self.held_out is None:
            return None
        self.model.eval()
        with torch.no_grad():
            parts = [self._embed(p, None) for p in _split(self.held_out, self.config.batch_size)]
        image, text = (torch.cat(x).cpu().numpy() for x in zip(*parts))
        captions = torch.unique(self.held_out.tokens, dim=0, return_inverse=True)[1]
        return judge(image, text, captions.numpy())

    def _save(self) -> None:
        state = {
            "request": self.request,
            "shards": self.pairs.digest,
            "step": self.step,
            "seen": self.seen,
            "position": tuple(self.position),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "curve": [asdict(p) for p in self.curve],
            "best": tuple(self.best),
            "losses": self._losses,
            "tallies": {k: asdict(t) for k, t in list(self.pairs.tallies.items())},
            "seconds": self._seconds(),
        }
        with storage.commit(storage.join(self.out, CHECKPOINT)) as tmp:
            torch.save(state, tmp)

    def _resume(self) -> None:
        path = storage.join(self.out, CHECKPOINT)
        if not storage.exists(path):
            return
        with storage.local_copy(path) as local:
            state = torch.load(local, map_location=self.device, weights_only=True)
        _same(self.out, self.request, state["request"])
        if state["shards"] != self.pairs.digest:
            raise Refused(
                f"out={self.out}: the shards have changed since its checkpoint; choose another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seen, self.seconds = state["step"], state["seen"], state["seconds"]
        self.position = Position(*state["position"])
        self.curve = [CurvePoint(**p) for p in state["curve"]]
        self.best = _Best(*state["best"])
        self._losses = state["losses"]
        self.pairs.tallies = {k: Tally(**t) for k, t in state["tallies"].items()}

    def _finish(self) -> TrainResult:
        if self.best.weights:
            self.model.load_state_dict(self.best.weights)
        summary = TrainResult(
            request=self.request,
            pairs=self.pairs.report(),
            steps=self.step,
            samples_seen=self.seen,
            parameters=sum(p.numel() for p in self.model.parameters()),
            device=_device_name(self.device),
            precision=self.precision,
            seconds=round(self._seconds(), 1),
            loss=self.curve[-1].loss,
            weights_of_step=self.best.step or self.step,
            held_out=self._judge(),
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "open_clip": open_clip.__version__,
            },
        )
        result.write_model(self.out, self.model, self.architecture, self.tokenizer)
        result.write_curve(self.out, self.curve)
        result.write_summary(self.out, summary)
        storage.remove_tree(storage.join(self.out, CHECKPOINT))
        return summary

    def _seconds(self) -> float:
        return self.seconds + time.monotonic() - self._began


def _on_cpu(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().to("cpu", copy=True) for k, v in model.state_dict().items()}


def _due(step: int, steps: int, times: int) -> bool:
    """Is `step` one of `times` points spread evenly over 1 .. steps, the last one included?"""
    return step * times // steps > (step - 1) * times // steps


def _split(pairs: Pairs, size: int) -> Iterator[Pairs]:
    for i in range(0, len(pairs.images), size):
        yield Pairs(pairs.images[i : i + size], pairs.tokens[i : i + size])


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )

"""The training loop, as every worker runs it.

Everything random in step t is a function of (seed, t), and the stream of batches can be entered at any
position. A training that is killed and started again therefore ends with the weights of an undisturbed
one: to the bit on a CPU, on a GPU as far as its kernels are deterministic. With more or fewer workers the
sums of a step are rounded in another order, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
from open_clip.transform import PreprocessCfg

from filters.network import result
from filters.network.augment import augment
from filters.network.batchnorm import synchronise
from filters.network.captions import Captioner
from filters.network.config import TrainSpec
from filters.network.data import Batch, Position, Tally, TrustedPairs
from filters.network.evaluate import HeldOut, judge
from filters.network.loss import contrastive_loss
from filters.network.optim import adamw, clamp_logit_scale, learning_rate
from filters.network.result import CurvePoint, TrainResult
from filters.network.towers import Embeddings, Towers, gradients
from filters.network.world import World
from pipeline import storage
from pipeline.decode import Decoder
from pipeline.errors import Refused, WinnowError
from pipeline.scorer import fetched, load_open_clip

CHECKPOINT = "checkpoint.pt"
CURVE_POINTS = 100
EVALUATIONS = 20
LR_FROM_RANDOM, LR_FROM_INIT = 2e-3, 1e-5


class Told(NamedTuple):
    """What a running training says of itself: steps done of all, and what came with the last of them."""

    step: int
    steps: int
    samples: int = 0
    note: str = ""


class _Best(NamedTuple):
    """The weights (on the CPU) that did best on the held-out pairs so far."""

    step: int = 0
    auc: float = 0.0
    weights: dict[str, torch.Tensor] | None = None


class Loop:
    """One network in training: model, optimiser, stream of pairs, and where in it the next step is."""

    def __init__(self, spec: TrainSpec, world: World) -> None:
        self.spec, self.config, self.world, self.device = spec, spec.config, world, world.device
        config = spec.config
        self.precision = config.precision
        if self.precision == "auto":
            self.precision = "bf16" if self.device.type == "cuda" else "fp32"
        torch.manual_seed(config.seed)
        torch.backends.cudnn.deterministic = True
        with contextlib.ExitStack() as stack:
            weights = stack.enter_context(fetched(spec.init)) if spec.init else None
            network: Any
            network, self.architecture, self.tokenizer = load_open_clip(spec.model, weights)
        if config.grad_checkpointing:
            network.set_grad_checkpointing()
        batch_norm = synchronise(network, world)
        self.model = network.to(self.device).to(memory_format=torch.channels_last)
        width = int(self.architecture["embed_dim"])
        self.towers = Towers(self.model, self.device, self.precision, width, batch_norm)
        self.optimizer = adamw(self.model, config.weight_decay)
        self.peak = config.lr or (LR_FROM_INIT if spec.init else LR_FROM_RANDOM)
        captioner = Captioner(spec.captions) if spec.captions else None
        decoder = Decoder(spec.decode, PreprocessCfg(**network.visual.preprocess_cfg))
        self.pairs = TrustedPairs(
            spec.pool, decoder, self.tokenizer, config.data, config.seed, captioner, world
        )
        self.step, self.seen, self.position, self.seconds = 0, 0, Position(), 0.0
        self.curve: list[CurvePoint] = []
        self.best = _Best()
        self._losses: list[float] = []
        self._began = time.monotonic()

    def run(self, tell: Callable[[Told], None]) -> TrainResult:
        """Train to the end and write the result; `tell` hears of every step."""
        try:
            self.held_out = self.pairs.held_out()
            self._resume()
            steps = self.config.steps
            tell(Told(self.step, steps))
            with contextlib.closing(self.pairs.batches(self.config.batch_size, self.position)) as batches:
                while self.step < steps:
                    batch, self.position = next(batches)
                    loss = self._update(batch)
                    tell(Told(self.step, steps, batch.rows.n, f"loss {loss:.3f}"))
                    if self.step % self.config.checkpoint_steps == 0 and self.step < steps:
                        self._save()
            return self._finish()
        finally:
            self.pairs.close()

    def _update(self, batch: Batch) -> float:
        """One step of the optimiser; returns its loss."""
        config, step = self.config, self.step
        rate = learning_rate(step, config.steps, config.warmup, self.peak)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        self.optimizer.zero_grad()
        value = self.world.sum(self._gradients(batch)).item()
        if not math.isfinite(value):
            raise WinnowError(f"the loss is {value} at step {step}: lower train.lr={self.peak:g}")
        self.world.add_gradients(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        clamp_logit_scale(self.model)
        self.step += 1
        self.seen += batch.rows.n
        self._losses.append(value)
        self._record(rate)
        return value

    def _gradients(self, batch: Batch) -> torch.Tensor:
        """This worker's part of the loss of a batch, and of its gradients."""
        self._seed()
        tokens, images = batch.pairs.tokens, self.images(batch)
        pieces = math.ceil(batch.largest / (self.config.micro_batch or batch.largest))
        cut = list(zip(images.tensor_split(pieces), tokens.tensor_split(pieces)))

        def embed(piece: int) -> Embeddings:
            self._seed(1 + self.world.rank, piece)  # for models with dropout: a piece is embedded twice
            return self.towers.embed(*cut[piece])

        def loss(image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            scale = self.model.logit_scale.exp()
            return contrastive_loss(image, text, tokens.to(self.device), scale, self.world, batch.rows)

        return gradients(embed, pieces, loss)

    def images(self, batch: Batch) -> torch.Tensor:
        """A batch's images as they are trained on, float (n, 3, H, W), values 0 to 255."""
        images = batch.pairs.images.to(self.device, non_blocking=True).float()
        return augment(images, self.config.augment, batch.rows)

    def _seed(self, *part: int) -> None:
        state = np.random.SeedSequence([self.config.seed, self.step, *part]).generate_state(1)
        torch.manual_seed(int(state[0]))

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

    def evaluate(self) -> HeldOut | None:
        """The figures of the network as it is; for use without `run`."""
        self.held_out = self.pairs.held_out()
        return self._judge()

    def _judge(self) -> HeldOut | None:
        if self.held_out is None:
            return None
        (images, tokens), rows, largest = self.held_out
        pieces = math.ceil(largest / (self.config.micro_batch or self.config.batch_size))
        self.model.eval()
        with torch.no_grad():
            parts = [
                self.towers.embed(x.to(self.device).float(), t)
                for x, t in zip(images.tensor_split(pieces), tokens.tensor_split(pieces))
            ]
            image, text = (self.world.gather(torch.cat(x), rows).cpu().numpy() for x in zip(*parts))
            tokens = self.world.gather(tokens.to(self.device), rows).cpu()
        captions = torch.unique(tokens, dim=0, return_inverse=True)[1]
        return judge(image, text, captions.numpy())

    def _save(self) -> None:
        if self.world.rank:
            return
        state = {
            "request": self.spec.request(),
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
        with storage.commit(storage.join(self.spec.out, CHECKPOINT)) as tmp:
            torch.save(state, tmp)

    def _resume(self) -> None:
        path = storage.join(self.spec.out, CHECKPOINT)
        there = storage.exists(path)
        if len(set(self.world.exchange(there))) > 1:
            raise Refused(f"out={self.spec.out}: not all workers see its checkpoint; use shared storage")
        if not there:
            return
        with storage.local_copy(path) as local:
            state = torch.load(local, map_location=self.device, weights_only=True)
        self.spec.check(state["request"])
        if state["shards"] != self.pairs.digest:
            raise Refused(
                f"out={self.spec.out}: the shards have changed since its checkpoint; choose another folder"
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
            request=self.spec.request(),
            pairs=self.pairs.report(),
            steps=self.step,
            samples_seen=self.seen,
            parameters=sum(p.numel() for p in self.model.parameters()),
            workers=self.world.size,
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
        if self.world.rank == 0:
            result.write_model(self.spec.out, self.model, self.architecture, self.tokenizer)
            result.write_curve(self.spec.out, self.curve)
            result.write_summary(self.spec.out, summary)
            storage.remove_tree(storage.join(self.spec.out, CHECKPOINT))
        self.world.exchange("written")  # nobody leaves before the result is there
        return summary

    def _seconds(self) -> float:
        return self.seconds + time.monotonic() - self._began


def _on_cpu(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().to("cpu", copy=True) for k, v in model.state_dict().items()}


def _due(step: int, steps: int, times: int) -> bool:
    """Is `step` one of `times` points spread evenly over 1 .. steps, the last one included?"""
    return step * times // steps > (step - 1) * times // steps


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )

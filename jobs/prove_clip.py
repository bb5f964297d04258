"""The judge of an image-text pool: a small CLIP model, by zero-shot accuracy or by retrieval on held-out pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from open_clip.transform import PreprocessCfg
from torch.nn.functional import normalize

from filters.network.augment import AugmentConfig, augment
from filters.network.evaluate import judge
from filters.network.loss import contrastive_loss
from filters.network.optim import adamw, clamp_logit_scale, learning_rate
from pipeline.errors import Refused
from pipeline.scorer import load_open_clip
from selection.draws import Ints
from selection.proof.labelled import digest
from selection.proxy import LabelledImages, Point, pixels
from selection.proxy.clock import run_steps

PROMPT = "a photo of a {}"
EVALUATION_BATCH = 250


@dataclass(kw_only=True)
class ClipConfig:
    """The CLIP model and its training from random weights, as `filters.network` trains a filter.

    model: an open_clip model name. lr: peak of the rate; the others: see `filters.network.config.TrainConfig`.
    """

    model: str = "small"
    batch_size: int = 128
    lr: float = 2e-3
    weight_decay: float = 1.0
    warmup: float = 0.05
    clip_norm: float = 1.0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ValueError(f"batch_size={self.batch_size}: at least 2, one pair has no negatives")
        if not 0 < self.lr <= 1:
            raise ValueError(f"lr={self.lr}: above 0 and at most 1")
        if not 0 <= self.weight_decay <= 10:
            raise ValueError(f"weight_decay={self.weight_decay}: from 0 to 10")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup}: at least 0 and below 1")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}: above 0")


@dataclass(frozen=True)
class Pairs:
    """Images, uint8 (n, H, W, 3), with the tokens of their captions, int32 (n, length)."""

    images: pixels.Images
    tokens: torch.Tensor


def image_size(config: ClipConfig) -> int:
    """Side of the model's square input, pixels."""
    model, _, _ = load_open_clip(config.model, None)
    size = model.visual.image_size
    return int(size if isinstance(size, int) else size[0])


class ClipJudge:
    """pool: its texts are captions, `copies` tells what the run chose. test: labelled images for zero-shot
    accuracy, or pairs for retrieval: the share of their images whose nearest caption, of all of theirs, is
    their own."""

    def __init__(self, pool: pixels.Images, test: LabelledImages | pixels.Images, config: ClipConfig) -> None:
        self.config = config
        model, _, self.tokenizer = load_open_clip(config.model, None)
        self.preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
        self.pairs = Pairs(pool, self._tokens(pool.texts))
        self.pool, self.batch_size = len(pool), config.batch_size
        self.subset = np.repeat(np.arange(len(pool)), pool.copies)
        self.test = test
        if isinstance(test, LabelledImages):
            if all(name.isdecimal() for name in test.classes):
                raise Refused("labels.classes: name the classes, in the order of their numbers, for prompts")
            self.metric = "zero-shot"
            self.prompts = self._tokens([PROMPT.format(name) for name in test.classes])
        else:
            self.metric = "retrieval"
            self.prompts = self._tokens(test.texts)

    def _tokens(self, texts: Sequence[str]) -> torch.Tensor:
        distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        return self.tokenizer(list(distinct)).to(torch.int32)[[distinct[text] for text in texts]]

    def identity(self, chosen: bool) -> dict[str, Any]:
        parts = [self.pairs.images.uids, self.pairs.tokens.numpy(), self.test.uids, self.prompts.numpy()]
        if isinstance(self.test, LabelledImages):
            parts.append(self.test.labels)
        if chosen:
            parts.append(self.subset)
        return {"clip": asdict(self.config), "data": [digest(part) for part in parts]}

    def train(
        self, rows: Iterator[Ints], steps: int, seed: int, evaluations: int, on_step: Callable[[int], None]
    ) -> list[Point]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            training = _Training(self, steps)
            return run_steps(
                rows,
                steps,
                training.step,
                training.judge,
                rows=self.pool,
                evaluations=evaluations,
                on_step=on_step,
            ).points


class _Training:
    def __init__(self, judge_: ClipJudge, steps: int) -> None:
        self.of, self.config, self.steps = judge_, judge_.config, steps
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network: Any = load_open_clip(self.config.model, None)[0]
        self.model = network.to(self.device).to(memory_format=torch.channels_last).train()
        self.optimizer = adamw(self.model, self.config.weight_decay)
        self.mean, self.std = (
            torch.tensor(v, device=self.device).view(1, -1, 1, 1) * 255
            for v in (judge_.preprocess.mean, judge_.preprocess.std)
        )

    def step(self, rows: Ints, step: int) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.steps, self.config.warmup, self.config.lr)
        images = augment(self._images(self.of.pairs.images.pixels[rows]), self.config.augment)
        tokens = self.of.pairs.tokens[rows].to(self.device)
        distinct, inverse = torch.unique(tokens, dim=0, return_inverse=True)
        image, text = self._embed(images), self._texts(distinct)[inverse]
        loss = contrastive_loss(image, text, tokens, self.model.logit_scale.exp())
        if not math.isfinite(loss.item()):
            raise Refused(f"clip.lr={self.config.lr}: the loss diverged at step {step}; take a smaller rate")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        clamp_logit_scale(self.model)
        return loss.detach()

    @torch.no_grad()
    def judge(self) -> float:
        self.model.eval()
        test = self.of.test
        content = test.images if isinstance(test, LabelledImages) else test.pixels
        starts = range(0, len(content), EVALUATION_BATCH)
        image = torch.cat([self._embed(self._images(content[i : i + EVALUATION_BATCH])) for i in starts])
        distinct, inverse = torch.unique(self.of.prompts, dim=0, return_inverse=True)
        text = self._texts(distinct.to(self.device))[inverse.to(self.device)]
        self.model.train()
        if isinstance(test, LabelledImages):
            nearest = (image @ text.T).argmax(1).cpu().numpy()
            return float((nearest == test.labels).mean())
        return judge(image.cpu().numpy(), text.cpu().numpy(), inverse.numpy()).accuracy

    def _images(self, content: np.ndarray) -> torch.Tensor:
        """float (n, 3, H, W), values 0 to 255."""
        return torch.from_numpy(np.ascontiguousarray(content)).to(self.device).permute(0, 3, 1, 2).float()

    def _embed(self, images: torch.Tensor) -> torch.Tensor:
        x = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        with self._autocast():
            return normalize(self.model.encode_image(x).float(), dim=1)

    def _texts(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            return normalize(self.model.encode_text(tokens.long()).float(), dim=1)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

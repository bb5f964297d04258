"""An open_clip model as a scorer: load, fingerprint, embed.

The score of a pair is the cosine of its image and text embedding (Fang et al., ICLR 2024, section 3).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from open_clip.transform import PreprocessCfg

from pipeline import storage
from pipeline.decode import Normalise
from pipeline.errors import Refused

open_clip.add_model_config(Path(__file__).parent / "models")

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class ScorerConfig:
    """Which model scores the pool.

    name: the score column is `score_<name>`. model: an open_clip model name.
    weights: a folder written by jobs.train_filter, a checkpoint file, an open_clip tag, or `hf-hub:org/repo`
    (folder and hub bring their own architecture; `model` is then not read).
    precision: auto is fp16 on a GPU and fp32 on a CPU. batch_size: pairs embedded at a time.
    """

    name: str = "dfn"
    model: str = "ViT-B-32"
    weights: str
    precision: str = "auto"
    batch_size: int = 256

    def __post_init__(self) -> None:
        if self.precision not in ("auto", *PRECISIONS):
            raise ValueError(f"precision={self.precision}: must be auto, {', '.join(PRECISIONS)}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1")
        if not self.name.isidentifier():
            raise ValueError(f"name={self.name}: must be letters, digits and underscores")
        if not self.weights:
            raise ValueError(
                "weights: give a folder from jobs.train_filter, a file, an open_clip tag or hf-hub:..."
            )

    @property
    def column(self) -> str:
        return f"score_{self.name}"

    def source(self) -> dict[str, Any]:
        """What the weights are, told without reading them: for recognising a scorer seen before."""
        names = [n for n in storage.listdir(self.weights) if not n.startswith(".")]
        files = [storage.join(self.weights, n) for n in names] or [self.weights]
        local = ":" not in self.weights.split("//")[0] and storage.exists(self.weights)
        marks = (
            {storage.name(f): storage.signature(f) for f in files} if local or "://" in self.weights else {}
        )
        return {"model": self.model, "weights": self.weights, "files": marks}


class Scorer:
    """A loaded model. `embed` may be called from many threads; on a GPU two batches are in flight at most.

    Raises Refused, in one line, when the model or its weights cannot be had.
    """

    def __init__(self, config: ScorerConfig, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.precision = config.precision
        if self.precision == "auto":
            self.precision = "fp16" if self.device.type == "cuda" else "fp32"
        with fetched(config.weights) as weights:
            model, architecture, self.tokenizer = load_open_clip(config.model, weights)
        self.preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
        self.embed_dim = int(architecture["embed_dim"])
        self.identity = {
            "architecture": architecture,
            "activation": "quick_gelu" if architecture.get("quick_gelu") else "gelu",
            "preprocess": asdict(self.preprocess),
            "precision": self.precision,
            "weights": _digest(model),
        }
        model = model.to(self.device).eval()
        self.model = model.to(memory_format=torch.channels_last)
        self._normalise = Normalise(self.preprocess, self.device)
        self._slots = threading.Semaphore(2) if self.device.type == "cuda" else contextlib.nullcontext()

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.identity)

    def embed(
        self, pixels: Sequence[torch.Tensor] | torch.Tensor, captions: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """n images, uint8 (3, H, W), and n captions to unit image and text embeddings, float32 (n, d), and cosines (n,).

        A zero or non-finite embedding has no direction: its row and its cosine are NaN.
        """
        unique, inverse = np.unique(np.asarray(captions, dtype=object).astype(str), return_inverse=True)
        tokens = self.tokenizer(unique.tolist())
        with self._slots, torch.inference_mode(), self._autocast():
            x = self._normalise(pixels).contiguous(memory_format=torch.channels_last)
            image = _unit(self.model.encode_image(x))
            text = _unit(self.model.encode_text(tokens.to(self.device)))[
                torch.from_numpy(inverse).to(self.device)
            ]
            cosine = (image * text).sum(1)
            return image.cpu().numpy(), text.cpu().numpy(), cosine.cpu().numpy()

    def embed_text(self, captions: Sequence[str]) -> np.ndarray:
        """n captions to unit embeddings of the text tower, float32 (n, d); NaN as in `embed`."""
        tokens = self.tokenizer(list(captions)).to(self.device)
        with self._slots, torch.inference_mode(), self._autocast():
            return np.concatenate([_unit(self.model.encode_text(t)).cpu().numpy() for t in tokens.split(256)])

    def _autocast(self) -> Any:
        dtype = PRECISIONS[self.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)


def fingerprint(identity: dict[str, Any]) -> str:
    """16 hex digits over architecture, activation, preprocessing, precision and every weight."""
    text = json.dumps(identity, sort_keys=True, default=list)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def fetched(weights: str) -> Iterator[str]:
    """`weights` as open_clip can read it: remote files and folders are copied to a temporary one."""
    if "://" not in weights:
        yield weights
        return
    fs, path = storage.resolve(weights)
    with tempfile.TemporaryDirectory(prefix="winnow-") as folder:
        local = os.path.join(folder, storage.name(path))
        fs.get(path, local, recursive=fs.isdir(path))
        yield local


def load_open_clip(model: str, weights: str | None) -> tuple[Any, dict[str, Any], Any]:
    """(model in float32 on the CPU, its architecture config, tokenizer).

    weights: None (random), a folder in open_clip's layout, a file, a tag, or `hf-hub:org/repo`. The
    activation that a published tag was trained with is used, whatever the model name's own default.
    """
    _known(model, weights)
    name, tag, quick_gelu = model, weights, False
    if weights and weights.startswith("hf-hub:"):
        name, tag = weights, None
    elif weights and os.path.isdir(weights):
        name, tag = f"local-dir:{os.path.abspath(weights)}", None
    elif weights:
        quick_gelu = bool((open_clip.get_pretrained_cfg(model, weights) or {}).get("quick_gelu"))
    try:
        with _quiet():
            built = open_clip.create_model(
                name, pretrained=tag, force_quick_gelu=quick_gelu, pretrained_image=False,
                require_pretrained=weights is not None,
            )  # fmt: skip
            tokenizer = open_clip.get_tokenizer(name)
            architecture = dict(open_clip.get_model_config(name))
    except Exception as e:  # open_clip and the hub raise many types; all mean that there is no model
        cause = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise Refused(f"cannot load model={model} weights={weights}: {cause}") from None
    if quick_gelu:
        architecture["quick_gelu"] = True
    return built, architecture, tokenizer


def _known(model: str, weights: str | None) -> None:
    """Refuse names that open_clip does not have, with the ones that look like them."""
    if weights and (weights.startswith("hf-hub:") or os.path.isdir(weights)):
        return
    if model not in open_clip.list_models():
        close = difflib.get_close_matches(model, open_clip.list_models(), 3)
        raise Refused(f"model={model} is not an open_clip model; close ones: {', '.join(close) or 'none'}")
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights and weights not in tags and not os.path.isfile(weights):
        raise Refused(
            f"weights={weights}: no such folder or file, and no tag of {model} (tags: {', '.join(tags)})"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence for loading: what goes wrong is told once, by us."""
    loggers = [logging.getLogger(n) for n in ("root", "huggingface_hub")]
    levels = [x.level for x in loggers]
    try:
        for x in loggers:
            x.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for x, level in zip(loggers, levels):
            x.setLevel(level)


def _digest(model: torch.nn.Module) -> str:
    h = hashlib.blake2b(digest_size=16)
    for key, tensor in sorted(model.state_dict().items()):
        h.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
        h.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return h.hexdigest()


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.float32)
    unit = x / x.norm(dim=1, keepdim=True)
    return torch.where(unit.isfinite().all(1, keepdim=True), unit, torch.nan)

"""How a filter network is trained, and what decides its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from filters.network.augment import AugmentConfig
from filters.network.captions import CaptionsConfig
from filters.network.data import DataConfig
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.samples import PoolConfig
from pipeline.scorer import PRECISIONS


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
    micro_batch: pairs that a worker embeds at a time, null for its whole part of the batch; gradients are
    those of the whole batch all the same (models with batch norm: but for their statistics), memory is that
    of one piece and of all embeddings, at one more forward pass. grad_checkpointing: activations are computed
    again instead of kept, for less memory and about a third more work.
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
    micro_batch: int | None = None
    grad_checkpointing: bool = False
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
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch={self.micro_batch}: must be null or at least 1")

    @property
    def steps(self) -> int:
        return self.samples_seen // self.batch_size


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """One training: everything that a worker needs to do its part of it.

    out: the result folder. model: an open_clip model name. init: None (random weights), an open_clip tag of
    `model`, a file, or a folder or `hf-hub:org/repo`, which bring their own architecture. captions: for pools
    with labels in place of captions.
    """

    out: str
    pool: PoolConfig
    decode: DecodeConfig
    model: str
    init: str | None
    config: TrainConfig
    captions: CaptionsConfig | None = None

    def request(self) -> dict[str, Any]:
        """All settings that decide the weights, as plain values; the number of workers is not among them."""
        settings = asdict(self.config)
        del settings["checkpoint_steps"], settings["grad_checkpointing"], settings["data"]["cache_bytes"]
        return {
            "shards": self.pool.shards,
            "pool": self.pool.reading(),
            "captions": asdict(self.captions) if self.captions else None,
            "decode": asdict(self.decode),
            "model": self.model,
            "init": self.init,
            "train": settings,
        }

    def check(self, found: dict[str, Any], request: dict[str, Any] | None = None) -> None:
        """Raises Refused when what was `found` in `out` is not this (or the given) request."""
        request = request or self.request()
        if request != found:
            changed = sorted(k for k in request if request[k] != found.get(k))
            raise Refused(
                f"out={self.out} holds a training with other settings ({', '.join(changed)});"
                " choose another folder"
            )

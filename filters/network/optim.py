"""AdamW as CLIP is trained with it, and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch

BETAS = (0.9, 0.98)  # Radford et al. 2021, table 18
EPSILON = 1e-6  # same; a hundred times torch's, so that rounding errors do not become steps of their own
MAX_LOGIT_SCALE = 100.0  # same, section 2.5


def learning_rate(step: int, steps: int, warmup: float, peak: float) -> float:
    """Rate of step 0 .. steps - 1: linear up to `peak` over the share `warmup`, then a cosine down to 0."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return peak * (step + 1) / rising
    return peak * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising))) / 2


def adamw(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """No weight decay on what has fewer than two dimensions: norms, biases and the logit scale."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)


def clamp_logit_scale(model: Any) -> None:
    """Keep exp(logit_scale), which multiplies the cosines, between 1 and 100."""
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(MAX_LOGIT_SCALE))

"""Batch normalisation over the batch of all workers.

torch's SyncBatchNorm does this on GPUs only; this one does it wherever torch.distributed does, so that what
trains on eight GPUs is what was tested on two CPUs. In a world of one nothing is changed but this: features
that are computed only to be computed again (no gradients) leave the running statistics alone.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from timm.layers import BatchNormAct2d
from torch.nn.modules.batchnorm import _BatchNorm

from filters.network.world import World


def synchronise(model: torch.nn.Module, world: World) -> bool:
    """Let every batch norm of `model` see all workers' rows when it trains; its weights stay as they are.

    Returns whether the model has any.
    """
    found = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    for module in found:
        module.forward = MethodType(_forward(type(module).forward, world), module)  # type: ignore[method-assign]
    return bool(found)


def _forward(own: Any, world: World) -> Any:
    """The forward pass of a batch norm; `own` is the one that its class has."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        if not module.training or (world.size == 1 and torch.is_grad_enabled()):
            return own(module, x)
        with torch.autocast(x.device.type, enabled=False):
            y = _normalised(module, x.float(), world).to(x.dtype)
        return module.act(module.drop(y)) if isinstance(module, BatchNormAct2d) else y

    return forward


def _normalised(module: Any, x: torch.Tensor, world: World) -> torch.Tensor:
    """Ioffe & Szegedy 2015, algorithm 1, with mean and variance of all workers' rows. x: float32 (n, c, ...)."""
    over = [d for d in range(x.ndim) if d != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    count = world.sum(torch.full((1,), float(x.numel() // x.shape[1]), device=x.device))
    mean = world.sum(x.sum(over)) / count
    centred = x - mean.view(shape)
    variance = world.sum(centred.square().sum(over)) / count
    if module.track_running_stats and torch.is_grad_enabled():
        with torch.no_grad():
            module.num_batches_tracked += 1
            share = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
            module.running_mean.lerp_(mean, share)
            module.running_var.lerp_(variance * count / (count - 1), share)
    y = centred * torch.rsqrt(variance + module.eps).view(shape)
    return y * module.weight.view(shape) + module.bias.view(shape) if module.affine else y

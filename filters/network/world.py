"""The workers of one training: what each of them holds of a batch, and sums over all of them.

Every worker computes its own part of the loss, and the parts add up to the loss of the whole batch. So do
gradients: what runs backwards through `World.sum` and `World.gather` reaches the rows of every worker, and
`World.add_gradients` adds up what has gathered at the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce
from torch.nn.utils import parameters_to_vector


@dataclass(frozen=True)
class Rows:
    """Which rows of a batch of `n` a worker holds: `at`, int64, ascending."""

    at: torch.Tensor
    n: int


class World:
    """This worker among all. Built without a process group, it is a world of one and all sums are free.

    device: where tensors of this worker lie.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        many = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if many else 0
        self.size = dist.get_world_size() if many else 1
        self.neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if many else 1  # on this machine
        # Words between workers go beside the tensors: a thread that reads ahead must not mix with training.
        self._words: Any = dist.new_group(backend="gloo") if self.size > 1 else None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every worker's `x`, with gradients."""
        return all_reduce(x) if self.size > 1 else x

    def gather(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """(rows.n, ...) in the batch's own order from each worker's (len(rows.at), ...), with gradients."""
        if self.size == 1:
            return x
        whole = torch.zeros(rows.n, *x.shape[1:], dtype=x.dtype, device=x.device)
        whole = whole.index_copy(0, rows.at.to(x.device), x)
        return self.sum(whole)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by its sum over the workers; a weight that nothing reached has zero."""
        if self.size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        vector = parameters_to_vector(p.grad.contiguous() for p in trained if p.grad is not None)
        dist.all_reduce(vector)
        start = 0
        for p in trained:
            assert p.grad is not None
            p.grad.copy_(vector[start : start + p.numel()].view(p.shape))
            start += p.numel()

    def exchange(self, word: Any) -> list[Any]:
        """Every worker's picklable `word`, by rank. Calls must come in the same order everywhere."""
        if self.size == 1:
            return [word]
        words: list[Any] = [None] * self.size
        dist.all_gather_object(words, word, group=self._words)
        return words

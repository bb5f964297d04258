"""The contrastive loss over a batch in which equal captions are positives of one another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

Gather = Callable[[torch.Tensor], torch.Tensor]


def alone(rows: torch.Tensor) -> torch.Tensor:
    """The gather of a single device: its own rows are the whole batch."""
    return rows


def contrastive_loss(
    image: torch.Tensor,
    text: torch.Tensor,
    captions: torch.Tensor,
    scale: torch.Tensor,
    gather: Gather = alone,
) -> torch.Tensor:
    """Mean of the image-to-text and text-to-image cross-entropy, a scalar.

    image, text: float (n, d), unit rows; row i of both is pair i. captions: int (n,) or (n, length), rows
    equal where captions are. scale: what cosines are multiplied by. gather: gives all devices' rows for
    this device's, with gradients where the input has them.

    The target of a pair is uniform over all pairs of the batch with its caption (Yang et al., "Unified
    Contrastive Learning in Image-Text-Label Space", CVPR 2022, equations 3-5), so that a second "a photo
    of a cat" is not pushed away from the first. With distinct captions it is open_clip's ClipLoss.
    """
    image, text, captions = gather(image), gather(text), gather(captions)
    logits = scale * image.float() @ text.float().T
    _, group = torch.unique(captions, dim=0, return_inverse=True)
    same = (group[:, None] == group[None, :]).to(logits.dtype)
    target = same / same.sum(1, keepdim=True)
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2

"""The contrastive loss over a batch in which equal captions are positives of one another."""

from __future__ import annotations

import torch
from torch.nn.functional import log_softmax

from filters.network.world import Rows, World

ALONE = World()


def contrastive_loss(
    image: torch.Tensor,
    text: torch.Tensor,
    captions: torch.Tensor,
    scale: torch.Tensor,
    world: World = ALONE,
    rows: Rows | None = None,
) -> torch.Tensor:
    """This worker's part of the mean image-to-text and text-to-image cross-entropy, a scalar.

    image, text: float (n, d), unit rows; row i of both is pair i. captions: int (n,) or (n, length), rows
    equal where captions are. scale: what cosines are multiplied by. rows: which of the batch's N pairs
    these n are; None when they are all of them.

    The parts of all workers add up to the loss of the batch, and their gradients to its gradients. A worker
    holds n x N similarities, as open_clip's ClipLoss does with local_loss and gather_with_grad.

    The target of a pair is uniform over all pairs of the batch with its caption (Yang et al., "Unified
    Contrastive Learning in Image-Text-Label Space", CVPR 2022, equations 3-5), so that a second "a photo
    of a cat" is not pushed away from the first. With distinct captions it is open_clip's ClipLoss.
    """
    image, text = image.float(), text.float()
    if rows is None:
        rows = Rows(torch.arange(len(image)), len(image))
    all_image, all_text, captions = (world.gather(x, rows) for x in (image, text, captions))
    _, group = torch.unique(captions, dim=0, return_inverse=True)
    same = (group[rows.at.to(group.device)][:, None] == group[None, :]).to(image.dtype)
    target = same / same.sum(1, keepdim=True)
    to_text = log_softmax(scale * image @ all_text.T, dim=1)
    to_image = log_softmax(scale * text @ all_image.T, dim=1)
    return -(target * (to_text + to_image)).sum() / (2 * rows.n)

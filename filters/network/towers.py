"""From pairs to unit embeddings, and from a batch to gradients, in pieces that fit the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from open_clip.transform import PreprocessCfg
from torch.nn.functional import normalize

from pipeline.scorer import PRECISIONS

Embeddings = tuple[torch.Tensor, torch.Tensor]


class Towers:
    """The two towers of a model on a device, in float32 weights and `precision` arithmetic.

    width: of the embeddings. batch_norm: the model has some, and every worker must pass it in every step.
    """

    def __init__(
        self, model: Any, device: torch.device, precision: str, width: int, batch_norm: bool
    ) -> None:
        self.model, self.device, self.dtype = model, device, PRECISIONS[precision]
        self.width, self.batch_norm = width, batch_norm
        preprocess = PreprocessCfg(**model.visual.preprocess_cfg)
        self.mean, self.std = (
            torch.tensor(v, device=device).view(1, -1, 1, 1) * 255 for v in (preprocess.mean, preprocess.std)
        )

    def embed(self, images: torch.Tensor, tokens: torch.Tensor) -> Embeddings:
        """images: float (n, 3, H, W), values 0 to 255. tokens: int (n, length).

        Unit image and text embeddings, float32 (n, d); equal captions go through the text tower once.
        """
        if len(images) == 0 and not self.batch_norm:  # no share in a small batch, and ViTs take no empty one
            image, text = (torch.zeros(0, self.width, device=self.device, requires_grad=True) for _ in "it")
            return image, text
        distinct, inverse = torch.unique(tokens, dim=0, return_inverse=True)
        image = self.encode_image(images)
        with self._autocast():
            text = self.model.encode_text(distinct.long().to(self.device))
        return normalize(image.float(), dim=1), normalize(text.float(), dim=1)[inverse.to(self.device)]

    def encode_image(self, images: torch.Tensor) -> torch.Tensor:
        """Image embeddings before they are brought to unit length."""
        images = ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
        with self._autocast():
            return self.model.encode_image(images)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def gradients(
    embed: Callable[[int], Embeddings],
    pieces: int,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Add the gradients of `loss` over all pieces to the weights; returns the loss, detached.

    embed: the embeddings of a piece, the same whenever it is asked. Of several pieces, one at a time is
    held with what its gradients need: all embeddings first, without; then the loss and its gradients in the
    embeddings; then each piece again (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
    Limited Setup", RepL4NLP 2021). The gradients are those of the undivided batch, except that batch norm
    sees one piece at a time.
    """
    if pieces == 1:
        value = loss(*embed(0))
        value.backward()
        return value.detach()
    with torch.no_grad():
        parts = [embed(i) for i in range(pieces)]
    leaves = [torch.cat(x).detach().requires_grad_() for x in zip(*parts)]
    value = loss(*leaves)
    value.backward()
    sizes = [len(image) for image, _ in parts]
    wanted: Sequence[Any] = [x.grad.split(sizes) for x in leaves if x.grad is not None]
    for i in range(pieces):
        torch.autograd.backward(embed(i), [w[i] for w in wanted])
    return value.detach()

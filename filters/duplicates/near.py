"""Blocked comparison: candidates by a cheap product, each then verified on the full vectors.

The product runs on short stand-ins, so that most pairs cost 64 multiplications, not 512:

- a *sketch*, the first m coordinates of a random rotation. For a fixed pair the squared distance of sketches
  over that of the vectors follows Beta(m/2, (d-m)/2) (Frankl & Maehara 1990, section 2), whatever the data,
  so a bound on it loses a share of pairs that is known beforehand (``MISS``);
- or the 64 bits of the perceptual hash as +1/-1: their product is exactly 64 - 2 * Hamming distance.

Candidates are then decided one pair at a time, in float64 where float32 comes within 1e-3 of the threshold:
no decision depends on how rows were blocked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import faiss
import numpy as np
import torch
from scipy import stats

from filters.duplicates.config import BLOCK_COLUMNS, BLOCK_ROWS, VERIFY_PAIRS, VERIFY_SLICE

PAIR = np.dtype([("a", "<i8"), ("b", "<i8"), ("similarity", "<f8"), ("hamming", "u1")])
NO_HASH = 255
# One block of products on a GPU, which needs more of them at a time than a core to be busy: 1 GiB.
GPU_BLOCK = (8192, 32_768)
# Share of pairs exactly at the threshold that the sketch may lose; closer ones are lost less.
MISS = 1e-4
# Float32 products are good to about 1e-6; what comes this close to the threshold is decided in float64.
RECHECK = 1e-3
# What float64 leaves uncertain, in favour of the pair.
ROUNDING = 1e-12
SKETCHES = (32, 64, 128, 256)


_device: torch.device | None = None


def use_device(name: str) -> None:
    """Where this process computes products from now on: ``cpu`` or ``cuda``."""
    global _device
    _device = torch.device(name)


def device() -> torch.device:
    """Where this process computes products: as told, else on a GPU when FAISS and torch have one."""
    if _device is not None:
        return _device
    return torch.device("cuda" if faiss.get_num_gpus() > 0 and torch.cuda.is_available() else "cpu")


def block_shape() -> tuple[int, int]:
    """Rows and columns of a block of products on the device of this process."""
    return (BLOCK_ROWS, BLOCK_COLUMNS) if device().type == "cpu" else GPU_BLOCK


@dataclass(frozen=True)
class SketchTest:
    """Candidate test on sketches, (n, m) float16: pairs within ``reach`` squared distance."""

    reach: float

    def sides(self, payload: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, m + 2) float32 left and right factors whose product is -half the squared distance."""
        sketch = torch.from_numpy(payload.astype(np.float32))
        half = -0.5 * (sketch * sketch).sum(1, keepdim=True)
        one = torch.ones_like(half)
        return torch.cat([sketch, half, one], 1), torch.cat([sketch, one, half], 1)

    @property
    def cut(self) -> float:
        """Products from which a pair is looked at; a little low, so that rounding decides nothing."""
        return -0.5 * self.reach - 1e-5

    def accept(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The exact test, one pair a row: (p,) bool."""
        difference = left.astype(np.float64) - right.astype(np.float64)
        return np.einsum("ij,ij->i", difference, difference) <= self.reach


@dataclass(frozen=True)
class HashTest:
    """Candidate test on perceptual hashes: (n,) uint64, pairs of at most ``distance`` differing bits."""

    distance: int

    def sides(self, payload: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        bits = np.unpackbits(np.ascontiguousarray(payload).view(np.uint8).reshape(-1, 8), axis=1)
        signs = torch.from_numpy(bits).to(torch.float32).mul_(2).sub_(1)
        return signs, signs

    @property
    def cut(self) -> float:
        return 64 - 2 * self.distance - 0.5

    def accept(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return hamming(left, right) <= self.distance


def hamming(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Differing bits of (n,) uint64 hashes: (n,) uint8."""
    differing = np.ascontiguousarray(left ^ right).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(differing, axis=1).sum(1, dtype=np.uint8)


def sketch_reach(similarity: float, sketch: int, width: int) -> float:
    """Squared sketch distance that all but MISS of the pairs at that cosine stay within."""
    squared = 2.0 - 2.0 * similarity
    if sketch >= width:
        return squared * 1.001 + 1e-5  # the rotation is whole: only float16 rounding stands between
    return squared * float(stats.beta.ppf(1 - MISS, sketch / 2, (width - sketch) / 2)) * 1.001 + 1e-5


def rotation(width: int, sketch: int, seed: int) -> np.ndarray:
    """First ``sketch`` columns of a random orthogonal (width, width) matrix: (width, sketch) float32."""
    normal = np.random.default_rng([seed, 1]).standard_normal((width, min(sketch, width)))
    q, r = np.linalg.qr(normal)
    return (q * np.sign(np.diag(r))).astype(np.float32)


def choose_sketch(cosines: np.ndarray, similarity: float, width: int) -> int:
    """Cheapest sketch for pairs that meet in a cluster, given a sample of their cosines.

    A pair costs its products (measured: about .1 + .006 m ns) and, when it passes, a check on two full
    vectors (about 400 ns).
    """
    distance = np.maximum(2.0 - 2.0 * cosines.astype(np.float64), 1e-9)

    def cost(sketch: int) -> float:
        if sketch >= width:
            return 0.1 + 0.006 * width
        share = sketch_reach(similarity, sketch, width) / distance
        passing = stats.beta.cdf(np.minimum(share, 1.0), sketch / 2, (width - sketch) / 2)
        false = np.where(cosines >= similarity, 0.0, passing).mean()
        return 0.1 + 0.006 * sketch + 400 * float(false)

    return min([m for m in SKETCHES if m < width] + [width], key=cost)


def candidate_blocks(
    left: torch.Tensor, right: torch.Tensor, cut: float, *, triangle: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Index pairs whose product reaches ``cut``, block by block: (rows of left, rows of right) int64.

    ``triangle``: both sides are the same rows, and only pairs with left index < right index are wanted.
    """
    height, width = block_shape()
    left, right = left.to(device()), right.to(device())
    # One buffer for all blocks: a fresh one each costs more in page faults than the product itself.
    buffer = torch.empty(min(len(left), height) * min(len(right), width), device=device())
    for top in range(0, len(left), height):
        rows = left[top : top + height]
        for first in range(top if triangle else 0, len(right), width):
            columns = right[first : first + width]
            product = buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
            torch.mm(rows, columns.T, out=product)
            hit = torch.nonzero(product.amax(1) >= cut).squeeze(1)
            if len(hit) == 0:
                continue
            where = torch.nonzero(product[hit] >= cut)
            a, b = (hit[where[:, 0]] + top).cpu().numpy(), (where[:, 1] + first).cpu().numpy()
            if triangle:
                a, b = a[a < b], b[a < b]
            if len(a):
                yield a, b


Vectors = Callable[[np.ndarray], np.ndarray]


def verify(
    vectors: Vectors, a: np.ndarray, b: np.ndarray, similarity: float
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines of row pairs, and which reach the threshold: (p,) float64, (p,) bool.

    ``vectors`` gives unit vectors of ascending distinct row ids.
    """
    cosines = np.empty(len(a))
    near = np.zeros(len(a), dtype=bool)
    for start in range(0, len(a), VERIFY_SLICE):
        part = slice(start, start + VERIFY_SLICE)
        ids, place = np.unique(np.concatenate([a[part], b[part]]), return_inverse=True)
        rows = vectors(ids)
        left, right = place[: len(place) // 2], place[len(place) // 2 :]
        cosines[part], near[part] = decide(rows, left, right, similarity)
    return cosines, near


def decide(
    rows: np.ndarray, left: np.ndarray, right: np.ndarray, similarity: float
) -> tuple[np.ndarray, np.ndarray]:
    """Cosine of rows[left] and rows[right], and whether it reaches the threshold: (p,) float64, (p,) bool.

    Float32 rules out what is clearly below; everything else is decided, and its cosine given, in float64.
    """
    cosine = np.einsum("ij,ij->i", rows[left], rows[right]).astype(np.float64)
    close = np.flatnonzero(cosine >= similarity - RECHECK)
    x, y = rows[left[close]].astype(np.float64), rows[right[close]].astype(np.float64)
    # Float32 unit rows are off unit length by 1e-7: without this, copies would not reach a similarity of 1.
    squares = np.einsum("ij,ij->i", x, x) * np.einsum("ij,ij->i", y, y)
    cosine[close] = np.einsum("ij,ij->i", x, y) / np.sqrt(squares)
    return cosine, cosine >= similarity - ROUNDING


def thin_out(
    vectors: Vectors,
    left_ids: np.ndarray,
    right_ids: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    similarity: float,
) -> np.ndarray:
    """Which candidates of one block deserve verification: (p,) bool. Dense blocks are multiplied in full."""
    if len(a) < math.prod(block_shape()) // 100:
        return np.ones(len(a), dtype=bool)
    rows, row_place = np.unique(a, return_inverse=True)
    columns, column_place = np.unique(b, return_inverse=True)
    x, y = (
        torch.from_numpy(_in_order(vectors, ids)).to(device()) for ids in (left_ids[rows], right_ids[columns])
    )
    return ((x @ y.T).cpu().numpy()[row_place, column_place] >= similarity - RECHECK).astype(bool)


def _in_order(vectors: Vectors, ids: np.ndarray) -> np.ndarray:
    order, place = np.unique(ids, return_inverse=True)
    return vectors(order)[place]


class PairWriter:
    """Gathers candidates, verifies them in bulk and appends the near ones to an open binary file.

    ``vectors`` None takes candidates as they are (perceptual hash alone); similarity is then the share of
    equal bits.
    """

    def __init__(self, file: BinaryIO, vectors: Vectors | None, similarity: float):
        self.file, self.vectors, self.similarity = file, vectors, similarity
        self.pending: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.waiting = self.written = 0

    def add(self, a: np.ndarray, b: np.ndarray, bits: np.ndarray) -> None:
        """Candidate pairs by row id, (p,) int64 each, and their Hamming distances (p,) uint8."""
        self.pending.append((np.minimum(a, b), np.maximum(a, b), bits))
        self.waiting += len(a)
        if self.waiting >= VERIFY_PAIRS:
            self.flush()

    def flush(self) -> None:
        if not self.waiting:
            return
        a, b, bits = (np.concatenate(parts) for parts in zip(*self.pending))
        self.pending, self.waiting = [], 0
        if self.vectors is None:
            cosine, near = 1 - bits / 64, np.ones(len(a), dtype=bool)
        else:
            order = np.lexsort((b, a))
            a, b, bits = a[order], b[order], bits[order]
            cosine, near = verify(self.vectors, a, b, self.similarity)
        pairs = np.empty(int(near.sum()), dtype=PAIR)
        pairs["a"], pairs["b"], pairs["similarity"], pairs["hamming"] = (
            a[near],
            b[near],
            cosine[near],
            bits[near],
        )
        self.file.write(pairs.tobytes())
        self.written += len(pairs)

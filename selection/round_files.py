"""Rounds on disk: one uid file a round, or a few lines of JSON that make any round again."""

import hashlib
import io
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from fractions import Fraction
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

from pipeline import storage
from selection.manifest_rows import UID, Manifest
from selection.rounds import Rounds

FORMAT = "winnow-rounds-1"
"""Names the draws as well as the file: whatever changes which entries a (seed, t) takes must change this."""


def write_uids(rounds: Rounds, t: int, path: str, memory: int = 128 << 20) -> None:
    """Write round t as one `.npy` of dtype `u8,u8`, shape (k,), sorted lexicographically (the subset.npy
    layout).

    path: local or fsspec. memory: bytes of uids sorted at once; a larger round is parted by the first bits of
    its uids into temporary files first, so that the peak stays within about four times this, however large
    the round.
    """
    with fsspec.open(path, "wb") as out:
        np.lib.format.write_array_header_1_0(
            out,
            {"descr": np.lib.format.dtype_to_descr(UID), "fortran_order": False, "shape": (rounds.size(t),)},
        )
        for uids in _sorted_blocks(rounds, t, memory):
            out.write(uids.tobytes())


def _sorted_blocks(rounds: Rounds, t: int, memory: int) -> Iterator[npt.NDArray[np.void]]:
    bits = max(0, (rounds.size(t) * UID.itemsize // memory).bit_length())
    if bits == 0:
        yield rounds.uids(t)
        return
    with ExitStack() as opened:
        parts = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(1 << bits)]
        for members in rounds.shards(t):
            uids = members.rows.uids
            part_of = (uids["f0"] >> np.uint64(64 - bits)).astype(np.int64)
            for part in np.unique(part_of).tolist():
                parts[part].write(uids[part_of == part].tobytes())
        for part in parts:
            part.seek(0)
            uids = np.frombuffer(part.read(), UID)
            yield uids[np.lexsort((uids["f1"], uids["f0"]))]


def save(rounds: Rounds, path: str, about: Mapping[str, Any] | None = None) -> None:
    """Write `<path>` (JSON: seed, ratio, sizes, counts file and its sha256) and `<stem>.counts.npy` beside
    it, the description last.

    The counts file holds int64 (S,), or (S, C) when stratified. `load` makes the same Rounds from the two.
    about: further entries for the description.
    """
    storage.write_bytes(_counts_path(path), _counts(rounds))
    storage.write_json(path, description(rounds, path, about))


def description(rounds: Rounds, path: str, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `save` writes to `path`."""
    return {
        "format": FORMAT,
        "seed": rounds.seed,
        "ratio": str(rounds.ratio),
        "replacement": rounds.replacement,
        "stratified": rounds.strata is not None,
        "entries": rounds.entries,
        "round_size": rounds.k,
        "counts": storage.name(_counts_path(path)),
        "counts_sha256": hashlib.sha256(_counts(rounds)).hexdigest(),
        "numpy": np.__version__,
        **(about or {}),
    }


def _counts_path(path: str) -> str:
    return f"{path.removesuffix('.json')}.counts.npy"


def _counts(rounds: Rounds) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rounds.counts if rounds.strata is None else rounds.strata)
    return buffer.getvalue()


def load(path: str, manifest: Manifest | None = None) -> Rounds:
    """The Rounds that `save` described. Raises ValueError if the format, or the counts file's content, is
    another.
    """
    description: dict[str, Any] = storage.read_json(path)
    if description.get("format") != FORMAT:
        raise ValueError(f"{path}: format {description.get('format')!r}, this version reads {FORMAT!r}")
    counts_path = _counts_path(path)
    content = storage.read_bytes(counts_path)
    if hashlib.sha256(content).hexdigest() != description["counts_sha256"]:
        raise ValueError(f"{counts_path}: not the counts that {path} was made with; make the rounds anew")
    counts = np.load(io.BytesIO(content))
    return Rounds(
        counts.sum(axis=1) if description["stratified"] else counts,
        ratio=Fraction(description["ratio"]),
        seed=description["seed"],
        replacement=description["replacement"],
        strata=counts if description["stratified"] else None,
        manifest=manifest,
    )

"""What selection left beside a run: influence, condensed images, rounds, proofs. Files in, plain data out."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from pipeline import storage
from pipeline.decode import FORMATS
from pipeline.errors import Refused
from pipeline.manifest import Run
from pipeline.report.pairs import stage_folder
from pipeline.report.pictures import data_uri
from pipeline.report.plots import log_ticks, nice_values
from pipeline.report.survey import Uid
from pipeline.samples import parse_uid, pick
from pipeline.shards import SHARD_SUFFIXES, Shard, open_shard
from pipeline.uids import find_uids

RANKS, CLASSES = 10, 20  # condensed images that are shown
COUNTED = 1_000_000  # samples whose uses in the rounds are counted
SAMPLES = 16  # most helpful and most harmful ones of an objective


@dataclass(frozen=True)
class Objective:
    """One objective of the influence stage; `harmful` and `helpful` are (uid, delta_if_removed), worst or best first.

    tree: its picture as a data URI, with the rules as text and the share of influence that it explains.
    """

    name: str
    numbers: Mapping[str, Any]
    harmful: list[tuple[Uid, float]]
    helpful: list[tuple[Uid, float]]
    tree: dict[str, Any] | None


@dataclass(frozen=True)
class Influence:
    result: Mapping[str, Any]
    objectives: list[Objective]

    def uids(self) -> set[Uid]:
        return {uid for o in self.objectives for uid, _ in [*o.harmful, *o.helpful]}


def influence(run: Run) -> Influence | None:
    folder = stage_folder(run, "influence")
    path = storage.join(folder, "result.json") if folder else ""
    if not folder or not storage.exists(path):
        return None
    result = storage.read_json(path)
    objectives = []
    for name, numbers in result["objectives"].items():
        harmful, helpful = (
            [(parse_uid(r["uid"]), float(r["delta_if_removed"])) for r in numbers[f"most_{side}"][:SAMPLES]]
            for side in ("harmful", "helpful")
        )
        tree = result.get("explanations", {}).get(name)
        if tree:
            picture = storage.read_bytes(storage.join(folder, tree["picture"]))
            tree = {**tree, "source": "data:image/png;base64," + base64.b64encode(picture).decode()}
        objectives.append(Objective(name, numbers, harmful, helpful, tree))
    return Influence(result, objectives)


# ---------------------------------------------------------------- condensed images


@dataclass
class Condensed:
    """A condensed set: `rows` maps a label to the data URIs of its first images, in rank order."""

    folder: str
    meta: Mapping[str, Any]
    images: int = 0
    rows: dict[str, list[str]] = field(default_factory=dict)
    labels: int = 0


def condensed(folder: str) -> Condensed:
    """Raises Refused for a folder that holds no shard with ranked images."""
    meta = storage.join(folder, "meta.json")
    found = Condensed(folder, storage.read_json(meta) if storage.exists(meta) else {})
    shown: dict[str, dict[int, str]] = {}
    labels = set()
    for shard, image, record in _ranked(folder):
        label, rank = str(record.get("label", "")), int(record["rank"])
        found.images += 1
        labels.add(label)
        if rank < RANKS and (label in shown or len(shown) < CLASSES):
            picture = Image.open(io.BytesIO(shard.read(image)), formats=FORMATS).convert("RGB")
            shown.setdefault(label, {})[rank] = data_uri(picture)
    if not found.images:
        raise Refused(
            f"condensed={folder}: no shard with ranked images there; name the folder that jobs.condense wrote"
        )
    found.rows = {label: [row[r] for r in sorted(row)] for label, row in shown.items()}
    found.labels = len(labels)
    return found


def _ranked(folder: str) -> Iterator[tuple[Shard, Any, dict[str, Any]]]:
    """(open shard, image member, json) of every sample that has a rank."""
    for name in storage.listdir(folder):
        if not name.endswith(SHARD_SUFFIXES):
            continue
        with open_shard(storage.join(folder, name)) as shard:
            for sample in shard.index().samples:
                image, record = pick(sample.members, ("png", "jpg", "webp")), pick(sample.members, ("json",))
                if image and record:
                    told = json.loads(shard.read(record))
                    if isinstance(told, dict) and isinstance(told.get("rank"), int):
                        yield shard, image, told


# ---------------------------------------------------------------- proofs


def proofs(run: Run) -> list[dict[str, Any]]:
    """Every proof of the run by name, with its curves laid out over a logarithmic axis of seconds.

    `stale` tells that it was made of another selection that had the run's name.
    """
    found, digest = [], run.digest()
    for name in storage.listdir(run.path("proof")):
        if name.endswith(".json"):
            proof = storage.read_json(run.path("proof", name))
            if proof.get("curves"):
                about = {"name": name.removesuffix(".json"), "stale": proof.get("run") != digest}
                found.append({**proof, **about, "plot": curves(proof)})
    return found


def curves(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Polylines and bands in a box of 1000 x 100, y downwards, and the ticks of both axes as shares."""
    shown = [[t for t in c["seconds"] if t > 0] for c in proof["curves"]]
    times = [t for ts in shown for t in ts] or [1.0]
    low, high = math.log10(min(times)), math.log10(max(times))
    wide = max(high - low, 1e-9)
    heights = [a for c in proof["curves"] for a in c["accuracy"]] + [proof["target"]]
    bottom, top = min(heights), max(heights)
    margin = 0.06 * max(top - bottom, 0.01)
    bottom, top = bottom - margin, top + margin

    def x(seconds: float) -> float:
        return round(1000 * (math.log10(seconds) - low) / wide, 2)

    def y(accuracy: float) -> float:
        return round(100 * (top - min(max(accuracy, bottom), top)) / (top - bottom), 3)

    lines = []
    for c in proof["curves"]:
        points = [p for p in zip(c["seconds"], c["accuracy"], c["deviation"]) if p[0] > 0]
        upper = [f"{x(t)},{y(a + d)}" for t, a, d in points]
        lower = [f"{x(t)},{y(a - d)}" for t, a, d in reversed(points)]
        lines.append(
            {
                "arm": c["arm"], "line": " ".join(f"{x(t)},{y(a)}" for t, a, _ in points),
                "band": " ".join(upper + lower),
                "reached": x(c["reached"]) / 1000 if c["reached"] is not None and c["reached"] > 0 else None,
            }
        )  # fmt: skip
    return {
        "lines": lines,
        "target": y(proof["target"]),
        "x": [{"at": x(t) / 1000, "text": _short(t)} for t in log_ticks(10**low, 10**high)],
        "y": [{"at": y(a) / 100, "text": f"{100 * a:g} %"} for a in nice_values(bottom, top, 5)],
    }


def _short(s: float) -> str:
    if s < 60:
        return f"{s:g} s"
    return f"{s / 60:g} min" if s < 3600 else f"{s / 3600:g} h"


# ---------------------------------------------------------------- rounds


def rounds(run: Run) -> dict[str, Any] | None:
    """The description of the run's rounds, with how often its samples are used where round files are there.

    counted: samples whose uses were counted, all or the first COUNTED by uid. uses: (times, samples) ascending.
    """
    path = run.path("rounds", "rounds.json")
    if not storage.exists(path):
        return None
    files = [n for n in storage.listdir(run.path("rounds")) if n.endswith(".npy") and n[:-4].isdigit()]
    found = {**storage.read_json(path), "files": len(files), "uses": [], "counted": 0}
    if files:
        entries = storage.read_json(run.path("receipt.json"))["entries"]
        limit = None if entries <= COUNTED else int(COUNTED / entries * 2**64)
        samples = np.unique(uids_below(run.path("subset.npy"), limit))
        counts = np.zeros(len(samples), np.int64)
        for name in files:
            uids = uids_below(run.path("rounds", name), limit)
            at = find_uids(samples["f0"], samples["f1"], uids["f0"], uids["f1"])
            counts += np.bincount(at[at >= 0], minlength=len(samples))
        found["counted"] = len(samples)
        found["uses"] = [(times, n) for times, n in enumerate(np.bincount(counts).tolist()) if n]
    return found


def uids_below(path: str, limit: int | None) -> np.ndarray:
    """The uids of a sorted uid file whose high half is below `limit` (all without one): `u8,u8`. Reads no others."""
    with storage.open_file(path) as f:
        np.lib.format.read_magic(f)
        (size,), _, kind = np.lib.format.read_array_header_1_0(f)
        start, low, high = f.tell(), 0, size
        while limit is not None and low < high:
            middle = (low + high) // 2
            f.seek(start + middle * kind.itemsize)
            if int.from_bytes(f.read(8), "little") < limit:
                low = middle + 1
            else:
                high = middle
        f.seek(start)
        return np.frombuffer(f.read((size if limit is None else low) * kind.itemsize), kind)

"""Why a sample stayed or went: every stage's verdict, its duplicates, leakage, influence, rounds, and its picture.

python -m jobs.explain out=/data/winnow run=default uid=7e0c... [to=picture.png]
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig
from PIL import Image

from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.errors import Refused
from pipeline.explain import Explanation, explain
from pipeline.manifest import Run
from pipeline.samples import format_uid
from selection.run_rounds import rounds_of_sample

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(kw_only=True)
class ExplainConfig:
    """out, run: the finished run. uid: 32 hex digits, or a list of such.

    to: where the picture goes: a file (.png, .jpg, .webp), or a folder for `<uid>.png` of each.
    """

    out: str = MISSING
    run: str = "default"
    uid: Any = MISSING
    to: str | None = None


def run(node: DictConfig) -> None:
    config = build(node, "", ExplainConfig)
    uids = [str(u) for u in config.uid] if isinstance(config.uid, (list, ListConfig)) else [str(config.uid)]
    to = storage.absolute(config.to, "to") if config.to else None
    if to and to.lower().endswith(SUFFIXES) and len(uids) > 1:
        raise Refused(f"to={config.to}: one file for {len(uids)} samples; name a folder")
    here = Run(storage.absolute(config.out, "out"), config.run)
    for found in explain(here, uids):
        rounds = rounds_of_sample(here, str(found.features["shard"]), found.uid)
        print(replace(found, rounds=rounds).describe())
        _show(found, to)


def _show(found: Explanation, to: str | None) -> None:
    """The picture: written where `to` says, and drawn when a person watches."""
    picture = found.picture() if to or sys.stdout.isatty() else None
    if picture is None:
        return
    if to:
        path = to if to.lower().endswith(SUFFIXES) else storage.join(to, f"{format_uid(*found.uid)}.png")
        buffer = io.BytesIO()
        picture.save(buffer, Image.registered_extensions()[os.path.splitext(path)[1].lower()])
        storage.write_bytes(path, buffer.getvalue())
        print(f"  picture   {path}")
    if sys.stdout.isatty():
        print(draw(picture, min(64, shutil.get_terminal_size().columns - 2)))


def draw(picture: Image.Image, width: int) -> str:
    """The picture as text: two pixels a character, as the colours of a half block and its ground."""
    height = max(2, round(picture.height / picture.width * width / 2) * 2)
    pixels = picture.resize((width, height)).load()
    assert pixels is not None
    rows = []
    for y in range(0, height, 2):
        cells = [
            "\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m▀".format(*pixels[x, y], *pixels[x, y + 1])  # type: ignore[misc]
            for x in range(width)
        ]
        rows.append("".join(cells) + "\x1b[0m")
    return "\n".join(rows)


register("explain", ExplainConfig)

if __name__ == "__main__":
    launch("explain", run)

"""A contact sheet: pool images with a line of text each, fetched by byte range from their shards."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, UnidentifiedImageError

from pipeline import storage

TILE, LINE, ACROSS = 128, 12, 10
LETTERS = TILE // 6  # of PIL's built-in font
PAPER, INK, MISSING = "white", "black", "lightgrey"


@dataclass(frozen=True)
class Tile:
    """One image: `shard` and the bytes `offset`, `size` of the image in the plain tar; lines of text below."""

    shard: str
    offset: int
    size: int
    lines: Sequence[str]

    def image(self) -> Any:
        """The picture at tile size, or None where the shard is gone, zipped, or holds something else there."""
        try:
            with storage.open_file(self.shard) as f:
                f.seek(self.offset)
                picture: Any = Image.open(io.BytesIO(f.read(self.size))).convert("RGB")
        except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError):
            return None
        scale = TILE / max(picture.size)
        return picture.resize([max(1, round(side * scale)) for side in picture.size])


def draw_sheet(path: str | Path, blocks: Sequence[tuple[str, Sequence[Tile]]]) -> int:
    """Write blocks of (title, tiles) as PNG; returns how many images could be shown."""
    lines = max((len(tile.lines) for _, tiles in blocks for tile in tiles), default=0)
    step = TILE + LINE * lines + 8
    heights = [LINE + 8 + step * -(-len(tiles) // ACROSS) for _, tiles in blocks]
    sheet = Image.new("RGB", (ACROSS * (TILE + 4) + 4, sum(heights) + 4), PAPER)
    pen, top, shown = ImageDraw.Draw(sheet), 4, 0
    for (title, tiles), height in zip(blocks, heights):
        pen.text((4, top), title, fill=INK)
        for n, tile in enumerate(tiles):
            x, y = 4 + n % ACROSS * (TILE + 4), top + LINE + 4 + n // ACROSS * step
            picture = tile.image()
            if picture is None:
                pen.rectangle((x, y, x + TILE - 1, y + TILE - 1), fill=MISSING)
                pen.text((x + 4, y + TILE // 2), "not reachable", fill=INK)
            else:
                sheet.paste(picture, (x, y))
                shown += 1
            for k, line in enumerate(tile.lines):
                text = line.encode("latin-1", "replace").decode("latin-1")[:LETTERS]
                pen.text((x, y + TILE + LINE * k), text, fill=INK)
        top += height
    sheet.save(path, "PNG")
    return shown

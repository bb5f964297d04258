"""Decoding equals open_clip's transform, and judges headers before it decodes a pixel."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from pipeline.decode import DecodeConfig, Decoder, ImageRejected
from pipeline.scorer import Scorer, ScorerConfig
from tests.build import encode, jpeg, picture

SIZES = [
    (500, 375),
    (333, 517),
    (640, 640),
    (97, 61),
    (33, 31),
    (20, 90),
    (300, 7),
    (1, 1),
    (32, 32),
    (64, 32),
]


def reference(data: bytes, cfg: PreprocessCfg) -> np.ndarray:
    """open_clip's own transform up to the tensor, in units of 1/255. float32 (3, H, W)."""
    *steps, to_tensor, _normalise = image_transform_v2(cfg, is_train=False).transforms
    image: Any = Image.open(io.BytesIO(data))
    for step in [*steps, to_tensor]:
        image = step(image)
    return image.numpy() * 255


def difference(data: bytes, cfg: PreprocessCfg) -> float:
    pixels = Decoder(DecodeConfig(), cfg)(data).pixels
    assert pixels is not None
    assert pixels.dtype == torch.uint8
    expected = reference(data, cfg)
    assert tuple(pixels.shape) == expected.shape
    return float(np.abs(pixels.numpy().astype(np.float32) - expected).mean())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("side", [32, 224])
def test_jpeg_equals_open_clip(size: tuple[int, int], mode: str, side: int) -> None:
    assert difference(encode(picture(size, 1, mode), quality=92), PreprocessCfg(size=side)) <= 1


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"subsampling": 0}, {"subsampling": 2}, {"quality": 20}]
)
def test_kinds_of_jpeg(options: dict[str, Any]) -> None:
    assert difference(encode(picture((201, 155)), **options), PreprocessCfg(size=64)) <= 1


@pytest.mark.parametrize(
    ("mode", "format", "options"),
    [
        ("CMYK", "JPEG", {}),
        ("RGB", "PNG", {}),
        ("RGBA", "PNG", {}),
        ("L", "PNG", {}),
        ("LA", "PNG", {}),
        ("P", "PNG", {}),
        ("P", "PNG", {"transparency": 3}),
        ("I;16", "PNG", {}),
        ("RGB", "WEBP", {}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("P", "GIF", {}),
        ("RGB", "BMP", {}),
        ("RGB", "TIFF", {}),
    ],
)
@pytest.mark.parametrize("size", [(75, 50), (31, 40)])
def test_other_modes_and_formats_equal_open_clip(
    mode: str, format: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    assert difference(encode(picture(size, 2, mode), format, **options), PreprocessCfg(size=32)) <= 1


def test_first_frame_of_an_animation() -> None:
    frames = [picture((40, 40), n).quantize(64) for n in range(3)]
    moving = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert difference(moving, PreprocessCfg(size=32)) <= 1
    assert difference(moving, PreprocessCfg(size=32)) == difference(
        encode(frames[0], "GIF"), PreprocessCfg(size=32)
    )


def test_exif_rotation_is_left_as_open_clip_leaves_it() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = encode(picture((80, 50)), exif=exif)
    assert difference(rotated, PreprocessCfg(size=32)) <= 1
    decoded = Decoder(DecodeConfig(), None)(rotated)
    assert (decoded.width, decoded.height) == (80, 50)


@pytest.mark.parametrize(
    "cfg",
    [
        PreprocessCfg(size=(48, 32)),
        PreprocessCfg(size=32, resize_mode="longest"),
        PreprocessCfg(size=32, resize_mode="squash"),
        PreprocessCfg(size=(32, 48), resize_mode="squash"),
        PreprocessCfg(size=32, interpolation="bilinear"),
    ],
)
@pytest.mark.parametrize("size", [(90, 60), (21, 40)])
def test_every_preprocessing_of_open_clip(cfg: PreprocessCfg, size: tuple[int, int]) -> None:
    assert difference(jpeg(size, 4), cfg) <= 1
    assert difference(encode(picture(size, 4), "PNG"), cfg) <= 1


def test_scores_equal_those_of_open_clips_transform(tiny_scorer: Path) -> None:
    scorer = Scorer(ScorerConfig(weights=str(tiny_scorer)))
    decoder = Decoder(DecodeConfig(), scorer.preprocess)
    transform = image_transform_v2(scorer.preprocess, is_train=False)
    files = [jpeg(size, n) for n, size in enumerate(SIZES)]
    captions = [f"picture {n}" for n in range(len(files))]
    pixels = torch.stack([p for p in (decoder(d).pixels for d in files) if p is not None])
    _, _, ours = scorer.embed(pixels, captions)
    images = torch.stack([transform(Image.open(io.BytesIO(d))) for d in files])
    with torch.inference_mode():
        image = torch.nn.functional.normalize(scorer.model.encode_image(images), dim=1)
        text = torch.nn.functional.normalize(scorer.model.encode_text(scorer.tokenizer(captions)), dim=1)
    np.testing.assert_allclose(ours, (image * text).sum(1).numpy(), atol=0.002)


# ---------------------------------------------------------------- what is refused


def reason(data: bytes, **config: Any) -> str:
    try:
        Decoder(DecodeConfig(**config), PreprocessCfg(size=32))(data)
    except ImageRejected as e:
        return e.reason
    return "ok"


def claiming(width: int, height: int, format: str) -> bytes:
    """A small image whose header says that it is large."""
    data = bytearray(encode(picture((16, 16)), format))
    if format == "JPEG":
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    else:
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


NOISY = encode(picture((96, 96)), quality=95)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "undecodable_image"),
        (b"<html></html>", "undecodable_image"),
        (bytes(500), "undecodable_image"),
        (b"\xff\xd8\xff" + b"junk" * 50 + b"\xff\xd9", "undecodable_image"),
        (NOISY[: len(NOISY) // 2], "truncated_image"),
        (NOISY[:400], "truncated_image"),
        (encode(picture((96, 96)), "PNG")[:3000], "truncated_image"),
        (encode(picture((400, 2)), "PNG"), "extreme_aspect"),
        (jpeg((2, 400)), "extreme_aspect"),
        (claiming(1, 60_000, "PNG"), "extreme_aspect"),
        (claiming(30_000, 30_000, "PNG"), "image_too_large"),
        (claiming(30_000, 30_000, "JPEG"), "image_too_large"),
        (jpeg(), "ok"),
    ],
)
def test_reasons(data: bytes, expected: str) -> None:
    assert reason(data) == expected


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_cut_or_scrambled_anywhere_is_a_reason_and_never_an_exception(format: str) -> None:
    whole = encode(picture((40, 40)), format)
    rng = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(whole[: rng.integers(0, len(whole))] if rng.random() < 0.5 else whole)
        for at in rng.integers(0, max(len(data), 1), 5 if data else 0):
            data[at] = rng.integers(256)
        assert reason(bytes(data)) in {
            "ok",
            "undecodable_image",
            "truncated_image",
            "image_too_large",
            "extreme_aspect",
        }


def test_truncated_image_is_kept_on_request() -> None:
    cut = NOISY[: len(NOISY) * 3 // 4]
    kept = Decoder(DecodeConfig(truncated="keep"), PreprocessCfg(size=32))(cut).pixels
    whole = Decoder(DecodeConfig(), PreprocessCfg(size=32))(NOISY).pixels
    assert kept is not None
    assert whole is not None
    top = kept[:, :16].float() - whole[:, :16].float()
    assert top.abs().mean() <= 1
    assert reason(cut) == "truncated_image"


def test_nested_formats_that_hide_their_size_are_refused() -> None:
    """An icon's directory may say 16x16 while the PNG inside it is a bomb; EPS is a program."""
    inner = claiming(30_000, 30_000, "PNG")
    icon = (
        struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22) + inner
    )
    assert reason(icon) == "undecodable_image"
    assert (
        reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n")
        == "undecodable_image"
    )


def _peak_kib(reset: bool = False) -> int:
    """This process's peak of resident memory since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory counter")
def test_memory_stays_flat_whatever_the_header_says() -> None:
    bombs = [claiming(30_000, 30_000, f) for f in ("JPEG", "PNG")] + [claiming(1, 100_000, "PNG")]
    decoder = Decoder(DecodeConfig(), PreprocessCfg(size=32))
    decoder(jpeg())
    before = _peak_kib(reset=True)
    for data in bombs * 20:
        with pytest.raises(ImageRejected):
            decoder(data)
    assert _peak_kib() - before < 20 << 10


def test_perceptual_thumb_and_pixel_hash_depend_on_pixels_alone() -> None:
    image = picture((60, 60), 5)
    png, bmp = (Decoder(DecodeConfig(), None)(encode(image, f)) for f in ("PNG", "BMP"))
    assert png.pixel_hash == bmp.pixel_hash
    np.testing.assert_array_equal(png.thumb, bmp.thumb)
    assert png.pixels is None
    assert png.pixel_hash != Decoder(DecodeConfig(), None)(encode(picture((60, 60), 6), "PNG")).pixel_hash

"""A metadata parquet as DataComp's have it, of any number of rows: made for benchmarks, the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

WORDS = {
    "en": "the a of and in on with for new old red blue photo picture house garden beach summer winter city "
    "girl boy woman man dog cat horse car bike kitchen table vintage leather shoes dress wedding birthday "
    "cake recipe free stock image vector illustration background design logo poster print wall art home",
    "de": "der die das und mit für ein eine neue alte Haus Garten Strand Sommer Winter Stadt Mädchen Junge Hund "
    "Katze Pferd Auto Fahrrad Küche Tisch Schuhe Kleid Hochzeit Geburtstag Kuchen kostenlos Bild",
    "fr": "le la les de et avec pour une nouvelle vieille maison jardin plage été hiver ville fille garçon chien "
    "chat cheval voiture vélo cuisine table chaussures robe mariage anniversaire gâteau gratuit image",
    "ru": "и в на с для новый старый дом сад пляж лето зима город девочка мальчик собака кошка лошадь машина "
    "кухня стол туфли платье свадьба торт рецепт бесплатно картинка фото",
    "zh": "新 旧 房子 花园 海滩 夏天 冬天 城市 女孩 男孩 狗 猫 马 汽车 厨房 桌子 鞋子 婚礼 生日 蛋糕 图片 照片",
}
SHARES = {"en": 0.6, "de": 0.12, "fr": 0.12, "ru": 0.08, "zh": 0.08}
CHUNK = 100_000


def write(path: Path, rows: int, seed: int = 0, row_group: int = 50_000) -> Path:
    """Captions of 1 to 24 words in five languages, log-normal sizes, scores spread as the published quantiles."""
    rng = np.random.default_rng(seed)
    writer = None
    captions = np.array(_captions(rng, min(CHUNK, rows)), dtype=object)
    for start in range(0, rows, CHUNK):
        table = _chunk(rng, rng.permutation(captions)[: rows - start].tolist())
        writer = writer or pq.ParquetWriter(path, table.schema, compression="snappy")
        writer.write_table(table, row_group_size=row_group)
    assert writer
    writer.close()
    return path


def _chunk(rng: np.random.Generator, captions: list[str]) -> pa.Table:
    n = len(captions)

    def hexes(size: int) -> list[str]:
        whole = rng.bytes(size * n).hex()
        return [whole[i : i + 2 * size] for i in range(0, len(whole), 2 * size)]

    width, height = (np.exp(rng.normal(6.3, 0.7, n)).astype(np.int64) + 20 for _ in range(2))
    scores = rng.normal(0.24, 0.06, n).astype(np.float32)
    uid = hexes(16)
    return pl.DataFrame(
        {
            "uid": uid,
            "url": [f"https://images.example.org/{u[:2]}/{u[2:18]}.jpg" for u in uid],
            "text": captions,
            "original_width": width,
            "original_height": height,
            "clip_b32_similarity_score": scores,
            "clip_l14_similarity_score": scores - rng.normal(0.04, 0.02, n).astype(np.float32),
            "face_bboxes": [[[0.1, 0.2, 0.3, 0.4]] if x < 0.15 else [] for x in rng.random(n)],
            "sha256": hexes(32),
        },
        schema_overrides={"face_bboxes": pl.List(pl.List(pl.Float64))},
    ).to_arrow().cast(_SCHEMA)  # fmt: skip


_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("url", pa.string()),
        ("text", pa.string()),
        ("original_width", pa.int64()),
        ("original_height", pa.int64()),
        ("clip_b32_similarity_score", pa.float32()),
        ("clip_l14_similarity_score", pa.float32()),
        ("face_bboxes", pa.list_(pa.list_(pa.float64()))),
        ("sha256", pa.string()),
    ]
)


def _captions(rng: np.random.Generator, n: int) -> list[str]:
    vocabulary = {k: np.array(words.split(), dtype=object) for k, words in WORDS.items()}
    languages = rng.choice(list(SHARES), n, p=list(SHARES.values()))
    lengths = np.clip(rng.geometric(0.11, n), 1, 24)
    draws = np.minimum(rng.random((n, 24)) ** 1.5, 0.999999)  # the first words of a list are the common ones
    found = []
    for language, length, draw in zip(languages, lengths, draws):
        words = vocabulary[language]
        found.append(" ".join(words[(draw[:length] * len(words)).astype(int)]))
    return found

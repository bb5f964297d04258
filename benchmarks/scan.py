"""Reading, decoding and resharding against the tools of the field, in one run on one machine.

python -m benchmarks.scan [--table PHOTOS.parquet] [--samples 2000] [--repeats 5]

`--table` is a parquet file with a column `jpg`; without it, photos are synthesised. Every comparison takes
turns (A B A B ...) and reports medians. Rows:

  decode     one core, shard to model input (224 px, float32): Winnow against webdataset + open_clip's transform
  ray data   the same two cores: Winnow's workers against ray.data.read_webdataset + open_clip's transform
             (needs `pip install 'ray[data]'`)
  workers    two warm workers against one
  reshard    one core, shard to shard, keeping 15 % and all: Winnow against webdataset + TarWriter
  memory     a worker's peak memory on shards of n and 8n samples
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import torch
import webdataset as wds
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from filters.score import ScoreCut
from filters.stage import FilterStage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import run_chain
from pipeline.decode import DecodeConfig, Decoder, Normalise
from pipeline.manifest import Run, write_outputs
from pipeline.reshard import ReshardWorker, plan
from pipeline.samples import PoolConfig, read_sample
from pipeline.scan import ErrorBudget, scan
from pipeline.shards import open_shard

CLIP = PreprocessCfg(size=224)
BATCH = 64


def photos(table: str | None, count: int) -> Iterator[bytes]:
    """JPEGs of 512 pixels on the short side and about 80 KB."""
    rng = np.random.default_rng(0)
    source = pl.read_parquet(table)["jpg"].to_list() if table else [None] * 64
    made = []
    for data in source[:256]:
        if data is None:  # smooth shapes with grain: compresses much as photos do
            low = rng.integers(0, 255, (24, 32, 3), np.uint8)
            image = Image.fromarray(low).resize((680, 512), Image.Resampling.BICUBIC)
            grain = rng.normal(0, 9, (512, 680, 1))
            image = Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))
        else:
            image = Image.open(io.BytesIO(data)).convert("RGB").resize((680, 512), Image.Resampling.BICUBIC)
        for quality in (95, 92, 90, 85, 80, 75):
            out = io.BytesIO()
            image.save(out, "JPEG", quality=quality)
            if out.tell() < 90_000:
                break
        made.append(out.getvalue())
    for i in range(count):
        yield made[i % len(made)]


def build(folder: Path, table: str | None, samples: int, shards: int) -> list[str]:
    folder.mkdir(parents=True)
    pictures = photos(table, samples)
    paths = []
    for s in range(shards):
        path = folder / f"{s:05d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(samples // shards):
                key = f"{s:05d}{i:06d}"
                record = json.dumps({"uid": f"{s:016x}{i:016x}", "key": key}).encode()
                for ext, data in (("jpg", next(pictures)), ("txt", b"a photo"), ("json", record)):
                    info = tarfile.TarInfo(f"{key}.{ext}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        paths.append(str(path))
    return paths


# ---------------------------------------------------------------- decode


def winnow_inputs(path: str) -> int:
    """Shard to normalised float32 batches with the scan's own reader and decoder."""
    decoder = Decoder(DecodeConfig(), CLIP)
    normalise = Normalise(CLIP, "cpu")
    pool = PoolConfig(shards=path)
    count = 0
    with open_shard(path) as shard:
        raws = shard.index().samples
        for start in range(0, len(raws), BATCH):
            samples = [read_sample(shard, "x.tar", raw, pool) for raw in raws[start : start + BATCH]]
            pixels = [decoder(shard.read(s.image)).pixels for s in samples if s.image]
            count += len(normalise([p for p in pixels if p is not None]))
    return count


def webdataset_inputs(path: str) -> int:
    transform = image_transform_v2(CLIP, is_train=False)
    data = wds.WebDataset(path, shardshuffle=False).decode("pil").to_tuple("jpg", "txt", "json")
    batch, count = [], 0
    for image, _text, _json in data:
        batch.append(transform(image))
        if len(batch) == BATCH:
            count += len(torch.stack(batch))
            batch = []
    return count + len(batch)


class Inputs:
    """A Ray worker that decodes whole shards, as the scan's does, and embeds nothing."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def decode(self, path: str) -> int:
        return winnow_inputs(path)


POOLS: dict[int, list] = {}


def winnow_ray(paths: list[str], count: int) -> int:
    """The shards on `count` warm workers, two in the queue of each, as `cluster.map_actors` hands them out."""
    import ray

    if count not in POOLS:
        POOLS[count] = [ray.remote(num_cpus=0)(Inputs).remote() for _ in range(count)]
    pool = ray.util.ActorPool(POOLS[count])
    return sum(pool.map_unordered(lambda actor, path: actor.decode.remote(path), paths))


def ray_data(paths: list[str]) -> int:
    import ray

    transform = image_transform_v2(CLIP, is_train=False)

    def decode(row: dict) -> dict:
        image = (
            row["jpg"]
            if isinstance(row["jpg"], np.ndarray)
            else np.asarray(Image.open(io.BytesIO(row["jpg"])))
        )
        return {"image": transform(Image.fromarray(image)).numpy()}

    data = ray.data.read_webdataset(paths, suffixes=["jpg", "txt", "json"]).map(decode)
    return sum(len(b["image"]) for b in data.iter_batches(batch_size=BATCH))


# ---------------------------------------------------------------- reshard and workers


def curated(out: str, folder: str, keep: float) -> Run:
    """Scan and keep a share, spread over the shards, without a network."""
    done = scan(out, PoolConfig(shards=folder), None, DecodeConfig(), ClusterConfig(), ErrorBudget())
    here = Run(out, f"keep{keep}")
    cut = ScoreCut(name="share", column="uid_lo", top_fraction=keep)
    last, results = run_chain(done, [FilterStage([cut])], here.path("stages"))
    write_outputs(here, done, last, results, {})
    return here


def winnow_reshard(here: Run, to: str, shard_size: int) -> int:
    worker = ReshardWorker(here.path("manifest.parquet"), here.tables().folder, to)
    return sum(worker.write(task) for task in plan(here.path("manifest.parquet"), shard_size))


def webdataset_reshard(paths: list[str], to: str, keep: set[str], shard_size: int) -> int:
    """What the reference does: read every sample, look its uid up, write it again."""
    Path(to).mkdir(parents=True, exist_ok=True)
    writer, count = None, 0
    for sample in wds.WebDataset(paths, shardshuffle=False):
        uid = json.loads(sample["json"])["uid"]
        if uid not in keep:
            continue
        if count % shard_size == 0:
            if writer:
                writer.close()
            writer = wds.TarWriter(f"{to}/{count // shard_size:08d}.tar")
        assert writer is not None
        writer.write({**sample, "__key__": f"{uid}-0"})
        count += 1
    if writer:
        writer.close()
    return count


# ---------------------------------------------------------------- measuring


def rates(a: Callable[[], int], b: Callable[[], int], repeats: int) -> tuple[float, float, float]:
    """Median samples/s of a and of b, and the median of their ratios, turn by turn."""
    pairs = []
    for _ in range(repeats + 1):
        pair = []
        for work in (a, b):
            started = time.perf_counter()
            count = work()
            pair.append(count / (time.perf_counter() - started))
        pairs.append(pair)
    pairs = pairs[1:]  # the first turn warms caches
    return (
        statistics.median(p[0] for p in pairs),
        statistics.median(p[1] for p in pairs),
        statistics.median(p[0] / p[1] for p in pairs),
    )


def show(name: str, ours: str, a: float, theirs: str, b: float, ratio: float, target: float) -> None:
    print(
        f"{name:<10} {ours} {a:8,.0f}/s   {theirs} {b:8,.0f}/s   ratio {ratio:5.2f} (target {target:g})",
        flush=True,
    )


def _peak(path: str, out: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    winnow_inputs(path)
    out.put((before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def peak_growth(path: str) -> float:
    """MiB that decoding one shard adds to a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue = context.Queue()  # type: ignore[assignment]
    process = context.Process(target=_peak, args=(path, queue))
    process.start()
    before, after = queue.get()
    process.join()
    return (after - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", help="parquet file with a jpg column")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool"
        paths = build(pool, args.table, args.samples, 8)
        size = sum(Path(p).stat().st_size for p in paths) / args.samples
        print(f"{args.samples} photos, {size / 1e3:.0f} KB of tar a sample; {args.repeats} turns, medians")
        one = paths[0]
        a, b, r = rates(lambda: winnow_inputs(one), lambda: webdataset_inputs(one), args.repeats)
        show("decode", "winnow", a, "webdataset", b, r, 2)
        tall = build(Path(folder) / "tall", args.table, args.samples, 1)
        for keep in (0.15, 1.0):
            here = curated(f"{folder}/out", tall[0], keep)
            kept = {f"{hi:016x}{lo:016x}" for hi, lo in np.load(here.path("subset.npy")).tolist()}
            a, b, r = rates(
                partial(winnow_reshard, here, f"{folder}/to", 1000),
                partial(webdataset_reshard, tall, f"{folder}/wds", kept, 1000),
                args.repeats,
            )
            show(f"keep {keep:.0%}", "winnow", a, "webdataset", b, r, 5)
        small, large = peak_growth(one), peak_growth(tall[0])
        print(
            f"memory     one shard of {args.samples // 8}: +{small:.0f} MiB, of {args.samples}: +{large:.0f} MiB"
        )
        a, b, r = rates(lambda: winnow_ray(paths, 2), lambda: winnow_ray(paths, 1), args.repeats)
        show("workers", "two", a, "one", b, r, 1.7)
        a, b, r = rates(lambda: winnow_ray(paths, 2), lambda: ray_data(paths), args.repeats)
        show("ray data", "winnow", a, "ray.data", b, r, 3)


if __name__ == "__main__":
    main()

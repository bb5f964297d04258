"""Near duplicates side by side: this project, FAISS IVFFlat range_search, semhash; and perceptual hashes.

    python benchmarks/dedup.py speed --rows 50000 200000         # this project against FAISS
    python benchmarks/dedup.py speed --rows 50000 --tools semhash  # in an environment that has semhash
    python benchmarks/dedup.py growth --rows 100000 1000000      # float16 shards on disk: time and memory
    python benchmarks/dedup.py phash --images PHOTOS.parquet  # against what is installed of the peers

Every measurement is a process of its own; tools take turns, and medians are shown. CPU seconds stand beside
wall time because they suffer less from what else the machine does; memory is the peak of what a process
holds for itself. Data: unit rows of 512, a fifth of them
near copies at cosine .9 of others, threshold .88; "isotropic" rows are Gaussian, "clustered" ones lie around
one centre for every 50 rows. Recall is that of the planted pairs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

WIDTH, COSINE, THRESHOLD, COPIES, SHARD_ROWS = 512, 0.9, 0.88, 0.2, 10_000


def base_rows(shard: int, count: int, kind: str, shards: int) -> np.ndarray:
    """Unit rows of a shard that are no copies: (count, WIDTH) float32."""
    rng = np.random.default_rng([11, shard])
    rows = _unit(rng.standard_normal((count, WIDTH), dtype=np.float32))
    if kind == "isotropic":
        return rows
    centres = np.random.default_rng(12).standard_normal((shards * count // 50, WIDTH), dtype=np.float32)
    return _unit(0.8 * _unit(centres)[rng.integers(0, len(centres), count)] + 0.6 * rows)


def write_pool(folder: Path, rows: int, kind: str) -> None:
    """Shards of SHARD_ROWS float16 rows and planted.npy: (p, 2) int64 row numbers of the copies."""
    shards, fresh = rows // SHARD_ROWS, int(SHARD_ROWS * (1 - COPIES))
    planted = []
    for shard in range(shards):
        rng = np.random.default_rng([13, shard])
        other = (shard * 7 + 3) % shards
        of = rng.choice(fresh, SHARD_ROWS - fresh, replace=False)
        source = base_rows(other, fresh, kind, shards)[of]
        noise = rng.standard_normal(source.shape, dtype=np.float32)
        noise = _unit(noise - (noise * source).sum(1, keepdims=True) * source)
        copies = COSINE * source + np.sqrt(1 - COSINE**2) * noise
        np.save(
            folder / f"{shard:08d}.npy",
            np.concatenate([base_rows(shard, fresh, kind, shards), copies]).astype(np.float16),
        )
        rows_here = shard * SHARD_ROWS + fresh + np.arange(len(of))
        planted.append(np.stack([other * SHARD_ROWS + of, rows_here], axis=1))
    np.save(folder / "planted.npy", np.sort(np.concatenate(planted), axis=1))


def _unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def run_winnow(folder: Path, threads: int, recall: float) -> np.ndarray:
    from filters.duplicates.blocks import Block, MemorySource
    from filters.duplicates.config import NearConfig, memory_plan
    from filters.duplicates.near import PAIR
    from filters.duplicates.search import NearSearch
    from filters.duplicates.tasks import LocalRunner

    blocks = {}
    for number, path in enumerate(shard_files(folder)):
        n = len(np.load(path, mmap_mode="r"))
        uid = np.arange(number * SHARD_ROWS, number * SHARD_ROWS + n, dtype=np.uint64)
        zero = np.zeros(n, np.uint64)
        blocks[path.stem] = Block(
            shard=path.stem,
            embeddings=[str(path)],
            uid_hi=zero,
            uid_lo=uid,
            score=np.zeros(n),
            alive=np.ones(n, bool),
        )
    config = NearConfig(method="embedding", similarity=THRESHOLD, recall=recall)
    with tempfile.TemporaryDirectory(dir=folder) as out:
        search = NearSearch(MemorySource(blocks), Path(out), config, LocalRunner(threads))
        plan = memory_plan(config, sum(block.rows for block in blocks.values()), WIDTH)
        print(plan.describe(config.task_memory, out), file=sys.stderr)
        print(search.run().recall, file=sys.stderr)
        pairs = np.concatenate([np.fromfile(path, dtype=PAIR) for path in search.pair_files()])
    return np.stack([(pairs[s] >> 32) * SHARD_ROWS + (pairs[s] & 0xFFFFFFFF) for s in ("a", "b")], axis=1)


def run_faiss(folder: Path, threads: int, recall: float) -> np.ndarray:
    import faiss

    faiss.omp_set_num_threads(threads)
    rows = np.concatenate([np.load(path) for path in shard_files(folder)]).astype(np.float32)
    faiss.normalize_L2(rows)
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(WIDTH), WIDTH, int(4 * len(rows) ** 0.5), faiss.METRIC_INNER_PRODUCT
    )
    index.train(rows)
    index.add(rows)
    index.nprobe = 4
    limits, _, neighbours = index.range_search(rows, THRESHOLD)
    row = np.repeat(np.arange(len(rows)), np.diff(limits.astype(np.int64)))
    return np.stack([row, neighbours], axis=1)[row != neighbours]


def run_semhash(folder: Path, threads: int, recall: float) -> np.ndarray:
    from semhash import SemHash

    rows = np.concatenate([np.load(path) for path in shard_files(folder)]).astype(np.float32)
    names = [str(row) for row in range(len(rows))]
    result = SemHash.from_embeddings(rows, records=names, model=None).self_deduplicate(threshold=THRESHOLD)
    return np.array([[int(d.record), int(k)] for d in result.filtered for k, _ in d.duplicates]).reshape(
        -1, 2
    )


# Loaded before the clock starts.
LIBRARIES = {"winnow": "filters.duplicates.search", "faiss": "faiss", "semhash": "semhash"}
TOOLS = {"winnow": run_winnow, "faiss": run_faiss, "semhash": run_semhash}


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("0*.npy"))


class Memory(threading.Thread):
    """Watches the memory of this process that is its own: KiB, without the pages of files that it maps."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            self.peak = max(self.peak, int(status.split("RssAnon:")[1].split()[0]))
            time.sleep(0.02)


def measure(tool: str, folder: Path, threads: int, recall: float) -> None:
    """In a process of its own: one run, printed as JSON."""
    importlib.import_module(LIBRARIES[tool])
    wall, cpu, memory = time.perf_counter(), time.process_time(), Memory()
    pairs = TOOLS[tool](folder, threads, recall)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    planted = np.load(folder / "planted.npy")
    key = np.int64(1) << 32
    found = np.isin(planted[:, 0] * key + planted[:, 1], pairs.min(1) * key + pairs.max(1)).mean()
    print(json.dumps({"wall": wall, "cpu": cpu, "recall": float(found), "gib": memory.peak / 2**20}))


def compare(tools: list[str], rows: int, kind: str, arguments: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="dedup-", dir=arguments.scratch))
    try:
        write_pool(folder, rows, kind)
        runs: dict[str, list[dict]] = {tool: [] for tool in tools}
        for _ in range(arguments.repeats):
            for tool in tools:
                command = [sys.executable, __file__, "measure", tool, str(folder)]
                command += [str(arguments.threads), str(arguments.recall)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                runs[tool].append(json.loads(output.splitlines()[-1]))
        for tool, results in runs.items():
            line = {name: statistics.median(result[name] for result in results) for name in results[0]}
            print(
                f"{rows:>9,} {kind:<10} {tool:<8} {line['wall']:7.1f} s  cpu {line['cpu']:7.1f} s  "
                f"recall {line['recall']:.4f}  {line['gib']:.2f} GiB",
                flush=True,
            )
    finally:
        shutil.rmtree(folder)


def compare_hashes(images: Path, count: int) -> None:
    """Time to hash decoded images, and to decode and hash them from bytes."""
    import io

    import torch
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_jpeg

    from pipeline.phash import gray_thumbnail, perceptual_hash

    torch.set_num_threads(1)
    import polars as pl

    if images.is_dir():
        data = [path.read_bytes() for path in sorted(images.glob("*.jpg"))[:count]]
    else:
        data = pl.read_parquet(images, columns=["jpg"])["jpg"].to_list()
    data = (data * (count // len(data) + 1))[:count]

    def ours(blob: bytes) -> int:
        tensor = decode_jpeg(torch.frombuffer(bytearray(blob), dtype=torch.uint8), ImageReadMode.RGB)
        return int(perceptual_hash([gray_thumbnail(tensor)])[0])

    tools = {"winnow": ours}
    try:
        import imagehash

        tools["imagehash.phash"] = lambda blob: int(str(imagehash.phash(Image.open(io.BytesIO(blob)))), 16)
    except ImportError:
        pass
    try:
        from imagededup.methods import PHash

        hasher = PHash(verbose=False)
        tools["imagededup.PHash"] = lambda blob: int(
            hasher.encode_image(image_array=np.asarray(Image.open(io.BytesIO(blob)))), 16
        )
    except ImportError:
        pass
    try:
        import daft
        from daft.functions import decode_image, image_hash

        frame = daft.from_pydict({"jpg": data})
        wall, start = time.perf_counter(), time.process_time()
        frame.select(image_hash(decode_image(frame["jpg"], mode="RGB"), method="phash")).collect()
        cpu, wall = time.process_time() - start, time.perf_counter() - wall
        print(f"{'daft.image_hash':<18} {len(data)} images from bytes: {cpu:.2f} s CPU, {wall:.2f} s")
    except ImportError:
        pass
    for name, function in tools.items():
        wall, start = time.perf_counter(), time.process_time()
        for blob in data:
            function(blob)
        cpu, wall = time.process_time() - start, time.perf_counter() - wall
        print(f"{name:<18} {len(data)} images from bytes: {cpu:.2f} s CPU, {wall:.2f} s")
    decoded = [
        decode_jpeg(torch.frombuffer(bytearray(b), dtype=torch.uint8), ImageReadMode.RGB) for b in data
    ]
    start = time.process_time()
    perceptual_hash([gray_thumbnail(tensor) for tensor in decoded])
    print(f"{'winnow':<18} {len(data)} decoded images: {time.process_time() - start:.2f} s CPU")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, tools, kinds in (
        ("speed", ["winnow", "faiss"], ["isotropic", "clustered"]),
        ("growth", ["winnow"], ["isotropic"]),
    ):
        one = commands.add_parser(name)
        one.add_argument("--rows", type=int, nargs="+", default=[50_000, 200_000])
        one.add_argument("--tools", nargs="+", default=tools, choices=list(TOOLS))
        one.add_argument("--kinds", nargs="+", default=kinds)
        one.add_argument("--threads", type=int, default=2)
        one.add_argument("--recall", type=float, default=0.9995 if name == "speed" else 0.99)
        one.add_argument("--repeats", type=int, default=3 if name == "speed" else 1)
        one.add_argument("--scratch", default=None)
    one = commands.add_parser("phash")
    one.add_argument("--images", type=Path, required=True)
    one.add_argument("--count", type=int, default=4000)
    one = commands.add_parser("measure")
    one.add_argument("tool")
    one.add_argument("folder", type=Path)
    one.add_argument("threads", type=int)
    one.add_argument("recall", type=float)
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments.tool, arguments.folder, arguments.threads, arguments.recall)
    elif arguments.command == "phash":
        compare_hashes(arguments.images, arguments.count)
    else:
        for rows in arguments.rows:
            for kind in arguments.kinds:
                compare(arguments.tools, rows, kind, arguments)


if __name__ == "__main__":
    main()

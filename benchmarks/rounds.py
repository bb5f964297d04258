"""RS2 rounds at scale: one shard's membership alone, a whole round streamed, and what 1.28 x 10^10 would
take.

    python -m benchmarks.rounds [entries=100000000] [shard=10000] [ratio=0.1]

Times are processor seconds of one core. Each figure is measured in a process of its own, so that the peak
memory is that of the one thing measured.
"""

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from selection.rounds import Rounds

LARGEST = 12_800_000_000


def one_shard(entries: int, per_shard: int, ratio: str) -> str:
    """Cold, a round of which nothing was asked before; and warm."""
    rounds = Rounds(np.full(entries // per_shard, per_shard), ratio, seed=1)
    seconds = []
    for t in range(21):
        start = time.process_time()
        rounds.members(t, (t * 7919) % len(rounds.counts))
        seconds.append(time.process_time() - start)
    start = time.process_time()
    for shard in range(0, len(rounds.counts), len(rounds.counts) // 100):
        rounds.members(4, shard)
    more = (time.process_time() - start) / 100
    return (
        f"one shard of a round: median {1e3 * statistics.median(seconds):.1f} ms, worst "
        f"{1e3 * max(seconds):.1f} ms; "
        f"{1e3 * more:.1f} ms each for 100 shards of one round"
    )


def counts_of_all_shards(entries: int, per_shard: int, ratio: str) -> str:
    rounds = Rounds(np.full(entries // per_shard, per_shard), ratio, seed=1)
    start = time.process_time()
    total = int(rounds.shard_sizes(4).sum())
    return f"members of each shard counted: {time.process_time() - start:.2f} s ({total:,} in all)"


def whole_round(entries: int, per_shard: int, ratio: str) -> str:
    rounds = Rounds(np.full(entries // per_shard, per_shard), ratio, seed=1)
    start = time.process_time()
    total = sum(len(positions) for _, positions in rounds.all_members(4))
    seconds = time.process_time() - start
    assert total == rounds.k
    rate = entries / seconds
    return (
        f"whole round streamed: {seconds:.1f} s, {total:,} members; at this rate {LARGEST:,} entries take "
        f"{LARGEST / rate / 60:.0f} min on one core, shared out by shard on as many as there are"
    )


def measured(figure: Callable[[int, int, str], str], entries: int, per_shard: int, ratio: str) -> None:
    text = figure(entries, per_shard, ratio)
    print(
        f"{text}; peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", flush=True
    )


def main() -> None:
    options = {"entries": "100000000", "shard": "10000", "ratio": "0.1"} | dict(
        argument.split("=", 1) for argument in sys.argv[1:]
    )
    per_shard, ratio = int(options["shard"]), options["ratio"]
    jobs = [(figure, int(options["entries"])) for figure in (one_shard, counts_of_all_shards, whole_round)]
    for figure, entries in [*jobs, (one_shard, LARGEST), (counts_of_all_shards, LARGEST)]:
        print(f"{entries:>14,} entries, {entries // per_shard:,} shards, ratio {ratio}: ", end="", flush=True)
        process = multiprocessing.get_context("spawn").Process(
            target=measured, args=(figure, entries, per_shard, ratio)
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{figure.__name__} failed")


if __name__ == "__main__":
    main()

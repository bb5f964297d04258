"""Wrong labels found, and accuracy after removal, on CIFAR-10 with one human annotator's labels (17.2 % wrong).

    python benchmarks/influence_labels.py prepare DATA OUT    # shards, a network, their embeddings
    python benchmarks/influence_labels.py measure OUT         # where cleanlab is installed
    python benchmarks/influence_labels.py train OUT           # small networks on what is kept

DATA holds cifar10-train.parquet, cifar10-test.parquet and cifar10-human-labels.parquet. `prepare` makes shards
whose captions and labels are the annotator's, trains the network `small` on those captions (no true label of
a training image is seen by anything but the final count), and embeds train and test images by the scan.

`measure` orders the 50,000 training rows by suspicion and counts the wrong ones among the first 5, 10 and 20 %:
Winnow's label-error order and its `utility` order, cleanlab's (confident learning on out-of-sample
probabilities of the same head, five folds), the head's own loss, and a random order. Then it removes rows
from training and compares the head's test accuracy with removing as many at random (3 seeds). `train` trains
the proxy network (`selection.proxy`) from random weights on the pixels of what the removal of a fifth in one
shot kept, and on as many rows drawn at random, for equal steps, 3 seeds each.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import time
from pathlib import Path

import numpy as np

from selection.influence import HeldOut, Rows, SelectionConfig, fit_head, influence, objective, select
from selection.influence.labels import label_errors

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SHARES = (0.05, 0.1, 0.2)
L2, FOLDS, SEEDS = 1.0, 5, 3
SAMPLES_SEEN = 320_000


def prepare(data: Path, out: Path) -> None:
    import polars as pl
    import ray

    from filters.network.config import TrainConfig, TrainSpec
    from filters.network.train import train_network
    from pipeline.cluster import ClusterConfig
    from pipeline.decode import DecodeConfig
    from pipeline.samples import PoolConfig
    from pipeline.scan import ErrorBudget, scan
    from pipeline.scorer import ScorerConfig

    train = pl.read_parquet(data / "cifar10-train.parquet")
    human = pl.read_parquet(data / "cifar10-human-labels.parquet").select("uid", "human_label")
    train = train.join(human, on="uid").sort("uid")
    test = pl.read_parquet(data / "cifar10-test.parquet").sort("uid").with_columns(human_label="label")
    for name, table in (("train", train), ("test", test)):
        write_shards(out / name, table)
    network = str(out / "network")
    config = TrainConfig(samples_seen=SAMPLES_SEEN)
    pool = PoolConfig(shards=f"{out}/train/*.tar")
    spec = TrainSpec(out=network, pool=pool, decode=DecodeConfig(), model="small", init=None, config=config)
    done = train_network(spec)
    print(done.describe())
    arrays: dict[str, np.ndarray] = {}
    for name, table in (("train", train), ("test", test)):
        pool = PoolConfig(shards=f"{out}/{name}/*.tar")
        scanned = scan(
            str(out / "tables"),
            pool,
            ScorerConfig(weights=network),
            DecodeConfig(),
            ClusterConfig(),
            ErrorBudget(),
        )
        blocks = [scanned.tables.embeddings(shard, "image") for shard in scanned.ids]
        arrays |= {f"x_{name}": np.concatenate(blocks).astype(np.float32)}
        arrays |= {f"y_{name}": table["label"].to_numpy().astype(np.int64)}
    np.savez(out / "features.npz", given=train["human_label"].to_numpy().astype(np.int64), **arrays)
    ray.shutdown()


def write_shards(folder: Path, table, each: int = 1_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(table.iter_slices(each)):
        with tarfile.open(folder / f"{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for row, (uid, label, jpg) in enumerate(part.select("uid", "human_label", "jpg").iter_rows()):
                record = {"uid": uid, "label": label, "caption": f"a photo of a {CLASSES[label]}"}
                for ext, data in (("jpg", jpg), ("json", json.dumps(record).encode())):
                    info = tarfile.TarInfo(f"{row:05d}.{ext}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


class Noisy:
    """Embeddings with an intercept column, the annotator's labels, and what is true."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.given, self.true = file["given"], file["y_train"]
            x, held_x, held_y = file["x_train"], file["x_test"], file["y_test"]
        self.x = np.hstack([x, np.ones((len(x), 1), np.float32)])
        held_x = np.hstack([held_x, np.ones((len(held_x), 1), np.float32)])
        self.wrong = self.given != self.true
        part = np.random.default_rng(0).permutation(len(held_y))
        rows = np.split(part, [4_000, 6_000])
        self.held, self.guard, self.test = (HeldOut(held_x[np.sort(r)], held_y[np.sort(r)]) for r in rows)
        self.rows = Rows.from_arrays(self.x, self.given)

    def fit(self, keep: np.ndarray | None = None, start=None, tolerance: float = 1e-7):
        rows = self.rows if keep is None else self.rows.where(keep)
        return fit_head(rows, l2=L2, classes=10, start=start, tolerance=tolerance)

    def accuracy(self, head) -> float:
        return float((head.predict(self.test.x) == self.test.y).mean())


def suspicion(noisy: Noisy) -> dict[str, np.ndarray]:
    """Orders of all rows, most suspicious first."""
    started = time.perf_counter()
    head = noisy.fit()
    fitted = time.perf_counter() - started
    delta = influence(noisy.rows, head, [objective("utility", noisy.held, head)]).column("utility")
    found = label_errors(noisy.rows, head, delta=delta).row
    took = time.perf_counter() - started
    print(
        f"head: test accuracy {noisy.accuracy(head):.4f}, fit {fitted:.1f} s, with label errors {took:.1f} s"
    )
    utility = np.argsort(delta, kind="stable")
    own = head.probabilities(noisy.x)[np.arange(len(noisy.given)), noisy.given]
    alone = label_errors(noisy.rows, head).row
    orders = {
        "random": np.random.default_rng(1).permutation(len(noisy.given)),
        "loss of the head": np.argsort(own, kind="stable"),
        "winnow, label errors": first(found, utility),
        "   without trusted held-out labels": first(alone, np.argsort(own, kind="stable")),
        "winnow, delta_if_removed_utility": utility,
    }
    return orders | confident_learning(noisy, head)


def first(some: np.ndarray, order: np.ndarray) -> np.ndarray:
    """All rows: `some` in their order, then the others in theirs."""
    return np.concatenate([some, order[~np.isin(order, some)]])


def confident_learning(noisy: Noisy, head) -> dict[str, np.ndarray]:
    try:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores
    except ImportError as error:
        print(f"cleanlab: not installed here ({error})")
        return {}
    started = time.perf_counter()
    fold = np.random.default_rng(0).integers(0, FOLDS, len(noisy.given))
    outside = np.empty((len(fold), 10))
    for f in range(FOLDS):
        outside[fold == f] = noisy.fit(fold != f, start=head, tolerance=1e-5).probabilities(
            noisy.x[fold == f]
        )
    ranked = {
        f"cleanlab, {method}": np.argsort(
            get_label_quality_scores(noisy.given, outside, method=method), kind="stable"
        )
        for method in ("self_confidence", "normalized_margin")
    }
    issues = find_label_issues(noisy.given, outside, return_indices_ranked_by="self_confidence", n_jobs=1)
    ranked[f"cleanlab, find_label_issues ({len(issues)})"] = first(
        issues, ranked["cleanlab, self_confidence"]
    )
    print(f"cleanlab: {FOLDS} folds in {time.perf_counter() - started:.1f} s")
    return ranked


def wrong_among_first(noisy: Noisy) -> None:
    orders = suspicion(noisy)
    print(
        f"truly wrong among the rows flagged first ({noisy.wrong.mean():.1%} of {len(noisy.wrong):,} are wrong)"
    )
    print(f"{'':38s}" + "".join(f"{share:>9.0%}" for share in SHARES))
    for name, order in orders.items():
        found = [noisy.wrong[order[: int(share * len(order))]].mean() for share in SHARES]
        print(f"{name:38s}" + "".join(f"{value:9.1%}" for value in found))


def after_removal(noisy: Noisy, out: Path) -> None:
    print("test accuracy of the head after removing rows; random: mean of 3 seeds")
    for budget, rounds, guard in ((0.05, 1, True), (0.1, 1, True), (0.2, 4, True), (0.2, 1, False)):
        config = SelectionConfig(budget=budget, rounds=rounds, guard=guard)
        result = select(
            noisy.rows, noisy.held, config, l2=L2, guard=noisy.guard, others={"test": noisy.test}, classes=10
        )
        before, after = result.metrics["test"]
        count, n = int(result.removed.sum()), len(noisy.given)
        np.save(out / "removed.npy", result.removed)  # `train` takes the last one
        others = []
        for seed in range(SEEDS):
            keep = np.isin(np.arange(n), random(n, count, seed))
            others.append(noisy.accuracy(noisy.fit(keep, result.base)))
        print(
            f"budget {budget:.0%}, {rounds} rounds, guard {'on' if guard else 'off'}: {result.verdict}\n"
            f"   base {before.accuracy:.4f}, kept by influence {after.accuracy:.4f}, random {np.mean(others):.4f}"
            f" ({', '.join(f'{a:.4f}' for a in others)}); {noisy.wrong[result.removed].mean():.1%} of the removed are wrong"
        )


def train(out: Path, steps: int) -> None:
    from selection.proxy import LabelConfig, ProxyConfig, batches, epochs, load_images, train_proxy

    labels = LabelConfig(classes=CLASSES)
    images, test = (load_images(f"{out}/{part}/*.tar", labels) for part in ("train", "test"))
    removed = np.load(out / "removed.npy")
    assert len(images) == len(removed), "every image of the shards is read, in their order"
    config, n, count = ProxyConfig(), len(removed), int(removed.sum())
    arms = {
        "kept by influence": lambda seed: np.flatnonzero(~removed),
        "random": lambda seed: random(n, count, seed),
    }
    print(
        f"proxy {config.arch}, {steps} steps of {config.batch_size}, {n - count:,} of {n:,} rows, test accuracy"
    )
    for name, rows in arms.items():
        found = []
        for seed in range(SEEDS):
            order = batches(epochs(rows(seed), seed), config.batch_size)
            done = train_proxy(images, order, steps, seed=seed, config=config, test=test)
            found.append(done.points[-1].accuracy)
            print(f"   {name}, seed {seed}: {found[-1]:.4f} ({done.seconds:.0f} s)", flush=True)
        print(f"{name}: mean {np.mean(found):.4f}, standard deviation {np.std(found, ddof=1):.4f}")


def random(n: int, count: int, seed: int) -> np.ndarray:
    """Sorted numbers of n rows without `count` drawn at random."""
    return np.sort(np.random.default_rng(seed).choice(n, n - count, replace=False))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("prepare", "measure", "train"))
    parser.add_argument("--steps", type=int, default=800, help="of each network, 128 images a step")
    parser.add_argument("folders", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.step == "prepare":
        prepare(*arguments.folders)
        return 0
    if arguments.step == "train":
        train(arguments.folders[0], arguments.steps)
        return 0
    noisy = Noisy(arguments.folders[0] / "features.npz")
    wrong_among_first(noisy)
    after_removal(noisy, arguments.folders[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())

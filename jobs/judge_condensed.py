"""Condensed sets against each other and against real images: accuracy over the number of images of each class.

python -m jobs.judge_condensed out=/data/winnow run=default test=/data/test.parquet to=/data/judged

Rows: A one condensation (idc) for each size; B images condensed one by one, joined; C prefixes of one plain
condensation (idc); mdc; dm; and the coresets of jobs.condense. Sets are made under `to` as they are needed and
kept; a command that was stopped goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from omegaconf import MISSING, DictConfig

from jobs.condense import CondenseJob, claim, condense_config, keep_images, make_condensed, make_set, open_run
from jobs.launch import build, launch, plain, register
from pipeline import storage
from pipeline.cluster import ActorPool
from pipeline.errors import Refused
from pipeline.evaluation import fingerprint
from pipeline.manifest import Run, versions
from pipeline.progress import Progress
from selection.condense.config import CondenseConfig
from selection.condense.judge import JudgeConfig, Row, judge, plot, table
from selection.condense.run import group_workers
from selection.coresets import CORESETS
from selection.proxy import LabelConfig, LabelledImages, load_images, pixels
from selection.proxy.pixels import drawn
from selection.ranked import META, RankedSet, load_ranked, save_figure

METHOD_OF = {"A": "idc", "B": "single", "C": "idc", "mdc": "mdc", "dm": "dm"}
ROWS = (*METHOD_OF, *CORESETS)
DEFAULT_ROWS = ["A", "B", "C", "mdc", "random", "kmeans", "herding"]


@dataclass(kw_only=True)
class JudgeJob(CondenseJob):
    """Settings of the command, beside those of `jobs.condense`.

    test: the test set: shards, a parquet table with a `label` column, or a folder with a folder a class.
    rows: which rows, of A, B, C, mdc, dm and the coresets. judge: see `JudgeConfig`.
    tune: image rates to try for each method; each is condensed without the share `held_out` of the images and
    judged on it, and the best mean over s is used. Empty: image_lr for all.
    """

    test: str = MISSING
    rows: list[str] = field(default_factory=lambda: list(DEFAULT_ROWS))
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    tune: list[float] = field(default_factory=list)
    held_out: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [r for r in self.rows if r not in ROWS]
        if unknown:
            raise ValueError(f"rows={unknown[0]}: must be among {', '.join(ROWS)}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}: must be above 0 and below 1")
        if not all(rate > 0 for rate in self.tune):
            raise ValueError(f"tune={self.tune}: rates above 0")
        if max(self.judge.sizes, default=1) > self.images_per_class:
            raise ValueError(
                f"judge.sizes={self.judge.sizes}: at most images_per_class={self.images_per_class}"
            )

    @property
    def sizes(self) -> list[int]:
        return self.judge.sizes or list(range(1, self.images_per_class + 1))


def run(node: DictConfig) -> None:
    config = build(node, "", JudgeJob)
    to = storage.absolute(config.to, "to")
    test = fingerprint(config.test, "test")  # refused now, not when sets have been made
    with storage.lock(to):
        here = open_run(config, storage.join(to, "pool"))
        kept = {
            k: v for k, v in plain(node).items() if k not in ("rows", "cluster", "to", "out", "run", "pool")
        }
        claim(to, {"judge": kept, "run": here.digest(), "test": test})
        judging = Judging(here, config, to)
        with group_workers(config.cluster, judging.groups) as judging.pool:
            rows = [judging.row(name) for name in config.rows]
        write(to, rows, config, plain(node))
    print(f"{table(rows, config.sizes)}\n\n{to}/judged.json and judged.png hold it")


class Judging:
    """The sets of one command and their accuracies, each kept in `to` when it is known."""

    def __init__(self, here: Run, config: JudgeJob, to: str) -> None:
        self.here, self.config, self.to = here, config, to
        self.images = storage.join(to, "images")
        self.pool: ActorPool | None = None
        self.classes = keep_images(here, config, self.images)
        self.groups = -(-len(self.classes) // config.classes_per_group)
        proxy = replace(
            config.judge.proxy, width=config.width, depth=config.depth, image_size=config.image_size
        )
        self.recipe = replace(config.judge, proxy=proxy)
        self.test = load_images(
            storage.absolute(config.test, "test"), LabelConfig(), known=self.classes,
            image_size=config.image_size, decode=config.decode,
        )  # fmt: skip

    def row(self, name: str) -> Row:
        """Accuracy of a row at every size, from its file when it was judged before."""
        path = storage.join(self.to, "rows", f"{name}.json")
        if not storage.exists(path):
            storage.write_json(path, self._judged(name))
        told = storage.read_json(path)
        return Row(name, np.array(told["accuracy"]), told["seconds"], told["flops"], told["image_lr"])

    def _judged(self, name: str) -> dict[str, Any]:
        config = condense_config(self.config)
        if name in CORESETS:
            seeds = range(self.config.judge.seeds) if name == "random" else [self.config.seed]
            made = [self._coreset(name, seed) for seed in seeds]
            accuracy = self._over_sizes(name, [load_ranked(folder) for folder in made])
            return {"accuracy": accuracy, "seconds": _costs(made)[0], "flops": None, "image_lr": None}
        rate = self._rate(METHOD_OF[name])
        config = replace(config, method=METHOD_OF[name], image_lr=rate)
        if name == "A":
            made = [self._of_size(s, config) for s in self.config.sizes]
            sets = [load_ranked(folder) for folder in made]
            with Progress("judge A", len(sets), "size") as progress:
                accuracy = []
                for ranked in sets:
                    accuracy += judge([ranked], self.test, self.recipe).tolist()
                    progress.step()
        else:
            made = [self._condensed(config.method, config)]
            accuracy = self._over_sizes(name, [load_ranked(made[0])])
        seconds, flops = _costs(made)
        return {"accuracy": accuracy, "seconds": seconds, "flops": flops, "image_lr": rate}

    def _over_sizes(self, name: str, sets: Sequence[RankedSet]) -> list[list[float]]:
        """Percent (sizes, seeds): the prefixes of a set; with several sets, seed i judges set i."""
        found = []
        with Progress(f"judge {name}", len(self.config.sizes), "size") as progress:
            for s in self.config.sizes:
                accuracies = judge([ranked.first(s) for ranked in sets], self.test, self.recipe)
                found.append(accuracies[0].tolist() if len(sets) == 1 else accuracies.diagonal().tolist())
                progress.step()
        return found

    def _coreset(self, method: str, seed: int) -> str:
        folder = storage.join(self.to, "sets", f"{method}-{seed}")
        if not storage.exists(storage.join(folder, META)):
            make_set(self.here, replace(self.config, method=method, seed=seed), folder)
        return folder

    def _of_size(self, s: int, config: CondenseConfig) -> str:
        """A set condensed for s images alone; that of all n is C's."""
        name = config.method if s == config.images_per_class else f"A-{s}"
        return self._condensed(name, replace(config, images_per_class=s))

    def _condensed(self, name: str, config: CondenseConfig, images: str | None = None) -> str:
        folder = storage.join(self.to, "sets", name)
        if not storage.exists(storage.join(folder, META)):
            work = storage.join(folder, "work")
            assert self.pool is not None
            make_condensed(images or self.images, self.classes, config, self.pool, folder, work)
            storage.remove_tree(work)
        return folder

    def _rate(self, method: str) -> float:
        """The image rate of a method: the best of `tune` on held-out images, by the mean over s."""
        if not self.config.tune:
            return self.config.image_lr
        path = storage.join(self.to, "tuning", f"{method}.json")
        if not storage.exists(path):
            images, held_out = self._divided()
            means = {}
            for rate in self.config.tune:
                config = replace(condense_config(self.config), method=method, image_lr=rate)
                ranked = load_ranked(self._condensed(f"tuning-{method}-{rate:g}", config, images))
                sets = [ranked.first(s) for s in self.config.sizes]
                means[str(rate)] = float(judge(sets, held_out, replace(self.recipe, seeds=1)).mean())
            storage.write_json(path, means)
        means = storage.read_json(path)
        return float(max(means, key=lambda rate: means[rate]))

    def _divided(self) -> tuple[str, LabelledImages]:
        """The folder of the images without the held-out ones, and those, by uid."""
        whole = pixels.kept(self.images, _gone)
        mask = drawn(whole.uids, self.config.held_out, self.config.seed)
        folder = storage.join(self.to, "images-tuning")
        pixels.kept(folder, lambda: _part(whole, ~mask))
        part = _part(whole, mask)
        if set(part.texts) != set(self.classes):
            raise Refused(
                f"held_out={self.config.held_out}: not every class has held-out images; hold more out"
            )
        places = {name: i for i, name in enumerate(self.classes)}
        labels = np.array([places[text] for text in part.texts])
        return folder, LabelledImages(part.pixels, labels, self.classes, part.uids, part.copies)


def _part(images: pixels.Images, mask: np.ndarray) -> pixels.Images:
    texts = [text for text, inside in zip(images.texts, mask) if inside]
    return replace(
        images, pixels=images.pixels[mask], texts=texts, uids=images.uids[mask], copies=images.copies[mask]
    )


def _gone() -> pixels.Images:
    raise FileNotFoundError("the decoded images are gone; run the command again")


def _costs(folders: Sequence[str]) -> tuple[float, float]:
    told = [storage.read_json(storage.join(folder, "cost.json")) for folder in folders]
    return sum(t["seconds"] for t in told), sum(t.get("flops", 0) for t in told)


def write(to: str, rows: Sequence[Row], config: JudgeJob, node: dict[str, Any]) -> None:
    """judged.json, judged.png and judged.txt."""
    content = {
        "sizes": config.sizes,
        "rows": {
            r.name: {
                "accuracy": r.accuracy.tolist(), "mean": r.means.tolist(), "mean_over_s": float(r.means.mean()),
                "seconds": r.seconds, "flops": r.flops, "image_lr": r.image_lr,
            }
            for r in rows
        },
        "config": node,
        "versions": versions(),
    }  # fmt: skip
    storage.write_json(storage.join(to, "judged.json"), content)
    storage.write_bytes(storage.join(to, "judged.txt"), (table(rows, config.sizes) + "\n").encode())
    save_figure(storage.join(to, "judged.png"), plot(rows, config.sizes))


register("judge_condensed", JudgeJob)

if __name__ == "__main__":
    launch("judge_condensed", run)

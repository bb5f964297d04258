"""Is what a run chose worth what choosing it cost? Time to accuracy, everything counted.

python -m jobs.prove out=/data/winnow run=default evaluate=/data/test.parquet
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from matplotlib.figure import Figure
from omegaconf import MISSING, DictConfig

from filters.network.result import SUMMARY
from jobs.launch import build, launch, plain, register
from jobs.prove_clip import ClipConfig, ClipJudge, image_size
from pipeline import storage
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.evaluation import fingerprint
from pipeline.manifest import Run, versions
from pipeline.tables import digest_json
from selection.proof.arms import SELECTED, ProofConfig
from selection.proof.labelled import ProxyJudge
from selection.proof.result import Costs, summarise
from selection.proof.trainings import Judge, train_all
from selection.proxy import LabelConfig, LabelledImages, ProxyConfig, load_images, pixels
from selection.proxy.images import labelled, text_of
from selection.quotas import round_size

JUDGES = ("labels", "zero_shot", "retrieval")
HELD_OUT, HELD_OUT_SHARE = 1_000, 0.1  # pairs of the pool that judge retrieval, at most


@dataclass(kw_only=True)
class ProveConfig(ProofConfig):
    """out, run: the finished run. name: of the files, `<out>/runs/<run>/proof/<name>.json` and `.png`.

    judge: `labels` trains a small convolutional network on the pool's labels and judges its accuracy; `zero_shot`
    and `retrieval` train a small CLIP model on its captions, and judge it by zero-shot accuracy on labelled images,
    or by finding the captions of held-out pairs.
    evaluate: the test set: shards, a parquet table (columns `label`, `caption`), or a folder with a folder a class.
    null, for retrieval alone: up to 1,000 pairs of the pool, which nothing is then trained on.
    labels: where the labels of the pool are; in a noisy pool they are what the pool says, not the truth.
    `labels.classes` also names the classes for zero-shot prompts.
    proxy, clip: the networks and their training. limit: samples of the pool that enter, at most; a random share of a
    larger pool stands for it.
    """

    out: str = MISSING
    run: str = "default"
    name: str = "proof"
    judge: str = "labels"
    evaluate: str | None = None
    labels: LabelConfig = field(default_factory=LabelConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    limit: int = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judge not in JUDGES:
            raise ValueError(f"judge={self.judge}: must be one of {', '.join(JUDGES)}")
        if self.evaluate is None and self.judge != "retrieval":
            raise ValueError("evaluate: give a labelled test set")
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}: at least 1")
        if not self.name or "/" in self.name:
            raise ValueError(f"name={self.name}: must be a plain name")


def run(node: DictConfig) -> None:
    config = build(node, "", ProveConfig)
    here = Run(storage.absolute(config.out, "out"), config.run)
    digest = here.digest()  # refuses a run that is not there before its folder is made for the lock
    if config.evaluate is not None:
        fingerprint(config.evaluate, "evaluate")  # refused now, not when the pool has been read
    chosen = set(SELECTED) & set(config.arms)
    selection = selection_seconds(here) if chosen else {}
    with storage.lock(here.path("proof")):
        judge, image = make_judge(here, config)
        trainings = train_all(judge, config, here.path("proof", "trainings"))
        costs = Costs(selection=selection, image=image)
        proof = summarise(trainings, costs, judge.metric, config.target)
        write(here, config, {**proof.as_json(), "run": digest, "config": plain(node)}, proof.figure())
    print(f"{proof.table()}\n\n{proof.verdict}\n{here.path('proof', config.name)}.json and .png hold it")


def make_judge(here: Run, config: ProveConfig) -> tuple[Judge, float]:
    """The judge, and the seconds that reading one of the pool's images takes.

    Raises Refused when the pool or the test set has nothing to train on or to judge by.
    """
    if config.judge == "labels":
        judge, images = _labels_judge(here, config)
    else:
        judge, images = _clip_judge(here, config)
    if not len(judge.subset) and set(SELECTED) & set(config.arms):
        raise Refused(f"{here.folder}: no sample that could be trained on was kept; nothing to prove")
    for entries in [judge.pool, *([len(judge.subset)] if "subset_rs2" in config.arms else [])]:
        try:
            round_size(entries, config.ratio)
        except ValueError as e:
            raise Refused(str(e)) from None
    return judge, images.seconds / len(images)


def _labels_judge(here: Run, config: ProveConfig) -> tuple[Judge, pixels.Images]:
    size = config.proxy.image_size
    images = pool_images(here, config, text_of(config.labels), asdict(config.labels), size)
    pool = labelled(images, config.labels, (), here.folder)
    return ProxyJudge(pool, _test(config, pool.classes, size), config.proxy), images


def _clip_judge(here: Run, config: ProveConfig) -> tuple[Judge, pixels.Images]:
    size = image_size(config.clip)
    images = pool_images(here, config, _caption, "caption", size)
    if not len(images):
        raise Refused(f"{here.folder}: no image with a caption there ({images.skipped or 'it is empty'})")
    if config.judge == "zero_shot":
        return ClipJudge(images, _test(config, (), size), config.clip), images
    if config.evaluate is not None:
        path = storage.absolute(config.evaluate, "evaluate")
        held_out = pixels.of_source(path, _caption, size, config.decode)
        pool = images
    else:
        mask = pixels.drawn(images.uids, min(HELD_OUT_SHARE, HELD_OUT / len(images)), seed=1)
        pool, held_out = images.take(~mask), images.take(mask)
    if not len(held_out) or not len(pool):
        raise Refused(f"evaluate={config.evaluate}: no pairs to judge by, or none left to train on")
    return ClipJudge(pool, held_out, config.clip), images


def _test(config: ProveConfig, known: Sequence[str], size: int) -> LabelledImages:
    assert config.evaluate is not None
    labels = LabelConfig(classes=config.labels.classes)
    path = storage.absolute(config.evaluate, "evaluate")
    return load_images(path, labels, known=known, image_size=size, decode=config.decode)


def _caption(sample: pixels.Sample) -> str | None:
    return sample.caption or None


def pool_images(
    here: Run, config: ProveConfig, text: pixels.TextOf, text_is: Any, size: int
) -> pixels.Images:
    """Every readable image of the pool with a text, or a share of them; decoded once and kept.

    text_is: what `text` is made from, for recognising images that were kept.
    """
    receipt = here.receipt()
    share = min(1.0, config.limit / receipt["pool"]["samples"])
    decided = [here.digest(), text_is, asdict(config.decode), size, share]
    return pixels.kept(
        here.path("proof", "images", digest_json(decided)),
        lambda: pixels.of_run(here, text, size, config.decode, whole_pool=True, share=share),
    )


def selection_seconds(here: Run) -> dict[str, float]:
    """What choosing took: training the filter network, scanning, and each stage, in seconds.

    The scan counts in full, whichever run it was made for: its tables keep the time. Raises Refused when they
    do not.
    """
    receipt = here.receipt()
    spent: dict[str, float] = {}
    weights = (receipt["config"].get("scorer") or {}).get("weights")
    summary = storage.join(weights or "", SUMMARY)  # there is one when jobs.train_filter made the weights
    if weights and storage.exists(summary):
        spent["filter network"] = storage.read_json(summary)["seconds"]
    shard_seconds = here.tables().seconds_per_shard()
    if shard_seconds is None:
        raise Refused(f"{here.tables().folder}: it is not known what its scan took; scan into a new `out`")
    spent["scan"] = shard_seconds * receipt["pool"]["shards"]
    return spent | {k: s for k, s in receipt["seconds"].items() if k != "scan"}


def write(here: Run, config: ProveConfig, content: dict[str, Any], figure: Figure) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    storage.write_bytes(here.path("proof", f"{config.name}.png"), image.getvalue())
    storage.write_json(here.path("proof", f"{config.name}.json"), {**content, "versions": versions()})


register("prove", ProveConfig)

if __name__ == "__main__":
    launch("prove", run)

"""A small training set in rank order, every prefix of which is good: condensed images, or a coreset of real ones.

python -m jobs.condense out=/data/winnow run=default images_per_class=10 method=mdc to=/data/condensed
python -m jobs.condense pool.shards='/data/pool/*.tar' method=herding to=/data/coreset
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from omegaconf import MISSING, DictConfig

from filters.stage import FilterStage
from jobs.launch import build, launch, plain, register
from pipeline import storage
from pipeline.cluster import ActorPool, ClusterConfig
from pipeline.decisions import run_chain
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.manifest import Run, write_outputs
from pipeline.samples import PoolConfig
from pipeline.scan import ErrorBudget, scan
from pipeline.scorer import ScorerConfig
from pipeline.tables import digest_json
from selection import candidates
from selection.candidates import Candidates
from selection.condense.config import CONDENSERS, CondenseConfig
from selection.condense.report import cost, items_of, plot_learnable
from selection.condense.run import condense, group_workers
from selection.coresets import CORESETS, order
from selection.proxy import pixels
from selection.proxy.images import distinct
from selection.ranked import META, save_figure, write_ranked

LABELS = ("pool", "clusters", "none")
MOST_CLASSES = 10_000


@dataclass(kw_only=True)
class SourceConfig:
    """Where the samples and their labels come from.

    out, run: a finished run. pool: shards in its place, which are then scanned into `<to>/pool` with `scorer`.
    labels: `pool` takes the samples' own; `clusters` makes `clusters` of them by k-means on image embeddings;
    `none` takes all samples as one class (coresets only).
    limit: samples that enter, at most; a random share of a larger run stands for it.
    """

    out: str | None = None
    run: str = "default"
    pool: Any = None
    scorer: Any = None
    labels: str = "pool"
    clusters: int = 100
    limit: int = 200_000
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise ValueError(f"labels={self.labels}: must be {', '.join(LABELS)}")
        for key in ("clusters", "limit"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: at least 1")


@dataclass(kw_only=True)
class CondenseJob(CondenseConfig, SourceConfig):
    """Settings of the command: those of `CondenseConfig` and `SourceConfig`.

    method: besides mdc, idc, dm and single, the coresets random, kmeans, herding, prototypes_easy and
    prototypes_hard, which take real images by their embeddings (by their pixels where the run has no scorer)
    and keep captions and image bytes as they are. Of the other settings they use images_per_class, image_size
    and seed. to: the folder for the set.
    """

    to: str = MISSING

    def __post_init__(self) -> None:
        CondenseConfig.__post_init__(self)
        SourceConfig.__post_init__(self)
        if self.labels == "none" and self.method in CONDENSERS:
            raise ValueError(f"labels=none: method={self.method} needs classes; take pool or clusters")

    @staticmethod
    def methods() -> tuple[str, ...]:
        return (*CONDENSERS, *CORESETS)


def run(node: DictConfig) -> None:
    config = build(node, "", CondenseJob)
    to = storage.absolute(config.to, "to")
    with storage.lock(to):
        here = open_run(config, storage.join(to, "pool"))
        request = {"config": _deciding(node), "run": here.digest()}
        if claim(to, request):
            print(f"{to}/ holds this set already")
            return
        make_set(here, config, to)
    print(f"{to}/ holds {META}, the shard in rank order and contact_sheet.png")


def make_set(here: Run, config: CondenseJob, to: str) -> None:
    """The set of a run by `config.method` into the folder `to`; what is there of it is gone on from."""
    work = storage.join(to, "work")
    if config.method in CORESETS:
        make_coreset(here, config, to, work)
    else:
        classes = keep_images(here, config, storage.join(work, "images"))
        groups = -(-len(classes) // config.classes_per_group)
        with group_workers(config.cluster, groups) as pool:
            make_condensed(storage.join(work, "images"), classes, condense_config(config), pool, to, work)
    storage.remove_tree(work)


def make_condensed(
    images: str, classes: tuple[str, ...], config: CondenseConfig, pool: ActorPool, to: str, work: str
) -> None:
    """Condense the images kept in the folder `images` into the folder `to`."""
    try:
        made = condense(images, work, classes, config, pool)
    except ValueError as e:
        raise Refused(str(e)) from None
    storage.write_json(storage.join(to, "trace.json"), [asdict(c) for c in made.chunks])
    storage.write_json(storage.join(to, "cost.json"), cost(config, len(classes), made))
    save_figure(storage.join(to, "learnable.png"), plot_learnable(made.chunks, config.interval))
    meta = {
        "method": config.method, "classes": list(classes), "images_per_class": config.images_per_class,
        "factor": config.factor, "condensed": asdict(config), "evaluation": recipe(config),
    }  # fmt: skip
    write_ranked(to, items_of(made, classes), meta, config.image_size)


def make_coreset(here: Run, config: CondenseJob, to: str, work: str) -> None:
    """Choose real samples, class by class, into the folder `to`."""
    started = time.monotonic()
    found, features = coreset_candidates(here, config, storage.join(work, "images"))
    classes = distinct(found.labels)
    places = {label: i for i, label in enumerate(classes)}
    numbers = np.array([places[label] for label in found.labels])
    ranked = np.empty((config.images_per_class, len(classes)), np.int64)
    for c, label in enumerate(classes):
        rows = np.flatnonzero(numbers == c)
        try:
            chosen = order(config.method, found.features[rows], config.images_per_class, config.seed)
        except ValueError as e:
            raise Refused(f"images_per_class={config.images_per_class}: class {label!r} has {e}") from None
        ranked[:, c] = rows[chosen]
    flat = ranked.ravel()
    ranks = np.arange(len(flat)) // len(classes)
    items = candidates.items_of(here, found.uids[flat], [found.labels[i] for i in flat], ranks.tolist())
    with storage.commit(storage.join(to, "subset.npy")) as tmp, open(tmp, "wb") as f:
        np.save(f, np.sort(found.uids[flat], order=("f0", "f1")))
    storage.write_json(storage.join(to, "cost.json"), {"seconds": round(time.monotonic() - started, 3)})
    meta = {
        "method": config.method, "classes": list(classes), "images_per_class": config.images_per_class,
        "factor": 1, "candidates": len(found.uids), "unusable": found.skipped, "features": features,
        "evaluation": recipe(config),
    }  # fmt: skip
    write_ranked(to, items, meta, config.image_size)


def coreset_candidates(here: Run, config: CondenseJob, images: str) -> tuple[Candidates, str]:
    """Samples with labels and features, and what the features are. Refuses a pool without labels by name."""
    if candidates.has_embeddings(here):
        found = candidates.embedded(here, config.limit, config.seed)
        if config.labels == "clusters":
            return found.labelled(
                candidates.clusters(found.features, config.clusters, config.seed)
            ), "embeddings"
        if config.labels == "none":
            return found.labelled(["all"] * len(found.uids)), "embeddings"
        return found.with_labels(), "embeddings"
    keep_images(here, config, images)
    kept = pixels.kept(images, _gone)
    flat = kept.pixels.reshape(len(kept), -1)
    return Candidates(kept.uids, kept.texts, flat), "pixels"


def keep_images(here: Run, config: SourceConfig, folder: str) -> tuple[str, ...]:
    """Decode the run's labelled images, or a share of them, into `folder`; returns the classes."""
    size, seed = config.image_size, config.seed  # type: ignore[attr-defined]
    share = candidates.share_of(here, config.limit)
    text_of = _text_of(here, config, seed)
    kept = pixels.kept(
        folder,
        lambda: pixels.of_run(here, text_of, size, config.decode, whole_pool=False, share=share, seed=seed),
    )
    if not len(kept):
        raise Refused(f"{here.folder}: no image with a label (labels={config.labels})")
    classes = distinct(kept.texts)
    if len(classes) > MOST_CLASSES:
        raise Refused(
            f"labels={config.labels}: {len(classes)} classes, more than {MOST_CLASSES}; labels=clusters makes fewer"
        )
    return classes


def _text_of(here: Run, config: SourceConfig, seed: int) -> pixels.TextOf:
    if config.labels == "pool":
        return lambda sample: sample.label or None
    if config.labels == "none":
        return lambda sample: "all"
    if not candidates.has_embeddings(here):
        raise Refused("labels=clusters: the run has no embeddings; scan with a scorer")
    found = candidates.embedded(here, config.limit, seed)
    names = candidates.clusters(found.features, config.clusters, seed)
    by_uid = {(int(u["f0"]), int(u["f1"])): name for u, name in zip(found.uids, names)}
    return lambda sample: by_uid.get(sample.uid)


def _gone() -> pixels.Images:
    raise FileNotFoundError("the decoded images are gone; run the command again")


def condense_config(config: CondenseConfig) -> CondenseConfig:
    """The part of a job's settings that decides condensed images."""
    return CondenseConfig(**{f.name: getattr(config, f.name) for f in fields(CondenseConfig)})


def recipe(config: CondenseConfig) -> dict[str, Any]:
    """How sets of this kind are judged: `python -m jobs.judge_condensed`."""
    return {
        "network": {"arch": "convnet", "width": config.width, "depth": config.depth},
        "labels": "hard", "augmentation": "crop, flip", "seeds": 3,
        "train_on": "the first s images of each class, each decoded to factor^2 images",
    }  # fmt: skip


def open_run(config: SourceConfig, folder: str) -> Run:
    """The finished run that the settings name, or one of all samples of `pool.shards`, made in `folder`."""
    shards = (config.pool or {}).get("shards")
    if bool(config.out) == bool(shards):
        raise Refused("give either out=... run=... (a finished run) or pool.shards=...")
    if config.out:
        here = Run(storage.absolute(config.out, "out"), config.run)
        here.receipt()
        return here
    given = {k: v for k, v in config.pool.items() if v is not None}
    pool = build(_node(given), "pool", PoolConfig)
    scorer = build(_node(config.scorer), "scorer", ScorerConfig) if config.scorer else None
    here = Run(folder, "default")
    scanned = scan(folder, pool, scorer, config.decode, config.cluster, ErrorBudget())
    last, results = run_chain(scanned, [FilterStage([])], here.path("stages"))
    about = {"config": {}, "seed": 0, "seconds": {}, "scanned_shards": scanned.scanned}
    write_outputs(here, scanned, last, results, about)
    return here


def _node(values: Any) -> DictConfig:
    return values if isinstance(values, DictConfig) else DictConfig(values)


def _deciding(node: DictConfig) -> dict[str, Any]:
    return {k: v for k, v in plain(node).items() if k not in ("cluster", "to", "out", "run", "pool")}


def claim(to: str, request: dict[str, Any]) -> bool:
    """Mark the folder with what is made in it. True when that is finished. Refuses a folder of something else."""
    mark, digest = storage.join(to, ".condense.json"), digest_json(request)
    if storage.exists(mark):
        if storage.read_json(mark)["digest"] != digest:
            raise Refused(f"to={to}: holds a set of other settings or of another run; choose another folder")
        return storage.exists(storage.join(to, META))
    others = [n for n in storage.listdir(to) if not n.startswith(".") and n != "pool"]
    if others:
        raise Refused(f"to={to}: is not empty ({others[0]}, ...); choose another folder")
    storage.write_json(mark, {"digest": digest, **request})
    return False


register("condense", CondenseJob)

if __name__ == "__main__":
    launch("condense", run)

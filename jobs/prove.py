"""Is what a run chose worth what choosing it cost? Time to accuracy, everything counted.

python -m jobs.prove out=/data/winnow run=default evaluate=/data/test.parquet
"""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig

from filters.network.result import read_summary
from jobs.launch import build, launch, plain, register
from pipeline import storage
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.manifest import Run, versions
from pipeline.tables import digest_json
from selection.proof.arms import SELECTED, ProofConfig
from selection.proof.labelled import ProxyJudge
from selection.proof.result import Costs, Proof, summarise
from selection.proof.trainings import Judge, train_all
from selection.proxy import LabelConfig, ProxyConfig, load_images, pixels
from selection.proxy.images import labelled, text_of


@dataclass(kw_only=True)
class ProveConfig(ProofConfig):
    """out, run: the finished run. name: of the files, `<out>/runs/<run>/proof/<name>.json` and `.png`.

    evaluate: the test set: shards, a parquet table with a `label` column, or a folder with a folder a class.
    labels: where the labels of the pool are; in a noisy pool they are what the pool says, not the truth.
    proxy: the network and its training. limit: samples of the pool that enter, at most; a random share of a
    larger pool stands for it.
    scan_seconds: what scoring the pool took, if no receipt of a run in `out` tells any more.
    """

    out: str = MISSING
    run: str = "default"
    name: str = "proof"
    evaluate: str = MISSING
    labels: LabelConfig = field(default_factory=LabelConfig)
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    limit: int = 1_000_000
    scan_seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit < 1:
            raise ValueError(f"limit={self.limit}: at least 1")
        if self.scan_seconds is not None and not self.scan_seconds >= 0:
            raise ValueError(f"scan_seconds={self.scan_seconds}: 0 or more, or null")
        if not self.name or "/" in self.name:
            raise ValueError(f"name={self.name}: must be a plain name")


def run(node: DictConfig) -> None:
    config = build(node, "", ProveConfig)
    here = Run(storage.absolute(config.out, "out"), config.run)
    chosen = set(SELECTED) & set(config.arms)
    selection = selection_seconds(here, config.scan_seconds) if chosen else {}
    with storage.lock(here.path("proof")):
        judge, image = proxy_judge(here, config)
        trainings = train_all(judge, config, here.path("proof", "trainings"))
        costs = Costs(selection=selection, image=image)
        proof = summarise(trainings, costs, judge.metric, config.target)
        write(here, config, proof, plain(node))
    print(f"{proof.table()}\n\n{proof.verdict}\n{here.path('proof', config.name)}.json and .png hold it")


def proxy_judge(here: Run, config: ProveConfig) -> tuple[Judge, float]:
    """The judge of a labelled pool, and the seconds that reading one of its images takes."""
    pool = pool_images(here, config)
    images = labelled(pool, config.labels, (), here.folder)
    labels = LabelConfig(classes=config.labels.classes)
    test = load_images(
        storage.absolute(config.evaluate, "evaluate"),
        labels,
        known=images.classes,
        image_size=config.proxy.image_size,
        decode=config.decode,
    )
    if not images.copies.any() and set(SELECTED) & set(config.arms):
        raise Refused(f"{here.folder}: none of the samples with a label was kept; nothing to prove")
    return ProxyJudge(images, test, config.proxy), pool.seconds / len(pool)


def pool_images(here: Run, config: ProveConfig) -> pixels.Images:
    """Every readable image of the pool with a label, or a share of them; decoded once and kept."""
    receipt = here.receipt()
    share = min(1.0, config.limit / receipt["pool"]["samples"])
    size = config.proxy.image_size
    decided = [receipt["stages"][-1]["digest"], asdict(config.labels), asdict(config.decode), size, share]
    return pixels.kept(
        here.path("proof", "images", digest_json(decided)),
        lambda: pixels.of_run(
            here, text_of(config.labels), size, config.decode, whole_pool=True, share=share
        ),
    )


def selection_seconds(here: Run, scan_seconds: float | None) -> dict[str, float]:
    """What choosing took: training the filter network, scanning, and each stage, in seconds.

    The scan's time is in the receipts of the runs that opened the shards. Raises Refused when none of those
    that are left did.
    """
    receipt = here.receipt()
    spent: dict[str, float] = {}
    weights = (receipt["config"].get("scorer") or {}).get("weights")
    network = read_summary(weights) if weights and storage.exists(weights) else None
    if network:
        spent["filter network"] = network.seconds
    spent["scan"] = _scan_seconds(here, receipt) if scan_seconds is None else scan_seconds
    return spent | {k: s for k, s in receipt["seconds"].items() if k != "scan"}


def _scan_seconds(here: Run, receipt: dict[str, Any]) -> float:
    seconds, opened = 0.0, 0
    for name in storage.listdir(storage.join(here.out, "runs")):
        path = Run(here.out, name).path("receipt.json")
        other = storage.read_json(path) if storage.exists(path) else {}
        if other.get("tables") == receipt["tables"] and other.get("scanned_shards"):
            seconds, opened = seconds + other["seconds"]["scan"], opened + other["scanned_shards"]
    if not opened:
        raise Refused(
            f"{here.folder}: no receipt in {here.out}/runs tells how long the scan took; give scan_seconds=SECONDS"
        )
    return seconds * max(1.0, receipt["pool"]["shards"] / opened)


def write(here: Run, config: ProveConfig, proof: Proof, node: dict[str, Any]) -> None:
    image = io.BytesIO()
    proof.figure().savefig(image, format="png", dpi=120)
    storage.write_bytes(here.path("proof", f"{config.name}.png"), image.getvalue())
    content = {**proof.as_json(), "config": node, "versions": versions()}
    storage.write_json(here.path("proof", f"{config.name}.json"), content)


register("prove", ProveConfig)

if __name__ == "__main__":
    launch("prove", run)

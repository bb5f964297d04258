"""One filter's trial: get its network, score the pool, keep the best share, train a small model on what it kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from filters.base import Filter
from filters.baselines import RandomCut, TrustedOrNot
from filters.network.captions import CaptionsConfig
from filters.network.config import TrainConfig, TrainSpec
from filters.network.evaluate import auc
from filters.network.poison import poison_shards
from filters.network.train import train_network
from filters.network.zero_shot import zero_shot_accuracy
from filters.score import ScoreCut
from filters.stage import FilterStage
from pipeline import storage
from pipeline.cluster import ClusterConfig
from pipeline.decisions import run_chain
from pipeline.decode import DecodeConfig
from pipeline.errors import Refused
from pipeline.evaluation import fingerprint
from pipeline.manifest import Run, write_outputs
from pipeline.samples import PoolConfig, format_uid
from pipeline.scan import ErrorBudget, Scan, scan
from pipeline.scorer import Scorer, ScorerConfig
from pipeline.tables import digest_json
from selection.proxy import LabelConfig, ProxyConfig, batches, epochs, load_images, of_run, train_proxy

KINDS = ("network", "classifier", "random")


@dataclass(kw_only=True)
class ContestantConfig:
    """A filter to be judged.

    kind: network, classifier (trusted or not, on the embeddings of a network) or random.
    weights, model, activation: a ready network, as in `scorer`; weights null trains one on `train_on`, the
    trusted pairs or the unfiltered pool, `poison` of the trusted ones replaced by unfiltered ones.
    embeddings: the contestant whose network the classifier uses; null for the first.
    """

    kind: str = "network"
    weights: str | None = None
    model: str = "ViT-B-32"
    activation: str | None = None
    train_on: str = "trusted"
    poison: float = 0.0
    embeddings: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}: must be {', '.join(KINDS)}")
        if self.train_on not in ("trusted", "pool"):
            raise ValueError(f"train_on={self.train_on}: must be trusted or pool")
        if not 0 <= self.poison <= 1:
            raise ValueError(f"poison={self.poison}: must be between 0 and 1")


@dataclass(kw_only=True)
class TruthConfig:
    """What is known of the pool's pairs: a parquet file with `uid` (32 hex digits) and `column`; the pairs
    whose value there is one of `right` are right, all others wrong. Pairs that it lacks do not count."""

    path: str | None = None
    column: str = "kind"
    right: list[str] = field(default_factory=lambda: ["clean", "exact_dup", "near_dup"])


@dataclass(kw_only=True)
class HeldOutConfig:
    """Labelled images (shards, a parquet file, a folder) that both the networks and the small models are
    tested on. class_names, templates: see `filters.network.captions`. The small models learn a pair's class
    from the class name that its caption holds."""

    images: str | None = None
    class_names: Any = None
    templates: Any = "openai"

    def captions(self) -> CaptionsConfig:
        return CaptionsConfig(class_names=self.class_names, templates=self.templates)

    def check(self) -> None:
        """Raises Refused, naming the field."""
        try:
            if self.images:
                self.captions().names()
        except (ValueError, Refused) as e:
            raise Refused(f"held_out.{e}") from None


@dataclass(frozen=True, kw_only=True)
class Arena:
    """What all contestants have in common. out: absolute. steps: of the small model."""

    out: str
    pool: PoolConfig
    trusted: PoolConfig | None
    truth: TruthConfig | None
    held_out: HeldOutConfig | None
    keep: float
    model: str
    init: str | None
    train: TrainConfig
    proxy: ProxyConfig
    steps: int
    decode: DecodeConfig
    cluster: ClusterConfig


@dataclass(frozen=True)
class Outcome:
    """kept: samples. precision: share of the kept pairs that are right. auc: probability that a right pair
    is ranked above a wrong one. own_accuracy: the network's zero-shot accuracy on the held-out images.
    accuracy: the small model's there. None: not known, or not applicable."""

    filter: str
    seed: int
    kept: int
    precision: float | None
    auc: float | None
    own_accuracy: float | None
    accuracy: float | None


class Trials:
    """Runs trials in `arena.out`; what is done is not done again.

    Raises Refused, before anything is trained, when what the filters are to be judged by is not there.
    """

    def __init__(self, arena: Arena, contestants: Mapping[str, ContestantConfig]) -> None:
        self.arena, self.contestants = arena, contestants
        self._truth = _read_truth(arena.truth) if arena.truth else None
        self._images: dict[int, Any] = {}
        self._judged_by = {
            key: fingerprint(path, key)
            for key, path in (
                ("truth.path", arena.truth and arena.truth.path),
                ("held_out.images", arena.held_out and arena.held_out.images),
            )
            if path
        }

    def run(self, name: str, seed: int) -> Outcome:
        """The trial of a contestant: its training, if it is trained here, and its small model take `seed`."""
        arena, contestant = self.arena, self.contestants[name]
        request = {
            "contestant": asdict(contestant),
            "network": [asdict(c) for c in self.contestants.values()]
            if contestant.kind != "network"
            else None,
            "seed": seed,
            "judged_by": self._judged_by,
            **{k: v for k, v in asdict(arena).items() if k not in ("out", "cluster")},
        }
        path = storage.join(arena.out, "results", f"{name}-{seed}-{digest_json(request)}.json")
        if storage.exists(path):
            return Outcome(**storage.read_json(path))
        scorer = self._scorer(name, seed)
        scanned = self._scan(arena.pool, scorer)
        run = self._select(name, seed, scanned, self._filter(name, seed, scorer))
        outcome = Outcome(
            filter=name,
            seed=seed,
            kept=run.receipt()["kept"],
            **self._against_truth(run, scanned),
            own_accuracy=self._own_accuracy(scorer) if contestant.kind == "network" else None,
            accuracy=self._small_model(run, seed),
        )
        storage.write_json(path, asdict(outcome))
        return outcome

    def _scorer(self, name: str, seed: int) -> ScorerConfig | None:
        """The scorer of a contestant: its network, the one that it builds on, or for chance the first there is."""
        networks = [n for n, c in self.contestants.items() if c.kind == "network"]
        contestant = self.contestants[name]
        if contestant.kind != "network":
            name = contestant.embeddings or next(iter(networks), "")
            if contestant.kind == "random" and not name:
                return None
        if name not in networks:
            raise Refused(
                f"contestants.{name or '<name>'}: a classifier needs a network among the contestants"
            )
        contestant = self.contestants[name]
        if contestant.weights:
            return ScorerConfig(
                model=contestant.model, weights=contestant.weights, activation=contestant.activation
            )
        return ScorerConfig(weights=self._trained(contestant, seed))

    def _trained(self, contestant: ContestantConfig, seed: int) -> str:
        """The folder of the network trained for a contestant; the same training serves all that ask for it."""
        arena = self.arena
        pool = arena.pool if contestant.train_on == "pool" else self._trusted()
        if contestant.poison:
            folder = storage.join(arena.out, "poisoned", f"{contestant.poison:g}-{seed}")
            pool = PoolConfig(shards=[poison_shards(pool, arena.pool, contestant.poison, seed, folder)])
        spec = TrainSpec(
            out="", pool=pool, decode=arena.decode, model=arena.model, init=arena.init,
            config=replace(arena.train, seed=seed),
        )  # fmt: skip
        out = storage.join(arena.out, "networks", digest_json(spec.request()))
        train_network(replace(spec, out=out), arena.cluster)
        return out

    def _trusted(self) -> PoolConfig:
        if self.arena.trusted is None:
            raise Refused("trusted.shards: must be given, a filter needs the trusted pairs")
        return self.arena.trusted

    def _scan(self, pool: PoolConfig, scorer: ScorerConfig | None, out: str = "") -> Scan:
        arena = self.arena
        return scan(out or arena.out, pool, scorer, arena.decode, arena.cluster, ErrorBudget())

    def _filter(self, name: str, seed: int, scorer: ScorerConfig | None) -> Filter:
        kind, keep = self.contestants[name].kind, self.arena.keep
        if kind == "random" or scorer is None:
            return RandomCut(top_fraction=keep, seed=seed).named(name)
        if kind == "classifier":
            tables = storage.join(self.arena.out, "trusted")
            self._scan(self._trusted(), scorer, tables)
            return TrustedOrNot(trusted=tables, top_fraction=keep, seed=seed).named(name)
        return ScoreCut(column=scorer.column, top_fraction=keep).named(name)

    def _select(self, name: str, seed: int, scanned: Scan, chosen: Filter) -> Run:
        run = Run(self.arena.out, f"{name}-{seed}")
        last, results = run_chain(scanned, [FilterStage([chosen])], run.path("stages"))
        write_outputs(run, scanned, last, results, {"seed": seed})
        return run

    def _against_truth(self, run: Run, scanned: Scan) -> dict[str, float | None]:
        if self._truth is None:
            return {"precision": None, "auc": None}
        frame = pl.concat(
            run.decisions.read(shard, ["uid_hi", "uid_lo", "kept", "value"]) for shard in scanned.ids
        )
        uid = [format_uid(*u) for u in frame.select("uid_hi", "uid_lo").iter_rows()]
        known = frame.with_columns(uid=pl.Series(uid, dtype=pl.String)).join(self._truth, on="uid")
        right, value = known["right"].to_numpy(), known["value"].fill_null(np.nan).to_numpy()
        ranked = np.isfinite(value)
        return {
            "precision": float(known.filter("kept")["right"].mean()),  # type: ignore[arg-type]
            "auc": auc(value[ranked & right], value[ranked & ~right]),
        }

    def _own_accuracy(self, config: ScorerConfig | None) -> float | None:
        held_out = self.arena.held_out
        if held_out is None or config is None:
            return None
        scorer = Scorer(config)
        size = scorer.preprocess.size
        test = self._test(size if isinstance(size, int) else size[0])
        captions = held_out.captions()
        return zero_shot_accuracy(
            scorer, test.images.transpose(0, 3, 1, 2), test.labels, captions.names(), captions.sentences()
        )

    def _test(self, size: int) -> Any:
        """The held-out images at a size."""
        held_out = self.arena.held_out
        assert held_out is not None
        if size not in self._images:
            labels = LabelConfig(classes=held_out.captions().names())
            self._images[size] = load_images(
                held_out.images, labels, image_size=size, decode=self.arena.decode
            )
        return self._images[size]

    def _small_model(self, run: Run, seed: int) -> float | None:
        """Accuracy on the held-out images of a model trained on what a run kept, by the classes of its captions."""
        arena = self.arena
        if arena.held_out is None:
            return None
        labels = LabelConfig(field="caption", classes=arena.held_out.captions().names())
        size = arena.proxy.image_size
        images = of_run(run, labels, image_size=size, decode=arena.decode)
        order = batches(epochs(images.entries(), seed), arena.proxy.batch_size)
        trained = train_proxy(
            images, order, arena.steps, seed=seed, config=arena.proxy, test=self._test(size)
        )
        return trained.points[-1].accuracy


def _read_truth(config: TruthConfig) -> pl.DataFrame:
    """uid and right, a row a known pair."""
    assert config.path
    with storage.open_input(config.path, "parquet", "truth.path") as f:
        frame = pl.read_parquet(f.read())
    for column in ("uid", config.column):
        if column not in frame.columns:
            raise Refused(
                f"truth.path={config.path}: no column {column!r}; it has {', '.join(frame.columns)}"
            )
    return frame.select(
        "uid", right=pl.col(config.column).cast(pl.String).is_in(config.right).fill_null(False)
    )

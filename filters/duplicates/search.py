"""The near pass over a pool: train once, place what is new, compare it, decide.

Everything lies under one directory and outlives the run::

    codebook.npz               centroids, rotation, margin (not for the perceptual hash alone)
    generation-0000.json       shards that entered, in order, with what identifies their vectors
    generation-0000/spill-*/   placements of those shards by cluster
    generation-0000/pairs-*    near pairs they brought
    generation-0000/done.json  counts and recall

A later run with more shards, or with rows an earlier filter now lets live, adds a generation: new rows meet
new and old ones, old ones do not meet again. A killed run goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from filters.duplicates.blocks import BlockSource, Shelf
from filters.duplicates.clusters import (
    Codebook,
    HashBands,
    SampleRows,
    Spill,
    SpillTask,
    Survey,
    SurveyShard,
    considered,
    similarities,
    train_centroids,
)
from filters.duplicates.compare import Compare, CompareTask, Sections, pack, plan_units
from filters.duplicates.config import (
    LEAST_ROWS,
    NearConfig,
    batch_rows,
    payload_bytes,
    tile_rows,
    training_rows,
)
from filters.duplicates.near import PAIR, choose_sketch, rotation, sketch_reach
from filters.duplicates.recall import (
    LEAST_PAIRS,
    MOST_PAIRS,
    ExactNeighbours,
    RecallEstimate,
    choose_margin,
    crossing_gaps,
    estimate_recall,
    plant_pairs,
    was_found,
)
from filters.duplicates.result import DuplicateResult, decide_partitions, partition_pairs
from filters.duplicates.tasks import Commit, Runner, run_all

# Rows of the training sample that show which pairs meet in a cluster.
LOOK_ROWS = 2048
_TRAIN, _CHECK = 1, 2


@dataclass(frozen=True)
class Sample:
    """Rows drawn from the pool and every live row near to one of them (PAIR records, ``a`` the drawn row)."""

    ids: np.ndarray
    vectors: np.ndarray
    pairs: np.ndarray

    def half(self, second: bool) -> np.ndarray:
        """Pairs of every other drawn row: the first half sets the margin, the second measures recall."""
        return self.pairs[np.searchsorted(self.ids, self.pairs["a"]) % 2 == int(second)]


class NearSearch:
    """Near duplicates of a pool of blocks, kept under ``directory``.

    Settings that decide what is searched (method, similarity, phash_distance, seed, clusters) must be those
    the directory was made with; ValueError names the first that differs. Raises ValueError also when blocks
    have embeddings of different widths, or rows of a known shard have changed.
    """

    def __init__(self, source: BlockSource, directory: Path, config: NearConfig, runner: Runner):
        self.source, self.directory, self.config, self.runner = source, directory, config, runner

    def run(self) -> DuplicateResult:
        """Search what is new, decide over everything: the result, also written to ``directory``."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.directory / ".lock")
        try:
            with lock.acquire(timeout=0):
                return self._run()
        except Timeout:
            raise RuntimeError(
                f"{self.directory}: another run is searching here; wait for it or stop it"
            ) from None

    def _run(self) -> DuplicateResult:
        self._check_settings()
        for number in range(len(self._manifests())):
            if not self._done(number).exists():
                self._search(number)
        surveys = run_all(self.runner, SurveyShard(self.source, self.config.method), list(self.source.shards))
        if self._register(surveys):
            self._search(len(self._manifests()) - 1)
        return self._decide()

    # ---- what has entered

    def _manifests(self) -> list[Path]:
        return sorted(self.directory.glob("generation-*.json"))

    def _generation(self, number: int) -> Path:
        return self.directory / f"generation-{number:04d}"

    def _done(self, number: int) -> Path:
        return self._generation(number) / "done.json"

    def _check_settings(self) -> None:
        names = ("method", "similarity", "phash_distance", "seed", "clusters")
        settings = {name: getattr(self.config, name) for name in names}
        path = self.directory / "settings.json"
        if not path.exists():
            with Commit(path) as temporary:
                temporary.write_text(json.dumps(settings))
        known = json.loads(path.read_text())
        for name in names:
            if known[name] != settings[name]:
                raise ValueError(
                    f"{name}={settings[name]}: {self.directory} was searched with {name}={known[name]}; "
                    "use another directory, or rethreshold() for a higher similarity"
                )

    def _entries(self, upto: int | None = None) -> dict[str, dict]:
        """Shards that have entered, by name: their survey, ordinal and live rows when last entered."""
        entries: dict[str, dict] = {}
        for manifest in self._manifests()[:upto]:
            for entry in json.loads(manifest.read_text())["shards"]:
                entries[entry["shard"]] = entry
        return entries

    def _register(self, surveys: Sequence[Survey]) -> bool:
        """Write the manifest of a new generation when anything is new: whether there is one."""
        known = self._entries()
        widths = {survey.width: survey for survey in surveys} | {
            e["width"]: Survey(**_survey(e)) for e in known.values()
        }
        if len(widths) > 1:
            first, second = list(widths.values())[:2]
            raise ValueError(
                f"{first.path} holds embeddings of width {first.width}, "
                f"{second.path} of width {second.width}; "
                "a run needs one model"
            )
        entering: list[dict] = []
        for survey in surveys:
            old = known.get(survey.shard)
            if old is None:
                entering.append(asdict(survey) | {"ordinal": len(known) + len(entering)})
            elif (old["rows"], old["path"]) != (survey.rows, survey.path):
                raise ValueError(
                    f"{survey.shard}: {survey.path} with {survey.rows} rows, where {old['path']} "
                    f"with {old['rows']} rows is in {self.directory}; use another directory for another model"
                )
        # Rows of known shards that a looser filter lets live enter too; the spill skips those already in.
        reborn = [s for s in surveys if s.shard in known and self._reborn(known[s.shard])]
        entering += [asdict(survey) | {"ordinal": known[survey.shard]["ordinal"]} for survey in reborn]
        if not entering and known:
            return False
        with Commit(self.directory / f"generation-{len(self._manifests()):04d}.json") as temporary:
            manifest = {"task_memory": self.config.task_memory, "shards": entering}
            temporary.write_text(json.dumps(manifest, indent=0))
        return True

    def _reborn(self, entry: dict) -> bool:
        """Whether a known shard has live rows that have not entered and could."""
        block = self.source.load(entry["shard"])
        seen = considered(self._spills(len(self._manifests())), entry["ordinal"], len(block.alive))
        return bool((block.alive & ~seen).any())

    def _shelf(self, upto: int) -> Shelf:
        entries = sorted(self._entries(upto).values(), key=lambda entry: entry["ordinal"])
        width = entries[0]["width"] if entries else 0
        return Shelf([e["shard"] for e in entries], [e["path"] for e in entries], width)

    def _spills(self, upto: int) -> list[str]:
        return [str(d) for number in range(upto) for d in sorted(self._generation(number).glob("spill-*"))]

    def pair_files(self) -> list[str]:
        """Every file of near pairs, oldest first."""
        return [
            str(f) for n in range(len(self._manifests())) for f in sorted(self._generation(n).glob("pairs-*"))
        ]

    # ---- one generation

    def _search(self, number: int) -> None:
        """Place and compare the rows of a generation; commits ``done.json``."""
        manifest = json.loads(self._manifests()[number].read_text())
        entries = manifest["shards"]
        # Tasks are cut by memory: a resume must cut them as they were, whatever it is given now.
        config = replace(self.config, task_memory=manifest["task_memory"])
        shelf = self._shelf(number + 1)
        rows = sum(entry["alive"] for entry in entries)
        sample = self._sample(entries, shelf, rows) if self.config.method != "phash" else None
        book = self._book(entries, shelf, rows, sample)
        counts = self._spill(number, entries, book, shelf, config)
        pairs = self._compare(number, book, shelf, config)
        recall = self._recall(sample, pairs)
        with Commit(self._done(number)) as temporary:
            temporary.write_text(
                json.dumps({"rows": counts[0], "unusable": counts[1], "recall": asdict(recall)})
            )

    def _sample(self, entries: list[dict], shelf: Shelf, rows: int) -> Sample:
        """Rows drawn from those entering, and their exact neighbours in the whole pool."""
        share = min(1.0, self.config.sample_rows / max(rows, 1))
        tasks = [(entry["ordinal"], entry["shard"]) for entry in entries]
        drawn = run_all(self.runner, SampleRows(self.source, share, self.config.seed, _CHECK), tasks)
        ids, vectors, hashes = (np.concatenate(columns) for columns in zip(*drawn))
        order = np.argsort(ids)
        ids, vectors, hashes = ids[order], vectors[order], hashes[order]
        config = self.config
        most = max(1000, MOST_PAIRS // len(shelf.shards))
        exact = ExactNeighbours(
            self.source,
            config.method,
            config.similarity,
            config.phash_distance,
            ids,
            vectors,
            hashes,
            most,
            config.seed,
        )
        found = run_all(self.runner, exact, list(enumerate(shelf.shards)))
        return Sample(ids, vectors, np.concatenate([*found, np.empty(0, dtype=PAIR)]))

    def _book(
        self, entries: list[dict], shelf: Shelf, rows: int, sample: Sample | None
    ) -> Codebook | HashBands:
        """The codebook of this directory, trained on the first generation that has rows."""
        if sample is None:
            return HashBands(self.config.phash_distance)
        path = self.directory / "codebook.npz"
        if path.exists():
            return Codebook.load(path)
        clusters = self.config.cluster_count(rows, shelf.width)
        share = min(1.0, training_rows(self.config, clusters, shelf.width) / max(rows, 1))
        tasks = [(entry["ordinal"], entry["shard"]) for entry in entries]
        drawn = run_all(self.runner, SampleRows(self.source, share, self.config.seed, _TRAIN), tasks)
        training = np.concatenate([vectors for _, vectors, _ in drawn])
        if not len(training):
            training = np.eye(1, shelf.width, dtype=np.float32)
        clusters = min(
            clusters, max(1, len(training) // LEAST_ROWS)
        )  # unusable rows may have thinned the sample
        centroids = train_centroids(training, self.config, clusters)
        margin = self._margin(centroids, shelf, sample)
        book = self._sketched(centroids, margin, training, sample)
        book.save(path)
        return book

    def _margin(self, centroids: np.ndarray, shelf: Shelf, sample: Sample) -> float:
        """Visiting margin that brings the recall for the least similar third of the pool's near pairs.

        Closer pairs are found more often, so the recall holds near the threshold and not only on average.
        LEAST_PAIRS are looked at in any case, planted ones when the pool has fewer.
        """
        pairs = sample.half(second=False)
        pairs = pairs[np.argsort(pairs["similarity"], kind="stable")][: max(LEAST_PAIRS, len(pairs) // 3)]
        pairs = pairs[:: len(pairs) // (50 * LEAST_PAIRS) + 1]
        others, place = np.unique(pairs["b"], return_inverse=True)
        x = sample.vectors[np.searchsorted(sample.ids, pairs["a"])]
        y = shelf.vectors(others)[place]
        missing = LEAST_PAIRS - len(pairs)
        if missing > 0 and len(sample.vectors):
            rng = np.random.default_rng([self.config.seed, 3])
            planted = plant_pairs(sample.vectors, self.config.similarity, missing, rng)
            x = np.concatenate([x, sample.vectors[np.arange(missing) % len(sample.vectors)]])
            y = np.concatenate([y, planted])
        return choose_margin(crossing_gaps(x, y, centroids), self.config.recall) if len(x) else 0.0

    def _sketched(
        self, centroids: np.ndarray, margin: float, training: np.ndarray, sample: Sample
    ) -> Codebook:
        """The codebook with the sketch that is cheapest for the pairs its clusters bring together."""
        width = training.shape[1]
        look = training[:: max(1, len(training) // LOOK_ROWS)][:LOOK_ROWS]
        products = similarities(look, centroids)
        home = products.argmax(1)
        met = (products.max(1)[:, None] - products <= margin)[:, home]
        met[np.tril_indices(len(look))] = False
        cosines = similarities(look, look)[met][:200_000]
        sketch = choose_sketch(cosines, self.config.similarity, width) if len(cosines) else min(64, width)
        # Rows that were not trained on: those that were lie closer to their centroid and visit less.
        fresh = similarities(sample.vectors if len(sample.vectors) else look, centroids)
        visits = float((fresh.max(1)[:, None] - fresh <= margin).sum(1).mean())
        reach = sketch_reach(self.config.similarity, sketch, width)
        return Codebook(centroids, rotation(width, sketch, self.config.seed), margin, reach, visits)

    def _spill(
        self, number: int, entries: list[dict], book: Codebook | HashBands, shelf: Shelf, config: NearConfig
    ) -> tuple[int, int]:
        """Place the entering rows: (rows entered, rows not usable)."""
        if isinstance(book, Codebook):
            sketch, placements = book.rotation.shape[1], book.placements
        else:
            sketch, placements = 0, float(len(book.edges) - 1)
        lane = payload_bytes(config, shelf.width, sketch)
        most = batch_rows(config, shelf.width, book.clusters, lane, placements)
        earlier = tuple(self._spills(number))
        tasks: list[SpillTask] = []
        batch: list[tuple[int, str]] = []
        filled = 0
        for index, entry in enumerate(entries):
            batch.append((entry["ordinal"], entry["shard"]))
            filled += entry["rows"]
            if index + 1 == len(entries) or filled + entries[index + 1]["rows"] > most:
                target = self._generation(number) / f"spill-{len(tasks):05d}"
                tasks.append(SpillTask(tuple(batch), earlier, str(target)))
                batch, filled = [], 0
        counts = run_all(self.runner, Spill(self.source, book, config.method), tasks)
        return sum(entered for entered, _ in counts), sum(unusable for _, unusable in counts)

    def _compare(
        self, number: int, book: Codebook | HashBands, shelf: Shelf, config: NearConfig
    ) -> list[str]:
        """Compare the entering rows: paths of the pair files of all generations so far."""
        sections = Sections(
            tuple(self._spills(number)), tuple(map(str, sorted(self._generation(number).glob("spill-*"))))
        )
        sizes = {name: files.sizes() for name, files in sections.open().items()}
        columns = 64
        if isinstance(book, Codebook) and config.method == "embedding":
            columns = book.rotation.shape[1]
        rows = tile_rows(config, shelf.width, columns)
        tasks = [
            CompareTask(units, str(self._generation(number) / f"pairs-{index:06d}"))
            for index, units in enumerate(pack(list(plan_units(sizes, rows))))
        ]
        compare = Compare(shelf, book, sections, config.similarity, config.phash_distance)
        run_all(self.runner, compare, tasks)
        return self.pair_files()

    def _recall(self, sample: Sample | None, files: list[str]) -> RecallEstimate:
        """Recall of the drawn rows that did not set the margin. Bands of the hash lose nothing."""
        if sample is None:
            return RecallEstimate(0, 0, 0, 1.0, 1.0)
        truth = sample.half(second=True)
        return estimate_recall(was_found(truth, files), truth["a"], len(sample.ids) // 2)

    # ---- the decision

    def _decide(self) -> DuplicateResult:
        done = [json.loads(self._done(n).read_text()) for n in range(len(self._manifests()))]
        shelf = self._shelf(len(done))
        if (self.directory / "partitions").exists():
            shutil.rmtree(self.directory / "partitions")
        partition_pairs(self.pair_files(), self.source, shelf.shards, self.directory)
        pairs, dropped = decide_partitions(self.directory, self.directory, self.config)
        result = DuplicateResult(
            directory=self.directory,
            config=self.config,
            rows=sum(part["rows"] for part in done),
            unusable=sum(part["unusable"] for part in done),
            pairs=pairs,
            dropped=dropped,
            recall=RecallEstimate(**done[-1]["recall"]),
        )
        result.save()
        return result


def _survey(entry: dict) -> dict:
    return {name: entry[name] for name in ("shard", "path", "rows", "alive", "width")}

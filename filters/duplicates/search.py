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
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock, Timeout

from filters.duplicates.blocks import BlockSource, Shelf
from filters.duplicates.clusters import Codebook, HashBands, Spill, SpillTask
from filters.duplicates.compare import Compare, CompareTask, Sections, pack, plan_units
from filters.duplicates.config import NearConfig, batch_rows, payload_bytes, tile_rows
from filters.duplicates.recall import RecallEstimate, estimate_recall, was_found
from filters.duplicates.result import DuplicateResult, decide_partitions, partition_pairs
from filters.duplicates.survey import SurveyShard, entered_files
from filters.duplicates.tasks import Runner, run_all
from filters.duplicates.training import Entry, Sample, draw_sample, train_book
from pipeline import storage
from pipeline.errors import Refused

log = logging.getLogger(__name__)


class NearSearch:
    """Near duplicates of a pool of blocks, kept under ``directory``.

    Settings that decide what is searched (method, similarity, phash_distance, seed, clusters) must be those
    the directory was made with; Refused names the first that differs. Raises Refused also when blocks have
    embeddings of different widths. When the vectors of a shard that has entered are no longer what they were,
    the search starts over.
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
            raise Refused(
                f"{self.directory}: another run is searching here; wait for it or stop it"
            ) from None

    def _run(self) -> DuplicateResult:
        self._check_settings()
        self._forget_changed()
        for number in range(len(self._manifests())):
            if not self._done(number).exists():
                self._search(number)
        if self._register():
            self._search(len(self._manifests()) - 1)
        return self._decide()

    # ---- what has entered

    def _manifests(self) -> list[Path]:
        return sorted(self.directory.glob("generation-????.json"))

    def _generation(self, number: int) -> Path:
        return self.directory / f"generation-{number:04d}"

    def _done(self, number: int) -> Path:
        return self._generation(number) / "done.json"

    def _check_settings(self) -> None:
        settings = self.config.searched()
        path = self.directory / "settings.json"
        if not path.exists():
            storage.write_json(str(path), settings)
        known = json.loads(path.read_text())
        for name in settings:
            if known[name] != settings[name]:
                raise Refused(
                    f"{name}={settings[name]}: {self.directory} was searched with {name}={known[name]}; "
                    "use another directory, or rethreshold() for a higher similarity"
                )

    def _forget_changed(self) -> None:
        """Forget everything when vectors have changed, and an unfinished generation when its shards are not here."""
        entries = self._entries()
        changed = [name for name, entry in entries.items() if self.source.version(name) != entry.version]
        manifests = self._manifests()
        if changed:
            log.warning(
                "%s has changed since it was searched (%d shards have): searching anew",
                changed[0],
                len(changed),
            )
            first = 0
        elif manifests and not self._done(len(manifests) - 1).exists():
            entering = {entry.shard for entry in self._entering(len(manifests) - 1)}
            first = len(manifests) - (not entering <= set(self.source.shards))
        else:
            return
        # Manifests go last: what they name and is not there is searched again.
        for number in range(first, len(manifests)):
            shutil.rmtree(self._generation(number), ignore_errors=True)
        if changed:
            (self.directory / "codebook.npz").unlink(missing_ok=True)
        for path in reversed(manifests[first:]):
            path.unlink()

    def _entering(self, number: int) -> list[Entry]:
        manifest = json.loads((self.directory / f"generation-{number:04d}.json").read_text())
        return [Entry(**entry) for entry in manifest["shards"]]

    def _entries(self, upto: int | None = None) -> dict[str, Entry]:
        """Shards that have entered, by name, as they last did."""
        numbers = range(len(self._manifests()) if upto is None else upto)
        return {entry.shard: entry for number in numbers for entry in self._entering(number)}

    def _register(self) -> bool:
        """Write the manifest of a new generation when anything is new: whether there is one."""
        known = self._entries()
        entered = entered_files(self._spills(len(self._manifests())))
        before = {name: entered.get(entry.ordinal, []) for name, entry in known.items()}
        tasks = [(shard, before.get(shard, [])) for shard in self.source.shards]
        surveys = run_all(self.runner, SurveyShard(self.source, self.config.method), tasks)
        widths = {survey.width: survey.shard for survey in [*surveys, *known.values()]}
        if len(widths) > 1:
            (width, shard), (other, second) = list(widths.items())[:2]
            raise Refused(
                f"{shard} holds embeddings of width {width}, {second} of width {other}; a run needs one model"
            )
        entering: list[Entry] = []
        for survey in surveys:
            if survey.shard not in known:
                entering.append(Entry(**asdict(survey), ordinal=len(known) + len(entering)))
        # Rows of known shards that a looser filter lets live enter too; the spill skips those already in.
        for survey in surveys:
            if survey.shard in known and survey.fresh:
                entering.append(Entry(**asdict(survey), ordinal=known[survey.shard].ordinal))
        if not entering and known:
            return False
        path = self.directory / f"generation-{len(self._manifests()):04d}.json"
        shards = [asdict(entry) for entry in entering]
        storage.write_json(str(path), {"task_memory": self.config.task_memory, "shards": shards})
        return True

    def _shelf(self, upto: int) -> Shelf:
        entries = sorted(self._entries(upto).values(), key=lambda entry: entry.ordinal)
        names = [entry.shard for entry in entries]
        return Shelf(names, [self.source.embeddings(n) for n in names], entries[0].width if entries else 0)

    def _spills(self, upto: int) -> list[str]:
        return [
            str(d) for number in range(upto) for d in sorted(self._generation(number).glob("spill-?????"))
        ]

    def pair_files(self) -> list[str]:
        """Every file of near pairs, oldest first."""
        numbers = range(len(self._manifests()))
        return [str(f) for n in numbers for f in sorted(self._generation(n).glob("pairs-??????"))]

    # ---- one generation

    def _search(self, number: int) -> None:
        """Place and compare the rows of a generation; commits ``done.json``."""
        storage.remove_leftovers(str(self._generation(number)))
        entries = self._entering(number)
        manifest = json.loads(self._manifests()[number].read_text())
        # Tasks are cut by memory: a resume must cut them as they were, whatever it is given now.
        config = replace(self.config, task_memory=manifest["task_memory"])
        shelf = self._shelf(number + 1)
        sample = None
        if config.method != "phash":
            sample = draw_sample(self.source, self.runner, config, entries, shelf)
        book = self._book(entries, shelf, sample, config)
        counts = self._spill(number, entries, book, shelf, config)
        self._compare(number, book, shelf, config)
        recall = self._recall(sample, self.pair_files())
        report = {"rows": counts[0], "unusable": counts[1], "recall": asdict(recall)}
        storage.write_json(str(self._done(number)), report)

    def _book(
        self, entries: list[Entry], shelf: Shelf, sample: Sample | None, config: NearConfig
    ) -> Codebook | HashBands:
        """The codebook of this directory, trained on the first generation."""
        if sample is None:
            return HashBands(config.phash_distance)
        path = self.directory / "codebook.npz"
        if not path.exists():
            train_book(self.source, self.runner, config, entries, shelf, sample).save(path)
        return Codebook.load(path)

    def _spill(
        self, number: int, entries: list[Entry], book: Codebook | HashBands, shelf: Shelf, config: NearConfig
    ) -> tuple[int, int]:
        """Place the entering rows: (rows entered, rows not usable)."""
        if isinstance(book, Codebook):
            sketch, placements = book.rotation.shape[1], book.placements
        else:
            sketch, placements = 0, float(len(book.edges) - 1)
        lane = payload_bytes(config, shelf.width, sketch)
        most = batch_rows(config, shelf.width, book.clusters, lane, placements)
        earlier = entered_files(self._spills(number))
        tasks: list[SpillTask] = []
        batch: list[tuple[int, str, tuple[str, ...]]] = []
        filled = 0
        for index, entry in enumerate(entries):
            batch.append((entry.ordinal, entry.shard, tuple(earlier.get(entry.ordinal, []))))
            filled += entry.rows
            if index + 1 == len(entries) or filled + entries[index + 1].rows > most:
                target = self._generation(number) / f"spill-{len(tasks):05d}"
                tasks.append(SpillTask(tuple(batch), str(target)))
                batch, filled = [], 0
        counts = run_all(self.runner, Spill(self.source, book, config.method), tasks)
        return sum(entered for entered, _ in counts), sum(unusable for _, unusable in counts)

    def _compare(self, number: int, book: Codebook | HashBands, shelf: Shelf, config: NearConfig) -> None:
        """Compare the entering rows with each other and with those that entered before."""
        new = [str(d) for d in sorted(self._generation(number).glob("spill-?????"))]
        sections = Sections(tuple(self._spills(number)), tuple(new))
        sizes = {name: files.sizes() for name, files in sections.open().items()}
        columns = 64
        if isinstance(book, Codebook) and config.method == "embedding":
            columns = book.rotation.shape[1]
        rows = tile_rows(config, shelf.width, columns)
        tasks = [
            CompareTask(units, str(self._generation(number) / f"pairs-{index:06d}"))
            for index, units in enumerate(pack(list(plan_units(sizes, rows))))
        ]
        compare = Compare(shelf, book, sections, config.cosine, config.phash_distance)
        run_all(self.runner, compare, tasks)

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

"""From a finished run to its page: which sections it has, what they show, and the samples they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl
import yaml

from pipeline import storage
from pipeline.manifest import Run
from pipeline.progress import Progress
from pipeline.report import chosen, pairs, plots
from pipeline.report.explorer import Explorer, explore
from pipeline.report.funnel import funnel
from pipeline.report.page import Section, about, render
from pipeline.report.pictures import Album, Place
from pipeline.report.survey import KEPT, Source, Survey, scores_of, survey

LOWEST = 10  # shards that are listed because they kept least


def write_report(run: Run, condensed: str | None = None) -> str:
    """Write `<run>/report.html` and return its path. `condensed`: a folder of condensed images to show too.

    Raises Refused when the run has not finished, or the folder holds no condensed images.

    Two passes over the columns that are shown, shard by shard; then single rows and the byte ranges of single
    pictures. The same run gives the same bytes.
    """
    receipt = run.receipt()
    source = Source.of(run)
    scores = scores_of(receipt)
    duplicates, leaks = pairs.duplicates(run), pairs.leaks(run)
    influence = chosen.influence(run)
    condensed_set = chosen.condensed(condensed) if condensed else None
    told = [part for part in (duplicates, influence, *leaks) if part]
    seen = survey(source, scores, {uid for part in told for uid in part.uids()})
    explorers = explore(source, scores, seen.ranges)
    album = Album(run.decisions, source.tables.folder, [s.column for s in scores])
    with Progress("report, pictures", 1, "step") as progress:
        album.fetch(_places(seen, explorers, leaks))
        progress.step()
    sections = [
        Section("funnel", "Funnel", {"steps": funnel(run, receipt), "receipt": receipt}),
        _scores(explorers, album),
        _grids(receipt, seen),
        _duplicates(duplicates, receipt, seen),
        _leakage(leaks, receipt, seen),
        _influence(influence, seen),
        _condensed(condensed_set),
        _rounds(chosen.rounds(run)),
        _proof(chosen.proofs(run)),
        _shards(run, receipt),
        _time(receipt),
        _config(receipt),
    ]
    head = {"run": run.name, "out": run.out, "receipt": receipt, "unreachable": _unreachable(album)}
    page = render(f"{run.name} · Winnow", head, [s for s in sections if s], album)
    path = run.path("report.html")
    storage.write_bytes(path, page.encode("utf-8", "replace"))
    return path


def _places(seen: Survey, explorers: Sequence[Explorer], leaks: Iterable[pairs.Leaks]) -> list[Place]:
    found = [p for group in seen.grid.values() for p in group]
    found += seen.found.values()
    found += [p for e in explorers for p, _, _ in e.places]
    found += [p for leak in leaks for p in leak.places()]
    return found


def _unreachable(album: Album) -> dict[str, Any] | None:
    if not album.unreachable:
        return None
    shard, error = min(album.unreachable.items())
    missing = sum(s.shard in album.unreachable for s in album.shots.values())
    return {"shards": len(album.unreachable), "samples": missing, "error": error, "shard": shard}


def _scores(explorers: Sequence[Explorer], album: Album) -> Section | None:
    if not explorers:
        return None
    shown = []
    for explorer in explorers:
        score, above = explorer.score, explorer.above()
        shown.append(
            {
                "explorer": explorer, "column": score.column, "filter": score.filter, "cut": explorer.cut,
                "plot": plots.histogram(explorer), "levels": explorer.levels(), "stay": above[explorer.at],
                "data": {
                    "edges": explorer.edges.tolist(), "above": above, "at": explorer.at, "filter": score.filter,
                    "cut": explorer.cut,
                    "shots": [
                        {"value": value, "bin": bin, "src": album[p].source, "tiny": album[p].tiny, **about(album, p)}
                        for p, value, bin in explorer.places
                    ],
                },
            }
        )  # fmt: skip
    return Section("scores", "Scores", {"scores": shown})


def _grids(receipt: Mapping[str, Any], seen: Survey) -> Section:
    def group(reason: str, count: int, explanation: str) -> dict[str, Any]:
        return {
            "reason": reason, "count": count, "explanation": explanation, "places": seen.grid.get(reason, []),
        }  # fmt: skip

    def ranked(kind: str) -> list[dict[str, Any]]:
        counts = sorted(receipt[kind].items(), key=lambda item: (-item[1], item[0]))
        return [group(r, n, receipt["reasons"].get(r, "")) for r, n in counts if seen.grid.get(r)]

    return Section(
        "pictures", "Kept and dropped",
        {"kept": group(KEPT, receipt["kept"], ""), "dropped": ranked("dropped"), "rejected": ranked("rejected")},
    )  # fmt: skip


def _duplicates(found: pairs.Duplicates | None, receipt: Mapping[str, Any], seen: Survey) -> Section | None:
    if found is None or not (found.groups or found.least):
        return None
    dropped = {r: receipt["dropped"].get(r, 0) for r in ("exact_duplicate", "near_duplicate")}
    data = {"groups": found.groups, "least": found.least, **found.told, "dropped": dropped}
    return Section(
        "duplicates", "Duplicates", {**data, "config": receipt["config"]["dedup"], "place": _placed(seen)}
    )


def _leakage(found: Sequence[pairs.Leaks], receipt: Mapping[str, Any], seen: Survey) -> Section | None:
    if not found:
        return None
    config = receipt["config"]["leakage"]
    return Section(
        "leakage", "Leakage",
        {"sets": found, "dropped": receipt["dropped"], "config": config, "place": _placed(seen)},
    )  # fmt: skip


def _influence(found: chosen.Influence | None, seen: Survey) -> Section | None:
    return Section("influence", "Influence", {"found": found, "place": _placed(seen)}) if found else None


def _condensed(found: chosen.Condensed | None) -> Section | None:
    if found is None:
        return None
    ranks = max(map(len, found.rows.values()), default=0)
    return Section("condensed", "Condensed", {"found": found, "ranks": ranks})


def _rounds(found: dict[str, Any] | None) -> Section | None:
    if found is None:
        return None
    most = max((n for _, n in found["uses"]), default=0)
    return Section("rounds", "Rounds", {"told": found, "most": most})


def _proof(found: list[dict[str, Any]]) -> Section | None:
    return Section("proof", "Proof", {"proofs": found}) if found else None


def _placed(seen: Survey) -> Any:
    """Where a sample of a pair lies: places are told as they are, uids are looked up; None when it is gone."""
    return lambda end: end if isinstance(end, Place) else seen.found.get(end)


def _shards(run: Run, receipt: Mapping[str, Any]) -> Section | None:
    accounting = pl.read_parquet(storage.read_bytes(run.path("accounting.parquet")))
    full = accounting.filter(pl.col("samples") > 0).with_columns(share=pl.col("kept") / pl.col("samples"))
    pool = receipt["pool"]
    shares = full["share"].sort()
    lowest = full.sort("share", "shard").head(LOWEST).to_dicts() if len(full) > 1 else []
    quartiles = [shares.quantile(q, "nearest") for q in (0, 0.25, 0.5, 0.75, 1)] if len(full) > 1 else []
    return Section(
        "shards", "Shards",
        {
            "pool": pool, "lowest": lowest, "quartiles": quartiles, "shares": _share_bars(shares),
            "incomplete": len(pool["damaged_shards"]),
        },
    )  # fmt: skip


def _share_bars(shares: pl.Series) -> dict[str, Any] | None:
    """How the shards' kept shares are spread, in twenty bars from 0 to 1."""
    if len(shares) < 2:
        return None
    counts = [0] * 20
    for value in shares:
        counts[min(int(value * 20), 19)] += 1
    tallest = max(counts)
    return {"path": plots.bars([c / tallest * 100 for c in counts], range(21)), "tallest": tallest}


def _time(receipt: Mapping[str, Any]) -> Section:
    spent = receipt["seconds"]
    shards, scanned = receipt["pool"]["shards"], receipt["scanned_shards"]
    left = {s["name"]: s["kept"] for s in receipt["stages"]}
    rows, entering = [], receipt["pool"]["samples"]
    for name, s in spent.items():
        worked = entering * scanned / shards if name == "scan" and shards else entering
        rows.append(
            {
                "name": name,
                "seconds": s,
                "samples": round(worked),
                "rate": worked / s if s and worked else None,
            }
        )
        entering = left.get(name, receipt["pool"]["samples"])
    longest = max((r["seconds"] for r in rows), default=0) or 1
    return Section(
        "time", "Time",
        {"rows": rows, "longest": longest, "total": sum(spent.values()), "scanned": scanned, "shards": shards},
    )  # fmt: skip


def _config(receipt: Mapping[str, Any]) -> Section:
    text = yaml.safe_dump(receipt["config"], sort_keys=False, allow_unicode=True)
    scorer = {
        k: v
        for k, v in receipt["scorer"].items()
        if k in ("column", "fingerprint", "precision", "weights") and v
    }
    return Section(
        "config", "Configuration",
        {"yaml": text, "versions": receipt["versions"], "scorer": scorer, "tables": receipt["tables"]},
    )  # fmt: skip

"""A census for a person: a page of text, and one picture for each distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import storage
from pipeline.census.count import quantiles

TITLES = {
    "caption": "captions", "word": "words", "gram2": "word pairs", "gram3": "word triples", "domain": "domains",
    "language": "languages", "format": "image formats",
}  # fmt: skip
MEASURES = {
    "words": ("words of a caption", 1), "characters": ("characters of a caption", 1),
    "short_side": ("short side, pixels", 1), "long_side": ("long side, pixels", 1),
    "aspect_x100": ("long side / short side", 100), "score_x1000": ("score", 1000),
}  # fmt: skip
SHORT = 8  # entries of a list that are printed; census.json has all
WIDE = 60


def describe(census: dict[str, Any]) -> str:
    """What was counted, in the order in which a person asks for it."""
    return "\n".join([*_head(census), *_measures(census), *_values(census), *_duplicates(census)])


def _head(census: dict[str, Any]) -> Iterator[str]:
    yield f"{census['samples']:,} samples in {census['shards']:,} shards; {census['unreadable']:,} cannot be read"
    labels = {
        "samples": "samples", "words_total": "words in captions", "email": "captions with an e-mail address",
        "phone": "captions with a phone number", "ip": "captions with an IP address",
    }  # fmt: skip
    if census["evaluation"]:
        labels["overlap"] = "captions that equal an evaluation caption"
    groups = census["groups"]
    if len(groups) > 1:
        yield f"{'':42}" + "".join(f"{g:>14}" for g in groups)
    for key, label in labels.items():
        yield f"{label:42}" + "".join(f"{census['by_group'][g][key]:>14,}" for g in groups)
    if met := census["evaluation"]:
        yield f"{met['met']:,} of {met['captions']:,} evaluation captions are in the pool"


def _measures(census: dict[str, Any]) -> Iterator[str]:
    yield f"\n{'5 / 25 / 50 / 75 / 95 %':42}"
    for what, by_group in census["histograms"].items():
        title, scale = MEASURES[what]
        for group, pairs in by_group.items():
            name = title if len(census["groups"]) == 1 else f"{title}, {group}"
            yield f"{name:42}" + " / ".join(f"{q / scale:g}" for q in quantiles(pairs))


def _values(census: dict[str, Any]) -> Iterator[str]:
    for kind, found in census["values"].items():
        title = TITLES.get(kind, f"{kind.removeprefix('gram')}-grams of words")
        yield f"\n{title}: {found['distinct']:,} different, {found['once']:,} of them once"
        yield from _list("most common", found["most_common"], census["groups"])
        yield from _list("least common", found["least_common"], census["groups"])
        for group, rows in found.get("telling", {}).items():
            yield from _list(f"{group} more often than chance would have it", rows, census["groups"])


def _list(title: str, rows: list[dict[str, Any]], groups: list[str]) -> Iterator[str]:
    if rows:
        yield f"  {title}"
    for row in rows[:SHORT]:
        apart = "".join(f"{row[g]:>12,} {g}" for g in groups) if len(groups) > 1 else ""
        yield f"    {row['count']:>12,}{apart}  {_cut(row['value'])!r}"


def _cut(text: str) -> str:
    return text if len(text) <= WIDE else text[: WIDE - 1] + "…"


def _duplicates(census: dict[str, Any]) -> Iterator[str]:
    if exact := census["exact_duplicate_captions"]:
        yield f"\nexact duplicates: {exact['groups']:,} captions are used again, {exact['copies']:,} times in all"
    if near := census["near_duplicate_captions"]:
        part = "" if near["one_in"] == 1 else f" (one in {near['one_in']} was looked at)"
        yield (
            f"near duplicates: {near['captions']:,} of {near['looked_at']:,} different captions lie in"
            f" {near['groups']:,} groups at a Jaccard similarity of {near['similarity']:g} or more{part}"
        )
        for group in near["largest"][:SHORT]:
            yield f"    {group['captions']:>8,} captions of {group['samples']:,} samples, such as {_cut(group['examples'][0])!r}"


def draw(census: dict[str, Any], folder: str) -> list[str]:
    """A picture `<measure>.png` for each distribution, groups side by side; returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for what, by_group in census["histograms"].items():
        title, scale = MEASURES[what]
        most = max(quantiles(pairs, (0.995,))[0] for pairs in by_group.values())
        least = min(pairs[0][0] for pairs in by_group.values())
        bins = min(60, max(1, most - least + 1))
        figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
        for group, pairs in by_group.items():
            values = [min(v, most) / scale for v, _ in pairs]
            axes.hist(
                values, bins=bins, range=(least / scale, (most + 1) / scale), weights=[n for _, n in pairs],
                histtype="step" if len(by_group) > 1 else "stepfilled", label=group, linewidth=1.5,
            )  # fmt: skip
        axes.set_xlabel(title)
        axes.set_ylabel("samples")
        if len(by_group) > 1:
            axes.legend(frameon=False)
        path = storage.join(folder, f"{what}.png")
        with storage.commit(path) as tmp:
            figure.savefig(tmp, dpi=130, format="png")
        pyplot.close(figure)
        paths.append(path)
    return paths

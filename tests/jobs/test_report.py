"""The report as a reader meets it: bytes, numbers, hostile captions, and the page itself in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import curate, report
from pipeline.samples import format_uid
from tests.build import TINY, call, encode, jpeg, make_shard, picture, sample, uid, work_in_process

HOSTILE = [
    "</script><img src=x onerror=\"document.title='owned'\">",
    "'\"><script>document.title='owned'</script>",
    "<!--<script>{{ 7 * 7 }} ${7*7}",
    "\u202eright to left\u202c and \ufffd",
]
SHARDS, EACH = 3, 40
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"

UNNAMED = """[...document.querySelectorAll("img, button, input, section, nav")].filter((e) => !(
    e.alt || e.textContent.trim() || e.ariaLabel || e.querySelector("img[alt]"))).map((e) => e.outerHTML)"""


def aesthetic(n: int) -> float:
    """Many ties, some of them at the cut."""
    return (n * 37 % 50) / 10


def _samples(shard: int) -> list[tuple[str, Any]]:
    made = []
    for n in range(shard * EACH, (shard + 1) * EACH):
        text = HOSTILE[n % 4] if n % 5 == 0 else f"picture number {n}"
        extra: dict[str, bytes] = {"jpg": jpeg((40, 30), 3 if n % 10 == 3 else n)}  # some pictures come again
        if n % 20 == 7:
            extra["jpg"] = b"not a picture"
        record = {"uid": uid(n), "aesthetic": aesthetic(n)}
        made.append(sample(n, txt=text.encode(), record=None, json=json.dumps(record).encode(), **extra))
    return made


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    for s in range(SHARDS):
        make_shard(folder / f"{s:05d}.tar", _samples(s))
    last = folder / f"{SHARDS - 1:05d}.tar"
    last.write_bytes(last.read_bytes()[: int(last.stat().st_size * 0.8)])
    (folder / "sizes.json").write_text(json.dumps({f"{s:05d}.tar": EACH for s in range(SHARDS)}))
    return folder


@pytest.fixture(scope="module")
def run(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder: a top fraction on a column with ties, leaks and duplicates by perceptual hash."""
    out, photos = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("photos")
    for n in (1, 2, 4, 6, 8, 9):
        (photos / f"{n}.jpg").write_bytes(jpeg((40, 30), n))
    with pytest.MonkeyPatch.context() as patch:
        work_in_process(patch.setattr)
        code = call(
            curate, f"pool.shards={pool}/*.tar", f"out={out}", "scorer=none", "filters=[column]",
            "filters.column.column=aesthetic", "filters.column.top_fraction=0.4", "dedup=near",
            "dedup.method=phash", "leakage.method=phash", f"+leakage.sets.photos={photos}",
            "+pool.json_fields.aesthetic=float",
        )  # fmt: skip
    assert code == 0
    return out / "runs" / "default"


def made(run: Path) -> str:
    assert call(report, f"out={run.parents[1]}") == 0
    return (run / "report.html").read_text()


def receipt(run: Path) -> dict[str, Any]:
    return json.loads((run / "receipt.json").read_text())


def explorer_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_numbers_are_the_receipts(run: Path) -> None:
    page, told = made(run), receipt(run)
    for n in (told["kept"], told["pool"]["samples"], *told["dropped"].values(), *told["rejected"].values()):
        assert f">{n:,}<" in page
    for reason in {*told["dropped"], *told["rejected"]}:
        assert f"<code>{reason}</code>" in page
    data = explorer_data(page)
    assert min(told["dropped"][r] for r in ("leaks_photos", "exact_duplicate", "column_below_cut")) > 0
    assert data["above"][data["at"]] == told["kept"]
    assert data["above"][0] - data["above"][data["at"]] == told["dropped"]["column_below_cut"]


def test_same_run_same_bytes_and_nothing_from_elsewhere(run: Path) -> None:
    page = made(run)
    assert made(run) == page
    assert len(page) < 5_000_000
    links = re.findall(
        r"(?:src|href)=[\"']?([^\"'> ]*)", re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    )
    assert all(link.startswith(("data:", "#")) for link in links if link != "x")
    assert "url(" not in page


def test_captions_stay_text(run: Path) -> None:
    page = made(run)
    assert "owned" in page
    assert "<img src=x" not in page
    assert "<script>document" not in page
    assert "49" not in re.findall(r"&lt;!--&lt;script&gt;(\d+)", page)


def test_sections_without_data_are_left_out(run: Path) -> None:
    page = made(run)
    sections = re.findall(r'<section id="(\w+)"', page)
    assert sections == ["funnel", "scores", "pictures", "duplicates", "leakage", "shards", "time", "config"]
    assert page.count('<li class="pair">') >= receipt(run)["dropped"]["leaks_photos"] > 0


def test_a_pool_out_of_reach_is_told(run: Path, pool: Path) -> None:
    away = pool.rename(pool.with_name("away"))
    try:
        page = made(run)
    finally:
        away.rename(pool)
    assert "The pool is out of reach from here" in page
    assert all(shot["src"] is None for shot in explorer_data(page)["shots"])
    assert explorer_data(page)["above"][0] > 0


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(report, f"out={tmp_path}", "run=none") == 2
    assert "no finished run there" in capfd.readouterr().err


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield chromium
        chromium.close()


class Reader:
    """A page under a reader's hands, with what it complained of and asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.trouble: list[str] = []
        self.page.on("console", lambda m: self.trouble.append(m.text))
        self.page.on("pageerror", lambda e: self.trouble.append(str(e)))
        self.page.on(
            "request", lambda r: None if r.url.startswith(("data:", "file:")) else self.trouble.append(r.url)
        )
        self.page.goto(path.as_uri())

    def number(self, name: str) -> int:
        return int(self.page.locator(f'[data-out="{name}"]').first.inner_text().replace(",", ""))

    def pictures(self, side: str) -> list[str]:
        return self.page.locator(f".side.{side} .note").all_inner_texts()


def test_the_cut_moves_by_keyboard_and_mouse(run: Path, browser: Any) -> None:
    made(run)
    told = receipt(run)
    reader = Reader(browser, run / "report.html", viewport={"width": 1280, "height": 900})
    page, cut = reader.page, reader.page.get_by_role("slider")
    assert reader.number("stay") == told["kept"]
    assert reader.number("go") == told["dropped"]["column_below_cut"]
    below, above = reader.pictures("go"), reader.pictures("stay")
    assert max(map(float, below)) <= min(map(float, above))

    cut.focus()
    for _ in range(12):
        page.keyboard.press("PageUp")
    assert reader.number("stay") < told["kept"]
    assert reader.pictures("stay") != above
    assert f"{reader.number('stay')} stay" in cut.get_attribute("aria-valuetext")
    page.keyboard.press("Home")
    assert reader.number("go") == 0
    page.get_by_role("button", name="Back to the run's cut").click()
    assert (reader.number("stay"), reader.pictures("go")) == (told["kept"], below)

    box = cut.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 5, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    assert reader.number("stay") > told["kept"]
    assert "filters.column.threshold=" in page.locator(".override").inner_text()
    assert reader.trouble == []


def test_hostile_captions_run_nothing(run: Path, browser: Any) -> None:
    made(run)
    reader = Reader(browser, run / "report.html")
    page = reader.page
    page.locator(".shot button").filter(has=page.locator('[alt*="</script>"]')).first.click()
    assert page.locator("#shot-caption").inner_text() == HOSTILE[0]
    assert page.locator("dialog dl").inner_text().count(".tar") == 1
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    assert "owned" not in page.title()
    assert reader.trouble == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_narrow_screen_in_both_colours(run: Path, browser: Any, scheme: str) -> None:
    made(run)
    reader = Reader(
        browser,
        run / "report.html",
        viewport={"width": 390, "height": 800},
        color_scheme=scheme,
        has_touch=True,
    )
    page = reader.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390

    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert (brightness() > 384) == (scheme == "light")
    theme = page.get_by_role("button", name="Colours")
    for wanted, bright in (("light", True), ("dark", False)):
        theme.click()
        assert theme.get_attribute("aria-label") == f"Colours: {wanted}"
        assert (brightness() > 384) == bright
    page.get_by_role("slider").scroll_into_view_if_needed()
    box = page.get_by_role("slider").bounding_box()
    before = reader.number("stay")
    page.touchscreen.tap(box["x"] + box["width"] * 0.1, box["y"] + box["height"] / 2)
    assert reader.number("stay") > before
    assert page.evaluate(UNNAMED) == []
    assert reader.trouble == []


@pytest.fixture
def chosen(run: Path, tmp_path: Path) -> Path:
    """The run with what its selections would leave beside it, in their formats; and a folder of condensed images."""
    whole = tmp_path / "out"
    shutil.copytree(run.parents[1], whole)
    copy = whole / "runs" / "default"
    kept = np.load(copy / "subset.npy")
    half = len(kept) // 2
    (copy / "rounds").mkdir()
    about = {
        "rounds": 3,
        "samples_per_round": half,
        "steps_per_round": None,
        "replacement": False,
        "stratify": None,
    }
    about |= {"unique_entries": len(kept), "entries": len(kept)}
    (copy / "rounds" / "rounds.json").write_text(json.dumps(about))
    for t, rows in enumerate((kept[:half], kept[half : 2 * half], kept[:half])):
        np.save(copy / "rounds" / f"{t:05d}.npy", rows)
    curve = {"arm": "subset", "samples": [10, 20], "unique": [10.0, 15.0], "seconds": [2.0, 70.0]}
    curve |= {"accuracy": [0.4, 0.61], "deviation": [0.01, 0.02], "reached": 70.0}
    proof = {
        "metric": "accuracy",
        "seeds": 3,
        "target": 0.6,
        "target_is": "as asked for",
        "verdict": "It paid.",
        "run": receipt(copy)["stages"][-1]["digest"],
    }
    proof |= {
        "costs": {"selection": {"scan": 1.5}, "image": 0.001},
        "curves": [curve, {**curve, "arm": "all"}],
    }
    (copy / "proof").mkdir()
    (copy / "proof" / "proof.json").write_text(json.dumps(proof))
    _influence(copy / "stages" / "03-influence", format_uid(*kept[0].tolist()))
    make_shard(
        tmp_path / "condensed" / "0.tar",
        [ranked(rank, label) for rank in range(3) for label in ("cat", "<b>")],
    )
    return copy


def _influence(folder: Path, uid: str) -> None:
    folder.mkdir()
    (folder / "tree_utility.png").write_bytes(encode(picture(), "PNG"))
    measured = {"accuracy": 0.8, "log_loss": 0.5}
    row = {"uid": uid, "delta_if_removed": -1.25}
    objective = {
        "unit": "nats",
        "base": 9.0,
        "predicted_change": -2.0,
        "realised_change": -1.0,
        "harmful_rows": 3,
    }
    result = {
        "verdict": "removed 2 of 9 rows", "rows": 9, "removed": 2,
        "sets": {"test": {"before": measured, "after": measured}},
        "objectives": {"utility": {**objective, "most_harmful": [row], "most_helpful": [row]}},
        "explanations": {"utility": {"verdict": "the tree explains 7%", "rules": "|--- a <= 1", "picture": "tree_utility.png"}},
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))


def ranked(rank: int, label: str) -> tuple[str, Any]:
    return sample(rank, key=f"{rank}{label[:1]}", record={"rank": rank, "label": label}, txt=None)


def test_selections_beside_the_run_are_shown(chosen: Path, tmp_path: Path, browser: Any) -> None:
    assert call(report, f"out={chosen.parents[1]}", f"condensed={tmp_path}/condensed") == 0
    reader = Reader(browser, chosen / "report.html")
    page = reader.page
    assert "-1.25" in page.locator("#influence").inner_text()
    assert page.locator('#influence img[alt^="Regression tree"]').evaluate("e => e.naturalWidth") == TINY[0]
    assert page.locator("#condensed img").count() == 6
    assert page.locator("#condensed tbody th").all_inner_texts() == ["cat", "<b>"]
    uses = page.locator("#rounds tbody tr").all_inner_texts()
    half, odd = divmod(receipt(chosen)["kept"], 2)
    assert [list(map(int, row.split())) for row in uses] == [[0, 1]] * odd + [[1, half], [2, half]]
    assert page.locator("#proof tbody tr").count() == 2
    assert "1 min 10 s" in page.locator("#proof").inner_text()
    assert "earlier selection" not in page.locator("#proof").inner_text()
    assert reader.trouble == []


def test_a_proof_of_another_selection_is_told_apart(chosen: Path, browser: Any) -> None:
    path = chosen / "proof" / "proof.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run": "another"}))
    assert call(report, f"out={chosen.parents[1]}") == 0
    assert "earlier selection" in Reader(browser, chosen / "report.html").page.locator("#proof").inner_text()


def test_a_folder_without_condensed_images_is_refused(run: Path, tmp_path: Path, capfd: Any) -> None:
    assert call(report, f"out={run.parents[1]}", f"condensed={tmp_path}") == 2
    assert "no shard with ranked images" in capfd.readouterr().err

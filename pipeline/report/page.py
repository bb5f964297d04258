"""The page: templates filled, style and script inlined. Captions are hostile; everything is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline.report.pictures import Album, Place

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Section:
    """One part of the page: `<template>.html` filled with `data`; the same name is its anchor."""

    name: str
    title: str
    data: Mapping[str, Any]


def render(title: str, head: Mapping[str, Any], sections: Sequence[Section], album: Album) -> str:
    """The whole page as one HTML document, which asks for nothing but itself."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(n=thousands, share=share, number=number, seconds=seconds)
    environment.globals["shot_of"] = lambda place: _shown(album, place)
    script = (TEMPLATES / "report.js").read_text()
    return environment.get_template("page.html").render(
        title=title,
        head=head,
        sections=sections,
        style=Markup((TEMPLATES / "report.css").read_text()),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _shown(album: Album, place: Place) -> dict[str, Any]:
    """A shot for the template: itself, and what the dialog tells of it."""
    shot = album[place]
    return {"shot": shot, "about": about(album, place)}


def about(album: Album, place: Place) -> dict[str, Any]:
    """What the page's script is told of a shot, pictures apart."""
    shot = album[place]
    told = {
        "caption": shot.caption, "uid": shot.uid, "shard": shot.shard, "key": shot.key, "size": shot.size,
        "label": shot.label or "", "fate": shot.fate, "detail": shot.detail or shot.missing,
        "scores": ", ".join(f"{c} {v:.5g}" for c, v in shot.numbers.items()),
    }  # fmt: skip
    return {k: v for k, v in told.items() if v}


def thousands(n: float) -> str:
    return f"{n:,}"


def share(part: float, whole: float = 1.0) -> str:
    """Per cent with as many digits as tell something: 43.2 %, 0.031 %."""
    value = 100 * part / whole if whole else 0.0
    if value == 0 or value >= 1:
        return f"{value:.1f} %"
    return f"{value:.2g} %" if value >= 0.01 else "< 0.01 %"


def number(x: float | None, digits: int = 4) -> str:
    return "" if x is None else f"{x:.{digits}g}" if abs(x) < 10_000 else f"{x:,.0f}"


def seconds(s: float) -> str:
    """A duration as a person says it."""
    if s < 60:
        return f"{s:.1f} s"
    minutes, rest = divmod(round(s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))

"""What --help prints: what the job does, what each key means, the keys with their values, and the choices."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf


def usage(conf: Path, name: str, about: str, schema: type, sections: Mapping[str, type]) -> str:
    """The help of the job `name`, from its module's docstring and those of its configuration's classes."""
    keys = [_documented("", schema)]
    keys += [_documented(key, kind) for key, kind in {**dict(sections_of(schema)), **sections}.items()]
    choices = [f"  {group}={' | '.join(names)}" for group, names in sorted(_choices(conf, name).items())]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        values = OmegaConf.to_yaml(hydra.compose(name))
    parts = [
        about.strip(),
        "KEYS\n" + "\n".join(k for k in keys if k),
        "VALUES unless told otherwise, as KEY=VALUE, SECTION.KEY=VALUE (??? must be given)\n"
        + _indented(values),
    ]
    if choices:
        parts.append("CHOICES, each a set of values\n" + "\n".join(choices))
    parts.append("--cfg job prints what would run. Exit codes: 0 done, 1 failed, 2 refused before any work.")
    return "\n\n".join(parts)


def _documented(key: str, kind: type) -> str:
    text = inspect.getdoc(kind) or ""
    if text.startswith(f"{kind.__name__}("):  # what dataclasses write themselves
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    return _indented(
        "\n".join([f"{key}: {lines[0]}", *(f"  {line}" for line in lines[1:])] if key else lines)
    )


def sections_of(schema: type) -> Iterator[tuple[str, type]]:
    """Fields that are sections of their own, with their classes."""
    hints: dict[str, Any] = get_type_hints(schema)
    for f in fields(schema):
        if is_dataclass(hints[f.name]):
            yield f.name, hints[f.name]


def _choices(conf: Path, name: str) -> dict[str, list[str]]:
    """Config groups of a job and what each can be, from the defaults of its file and of those that it is built on."""
    found: dict[str, list[str]] = {}
    content: Any = OmegaConf.to_container(OmegaConf.load(conf / f"{name}.yaml"))
    for entry in content.get("defaults", []):
        if isinstance(entry, str):
            if entry not in ("_self_", "quiet") and (conf / f"{entry}.yaml").exists():
                found |= _choices(conf, entry)
            continue
        for group in entry:
            if not str(group).startswith("override"):
                found[str(group)] = sorted(p.stem for p in (conf / str(group)).glob("*.yaml"))
    return found


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.strip().splitlines())

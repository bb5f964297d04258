"""Captions from class names, for labelled pools (Radford et al. 2021, section 3.1.4)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import open_clip

from pipeline import storage
from pipeline.errors import Refused
from pipeline.samples import Sample, format_uid

PLACE = "{}"


@dataclass(kw_only=True)
class CaptionsConfig:
    """What the class names are, and the sentences they are put into.

    class_names: `imagenet`, a text file with one name a line, or a list; in the order of the labels.
    templates: `openai` (CLIP's 80 for ImageNet), `simple` (7 of them), or a list of sentences with `{}`.
    """

    class_names: Any
    templates: Any = "openai"

    def __post_init__(self) -> None:
        sentences = self.templates
        if isinstance(sentences, str):
            if sentences not in ("openai", "simple"):
                raise ValueError(f"templates={sentences}: must be openai, simple, or a list of sentences")
        elif not sentences or any(PLACE not in s for s in sentences):
            raise ValueError(f"templates={list(sentences)}: each must have {PLACE} where the name goes")
        if not self.class_names:
            raise ValueError("class_names: give imagenet, a text file, or a list of names")

    def names(self) -> list[str]:
        """The class names. Raises Refused when their file is not there."""
        if not isinstance(self.class_names, str):
            return [str(n) for n in self.class_names]
        if self.class_names == "imagenet":
            return list(open_clip.IMAGENET_CLASSNAMES)
        if not storage.exists(self.class_names):
            raise Refused(f"class_names={self.class_names}: neither imagenet nor a file")
        lines = storage.read_bytes(self.class_names).decode().splitlines()
        return [x.strip() for x in lines if x.strip()]

    def sentences(self) -> list[str]:
        """The templates, with `{}` where the name goes."""
        own = {
            "openai": open_clip.OPENAI_IMAGENET_TEMPLATES, "simple": open_clip.SIMPLE_IMAGENET_TEMPLATES,
        }  # fmt: skip
        if isinstance(self.templates, str):
            return [template(PLACE) for template in own[self.templates]]
        return list(self.templates)


class Captioner:
    """Gives samples that have a label and no caption a sentence about it, chosen by the uid: always the same."""

    def __init__(self, config: CaptionsConfig) -> None:
        self.names, self.templates = config.names(), config.sentences()
        self._labels = {name: i for i, name in enumerate(self.names)} | {
            str(i): i for i in range(len(self.names))
        }

    def label(self, label: str | None) -> int | None:
        """The class that a sample's label, its number or its name, stands for."""
        return self._labels.get(label) if label is not None else None

    def caption(self, sample: Sample) -> None:
        """Caption `sample` in place when its caption is what it lacks and its label is one of the classes."""
        number = self.label(sample.label)
        if sample.status != "missing_caption" or number is None:
            return
        digest = hashlib.blake2b(format_uid(*sample.uid).encode(), digest_size=8, person=b"template").digest()
        template = self.templates[int.from_bytes(digest, "big") % len(self.templates)]
        sample.caption, sample.status = template.replace(PLACE, self.names[number]), "ok"

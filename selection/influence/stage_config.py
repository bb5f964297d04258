"""Settings of the influence stage of a run: what rows, labels and held-out sets are, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline import storage
from pipeline.errors import Refused
from selection.influence.config import SelectionConfig
from selection.influence.cost import SelectionCost, selection_cost
from selection.influence.objectives import FAIRNESS
from selection.influence.pool import TOWERS
from selection.influence.score import LEVERAGE_CLASSES


@dataclass(kw_only=True)
class InfluenceStageConfig(SelectionConfig):
    """The settings of `SelectionConfig`, and what rows, labels and held-out sets are.

    embedding: the features: `image`, `text`, or `both` side by side.
    labels: a column of the tables (`label`, or metadata); `prompts`: zero-shot, the class whose prompts are
        nearest to the image; `captions`: the class whose prompts are nearest to the caption; or `clusters`.
        Rows without a label take no part and stay.
    classes: names of the classes, or a file with one a line; null: the values of the column. A label may also
        be the number of its class. templates: prompts of a class, averaged. clusters: how many.
    groups: a column that holds the sensitive group, for the gaps and group_floor; null: none.
    target: the task: shards, a parquet file or a folder of images, with labels where it has them. It is split
        into the influence, guard and test sets. null: `held_out` rows of the pool (a fifth at most) serve.
    guard_share, test_share: of the target's rows. l2: the head's penalty on (1/2)||w||^2 beside *summed*
        losses. explain_depth: levels of the explaining tree, 0 for none. seed: draws and splits.
    """

    embedding: str = "image"
    labels: str = "label"
    classes: Any = None
    templates: list[str] = field(default_factory=lambda: ["a photo of a {}"])
    clusters: int = 10
    groups: str | None = None
    target: str | None = None
    held_out: int = 10_000
    guard_share: float = 0.3
    test_share: float = 0.3
    l2: float = 1.0
    explain_depth: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding not in TOWERS:
            raise ValueError(f"embedding={self.embedding}: must be {', '.join(TOWERS)}")
        if self.labels in ("prompts", "captions") and not self.classes:
            raise ValueError(f"classes=null: labels={self.labels} needs the names of the classes")
        if not self.templates or any("{}" not in template for template in self.templates):
            raise ValueError(
                f"templates={list(self.templates)}: at least one, each with a {{}} for the class"
            )
        if self.clusters < 2:
            raise ValueError(f"clusters={self.clusters}: at least 2")
        needs_groups = bool(self.group_floor) or bool(set(self.objectives) & set(FAIRNESS))
        if needs_groups and self.groups is None:
            raise ValueError("groups=null: fairness objectives and group_floor need the column of the groups")
        if self.held_out < 10:
            raise ValueError(f"held_out={self.held_out}: at least 10 rows")
        for name in ("guard_share", "test_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share between 0 and 1")
        if self.guard_share + self.test_share >= 1:
            raise ValueError(f"test_share={self.test_share}: guard_share and test_share must leave a rest")
        if not self.l2 > 0:
            raise ValueError(f"l2={self.l2}: greater than 0")
        if self.explain_depth < 0:
            raise ValueError(f"explain_depth={self.explain_depth}: 0 or more")

    def class_names(self) -> list[str] | None:
        """The classes as given, or None to take the column's values. Raises Refused for a file it cannot read."""
        if not isinstance(self.classes, str):
            return None if self.classes is None else [str(name) for name in self.classes]
        path = storage.absolute(self.classes, "selection.classes")
        if not storage.exists(path):
            raise Refused(f"selection.classes={self.classes}: no such file; give a list, or one name a line")
        return [line.strip() for line in storage.read_bytes(path).decode().splitlines() if line.strip()]

    def expected_classes(self) -> int | None:
        """How many classes there will be, where the settings say it; None where the pool's labels do."""
        if self.labels == "clusters":
            return self.clusters
        names = self.class_names()
        return None if names is None else len(names)

    def cost(self, rows: int, embed_dim: int, classes: int) -> SelectionCost:
        """What the stage will cost on `rows` pool rows, with embeddings of `embed_dim` numbers a tower."""
        d = embed_dim * len(TOWERS[self.embedding]) + 1
        return selection_cost(
            rows=rows, d=d, classes=classes, objectives=len(self.objectives), rounds=self.rounds,
            leverage=self.corrects(classes),
        )  # fmt: skip

    def corrects(self, classes: int) -> bool:
        """Whether estimates are corrected by leverage: as asked for, else with the guard and few classes."""
        if self.leverage is not None:
            return self.leverage
        return self.guard and classes <= LEVERAGE_CLASSES

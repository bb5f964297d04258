"""A shallow regression tree from named features to influence, with the share of it that the tree explains.

The tree is fitted on half of the rows and judged on the other half: a picture of a tree that explains nothing
is worse than none, so its held-out R^2 stands in its title and in its verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.tree import DecisionTreeRegressor, export_text, plot_tree

EXPLAINS_NOTHING = 0.1
MOST_ROWS = 200_000


@dataclass(frozen=True)
class Explanation:
    """A fitted tree.

    Attributes:
        name: the objective.
        tree: from the features to `delta_if_removed` (negative = harmful).
        features: names, in column order.
        r2: coefficient of determination on rows the tree did not see; at most 1, negative when the tree is
            worse than the mean.
    """

    name: str
    tree: DecisionTreeRegressor
    features: tuple[str, ...]
    r2: float

    @property
    def verdict(self) -> str:
        """One line for a person."""
        if self.r2 < EXPLAINS_NOTHING:
            return f"the tree explains nothing of {self.name} (held-out R^2 {self.r2:.2f}): do not read it"
        return f"the tree explains {self.r2:.0%} of {self.name} (held-out R^2 {self.r2:.2f})"

    @property
    def text(self) -> str:
        """The tree as indented rules."""
        return export_text(self.tree, feature_names=list(self.features), decimals=self._decimals)

    @property
    def _decimals(self) -> int:
        """Decimals that show three digits of the largest leaf: influences are often below .001."""
        largest = float(np.abs(self.tree.tree_.value).max())
        return max(3, 2 - int(np.floor(np.log10(largest)))) if largest > 0 else 3

    def draw(self, path: str | Path) -> None:
        """Write the picture as PNG, the same bytes for the same tree."""
        depth = self.tree.get_depth()
        figure = Figure(figsize=(max(6.0, 2.6 * 2**depth), 1.8 * (depth + 1.5)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        # Impurity is off: squared error of influences has no unit a reader could use.
        plot_tree(
            self.tree,
            feature_names=list(self.features),
            filled=True,
            impurity=False,
            precision=self._decimals,
            ax=axes,
        )
        axes.set_title(f"delta_if_removed_{self.name}: negative = harmful\n{self.verdict}")
        figure.savefig(path, format="png", dpi=110, metadata={"Software": None})


def explain(
    name: str,
    features: np.ndarray,
    delta: np.ndarray,
    names: Sequence[str],
    *,
    depth: int = 3,
    seed: int = 0,
) -> Explanation:
    """Fit a tree of at most `depth` levels to influence and judge it on the other half of the rows.

    Args:
        features: (n, f) columns a reader understands. Put the label among them: influence is a residual times
            features, and without the label its sign cannot be told.
        delta: (n,) delta_if_removed.
        names: f feature names.
        seed: draws the halves, and at most 200,000 rows.
    Raises:
        ValueError: fewer than 20 rows, or names that do not match.
    """
    if features.shape != (len(delta), len(names)):
        raise ValueError(
            f"features {features.shape}: expected ({len(delta)}, {len(names)}) as delta and names"
        )
    if len(delta) < 20:
        raise ValueError(f"{len(delta)} rows: a tree with a held-out half needs at least 20")
    order = np.random.default_rng(seed).permutation(len(delta))[:MOST_ROWS]
    half = len(order) // 2
    leaf = max(5, half // 200)  # a leaf of a few rows is an anecdote, not an explanation
    tree = DecisionTreeRegressor(max_depth=depth, min_samples_leaf=leaf, random_state=seed)
    tree.fit(features[order[:half]], delta[order[:half]])
    r2 = float(tree.score(features[order[half:]], delta[order[half:]]))
    return Explanation(name, tree, tuple(names), r2)

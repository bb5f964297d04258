"""Multisize dataset condensation: one ordered set of learned images, every prefix of which trains well.

    config = CondenseConfig(images_per_class=10, method="mdc", image_size=32)
    made = condense("/data/images", "/data/scratch", classes, config, ClusterConfig())
    made.images                                     # (n, C, 3, H, W), rank by rank

He, Xiao, Zhou and Tsang, "Multisize Dataset Condensation", ICLR 2024, on IDC (Kim et al., "Dataset Condensation
via Efficient Synthetic-Data Parameterization", ICML 2022). `selection.ranked` writes such sets and reads them.
"""

from selection.condense.config import CONDENSERS, CondenseConfig
from selection.condense.run import Chunk, Condensed, condense

__all__ = ["CONDENSERS", "Chunk", "CondenseConfig", "Condensed", "condense"]

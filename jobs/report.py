"""A finished run as one HTML file: funnel, scores with their cuts, pictures, duplicates, leakage, time, config.

python -m jobs.report out=/data/winnow run=default
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING, DictConfig

from jobs.launch import build, launch, register
from pipeline import storage
from pipeline.manifest import Run
from pipeline.report import write_report


@dataclass(kw_only=True)
class ReportConfig:
    """out, run: the finished run; the report is written into its folder, as report.html."""

    out: str = MISSING
    run: str = "default"


def run(node: DictConfig) -> None:
    config = build(node, "", ReportConfig)
    print(write_report(Run(storage.absolute(config.out, "out"), config.run)))


register("report", ReportConfig)

if __name__ == "__main__":
    launch("report", run)

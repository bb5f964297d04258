"""A finished run as one HTML file that opens anywhere: what was kept, what went, why, and what the cut decides.

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
    """out, run: the finished run; the report is written into its folder, as report.html.

    condensed: a folder that jobs.condense wrote, to show its images too.
    """

    out: str = MISSING
    run: str = "default"
    condensed: str | None = None


def run(node: DictConfig) -> None:
    config = build(node, "", ReportConfig)
    condensed = storage.absolute(config.condensed, "condensed") if config.condensed else None
    print(write_report(Run(storage.absolute(config.out, "out"), config.run), condensed))


register("report", ReportConfig)

if __name__ == "__main__":
    launch("report", run)

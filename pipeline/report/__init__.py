"""A finished run as one HTML file that opens anywhere: what it kept, what it dropped, and why."""

from pipeline.report.build import write_report

__all__ = ["write_report"]

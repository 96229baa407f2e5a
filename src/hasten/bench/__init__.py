"""The benchmark: prompt suites, an interleaved runner, peers, and figures with their conditions."""

from hasten.bench.config import BenchConfig, Progress
from hasten.bench.output import OVERALL, Report, Row

__all__ = ["OVERALL", "BenchConfig", "Progress", "Report", "Row"]

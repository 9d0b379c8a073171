"""Benchmark of attention with a position bias: speed, memory and accuracy of vispe and alternatives.

`cases` defines the shapes and modes, `contenders` the implementations, `correctness` and `timing` the measurements;
`benchmark` stores the results in a file and resumes interrupted runs, `targets` compares results with targets, and
`report` prints them.
"""

from vispe.experimental.speed.benchmark import Bench
from vispe.experimental.speed.cases import MODES, BenchmarkPlan, Case, plan_for
from vispe.experimental.speed.report import table, winners
from vispe.experimental.speed.targets import judge

__all__ = ["MODES", "Bench", "BenchmarkPlan", "Case", "judge", "plan_for", "table", "winners"]

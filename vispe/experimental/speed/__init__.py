"""Benchmark of attention with a position bias: speed, memory and accuracy of vispe and alternatives.

`cases` defines the shapes and modes, `contenders` the implementations, `checks` and `measure` the measurements; `run`
stores the results in a file and resumes interrupted runs, `targets` compares results with targets, and
`report` prints them.
"""

from vispe.experimental.speed.benchmark import Bench
from vispe.experimental.speed.cases import MODES, Case, Plan, plan_for
from vispe.experimental.speed.report import table, winners
from vispe.experimental.speed.targets import judge

__all__ = ["MODES", "Bench", "Case", "Plan", "judge", "plan_for", "table", "winners"]

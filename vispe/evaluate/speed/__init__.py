"""How fast, how large and how exact attention with a position bias is: ours and its rivals, in one run.

`cases` says what is measured, `contenders` who takes part, `checks` and `measure` do it, `run` keeps the results in a
file and goes on where it was stopped, `targets` judges them and `report` prints them.
"""

from vispe.evaluate.speed.benchmark import Bench
from vispe.evaluate.speed.cases import MODES, Case, Plan, plan_for
from vispe.evaluate.speed.report import table, winners
from vispe.evaluate.speed.targets import judge

__all__ = ["MODES", "Bench", "Case", "Plan", "judge", "plan_for", "table", "winners"]

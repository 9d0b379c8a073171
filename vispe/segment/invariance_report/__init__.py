"""Invariance of the segmentation of one image to the pose of the sample: the report of option `trust`.

`measure_invariance` needs only a function that segments a page, so it works with every kind of model.
"""

from vispe.segment.invariance_report.pose_comparison import RUNS, SHIFTS, measure_invariance
from vispe.segment.invariance_report.pose_result import FAMILIES, PoseResult
from vispe.segment.invariance_report.result import InvarianceReport

__all__ = ["FAMILIES", "RUNS", "SHIFTS", "InvarianceReport", "PoseResult", "measure_invariance"]

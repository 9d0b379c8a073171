"""Invariance of the segmentation of one image to the pose of the sample: the report of option `trust`.

`trust_page` needs only a function that segments a page, so it works with every kind of model.
"""

from vispe.segment.invariance_report.pose_comparison import RUNS, SHIFTS, trust_page
from vispe.segment.invariance_report.result import FAMILIES, Posed, Trust

__all__ = ["FAMILIES", "RUNS", "SHIFTS", "Posed", "Trust", "trust_page"]

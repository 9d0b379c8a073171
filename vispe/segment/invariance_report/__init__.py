"""Whether the segmentation of one picture depends on how the sample lies: the report that `--trust` adds.

`trust_page` needs nothing but a function that segments a page, so it serves every kind of model.
"""

from vispe.segment.invariance_report.pose_comparison import RUNS, SHIFTS, trust_page
from vispe.segment.invariance_report.result import FAMILIES, Posed, Trust

__all__ = ["FAMILIES", "RUNS", "SHIFTS", "Posed", "Trust", "trust_page"]

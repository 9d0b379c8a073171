"""Whether the segmentation of one picture depends on how the sample lies: the report that `--trust` adds.

`trust_page` needs nothing but a function that segments a page, so it serves every kind of model.
"""

from vispe.segment.trust.measure import RUNS, SHIFTS, trust_page
from vispe.segment.trust.result import FAMILIES, Posed, Trust

__all__ = ["FAMILIES", "RUNS", "SHIFTS", "Posed", "Trust", "trust_page"]

"""Merging of records from several processes, each with a consecutive part of the images.

Under `torchrun`, every process measures its part, and all of them get the merged records. The result is bit-identical
to that of one process with the same number of threads: the batches do not depend on the number of processes, and random
numbers depend on the index of the image.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vispe.evaluate.rotation.records import Measurement, merge

Piece = tuple[int, "tuple[Measurement, ...] | None"]
"""Number of images and their records; None if these images have no such records."""


def filled(pieces: Sequence[Piece]) -> tuple[Measurement, ...]:
    """Merge the records of consecutive pieces; images without records get NaN; () if there are no records."""
    known = next((rows for _, rows in pieces if rows is not None), None)
    if known is None:
        return ()
    return merge([_nan_records(known, n) if rows is None else rows for n, rows in pieces])


def _nan_records(rows: Sequence[Measurement], n: int) -> tuple[Measurement, ...]:
    nan = np.full(n, np.nan)
    return tuple(replace(row, values=nan, floors=dict.fromkeys(row.floors, nan)) for row in rows)

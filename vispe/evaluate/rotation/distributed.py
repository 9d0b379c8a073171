"""The rows of several processes, each with a consecutive share of the images, as one result.

Started by `torchrun`, every process measures its share, and all of them get the joined rows. Equal to one process bit
for bit at the same number of threads: images are measured in pieces that do not depend on the shares, and every random
draw belongs to the number of its image.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vispe.evaluate.rotation.records import Measurement, merge

Piece = tuple[int, "tuple[Measurement, ...] | None"]
"""A number of images and their rows; None where these images have no such rows."""


def filled(pieces: Sequence[Piece]) -> tuple[Measurement, ...]:
    """Join the rows of consecutive pieces; images without rows get NaN, and where none has any there are no rows."""
    known = next((rows for _, rows in pieces if rows is not None), None)
    if known is None:
        return ()
    return merge([_nothing(known, n) if rows is None else rows for n, rows in pieces])


def _nothing(rows: Sequence[Measurement], n: int) -> tuple[Measurement, ...]:
    nan = np.full(n, np.nan)
    return tuple(replace(row, values=nan, floors=dict.fromkeys(row.floors, nan)) for row in rows)

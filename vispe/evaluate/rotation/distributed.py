"""Merging of records from several processes, each with a consecutive part of the images.

Under `torchrun`, every process measures its part, and all of them get the merged records. The result is bit-identical
to that of one process with the same number of threads: the batches do not depend on the number of processes, and random
numbers depend on the index of the image.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vispe.errors import ShapeError
from vispe.evaluate.rotation.records import Measurement

Piece = tuple[int, "tuple[Measurement, ...] | None"]
"""Number of images and their records; None if these images have no such records."""


def filled(pieces: Sequence[Piece]) -> tuple[Measurement, ...]:
    """Merge the records of consecutive pieces; images without records get NaN; () if there are no records."""
    known = next((rows for _, rows in pieces if rows is not None), None)
    if known is None:
        return ()
    return merge([_nan_records(known, n) if rows is None else rows for n, rows in pieces])


def merge(parts: Sequence[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """Merge records that were measured on consecutive parts of the images, such as by several processes.

    Raises:
        ShapeError: the parts do not have the same records in the same order.

    Example:
        >>> parts = [[Measurement("D4", "error", np.array([v]))] for v in (0.1, 0.2)]
        >>> merge(parts)[0].values.tolist()
        [0.1, 0.2]
    """
    keys = [[(r.transform, r.metric, r.part, r.control, tuple(r.floors)) for r in rows] for rows in parts]
    if not keys or any(key != keys[0] for key in keys):
        raise ShapeError(
            f"merge: parts must have the same records, got {[len(k) for k in keys]} records. Use equal metrics."
        )
    return tuple(
        replace(
            records[0],
            values=np.concatenate([r.values for r in records]),
            floors={name: np.concatenate([r.floors[name] for r in records]) for name in records[0].floors},
        )
        for records in zip(*parts, strict=True)
    )


def _nan_records(rows: Sequence[Measurement], n: int) -> tuple[Measurement, ...]:
    nan = np.full(n, np.nan)
    return tuple(replace(row, values=nan, floors=dict.fromkeys(row.floors, nan)) for row in rows)

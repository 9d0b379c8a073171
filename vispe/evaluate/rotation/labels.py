"""Label maps under motion, and the numbers that compare two of them.

Labels are whole numbers: 1..K are classes, 0 is no data and does not count.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vispe.backbones.batches import checked_labels
from vispe.errors import InputError


def truths_of(truths: Sequence[object], number: int, image: Tensor) -> np.ndarray:
    """Return the truth of an image as int64 (H, W), or say that it is missing or does not fit."""
    if number >= len(truths):
        raise InputError(
            f"Image {number} has no truth: there are {len(truths)}; give one for each image, in order."
        )
    return checked_labels(truths[number], tuple(image.shape[-2:]), f"The truth of image {number} has")

"""Comparison of outputs for original and for transformed images, and the poses that are compared."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.backbones.batching import batches
from vispe.errors import OptionError, counted
from vispe.images.symmetry.d4 import D4, IDENTITY, Element

Pair = tuple[Hashable, Iterable[Any], Iterable[Any]]
"""Name of a transform, outputs for the original images of a batch, and outputs for the transformed ones, undone."""


def compared(
    images: Iterable[Tensor],
    pairs: Callable[[Tensor], Iterable[Pair]],
    scores: Mapping[str, Callable[[Any, Any], float]],
    batch_size: int = 1,
) -> dict[tuple[Any, str], np.ndarray]:
    """Compare outputs for transformed images with those for the original ones, one batch at a time.

    Args:
        images: (c, H, W) each.
        pairs: called with a batch (b, c, H, W); yields the pairs to compare, the same transforms for every batch.
        scores: functions of two maps, by name.
        batch_size: max number of images of equal size per batch.

    Returns:
        (n,) values, one per image, by transform and score.

    >>> from vispe.evaluate.rotation.feature_similarity import error
    >>> shifted = lambda batch: [("roll", batch, batch.roll(1, -1))]
    >>> compared(torch.eye(2)[None, None], shifted, {"error": error})
    {('roll', 'error'): array([2.])}
    """
    values: dict[tuple[Any, str], list[float]] = {}
    for batch in batches(images, batch_size):
        for move, still, back in pairs(batch):
            for one, other in zip(still, back, strict=True):
                for name, score in scores.items():
                    values.setdefault((move, name), []).append(score(one, other))
    return {key: np.array(numbers) for key, numbers in values.items()}


def poses_of(elements: Sequence[Element], what: str) -> list[Element]:
    """Return the unique poses except the identity.

    Raises:
        OptionError: there is no such pose.

    >>> [g.name for g in poses_of(D4[:3], "Equivariance")]
    ['rot90', 'rot180']
    """
    poses = [g for g in dict.fromkeys(elements) if g != IDENTITY]
    if not poses:
        raise OptionError(
            f"{what} needs a pose besides the identity, got {[g.name for g in elements]}. Use elements=D4."
        )
    return poses


def label_of(elements: Sequence[Element]) -> str:
    """Return the name of the mean over poses: 'D4' for all of them."""
    poses = set(elements) - {IDENTITY}
    return "D4" if poses == set(D4) - {IDENTITY} else f"mean of {counted(len(poses), 'pose')}"


def shuffled(maps: Tensor, rng: np.random.Generator) -> Tensor:
    """Return a map (d, h, w) with shuffled tokens."""
    order = torch.from_numpy(rng.permutation(maps[0].numel())).to(maps.device)
    return maps.flatten(1)[:, order].reshape(maps.shape)

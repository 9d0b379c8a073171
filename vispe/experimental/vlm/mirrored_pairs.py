"""Pretext task of mirrored pairs: match an image and its mirror image with a statement and its reversal.

After an experiment on LXMERT ("present but unavailable"): models with positional information may still not distinguish
images that differ in positions only. Its authors report that the training solves the pretext task but hardly changes
downstream tasks. Use it to test whether a model *can* learn left and right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.errors import ShapeError
from vispe.evaluate.behaviour.left_right import WORDS, draw_sides
from vispe.utils.options import PositiveInt, checked


class MirroredPairs(NamedTuple):
    """Batch of pairs of images and pairs of statements.

    Attributes:
        images: images (b, 2, 3, side, side) in [0, 1], the second of each pair mirrored.
        statements: for each pair, the statement about the first image and the statement about the second.
    """

    images: Tensor
    statements: tuple[tuple[str, str], ...]


@checked
def mirrored_pairs(batch: PositiveInt, *, step: int = 0, seed: int = 0, side: int = 224) -> MirroredPairs:
    """Return the batch of a training step, determined by (seed, step).

    Args:
        batch: number of pairs.
        step: index of the step.
        seed: seed of the training.
        side: side of the images in pixels.

    Raises:
        OptionError: `batch` is below 1.

    >>> pairs = mirrored_pairs(2, side=32)
    >>> pairs.images.shape, pairs.statements[0]
    (torch.Size([2, 2, 3, 32, 32]), ('the blue disc is right of the red disc', 'the blue disc is left of the red disc'))
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    images, statements = [], []
    for number in range(step * batch, (step + 1) * batch):
        pair = draw_sides(number, generator, side)
        words = WORDS[pair.axis] if pair.truth else WORDS[pair.axis][::-1]
        images.append(pair.pictures)
        statements.append(tuple(f"the {pair.a} is {word} the {pair.b}" for word in words))
    return MirroredPairs(torch.stack(images), tuple(statements))


def iterate_pairs(batch: int, *, seed: int = 0, side: int = 224) -> Iterator[MirroredPairs]:
    """Yield the batches of all steps, indefinitely."""
    step = 0
    while True:
        yield mirrored_pairs(batch, step=step, seed=seed, side=side)
        step += 1


def pair_contrastive_loss(scores: Tensor) -> Tensor:
    """Return the symmetric contrastive loss of each pair, (b,).

    Args:
        scores: similarity of image i and statement j, (b, 2, 2); pairs with i = j match.

    Raises:
        ShapeError: another shape.

    >>> pair_contrastive_loss(torch.zeros(1, 2, 2))
    tensor([0.6931])
    """
    if scores.ndim != 3 or tuple(scores.shape[1:]) != (2, 2):
        raise ShapeError(
            f"pair_contrastive_loss: scores must have the shape (b, 2, 2), got {tuple(scores.shape)}."
        )
    # cross entropy over images and over statements
    losses = [-F.log_softmax(scores, dim).diagonal(dim1=1, dim2=2).mean(1) for dim in (1, 2)]
    return (losses[0] + losses[1]) / 2


def matching_accuracy(scores: Tensor) -> float:
    """Return the fraction of pairs (b, 2, 2) whose correct matching has a higher score than the swapped one."""
    matched, swapped = scores.diagonal(dim1=1, dim2=2).sum(1), scores.flip(2).diagonal(dim1=1, dim2=2).sum(1)
    return float((matched > swapped).double().mean())

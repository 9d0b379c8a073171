"""A pretext task of sides: match a picture and its mirror image with a statement and the statement turned round.

After what was tried on LXMERT ("present but unavailable"): a model that holds positions still does not tell apart
images that differ in nothing else. Its authors found that this training makes the pretext itself easy and changes
downstream tasks by next to nothing; the same must be expected here. It is a check that a model *can* learn sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.errors import OptionError, ShapeError
from vispe.evaluate.behaviour.left_right import WORDS, draw_sides


class Quads(NamedTuple):
    """A batch of pairs of pictures and pairs of statements.

    Attributes:
        pictures: (b, 2, 3, side, side) in [0, 1], the second of each pair mirrored.
        statements: for each pair the one that is true of the first picture, and the one that is true of the second.
    """

    pictures: Tensor
    statements: tuple[tuple[str, str], ...]


def quads(batch: int, *, step: int = 0, seed: int = 0, side: int = 224) -> Quads:
    """Return the batch of a training step, drawn from (seed, step).

    Args:
        batch: pairs.
        step: number of the step.
        seed: of the training.
        side: of the pictures in pixels.

    Raises:
        OptionError: no pairs are asked.

    >>> pairs = quads(2, side=32)
    >>> pairs.pictures.shape, pairs.statements[0]
    (torch.Size([2, 2, 3, 32, 32]), ('the blue disc is right of the red disc', 'the blue disc is left of the red disc'))
    """
    if batch < 1:
        raise OptionError(f"A batch of pairs needs one or more, got batch={batch}.")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    pictures, statements = [], []
    for number in range(step * batch, (step + 1) * batch):
        pair = draw_sides(number, generator, side)
        words = WORDS[pair.axis] if pair.truth else WORDS[pair.axis][::-1]
        pictures.append(pair.pictures)
        statements.append(tuple(f"the {pair.a} is {word} the {pair.b}" for word in words))
    return Quads(torch.stack(pictures), tuple(statements))


def endless(batch: int, *, seed: int = 0, side: int = 224) -> Iterator[Quads]:
    """Yield the batches of all steps, from the first on."""
    step = 0
    while True:
        yield quads(batch, step=step, seed=seed, side=side)
        step += 1


def two_by_two(scores: Tensor) -> Tensor:
    """Return the contrastive loss of each pair (b,): every picture finds its statement, every statement its picture.

    Args:
        scores: (b, 2, 2), how well picture i fits statement j; those of equal number belong together.

    Raises:
        ShapeError: another shape.

    >>> two_by_two(torch.zeros(1, 2, 2))
    tensor([0.6931])
    """
    if scores.ndim != 3 or tuple(scores.shape[1:]) != (2, 2):
        raise ShapeError(f"The loss of pairs needs scores (b, 2, 2), got {tuple(scores.shape)}.")
    # minus log of the right share, along pictures and along statements
    lost = [-F.log_softmax(scores, dim).diagonal(dim1=1, dim2=2).mean(1) for dim in (1, 2)]
    return (lost[0] + lost[1]) / 2


def matched(scores: Tensor) -> float:
    """Return the share of pairs (b, 2, 2) in which the right matching scores more than the exchanged one."""
    right, wrong = scores.diagonal(dim1=1, dim2=2).sum(1), scores.flip(2).diagonal(dim1=1, dim2=2).sum(1)
    return float((right > wrong).double().mean())

"""Relative positions: questions about left and right, above and below, on images and their mirror images.

Follows MIRP ("Your other Left! Vision-Language Models Fail to Identify Relative Positions in Medical Images") and VSR
("Visual Spatial Reasoning"), with our own images: a red and a blue shape on white or on a texture. The correct answer
flips with the image; a model that always answers "left" is correct half of the time and never flips.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator, Measure, Outcome
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.utils.interval import Interval
from vispe.utils.options import checked

SIDE = 224
WORDS = (("left of", "right of"), ("above", "below"))
TEMPLATES = (
    "Where is the {a}? It is {first} or {second} the {b}.",
    "Is the {a} {second} or {first} the {b}?",
    "Look at the picture. Seen from the {b}, the {a} is {first} or {second} it?",
    "The {a} is ... the {b}: {second} or {first}?",
)


class MirroredPair(NamedTuple):
    """An image, its mirror image, and the question about both.

    Attributes:
        pictures: (2, 3, side, side) in [0, 1], the second one mirrored.
        red_first: whether the red shape is left of, or above, the blue one in the first image.
        axis: 0 for left and right, 1 for above and below.
        a: subject of the question, such as "red disc".
        b: its reference.
        truth: whether the first of `WORDS[axis]` is correct for `a` in the first image.
    """

    pictures: Tensor
    red_first: bool
    axis: int
    a: str
    b: str
    truth: bool


@checked
def draw_sides(
    number: int, generator: torch.Generator, side: Annotated[int, Interval(least=32)] = SIDE
) -> MirroredPair:
    """Render a pair: left-right for even indices, above-below for odd; white and textures alternate every two pairs.

    Args:
        number: index of the pair, from 0.
        generator: random generator of positions, shapes and the question.
        side: side of the images in pixels.

    Raises:
        OptionError: images are smaller than 32 pixels.

    >>> pair = draw_sides(0, torch.Generator().manual_seed(0), side=64)
    >>> pair.pictures.shape, pair.axis
    (torch.Size([2, 3, 64, 64]), 0)
    """
    axis = number % 2
    red_first, red_subject, red_disc, blue_disc = (torch.rand(4, generator=generator) < 0.5).tolist()
    image = torch.ones(3, side, side)
    if number // 2 % 2:
        coarse = torch.rand(1, 3, side // 8, side // 8, generator=generator)
        image = 0.4 + 0.4 * F.interpolate(coarse, (side, side), mode="bilinear")[0]

    # along the axis the shapes lie in different halves; across it their positions are independent
    low, high, across, other = (torch.rand(4, generator=generator) * 0.2).tolist()
    along = (0.18 + low, 0.62 + high) if red_first else (0.62 + low, 0.18 + high)
    line = (torch.arange(side) + 0.5) / side
    for channel, disc, along_, across_ in ((0, red_disc, along[0], across), (2, blue_disc, along[1], other)):
        x, y = (along_, 0.4 + across_) if axis == 0 else (0.4 + across_, along_)
        dx, dy = (line[None] - x).abs(), (line[:, None] - y).abs()
        inside = dx**2 + dy**2 < 0.1**2 if disc else torch.maximum(dx, dy) < 0.09
        colour = torch.eye(3)[channel] * 0.9
        image = torch.where(inside, colour[:, None, None], image)

    names = [f"red {_shape(red_disc)}", f"blue {_shape(blue_disc)}"]
    a, b = names if red_subject else names[::-1]
    pair = torch.stack([image, image.flip(2 - axis)])
    return MirroredPair(pair, red_first, axis, a, b, red_first == red_subject)


def flips(margins: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accuracy and the flip consistency of answers to images and their mirror images.

    Args:
        margins: (..., 2), score of the first answer minus that of the second; 0 is undecided.
        truth: (...) bool, whether the first answer is correct for the image; it is wrong for the mirror image.

    Returns:
        The fraction of correct answers, (...) in {0, 0.5, 1} with half a point if undecided, and whether answers flip.

    >>> flips(torch.tensor([[1.0, -1.0], [1.0, 2.0]]), torch.tensor([True, True]))
    (tensor([1.0000, 0.5000], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64))
    """
    answers = margins.double().sign()
    sign = truth.double().mul(2).sub(1)[..., None] * torch.tensor([1.0, -1.0], dtype=torch.float64)
    return ((answers * sign + 1) / 2).mean(-1), (answers[..., 0] * answers[..., 1] < 0).double()


def head_margins(features: Tensor, truth: Tensor) -> Tensor:
    """Return margins of a linear head on features, by two-fold cross-validation over pairs.

    Args:
        features: (pairs, 2, d) of images and mirror images.
        truth: (pairs,) bool.
    """
    features, sign = features.double(), truth.double().mul(2).sub(1)
    margins = torch.zeros(features.shape[:2], dtype=torch.float64)
    half = torch.arange(len(features)) % 2 == 0
    for train in (half, ~half):
        # ridge regression on the signed difference of a pair, which removes everything common to both images
        change = sign[train, None] * (features[train, 0] - features[train, 1])
        gram = change @ change.T
        ridge = 0.01 * gram.diagonal().mean().clamp_min(1e-12)
        weight = change.T @ torch.linalg.solve(
            gram + ridge * torch.eye(len(gram)), torch.ones(len(gram)).double()
        )
        margins[~train] = (features[~train] - features[train].mean((0, 1))) @ weight
    return margins


class LeftRight(Measure):
    """Fraction of mirrored pairs with both answers correct; 0.25 at chance.

    Follows MIRP ("Your other Left! Vision-Language Models Fail to Identify Relative Positions in Medical Images"), VSR
    ("Visual Spatial Reasoning"), and for the linear head the spatial probing of "Probing the Role of Positional
    Information in Vision-Language Models".
    """

    name = "sides"
    family = "behaviour"
    order = 4
    limit = 0.1
    question = "Does the model distinguish left from right and above from below?"
    number = "fraction of mirrored pairs with both answers correct"
    misleads = (
        "Two coloured shapes are not a scene: a model may succeed here and rely on priors in photographs."
    )
    papers = (
        "Your other Left! Vision-Language Models Fail to Identify Relative Positions in Medical Images",
        "Visual Spatial Reasoning, https://arxiv.org/abs/2205.00363",
        "Probing the Role of Positional Information in Vision-Language Models",
    )
    needs = frozenset({"pooled"})
    items = 32

    def rerun(self, acc: Accumulator, runs: PerturbedRuns) -> None:
        """Ask about a pair of images, or store their descriptors for a linear head."""
        audited = runs.audited
        pair = draw_sides(runs.number, runs.generator())
        acc.note(axis=pair.axis, truth=pair.truth, red_first=pair.red_first)
        if audited.answers is None:
            images = draw_sides(runs.number, runs.generator(), audited.side).pictures
            images = audited.normalised(images)
            both = torch.stack([runs.pooled(f"sides {k}", image) for k, image in enumerate(images)])
            rows = torch.zeros(self.items, *both.shape)
            rows[runs.number] = both
            acc.add("pooled", rows)
            return

        # the third image is uniformly grey, so that its answers measure the language prior
        images = [*pair.pictures, torch.full_like(pair.pictures[0], 0.5)]
        words = WORDS[pair.axis]
        for template in TEMPLATES:
            question = template.format(a=pair.a, b=pair.b, first=words[0], second=words[1])
            scores = torch.stack(
                [audited.answers([image], question, words).double().cpu() for image in images]
            )
            acc.layer(margins=scores[:, 0] - scores[:, 1])

    def summarize(self, acc: Accumulator, audited: AuditedModel) -> Outcome:
        """Return the fraction over pairs; the details have accuracy, flips, language prior and spread over wordings."""
        if audited.answers is None:
            axis, truth = acc.column("axis"), torch.tensor(acc.column("red_first") > 0)
            numbers = torch.arange(len(axis))
            margins = torch.zeros(len(axis), 2, dtype=torch.float64)
            for k in (0, 1):
                chosen = numbers[torch.tensor(axis == k)]
                margins[chosen] = head_margins(acc.sums["pooled"][chosen], truth[chosen])
            accuracy, flipped = flips(margins, truth)
            both = (accuracy == 1).double()
            details = {"accuracy": accuracy.mean().item(), "flips": flipped.mean().item()}
            note = "A linear head was trained on half of the pairs and evaluated on the other half: an upper bound."
        else:
            margins = torch.tensor(acc.column("margins"))  # (pairs, templates, 3)
            truth = torch.tensor(acc.column("truth") > 0)[:, None].expand(margins.shape[:2])
            by_template, flipped_by = flips(margins[..., :2], truth)
            grey = ((margins[..., 2].sign() * truth.double().mul(2).sub(1)) + 1) / 2
            both = (by_template == 1).double().mean(1)
            details = {
                "accuracy": by_template.mean().item(),
                "flips": flipped_by.mean().item(),
                "language_prior": grey.mean().item(),
                "accuracy_by_wording": by_template.mean(0).tolist(),
                "flips_by_wording": flipped_by.mean(0).tolist(),
                "wording_spread": float(np.std(by_template.mean(0).numpy())),
            }
            note = "The model answered text questions."
        note += f" Accuracy {details['accuracy']:.0%} (chance 50%)."
        return Outcome(
            both.mean().item(), both.tolist(), control={"chance": 0.25}, note=note, details=details
        )


def _shape(disc: bool) -> str:
    return "disc" if disc else "square"

"""Does a model know left from right, above from below? Questions about pictures and their mirror images.

After MIRP (relative positions in medical slices) and VSR (visual spatial reasoning), with pictures of our own: a red
and a blue shape on white or on a texture. The right answer flips with the picture; a model that always says "left" is
right half of the time and never flips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.errors import OptionError
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Kept, Measure, Outcome
from vispe.evaluate.behaviour.perturbed_runs import Reruns

SIDE = 224
WORDS = (("left of", "right of"), ("above", "below"))
TEMPLATES = (
    "Where is the {a}? It is {first} or {second} the {b}.",
    "Is the {a} {second} or {first} the {b}?",
    "Look at the picture. Seen from the {b}, the {a} is {first} or {second} it?",
    "The {a} is ... the {b}: {second} or {first}?",
)


class Sides(NamedTuple):
    """A picture, its mirror image, and what is asked about both.

    Attributes:
        pictures: (2, 3, side, side) in [0, 1], the second one mirrored.
        red_first: whether the red shape is left of, or above, the blue one in the first picture.
        axis: 0 for left and right, 1 for above and below.
        a: what is asked about, "red disc".
        b: what it is compared with.
        truth: whether the first of `WORDS[axis]` is right for `a` in the first picture.
    """

    pictures: Tensor
    red_first: bool
    axis: int
    a: str
    b: str
    truth: bool


def draw_sides(number: int, generator: torch.Generator, side: int = SIDE) -> Sides:
    """Draw a pair: left and right for even numbers, above and below for odd; white, then textures, by turns of two.

    Args:
        number: of the pair, from 0.
        generator: for places, shapes and the question.
        side: of the pictures in pixels.

    Raises:
        OptionError: pictures are smaller than 32 pixels.

    >>> pair = draw_sides(0, torch.Generator().manual_seed(0), side=64)
    >>> pair.pictures.shape, pair.axis
    (torch.Size([2, 3, 64, 64]), 0)
    """
    if side < 32:
        raise OptionError(f"Pictures of sides need 32 pixels or more, got side={side}; choose a larger one.")
    axis = number % 2
    red_first, red_asked, red_disc, blue_disc = (torch.rand(4, generator=generator) < 0.5).tolist()
    picture = torch.ones(3, side, side)
    if number // 2 % 2:
        coarse = torch.rand(1, 3, side // 8, side // 8, generator=generator)
        picture = 0.4 + 0.4 * F.interpolate(coarse, (side, side), mode="bilinear")[0]

    # along the axis the shapes stand in two halves; across it both stand anywhere: nothing else tells them apart
    low, high, across, other = (torch.rand(4, generator=generator) * 0.2).tolist()
    along = (0.18 + low, 0.62 + high) if red_first else (0.62 + low, 0.18 + high)
    line = (torch.arange(side) + 0.5) / side
    for channel, disc, place, free in ((0, red_disc, along[0], across), (2, blue_disc, along[1], other)):
        x, y = (place, 0.4 + free) if axis == 0 else (0.4 + free, place)
        dx, dy = (line[None] - x).abs(), (line[:, None] - y).abs()
        inside = dx**2 + dy**2 < 0.1**2 if disc else torch.maximum(dx, dy) < 0.09
        colour = torch.eye(3)[channel] * 0.9
        picture = torch.where(inside, colour[:, None, None], picture)

    names = [f"red {_shape(red_disc)}", f"blue {_shape(blue_disc)}"]
    a, b = names if red_asked else names[::-1]
    pair = torch.stack([picture, picture.flip(2 - axis)])
    return Sides(pair, red_first, axis, a, b, red_first == red_asked)


def flips(margins: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return (right, flipped) of answers to pictures and mirror images.

    Args:
        margins: (..., 2), how much more the first answer is believed than the second; 0 is no answer.
        truth: (...) bool, whether the first answer is right for the picture; it is wrong for its mirror image.

    Returns:
        The share of right answers, (...) in {0, 0.5, 1} with half a point for no answer, and whether answers flip.

    >>> flips(torch.tensor([[1.0, -1.0], [1.0, 2.0]]), torch.tensor([True, True]))
    (tensor([1.0000, 0.5000], dtype=torch.float64), tensor([1., 0.], dtype=torch.float64))
    """
    said = margins.double().sign()
    sign = truth.double().mul(2).sub(1)[..., None] * torch.tensor([1.0, -1.0], dtype=torch.float64)
    return ((said * sign + 1) / 2).mean(-1), (said[..., 0] * said[..., 1] < 0).double()


def head_margins(features: Tensor, truth: Tensor) -> Tensor:
    """Return margins of a linear head on features; each half of the pairs is scored by the head of the other half.

    Args:
        features: (pairs, 2, d) of pictures and mirror images.
        truth: (pairs,) bool.
    """
    features, sign = features.double(), truth.double().mul(2).sub(1)
    margins = torch.zeros(features.shape[:2], dtype=torch.float64)
    half = torch.arange(len(features)) % 2 == 0
    for own in (half, ~half):
        # ridge on the signed difference of a pair: what both pictures share cannot help
        change = sign[own, None] * (features[own, 0] - features[own, 1])
        gram = change @ change.T
        ridge = 0.01 * gram.diagonal().mean().clamp_min(1e-12)
        weight = change.T @ torch.linalg.solve(
            gram + ridge * torch.eye(len(gram)), torch.ones(len(gram)).double()
        )
        margins[~own] = (features[~own] - features[own].mean((0, 1))) @ weight
    return margins


@dataclass(frozen=True)
class SidesMeasure(Measure):
    """How often both a picture and its mirror image are answered rightly; a quarter of the pairs at chance."""

    name = "sides"
    family = "behaviour"
    asks = "Does it know left from right and above from below?"
    number = "pairs of mirrored pictures that are both answered rightly"
    misleads = "Shapes of two colours are no scene: an answerer may know sides here and follow habits in photographs."
    needs = frozenset({"pooled"})
    items = 32

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Ask about a pair of pictures, in words or of a linear head."""
        host = reruns.host
        pair = draw_sides(reruns.number, reruns.generator())
        kept.note(axis=pair.axis, truth=pair.truth, red_first=pair.red_first)
        if host.answers is None:
            pictures = draw_sides(reruns.number, reruns.generator(), host.side).pictures
            pictures = host.normalised(pictures)
            both = torch.stack([reruns.pooled(f"sides {k}", picture) for k, picture in enumerate(pictures)])
            rows = torch.zeros(self.items, *both.shape)
            rows[reruns.number] = both
            kept.add("pooled", rows)
            return

        # the third picture is grey: what is answered then is what words alone suggest
        pictures = [*pair.pictures, torch.full_like(pair.pictures[0], 0.5)]
        words = WORDS[pair.axis]
        for template in TEMPLATES:
            question = template.format(a=pair.a, b=pair.b, first=words[0], second=words[1])
            scores = torch.stack(
                [host.answers([picture], question, words).double().cpu() for picture in pictures]
            )
            kept.layer(margins=scores[:, 0] - scores[:, 1])

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the share of flips over pairs, with accuracy, language prior and spread over wordings."""
        if host.answers is None:
            axis, truth = kept.column("axis"), torch.tensor(kept.column("red_first") > 0)
            numbers = torch.arange(len(axis))
            margins = torch.zeros(len(axis), 2, dtype=torch.float64)
            for k in (0, 1):
                own = numbers[torch.tensor(axis == k)]
                margins[own] = head_margins(kept.sums["pooled"][own], truth[own])
            right, flipped = flips(margins, truth)
            both = (right == 1).double()
            details = {"accuracy": right.mean().item(), "flips": flipped.mean().item()}
            note = "A linear head was trained on half of the pairs and scored on the others: an upper bound."
        else:
            margins = torch.tensor(kept.column("margins"))  # (pairs, templates, 3)
            truth = torch.tensor(kept.column("truth") > 0)[:, None].expand(margins.shape[:2])
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
            note = "It answered questions in words."
        note += f" Accuracy {details['accuracy']:.0%} (chance 50%)."
        return Outcome(
            both.mean().item(), both.tolist(), control={"chance": 0.25}, note=note, details=details
        )


def _shape(disc: bool) -> str:
    return "disc" if disc else "square"

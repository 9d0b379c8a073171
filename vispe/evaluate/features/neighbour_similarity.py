"""Are features of near patches more alike than those of far ones, where the picture gives no reason?

A causal mask or an encoding makes neighbours alike in models that were never trained; so does any picture that is
smooth. The headline is that of pictures whose patches stand in random order: what is left is not the picture's.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor

from vispe.errors import ShapeError, UnsupportedHost
from vispe.evaluate.attention.head_statistics import by_distance, by_offset, pairs
from vispe.evaluate.audit.audited_model import Host, Need
from vispe.evaluate.audit.measure import Family, Kept, Measure, Outcome, View
from vispe.evaluate.behaviour.perturbed_runs import Reruns
from vispe.evaluate.behaviour.rolls import refuse, shuffled, step_or_note
from vispe.grid import Grid


def profile(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the mean cosine of centred features at each distance, from 0 on, (distances,).

    Args:
        x: (n, d), one row a token.
        shape: (n,) for a sequence, or (h, w), whose distances are rounded.

    Raises:
        ShapeError: other tokens than the shape has.
    """
    if x.ndim != 2 or len(x) != np.prod(shape):
        raise ShapeError(f"A profile over {shape} tokens needs features of as many, got {tuple(x.shape)}.")
    x = x - x.mean(0)
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    grid = Grid((1, *shape) if len(shape) == 1 else tuple(shape))
    table = by_offset((x @ x.T)[None], grid)
    return (by_distance(table, grid) / by_distance(pairs(grid)[None], grid))[0]


def index(curve: Tensor) -> float:
    """Return how much more alike neighbours are than tokens beyond half the largest distance."""
    return float(curve[1] - curve[len(curve) // 2 + 1 :].nanmean())


class Neighbours(Measure):
    """Cosine of neighbours minus that of far patches, in pictures with shuffled patches: one more pass."""

    name: ClassVar[str] = "neighbours"
    family: ClassVar[Family] = "features"
    asks: ClassVar[str] = "Are near patches alike for no other reason than that they are near?"
    number: ClassVar[str] = "cosine of neighbours minus that of far patches, patches in random order"
    misleads: ClassVar[str] = (
        "Shuffled pictures are unlike any that the model knows, so it may do other things there."
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"maps"})
    controls: ClassVar[tuple[View, ...]] = ("none",)
    beside: ClassVar[tuple[View, ...]] = ("random",)

    def ask(self, kept: Kept, reruns: Reruns) -> None:
        """Take the profile of the image as it is, and of its patches in random order."""
        step = step_or_note(kept, reruns, 3)
        if step is None:
            return
        picture = shuffled(reruns.image, step.pixels, reruns.generator(1))
        for word, maps in (("plain", reruns.maps()), ("mixed", reruns.maps("shuffle 1", picture))):
            curve = profile(maps.flatten(1).T, tuple(maps.shape[-2:]))
            kept.note(**{word: index(curve), f"{word}_profile": curve[:12]})

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the mean over images of the index of shuffled pictures."""
        refuse(kept)
        values = kept.column("mixed")
        if np.isnan(values).all():
            raise UnsupportedHost("The grid of features is too small for near and far patches.")
        details = {
            "of the pictures themselves": float(kept.column("plain").mean()),
            "profile": kept.column("mixed_profile").mean(0).tolist(),
            "profile of the pictures themselves": kept.column("plain_profile").mean(0).tolist(),
        }
        return Outcome(float(values.mean()), values, control={"flat": 0.0}, details=details)

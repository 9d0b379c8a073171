"""Where content is moved to: rolls by whole patches that bring a strip of an image to every place."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.errors import UnsupportedHost
from vispe.evaluate.audit.measure import Kept
from vispe.evaluate.behaviour.perturbed_runs import AS_IT_IS, Reruns, Step

K = 4
"""Strips of an image along each side."""

Offset = tuple[int, int]


def step_or_note(kept: Kept, reruns: Reruns, least: int = 2) -> Step | None:
    """Return `reruns.step()`, or None and a note for `refuse` where there is none, or fewer than `least` a side."""
    try:
        step = reruns.step()
        if min(step.grid) < least:
            raise UnsupportedHost(f"it needs {least} patches a side, and an image has {step.grid}")
    except UnsupportedHost as error:
        kept.note(refused=str(error))
        return None
    return step


def refuse(kept: Kept) -> None:
    """Raise `UnsupportedHost` where an image was refused."""
    why = next((record["refused"] for record in kept.records if "refused" in record), None)
    if why is not None:
        raise UnsupportedHost(why)


def starts(n: int) -> tuple[int, ...]:
    """Return where K strips of n // K steps begin, from end to end.

    >>> starts(8), starts(37)
    ((0, 2, 4, 6), (0, 9, 19, 28))
    """
    return tuple(round(k * (n - n // K) / (K - 1)) for k in range(K))


def rolls(number: int, step: Step) -> list[Offset]:
    """Return the offsets in steps that bring one of K strips, in turn by the number of the image, to each place."""
    rows, cols = map(starts, step.grid)
    return [(r - rows[number % K], c - cols[number % K]) for r, c in zip(rows, cols, strict=True)]


def rolled(picture: Tensor, step: Step, offset: Offset) -> tuple[str, Tensor]:
    """Return the name of a roll by an offset in steps, and the picture (c, H, W) rolled around."""
    down, right = (o * step.pixels for o in offset)
    return f"roll {down},{right}" if down or right else AS_IT_IS, picture.roll((down, right), (-2, -1))


def shuffled(image: Tensor, patch: int, generator: torch.Generator) -> Tensor:
    """Return an image (c, H, W) with its patches in random order: what it shows has no layout any more.

    >>> shuffled(torch.arange(4.0).reshape(1, 2, 2), 1, torch.Generator().manual_seed(0)).sum()
    tensor(6.)
    """
    c = image.shape[0]
    cut = image.unfold(1, patch, patch).unfold(2, patch, patch)
    h, w = cut.shape[1:3]
    order = torch.randperm(h * w, generator=generator)
    mixed = cut.reshape(c, h * w, patch, patch)[:, order].reshape(c, h, w, patch, patch)
    whole = image.clone()  # a rest at the border stays as it is
    whole[:, : h * patch, : w * patch] = mixed.permute(0, 1, 3, 2, 4).reshape(c, h * patch, w * patch)
    return whole

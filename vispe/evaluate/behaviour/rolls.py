"""Cyclic shifts (rolls) of images by whole patches, and shuffled patches."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.errors import UnsupportedHost, counted
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import ORIGINAL, CommonStep, PerturbedRuns

K = 4
"""Number of strips along each side of an image."""

Offset = tuple[int, int]


def step_or_refusal(acc: Accumulator, runs: PerturbedRuns, least: int = 2) -> CommonStep | None:
    """Return `runs.step()`, or None after noting the reason for `raise_if_refused`; at least `least` steps per side."""
    try:
        step = runs.step()
        if min(step.grid) < least:
            raise UnsupportedHost(
                f"it needs at least {counted(least, 'patch')} per side, but images have {step.grid}"
            )
    except UnsupportedHost as error:
        acc.note(refused=str(error))
        return None
    return step


def raise_if_refused(acc: Accumulator) -> None:
    """Raise `UnsupportedHost` with the reason that was noted for an image, if there is one."""
    reason = next((record["refused"] for record in acc.records if "refused" in record), None)
    if reason is not None:
        raise UnsupportedHost(reason)


def starts(n: int) -> tuple[int, ...]:
    """Return the first steps of K evenly spaced strips of n // K steps.

    >>> starts(8), starts(37)
    ((0, 2, 4, 6), (0, 9, 19, 28))
    """
    return tuple(round(k * (n - n // K) / (K - 1)) for k in range(K))


def rolls(number: int, step: CommonStep) -> list[Offset]:
    """Return the offsets in steps that move strip number % K to the position of each of the K strips."""
    rows, cols = map(starts, step.grid)
    return [(r - rows[number % K], c - cols[number % K]) for r, c in zip(rows, cols, strict=True)]


def rolled(image: Tensor, step: CommonStep, offset: Offset) -> tuple[str, Tensor]:
    """Return the name of a roll by an offset in steps, and the rolled image (c, H, W)."""
    down, right = (o * step.pixels for o in offset)
    return f"roll {down},{right}" if down or right else ORIGINAL, image.roll((down, right), (-2, -1))


def shuffled(image: Tensor, patch_size: int, generator: torch.Generator) -> Tensor:
    """Return an image (c, H, W) with its patches in random order.

    >>> shuffled(torch.arange(4.0).reshape(1, 2, 2), 1, torch.Generator().manual_seed(0)).sum()
    tensor(6.)
    """
    c = image.shape[0]
    patches = image.unfold(1, patch_size, patch_size).unfold(2, patch_size, patch_size)
    h, w = patches.shape[1:3]
    order = torch.randperm(h * w, generator=generator)
    mixed = patches.reshape(c, h * w, patch_size, patch_size)[:, order].reshape(
        c, h, w, patch_size, patch_size
    )
    result = image.clone()  # incomplete patches at the border are unchanged
    result[:, : h * patch_size, : w * patch_size] = mixed.permute(0, 1, 3, 2, 4).reshape(
        c, h * patch_size, w * patch_size
    )
    return result

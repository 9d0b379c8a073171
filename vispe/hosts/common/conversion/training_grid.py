"""Training grid of a host: encodings and specs that use it, and rotary bases that are too small for a grid."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from vispe.encodings.base import Encoding
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.encodings.parts.rotary.rope.smallest_base import BaseTooSmall
from vispe.errors import OptionError
from vispe.grid import Grid


def with_training_grid(
    spec: Sequence[dict[str, Any]], parts: Sequence[Encoding], grid: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Return a spec with the training grid as `reference` of each encoding that uses it.

    A model built from the returned spec for another image size then computes the same function.

    Args:
        spec: parsed terms.
        parts: the encoding of each term.
        grid: the grid of the training resolution.
    """
    return [
        {**term, "reference": list(grid)} if uses_reference(part, grid) else term
        for term, part in zip(spec, parts, strict=True)
    ]


def uses_reference(encoding: Encoding, grid: tuple[int, ...]) -> bool:
    """Return whether an encoding uses the host's training grid; encodings reject a training grid without effect."""
    accepted = inspect.signature(type(encoding)).parameters
    if "reference" not in accepted or getattr(encoding, "reference", None) is not None:
        return False
    options = {name: getattr(encoding, name) for name in accepted}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            type(encoding)(**{**options, "reference": list(grid)})
        except OptionError:
            return False
    return True


def base_too_small(
    parts: Sequence[Encoding], shape: tuple[int, ...] | None, reference: tuple[int, ...] | None
) -> list[BaseTooSmall]:
    """Return the rotary encodings whose base is too small for a grid; empty if the host has no fixed grid."""
    if shape is None:
        return []
    grid = Grid(shape, reference=reference)
    reports = [e.base_too_small(grid) for e in parts if isinstance(e, RopeBase)]
    return [report for report in reports if report is not None]

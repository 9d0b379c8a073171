"""Checks of position samplers in a host: incompatible position information, samplers without effect, aliasing."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.encodings.parts.preparation import check_samplers, prepare
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.errors import UnsupportedCombination
from vispe.grid import Grid


def check_sampled(parts: Sequence[Encoding], stock: type[Any], keep_abs: bool, keep_rope: bool) -> None:
    """Raise `UnsupportedCombination` if a sampler changes positions, but the model's own embedding ignores it."""
    check_samplers(parts)
    sampler = next((e.name for e in parts if isinstance(e, Sampler)), None)
    embedding = "rotary embedding" if keep_rope else "absolute table" if keep_abs else None
    if sampler and embedding:
        flag = "keep_rope" if keep_rope else "keep_abs"
        raise UnsupportedCombination(
            f"{sampler} moves tokens, but the {embedding} of {stock.__name__} does not follow their coordinates, got "
            f"{flag}=True. Set {flag}=False, and add an encoding of coordinates instead."
        )


def ineffective_samplers(parts: Sequence[Encoding]) -> list[str]:
    """Return a sentence for each sampler without effect: shifts, if all encodings depend on distances only."""
    readers = [e for e in parts if isinstance(e, Additive | Rotary | Biased | Mixing)]
    if not readers or any("translation" not in e.invariant for e in readers):
        return []
    names = " + ".join(e.name for e in readers)
    return [
        f"shift has no effect between patches: {names} depends on distances only, which do not change; use another "
        "sampler"
        for e in parts
        if e.name == "shift"
    ]


def aliased_rotations(parts: Sequence[Encoding], shape: tuple[int, ...] | None) -> list[str]:
    """Return a sentence for each rotary encoding with channel pairs rotated by more than pi between neighbours."""
    samplers = [e for e in parts if isinstance(e, Sampler)]
    sentences = []
    for e in parts if samplers and shape is not None else ():
        if isinstance(e, RopeBase):
            fraction = _aliased_fraction(e, samplers, Grid(shape or ()))
            if fraction:
                sentences.append(
                    f"{samplers[0].name} rotates {fraction:.0%} of the channel pairs of {e.name} by more than half a "
                    "turn between neighbouring tokens in evaluation, so their order becomes ambiguous; reduce reach, "
                    "or use spacing=kept"
                )
    return sentences


def _aliased_fraction(encoding: RopeBase, samplers: Sequence[Sampler], grid: Grid) -> float:
    """Return the fraction of channel pairs rotated by more than pi between neighbours, at positions of evaluation."""
    with torch.no_grad():
        pos = prepare([copy.deepcopy(s).eval() for s in samplers], grid.positions())
        angles = encoding.angles(pos)[0, 0].reshape(*grid.shape, -1)
    steps = [angles.diff(dim=a).abs().flatten(0, -2).mean(0) for a in range(grid.axes) if grid.shape[a] > 1]
    return float((torch.stack(steps).amax(0) > math.pi).float().mean()) if steps else 0.0

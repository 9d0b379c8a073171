"""What a host says of samplers: what could not follow them, and what they do to the encodings beside them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.parts.preparation import check_samplers, prepare
from vispe.encodings.parts.rope import RopeBase
from vispe.encodings.parts.sampler import Sampler
from vispe.errors import UnsupportedCombination
from vispe.grid import Grid


def check_moved(parts: Sequence[Encoding], stock: type[Any], keep_abs: bool, keep_rope: bool) -> None:
    """Raise when tokens are moved by a sampler and something of the model could not follow."""
    check_samplers(parts)
    sampler = next((e.name for e in parts if isinstance(e, Sampler)), None)
    kept = "rotary embedding" if keep_rope else "absolute table" if keep_abs else None
    if sampler and kept:
        word = "keep_rope" if keep_rope else "keep_abs"
        raise UnsupportedCombination(
            f"{sampler} moves tokens, and the {kept} of {stock.__name__}, which stays, would not follow; say "
            f"{word}=False, and add an encoding of coordinates instead."
        )


def without_effect(parts: Sequence[Encoding]) -> list[str]:
    """Return sentences on samplers that nothing in a model can notice: shifts, where distances alone count."""
    readers = [e for e in parts if isinstance(e, Additive | Rotary | Biased | Mixing)]
    if not readers or any("translation" not in e.invariant for e in readers):
        return []
    names = " + ".join(e.name for e in readers)
    return [
        f"shift has no effect between patches: {names} tells distances, which stay the same; take another sampler"
        for e in parts
        if e.name == "shift"
    ]


def aliased(parts: Sequence[Encoding], shape: tuple[int, ...] | None) -> list[str]:
    """Return sentences on rotations that turn by more than half a circle from one token to the next."""
    samplers = [e for e in parts if isinstance(e, Sampler)]
    found = []
    for e in parts if samplers and shape is not None else ():
        if isinstance(e, RopeBase):
            share = _aliased_share(e, samplers, Grid(shape or ()))
            if share:
                found.append(
                    f"{samplers[0].name} turns {share:.0%} of the pairs of {e.name} by more than half a circle from "
                    "token to token, in evaluation, so that they tell no order; take a shorter reach, or spacing=kept"
                )
    return found


def _aliased_share(encoding: RopeBase, samplers: Sequence[Sampler], grid: Grid) -> float:
    """Return the share of pairs that turn by more than pi between neighbours, at the places of evaluation."""
    with torch.no_grad():
        pos = prepare([copy.deepcopy(s).eval() for s in samplers], grid.positions())
        angles = encoding.angles(pos)[0, 0].reshape(*grid.shape, -1)
    steps = [angles.diff(dim=a).abs().flatten(0, -2).mean(0) for a in range(grid.axes) if grid.shape[a] > 1]
    return float((torch.stack(steps).amax(0) > math.pi).float().mean()) if steps else 0.0

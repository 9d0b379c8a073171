"""Preparation of positions before attention: order of samplers, draws per sample, and checks of combinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from vispe.attention.backends import reference
from vispe.attention.call import Call
from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.errors import ShapeError, UnsupportedCombination
from vispe.grid import Grid, Positions


def prepare(
    encodings: Iterable[Encoding],
    pos: Positions,
    *,
    batch: int | None = None,
    generator: torch.Generator | None = None,
    draws: dict[str, Tensor] | None = None,
) -> Positions:
    """Return the positions of one forward pass, prepared by all `encodings`, samplers first.

    Args:
        encodings: all encodings of the forward pass.
        pos: positions of the input.
        batch: number of samples, for samplers with per='sample'; that of `pos` by default.
        generator: source of the draws; the global one by default.
        draws: values to use instead of drawing, by name.
    """
    # sorting is stable: samplers first, otherwise in the order of the sum
    ordered = sorted(encodings, key=lambda e: not isinstance(e, Sampler))
    per_sample = any(
        isinstance(e, Sampler) and (e.training or e.always) and e.per == "sample" for e in ordered
    )
    # a row of coordinates per sample, so that each sample gets a separate draw
    if per_sample and batch is not None and pos.coords.shape[0] == 1:
        on_grid, index = pos.on_grid, pos.numbers().expand(batch, -1)
        pos = pos.replace(coords=pos.coords.expand(batch, -1, -1), index=index)
        # `replace` resets it, but the coordinates are still those of the grid
        pos.on_grid = on_grid
    for encoding in ordered:
        pos = encoding.prepare(pos, generator, draws)
    return pos


def check_samplers(encodings: Sequence[Encoding]) -> None:
    """Raise if samplers are used without an encoding that reads coordinates, or with one that looks up grid cells.

    Raises:
        UnsupportedCombination: there are only samplers, one is repeated, or a member looks up cells of a grid.
    """
    samplers = [e for e in encodings if isinstance(e, Sampler)]
    readers = [e for e in encodings if not isinstance(e, Sampler) and e.name != "none"]
    if not samplers:
        return
    names = [e.name for e in samplers]
    if not readers:
        raise UnsupportedCombination(
            f"{' + '.join(names)} only moves positions, and no encoding reads them. Combine it with an encoding, as "
            f"in '{names[0]}+{samplers[0].reader}'."
        )
    if len(set(names)) < len(names):
        raise UnsupportedCombination(
            f"Each sampler can be used once, got {' + '.join(names)}. Remove the repetition."
        )
    for e in readers:
        if not any(p.is_meta for p in e.parameters()) and reads_cells(e):
            raise UnsupportedCombination(
                f"{e.name} looks up the cells of a grid, so it cannot follow {names[0]}, which moves tokens between "
                "cells. Use an encoding of coordinates, such as rope_axial, alibi2d or sincos2d."
            )


def reads_cells(encoding: Encoding) -> bool:
    """Whether an encoding needs the grid cell of each token, not only its coordinates, as tables do."""
    shape = getattr(encoding, "grid", None) or (2, 3, 2)[: encoding.ndim[0]]
    grid = Grid(tuple(shape)).positions()
    # the same tokens as free coordinates, between the cells
    free = Positions(grid.coords + 0.25, grid.spatial, grid.extent, cell=grid.cell)
    # the test call must not advance the random state of the caller
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return _works(encoding, grid) and not _works(encoding, free)


def _works(encoding: Encoding, pos: Positions) -> bool:
    """Whether all operations of an encoding accept these positions; tested in a small attention call."""
    like = next(encoding.parameters(), pos.coords)
    heads = getattr(encoding, "num_heads", 1)
    x = torch.ones(1, pos.tokens, getattr(encoding, "dim", 24 * heads), device=like.device)
    q = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    try:
        pos = encoding.prepare(pos)
        if isinstance(encoding, Additive):
            encoding.table(pos)
        if isinstance(encoding, Mixing):
            encoding.mix(x, pos, 0)
        if isinstance(encoding, Rotary | Biased):
            term = encoding.value_term(pos, 0) if isinstance(encoding, Biased) else None
            branches = cast("Any", encoding).branches(pos, 0, x) if encoding.multi_softmax else (None,)
            for branch in branches:
                one = encoding if branch is None else branch
                bias = one.bias(pos, 0, x) if isinstance(one, Biased) else getattr(branch, "bias", None)
                transform = (
                    one.transform(pos, 0, x)
                    if isinstance(one, Rotary)
                    else getattr(branch, "transform", None)
                )
                reference.run(Call(q, q, q, bias, transform, term))
    except ShapeError:
        return False
    return True

"""Random shift, stretch and scale of coordinates in training, of RoPE variants."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from vispe.encodings.base import Rotary
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.utils.options import Interval, NonNegativeFloat, PositiveInt

AUGMENTATIONS = ("shift_coords", "jitter_coords", "rescale_coords")


class Draws(NamedTuple):
    """Coordinate augmentation of one forward pass; each (1 or blocks, axes or 1), or None."""

    shift_coords: Tensor | None = None
    jitter_coords: Tensor | None = None
    rescale_coords: Tensor | None = None

    def apply(self, coords: Tensor, cell: Tensor | None, layer: int) -> Tensor:
        """Return augmented coordinates (b, n, a); shifts are in units of `cell` (b, a)."""
        # one row for all blocks, or one per block
        shift, jitter, rescale = (None if d is None else d[min(layer, len(d) - 1)].to(coords) for d in self)
        if shift is not None:
            coords = coords + (shift if cell is None else shift * cell[:, None])
        if jitter is not None:
            coords = coords * jitter
        return coords if rescale is None else coords * rescale


class AugmentedRotary(Rotary):
    """Rotary encoding whose coordinates are augmented in training; the draws are in ``Positions.attrs['rope']``.

    Subclasses read coordinates through `_augmented` and check the options by `_check_augmentation`.
    """

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    depth: PositiveInt | None = None
    shift_coords: NonNegativeFloat | None = None
    jitter_coords: Annotated[float, Interval(least=1)] | None = None
    rescale_coords: Annotated[float, Interval(least=1)] | None = None
    per_block: bool = False

    def _check_augmentation(self) -> None:
        if self.per_block and all(getattr(self, name) is None for name in AUGMENTATIONS):
            raise OptionError(
                f"per_block=True has no effect without {', '.join(AUGMENTATIONS)}. Set one of them."
            )
        if self.per_block and self.depth is None:
            raise OptionError(
                "per_block=True draws for every block of the model, got depth=None. Pass depth."
            )

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw the augmentation of this forward pass while training.

        `draws` may contain shift_coords (axes,), jitter_coords (axes,) and rescale_coords (1,), the last two as
        factors; with `per_block`, each with a first axis of `depth`. Supplied draws also apply in evaluation.
        """
        supplied = {name: d for name, d in (draws or {}).items() if name in AUGMENTATIONS}
        if not supplied and (not self.training or "rope" in pos.attrs):
            return pos
        drawn: dict[str, Tensor] = {}
        for name, axes in zip(AUGMENTATIONS, (pos.axes, pos.axes, 1), strict=True):
            limit = getattr(self, name)
            shape = (self.depth if self.per_block and self.depth else 1, axes)
            if limit is not None and name in supplied:
                drawn[name] = self._checked_draw(name, supplied[name], shape)
            elif limit is not None and self.training:
                # uniform in [-1, 1]; as a factor, log-uniform in [1 / limit, limit]
                unit = torch.rand(shape, generator=generator, device=pos.coords.device) * 2 - 1
                drawn[name] = unit * limit if name == "shift_coords" else (unit * math.log(limit)).exp()
        return pos.replace(attrs={**pos.attrs, "rope": Draws(**drawn)}) if drawn else pos

    def _checked_draw(self, name: str, draw: Tensor, shape: tuple[int, int]) -> Tensor:
        draw = draw[None] if draw.ndim == 1 else draw
        if tuple(draw.shape) != shape:
            raise ShapeError(f"{self.name} needs a draw of {name} of shape {shape}, got {tuple(draw.shape)}.")
        return draw

    def _augmented(self, coords: Tensor, cell: Tensor | None, pos: Positions, layer: int) -> Tensor:
        """Return coordinates (b, n, a) with the draws of `prepare`, if any; shifts are in units of `cell` (b, a)."""
        return pos.attrs["rope"].apply(coords, cell, layer) if "rope" in pos.attrs else coords

"""How much of a sequence is left: sinusoids of the remaining length (Takase and Okazaki, arXiv 1904.07418)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32, readable
from vispe.encodings.base import Additive
from vispe.encodings.parts.coords import exact_device, padded
from vispe.encodings.parts.fourier import Revealed
from vispe.encodings.registry import register
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.options import Limits, Number, Positive

Mode = Literal["difference", "ratio"]
LENGTH = "length"


@register
class Countdown(Revealed, Additive):
    """Adds to every token how many are left, or which share of the length is behind it.

    difference (LDPE): [sin(r w_i), cos(r w_i)], r = length + offset - t, w_i = T^(-i / (K - 1))   arXiv 1904.07418
    ratio (LRPE): [sin(t w_i), cos(t w_i)], w_i = length^(-i / (K - 1)); t = 1, 2, .., K = d / 2, i = 0 .. K - 1

    The length of each sample comes in `Positions.attrs['length']`, (b,), in tokens that have a place. Without it the
    tokens of a grid have that of the grid. Along two or three axes t counts row by row; for pictures, `border` has the
    distance to every side. Made for the text of a model that is asked for an answer of some length.

    Args:
        dim: width of the tokens, d; 4 or more.
        mode: 'difference', or 'ratio' (``countdown.ratio``): the slowest wave is at phase t / length.
        offset: added to what is left, only for 'difference'; 3 in the released code.
        temperature: T, only for 'difference'.
        reveal: 'linear' or 'cosine' opens the waves band by band while the model is trained, long ones first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' has all of them from the start.

    Shapes: pos of a grid, or pos.coords (1 or b, n, 1) from 0 -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: counts from the new length.   Cost: no parameters, O(n d) per forward.
    Invariant to: nothing; tokens at the same distance from their end have the same vector ('difference').
    Raises: ShapeError without a length on free coordinates, for a length that is no positive number or not one per
        sample, or for free coordinates of more than one axis.
    Differs from the reference: fractions of a position are taken as they are; prefix tokens get 0, there padding.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("countdown", dim=16)
        >>> pos = Grid((6,)).positions().replace(attrs={"length": torch.tensor([9, 12])})
        >>> encoding.table(pos).shape
        torch.Size([2, 6, 16])
    """

    name = "countdown"
    paper = "Positional Encoding to Control Output Sequence Length, https://arxiv.org/abs/1904.07418"
    year = 2019
    ndim = (1, 2, 3)
    knows = ("place",)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"ratio": {"mode": "ratio"}}

    dim: Annotated[int, Limits(least=4)]
    mode: Mode = "difference"
    offset: Number = 3
    temperature: Positive = 10000.0

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the vectors of all tokens, (1 or b, n, d) in float32 or better, 0 for prefix tokens."""
        self._need_axes(pos)
        self._need_start(pos, "counts the tokens of the grid")
        exact = exact_device(pos.coords)
        length, place = (t.to(exact, torch.float64) for t in (self._length(pos), self._place(pos)))
        # powers and phases in float64, so that long sequences keep theirs until they are rounded once
        powers = torch.arange(self.dim // 2, dtype=torch.float64, device=exact) / (self.dim // 2 - 1)
        if self.mode == "difference":
            angle = (length + self.offset - place)[..., None] * self.temperature**-powers
        else:
            angle = place[..., None] * length[..., None] ** -powers
        waves = torch.cat([angle.sin(), angle.cos()], -1).to(at_least_float32(pos.coords))
        return padded(self.opened(waves, self.dim // 2), self.dim) * pos.spatial[..., None]

    def _place(self, pos: Positions) -> Tensor:
        """Return the number of each token, (1 or b, n), from 1; free coordinates are their own numbers from 0."""
        if pos.grid is not None:
            return pos.numbers() + 1
        if pos.axes > 1:
            raise ShapeError(
                f"countdown counts the tokens of a grid, or along one axis of free coordinates, got {pos}; give "
                "positions of a Grid."
            )
        return pos.coords[..., 0] / pos.cell[..., :1] + 1

    def _length(self, pos: Positions) -> Tensor:
        """Return the length of each sample, (1 or b, 1)."""
        given = pos.attrs.get(LENGTH)
        if given is None and pos.grid is not None:
            return pos.coords.new_full((1, 1), pos.grid.patches)
        if given is None:
            raise ShapeError(
                f"countdown needs the length of every sample, got {pos} without one; put a tensor (b,) into "
                f"Positions.attrs[{LENGTH!r}], or give positions of a Grid."
            )
        b = pos.coords.shape[0]
        numbers = isinstance(given, Tensor) and given.dtype != torch.bool and not given.is_complex()
        if not numbers or given.ndim != 1 or (b > 1 and len(given) not in (1, b)):
            found = (
                f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
            )
            raise ShapeError(
                f"countdown needs one length for each of {b if b > 1 else 'b'} samples in "
                f"Positions.attrs[{LENGTH!r}], got {found}; give a tensor (b,)."
            )
        if readable(given) and not bool((given > 0).all()):
            raise ShapeError(
                f"countdown needs lengths above 0 in Positions.attrs[{LENGTH!r}], got {given.min().item():g}."
            )
        return given[:, None]

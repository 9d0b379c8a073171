"""Sinusoids of the remaining sequence length (Takase and Okazaki, arXiv 1904.07418)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32, readable
from vispe.encodings.base import Additive
from vispe.encodings.parts.additive.fourier import ProgressiveBands
from vispe.encodings.parts.coords import exact_device, padded
from vispe.encodings.registry import register
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import FiniteFloat, PositiveFloat

Mode = Literal["difference", "ratio"]
LENGTH = "length"


@register
class Countdown(ProgressiveBands, Additive):
    """Adds sinusoids of the number of remaining tokens, or of the completed fraction of the length, to every token.

    difference (LDPE): [sin(r w_i), cos(r w_i)], r = length + offset - t, w_i = T^(-i / (K - 1))   arXiv 1904.07418
    ratio (LRPE): [sin(t w_i), cos(t w_i)], w_i = length^(-i / (K - 1)); t = 1, 2, .., K = d / 2, i = 0 .. K - 1

    The length of each sample is read from `Positions.attrs['length']`, (b,), in tokens with positions. Without it, the
    length is that of the grid. Along two or three axes t counts row by row; for images, `border` has the
    distance to every side. Designed for text models that generate an output of a requested length.

    Args:
        dim: width of the tokens, d; 4 or more.
        mode: 'difference', or 'ratio' (``countdown.ratio``): the slowest wave is at phase t / length.
        offset: added to the remaining length, only for 'difference'; 3 in the released code.
        temperature: T, only for 'difference'.
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos of a grid, or pos.coords (1 or b, n, 1) from 0 -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: counts from the new length.   Cost: no parameters, O(n d) per forward.
    Invariant to: nothing; tokens at the same distance from their end have the same vector ('difference').
    Raises: ShapeError without a length on free coordinates, for a length that is not positive or not one per
        sample, or for free coordinates of more than one axis.
    Differs from the reference: fractional positions are supported; prefix tokens get 0, as padding in the reference.

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
    encodes = ("position",)
    formula = (
        r"\left[ \sin r \omega_i, \; \cos r \omega_i \right], \quad r = \mathrm{length} + \mathrm{offset} "
        r"- t, \quad \omega_i = T^{-i / (K - 1)}"
    )
    tested_options = ("offset=0,temperature=100",)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"ratio": {"mode": "ratio"}}

    dim: Annotated[int, Interval(least=4)]
    mode: Mode = "difference"
    offset: FiniteFloat = 3
    temperature: PositiveFloat = 10000.0

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the vectors of all tokens, (1 or b, n, d) in float32 or better, 0 for prefix tokens."""
        self._need_axes(pos)
        self._need_start(pos, "counts the tokens of the grid")
        exact = exact_device(pos.coords)
        length, index = (t.to(exact, torch.float64) for t in (self._length(pos), self._index(pos)))
        # powers and phases in float64, for accuracy in long sequences
        powers = torch.arange(self.dim // 2, dtype=torch.float64, device=exact) / (self.dim // 2 - 1)
        if self.mode == "difference":
            # (b, n, 1) * (d / 2,) -> (b, n, d / 2)
            angle = (length + self.offset - index)[..., None] * self.temperature**-powers
        else:
            # the base is the length of each sample
            angle = index[..., None] * length[..., None] ** -powers
        waves = torch.cat([angle.sin(), angle.cos()], -1).to(at_least_float32(pos.coords))
        # an odd width has a last channel of 0
        return padded(self.with_band_weights(waves, self.dim // 2), self.dim) * pos.spatial[..., None]

    def _index(self, pos: Positions) -> Tensor:
        """Return the index of each token, (1 or b, n), from 1; free coordinates count from 0."""
        if pos.grid is not None:
            return pos.numbers() + 1
        if pos.axes > 1:
            raise ShapeError(
                f"countdown needs the tokens of a grid, or free coordinates of one axis, got {pos}. Pass "
                "positions of a Grid."
            )
        # coordinates in cells, counted from 1
        return pos.coords[..., 0] / pos.cell[..., :1] + 1

    def _length(self, pos: Positions) -> Tensor:
        """Return the length of each sample, (1 or b, 1)."""
        lengths = pos.attrs.get(LENGTH)
        if lengths is None and pos.grid is not None:
            return pos.coords.new_full((1, 1), pos.grid.patches)
        if lengths is None:
            raise ShapeError(
                f"countdown needs the length of every sample, got {pos} without one. Put a tensor (b,) into "
                f"Positions.attrs[{LENGTH!r}], or pass positions of a Grid."
            )
        b = pos.coords.shape[0]
        is_numeric = isinstance(lengths, Tensor) and lengths.dtype != torch.bool and not lengths.is_complex()
        if not is_numeric or lengths.ndim != 1 or (b > 1 and len(lengths) not in (1, b)):
            description = (
                f"{tuple(lengths.shape)} {lengths.dtype}"
                if isinstance(lengths, Tensor)
                else type(lengths).__name__
            )
            raise ShapeError(
                f"countdown needs one length for each of {b if b > 1 else 'b'} samples in "
                f"Positions.attrs[{LENGTH!r}], got {description}. Pass a tensor (b,)."
            )
        if readable(lengths) and not bool((lengths > 0).all()):
            raise ShapeError(
                f"countdown needs lengths above 0 in Positions.attrs[{LENGTH!r}], got {lengths.min().item():g}."
            )
        return lengths[:, None]

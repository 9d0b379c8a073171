"""Random Fourier features of the coordinates (Tancik et al., arXiv 2006.10739)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import exact_product
from vispe.encodings.parts.additive.fourier import FourierEncoding
from vispe.encodings.parts.coords import padded
from vispe.encodings.parts.layers import PreciseLinear, small_init
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt

Basis = Literal["gaussian", "identity", "octaves", "none"]


@register
class Fourier(FourierEncoding):
    """Adds sines and cosines of the coordinates along random directions to the tokens.

    [sin(2 pi B x), cos(2 pi B x)], B (features / 2, axes) drawn once from N(0, scale^2)       arXiv 2006.10739

    On its own, ``encode(x)`` takes free coordinates (..., axes), in [0, 1) as the authors use them. ``fourier.tancik``
    has the scale that they take for photographs; ``fourier.basic`` one wave per axis; ``fourier.nerf`` octaves.

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; determines the number of coordinates.
        axes: number of coordinates, 1 to 3, where no grid is known; 2 by default.
        basis: 'gaussian' (random), 'identity' (B = 1) or 'octaves' (2^(k-1) along every axis, k = 0, 1, ..), or
            'none' for the coordinates themselves.
        features: sines and cosines in all; as many as fit into d by default. 'identity' has 2 per axis, 'none' 1.
        scale: standard deviation of B, in waves per unit of the coordinates; only for 'gaussian'.
        two_pi: whether angles have the factor 2 pi; without it a scale means 2 pi times less.
        learned: whether B is trained. It is saved in any case, since it is drawn at random.
        project: whether a linear map to d follows; without it channels beyond the features are 0.
        normalize: coordinates of `table`, from cell centres: 'field' (fractions of the field of view), 'common'
            (of its longest side, for both axes), 'reference' (of the longest side of the training grid, in patches),
            'corners' (-1 to 1 from the first to the last cell), 'none' (unscaled).
        reference: shape of the training grid for normalize='reference'; that of the host by default.
        reveal: 'linear' or 'cosine' activates frequency bands during training, long wavelengths first (PINs, see
            `vispe.encodings.positions.set_progress`); 'none' uses all bands from the start.

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: the same field is sampled at other points; with 'reference' and 'none' waves are extrapolated.
    Cost: features / 2 * axes fixed numbers, O(n d) per forward.
    Invariant to: the resolution, where cell centres coincide (normalize='field'); within a grid, products of two
        tokens' encodings depend on their offset only (project=False), in expectation on its length ('gaussian').
    Raises: ShapeError if `pos` has another number of axes; OptionError for invalid numbers of features.
    Differs from the reference: angles are in float32 or better for every dtype of the model; positions are cell centres
        (in the reference pixel corners, i / n).

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("fourier", dim=16, grid=(2, 3))
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "fourier"
    paper = "Fourier Features Let Networks Learn High Frequency Functions, https://arxiv.org/abs/2006.10739"
    year = 2020
    encodes = ("position",)
    formula = r"\left[ \sin 2 \pi B p, \; \cos 2 \pi B p \right], \quad B \sim N(0, \sigma^2)"
    tested_options = (
        "scale=3,two_pi=false,features=10",
        "learned=true",
        "project=true,features=40",
        "basis=identity,learned=true",
        "basis=octaves,features=16",
        "basis=none,project=true",
        "normalize=common",
        "normalize=reference,reference=[3,4]",
        "normalize=corners",
        "normalize=none",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tancik": {"scale": 10.0},
        "basic": {"basis": "identity"},
        "nerf": {"basis": "octaves"},
    }

    basis: Basis = "gaussian"
    features: PositiveInt | None = None
    scale: PositiveFloat = 1.0
    two_pi: bool = True
    learned: bool = False
    project: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.basis != "gaussian" and self.scale != 1:
            raise OptionError(
                f"scale={self.scale:g} has no effect with basis={self.basis!r}, whose frequencies are fixed. Omit it."
            )
        if self.basis == "none" and (self.learned or not self.two_pi):
            raise OptionError(
                "learned and two_pi have no effect with basis='none', which has no frequencies. Omit them."
            )
        if self.basis == "none" and self.reveal != "none":
            raise OptionError(
                f"reveal={self.reveal!r} has no effect with basis='none', which has no frequencies. Omit it."
            )
        self.count = self._count()
        if not self.project and self.count > self.dim:
            raise OptionError(
                f"fourier has {counted(self.count, 'feature')}, which do not fit into dim={self.dim}. Use fewer, or "
                "project=true."
            )
        has_buffer = self.basis == "gaussian" or (self.learned and self.basis != "none")
        frequency = torch.empty(self.count // 2, self.coordinates) if has_buffer else None
        if self.learned:
            self.frequency: Tensor | None = None if frequency is None else nn.Parameter(frequency)
        else:
            self.register_buffer("frequency", frequency)
        self.to_dim = PreciseLinear(self.count, self.dim) if self.project else None
        self.reset_parameters()

    def _count(self) -> int:
        """Return the number of features; raise `OptionError` if it does not fit the basis."""
        a, basis, features = self.coordinates, self.basis, self.features
        step = {"gaussian": 2, "octaves": 2 * a, "identity": 2 * a, "none": a}[basis]
        # `step` features belong together: sine and cosine, of every axis where bands are per axis
        count = (max(self.dim // step, 1) if basis in ("gaussian", "octaves") else 1) * step
        if features is None:
            return count
        if basis != "none" and features % 2:
            raise OptionError(f"fourier needs an even number of features, got features={features}.")
        if features % step or (basis in ("identity", "none") and features != count):
            rule = "a multiple of" if basis == "octaves" else "exactly"
            raise OptionError(
                f"fourier needs {rule} {counted(step, 'feature')} with basis={basis!r}, got features={features}."
            )
        return features

    def reset_parameters(self) -> None:
        """Draw the frequencies, or set those of a fixed basis; the projection starts small (0.02)."""
        if self.frequency is not None:
            if self.basis == "gaussian":
                nn.init.normal_(self.frequency, std=self.scale)
            else:
                with torch.no_grad():
                    self.frequency.copy_(self._fixed(self.frequency))
        if self.to_dim is not None:
            small_init(self.to_dim)

    def _fixed(self, like: Tensor) -> Tensor:
        """Return the frequencies of a basis that is not drawn, (features / 2, axes)."""
        a = self.coordinates
        octaves = self.count // (2 * a)
        first = 0 if self.basis == "identity" else -1
        # octaves start at 1/2: half a wave per unit with two_pi
        powers = 2.0 ** (torch.arange(octaves, device=like.device) + first)
        axes = torch.eye(a, device=like.device)
        # (axes, octaves, axes) -> (features / 2, axes), bands of an axis adjacent
        return (axes[:, None] * powers[None, :, None]).flatten(0, 1).to(like.dtype)

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        if self.basis == "none":
            return self._joined(coords)
        frequency = self._fixed(coords) if self.frequency is None else self.frequency
        # of shape (..., axes) @ (axes, features / 2), in float32 also under autocast
        angle = exact_product(coords * (2 * math.pi) if self.two_pi else coords, frequency.t())
        waves = torch.cat([angle.sin(), angle.cos()], -1)
        return self._joined(self.by_length(waves, *self._bands(frequency)) if self.uses_progress else waves)

    def _bands(self, frequency: Tensor) -> tuple[Tensor, int]:
        """Return the band of each frequency (features / 2,), and the number of bands."""
        rows = len(frequency)
        if self.basis == "gaussian":  # one band per row, ordered by wavelength
            # argsort of argsort is the rank of each row
            return frequency.detach().norm(dim=-1).argsort().argsort(), rows
        octaves = rows // self.coordinates
        # rows are axis by axis, each from the lowest octave
        return torch.arange(rows, device=frequency.device) % octaves, octaves

    def _joined(self, features: Tensor) -> Tensor:
        return padded(features, self.dim) if self.to_dim is None else self.to_dim(features)

"""Orthogonal functions of the relative position in the field (arXiv 2506.06398, after PoPE, arXiv 2405.04585)."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import readable
from vispe.encodings.parts.coords import (
    FRACTIONS,
    FieldEncoder,
    cell_centres,
    exact_device,
)
from vispe.encodings.parts.layers import PreciseLinear, small_init
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.constants import constant
from vispe.utils.options import NonNegativeInt

Basis = Literal["legendre", "chebyshev", "haar", "zernike"]
MOST = 4096  # features


@register
class Legendre(FieldEncoder):
    """Adds a linear map of orthogonal polynomials, or wavelets, of the relative position in the field to the tokens.

    W (g_s P_i(y) P_j(x)), s = i + j <= degree, y and x the cell centres on [-1, 1]          arXiv 2506.06398

    One gain g_s per total degree is learned. Features are ordered by total degree, then by descending i. On its own,
    ``encode(x)`` takes free coordinates (..., axes) in [-1, 1], and ``features(x)`` returns only the functions, in
    float64. ``legendre.chebyshev`` varies less at the borders; ``legendre.haar`` has wavelets, which are local;
    ``legendre.zernike`` functions of radius and angle on the disc around the field, where rotating the image mixes cos
    and sin of one m only.

    Args:
        dim: width of the tokens, d.
        grid: shape of the model's grid; defines the number of coordinates.
        axes: number of coordinates, 1 to 3, if no grid is known; 2 by default.
        degree: the largest total degree; 8 by default, for 'haar' 3. A wavelet of width 2 / 2^(l-1) has degree l.
        basis: 'legendre' P_k; 'chebyshev' T_k(t) = cos(k arccos t); 'haar' (1 and -1 on the halves of an interval);
            'zernike', two axes, R_n^m(r) times cos(m phi), or sin for m < 0.
        orthonormal: scale the functions to norm 1 on [-1, 1] (P_k by sqrt((2k + 1) / 2); 'chebyshev' with weight
            1 / sqrt(1 - t^2)) or, 'zernike', on the disc. Otherwise they are in [-1, 1].

    Shapes: pos.coords (1 or b, n, axes) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: every grid is mapped to [-1, 1] ('zernike': its corners to radius 1); nothing extrapolates.
    Cost: (degree + 1) (degree + 2) / 2 features in 2D ('haar': more), computed in float64, and their linear map.
    Invariant to: the resolution, where cell centres coincide.
    Raises: ShapeError if `pos` has another number of axes, or a position outside the field (by more than a cell, in
        `table`), where polynomials grow without bound; OptionError for 'zernike' without two axes, or too many
        features.
    Differs from the reference: the paper has no code; total degree instead of all pairs, the gain per degree and
        the small start of the linear map (0.02) are ours, as is 'zernike'.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("legendre", dim=16, grid=(2, 3))
        >>> encoding.table(Grid((2, 3)).positions()).shape
        torch.Size([1, 6, 16])
    """

    name = "legendre"
    paper = (
        "Theoretical Analysis of Positional Encodings in Transformer Models, https://arxiv.org/abs/2506.06398"
    )
    year = 2025
    encodes = ("position",)
    formula = (
        r"W \left( g_s P_i(y) P_j(x) \right), \quad s = i + j \le \mathrm{degree}, \quad x, y \in [-1, 1]"
    )
    tested_options = (
        "degree=3,orthonormal=true",
        "basis=chebyshev,degree=4,orthonormal=true",
        "basis=haar,degree=2",
        "basis=zernike,degree=4,orthonormal=true",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "chebyshev": {"basis": "chebyshev"},
        "haar": {"basis": "haar"},
        "zernike": {"basis": "zernike"},
    }

    normalize: ClassVar[bool] = True

    degree: NonNegativeInt | None = None
    basis: Basis = "legendre"
    orthonormal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.basis == "zernike" and self.coordinates != 2:
            raise OptionError(f"basis='zernike' needs 2 axes, got {self.coordinates}. Use another basis.")
        self.most = (3 if self.basis == "haar" else 8) if self.degree is None else self.degree
        # wavelets: one each of degree 0 and 1, then twice as many per degree
        each = [2 ** max(k - 1, 0) if self.basis == "haar" else 1 for k in range(self.most + 1)]
        self._terms_of = [
            d for d in product(range(self.most + 1), repeat=self.coordinates) if sum(d) <= self.most
        ]
        # by total degree, then by descending degree of the first axes
        self._terms_of.sort(key=lambda d: (sum(d), *(-k for k in d)))
        sizes = [math.prod(each[k] for k in degrees) for degrees in self._terms_of]
        if sum(sizes) > MOST:
            raise OptionError(
                f"legendre with degree={self.most}, basis={self.basis!r} has {counted(sum(sizes), 'feature')}, more "
                f"than {MOST}: use a smaller degree."
            )
        # the total degree of each feature
        self._totals = [sum(d) for d, size in zip(self._terms_of, sizes, strict=True) for _ in range(size)]
        self.gain = nn.Parameter(torch.empty(self.most + 1))
        self.to_dim = PreciseLinear(len(self._totals), self.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gains to one over the root of the number of features; the linear map starts small (0.02)."""
        nn.init.constant_(self.gain, len(self._totals) ** -0.5)
        small_init(self.to_dim)

    def place(self, pos: Positions) -> Tensor:
        """Return the positions that `table` encodes, (1 or b, n, axes) float64, on [-1, 1] or the unit disc."""
        self._need_start(pos, FRACTIONS)
        device = exact_device(pos.coords)
        # float64: high degrees amplify rounding errors
        extent = pos.extent.to(device, torch.float64)
        centres = cell_centres(pos).to(device, torch.float64)
        if self.basis == "zernike":  # one unit for both axes, so that rotations remain rotations
            half = extent / 2
            return (centres - half[:, None]) / half.square().sum(-1).sqrt()[:, None, None]
        return 2 * centres / extent[:, None] - 1

    def features(self, coords: Tensor) -> Tensor:
        """Return the functions (..., features) float64 of positions (..., axes) on [-1, 1], or on the disc."""
        exact = coords.to(exact_device(coords), torch.float64)
        if self.basis == "zernike":
            return zernike(exact, self.most, self.orthonormal)
        # per degree (..., axes, functions)
        line = LINE_FUNCTIONS[self.basis](exact, self.most, self.orthonormal)
        values: list[Tensor] = []
        for degrees in self._terms_of:
            value = line[degrees[0]][..., 0, :]
            for axis, k in list(enumerate(degrees))[1:]:
                value = (value[..., :, None] * line[k][..., axis, None, :]).flatten(-2)
            values.append(value)
        return torch.cat(values, -1)

    def _check_inside(self, coordinates: Tensor, pos: Positions | None) -> None:
        if not readable(coordinates) or not coordinates.numel():
            return
        # augmentation may move border tokens out of the field by less than a cell
        margin = 0.0 if pos is None else 2 * float((pos.cell / pos.extent).detach().max())
        radius = (
            coordinates.detach().square().sum(-1).sqrt()
            if self.basis == "zernike"
            else coordinates.detach().abs()
        )
        if float(radius.max()) > 1 + margin + 1e-6:
            domain = "the disc of radius 1" if self.basis == "zernike" else "[-1, 1]"
            raise ShapeError(
                f"legendre needs positions in {domain}, got one at {float(radius.max()):.4g} from the centre. Pass "
                "Positions whose extent contains all coordinates."
            )

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        self._check_inside(coords, pos)
        features = self.features(coords).to(coords if pos is None else pos.coords)
        gains = self.gain.to(features.dtype)[constant(tuple(self._totals), torch.int64, features.device)]
        return self.to_dim(features * gains)


# Functions of one variable on [-1, 1] return a list over the degree, each (..., functions of that degree); all use
# stable recurrences.


def legendre(t: Tensor, degree: int, orthonormal: bool) -> list[Tensor]:
    """Return P_k(t), k = 0 .. degree; times sqrt((2k + 1) / 2) for norm 1 on [-1, 1]."""
    values = _jacobi(t, degree, 0)
    scales = [math.sqrt((2 * k + 1) / 2) if orthonormal else 1.0 for k in range(degree + 1)]
    return [(v * s)[..., None] for v, s in zip(values, scales, strict=True)]


def chebyshev(t: Tensor, degree: int, orthonormal: bool) -> list[Tensor]:
    """Return T_k(t), k = 0 .. degree; scaled for norm 1 on [-1, 1] with weight 1 / sqrt(1 - t^2)."""
    values = [torch.ones_like(t), t]
    # by recurrence, since the arccos of the definition has no gradient at -1 and 1
    for _ in range(2, degree + 1):
        values.append(2 * t * values[-1] - values[-2])
    scales = [math.sqrt((2 if k else 1) / math.pi) if orthonormal else 1.0 for k in range(degree + 1)]
    return [(v * s)[..., None] for v, s in zip(values, scales, strict=False)]


def haar(t: Tensor, degree: int, orthonormal: bool) -> list[Tensor]:
    """Return the constant, then for l = 1 .. degree the 2^(l - 1) wavelets of width 2 / 2^(l - 1), from -1 to 1.

    A wavelet is 1 on the first half of its interval and -1 on the second; intervals are half-open. For norm 1 it
    is divided by the root of its width.
    """
    functions = [torch.full_like(t, 2**-0.5 if orthonormal else 1.0)[..., None]]
    for level in range(1, degree + 1):
        count = 2 ** (level - 1)
        # index of the half interval; t = 1 belongs to the last one
        half = ((t + 1) * count).floor().clamp(0, 2 * count - 1)
        sign = 1 - 2 * half.remainder(2)
        in_interval = (half / 2).floor()[..., None] == torch.arange(count, dtype=t.dtype, device=t.device)
        functions.append(in_interval * (sign * (math.sqrt(count / 2) if orthonormal else 1.0))[..., None])
    return functions


def zernike(points: Tensor, degree: int, orthonormal: bool) -> Tensor:
    """Return R_n^|m|(r) times cos(m phi), m >= 0, or sin(|m| phi), m < 0, of points (..., (y, x)) on the disc.

    Ordered by n = 0 .. degree, then m = -n, -n + 2, .., n. With norm 1, the integral of the square over the disc is 1.
    """
    y, x = points.unbind(-1)
    # r^m cos(m phi) and r^m sin(m phi) as polynomials of x and y, since the angle has no gradient at the centre
    cos, sin = [torch.ones_like(x)], [torch.zeros_like(x)]
    for m in range(degree):
        cos.append(cos[m] * x - sin[m] * y)
        sin.append(cos[m] * y + sin[m] * x)
    z = 2 * (x * x + y * y) - 1
    # R_n^m(r) = r^m P_k^(0, m)(2 r^2 - 1), k = (n - m) / 2
    radial = {m: _jacobi(z, (degree - m) // 2, m) for m in range(degree + 1)}
    functions: list[Tensor] = []
    for n in range(degree + 1):
        for m in range(-n, n + 1, 2):
            value = radial[abs(m)][(n - abs(m)) // 2] * (cos[m] if m >= 0 else sin[-m])
            functions.append(value * math.sqrt((n + 1) * (2 if m else 1) / math.pi) if orthonormal else value)
    return torch.stack(functions, -1)


LINE_FUNCTIONS = {"legendre": legendre, "chebyshev": chebyshev, "haar": haar}


def _jacobi(z: Tensor, degree: int, b: int) -> list[Tensor]:
    """Return the Jacobi polynomials P_k^(0, b)(z), k = 0 .. degree; those of Legendre for b = 0."""
    values = [torch.ones_like(z), 1 + (b + 2) * (z - 1) / 2]
    for k in range(2, degree + 1):
        c = 2 * k + b
        first = (c - 1) * (c * (c - 2) * z - b * b) * values[-1]
        second = 2 * (k - 1) * (k + b - 1) * c * values[-2]
        values.append((first - second) / (2 * k * (k + b) * (c - 2)))
    return values[: degree + 1]

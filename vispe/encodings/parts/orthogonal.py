"""Orthogonal functions on [-1, 1] (Legendre, Chebyshev, Haar) and the disc (Zernike), by stable recurrences.

Functions of one variable return a list over the degree, each (..., functions of that degree).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def zernike(places: Tensor, degree: int, orthonormal: bool) -> Tensor:
    """Return R_n^|m|(r) times cos(m phi), m >= 0, or sin(|m| phi), m < 0, of points (..., (y, x)) on the disc.

    Ordered by n = 0 .. degree, then m = -n, -n + 2, .., n. With norm 1, the integral of the square over the disc is 1.
    """
    y, x = places.unbind(-1)
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


def _jacobi(z: Tensor, degree: int, b: int) -> list[Tensor]:
    """Return the Jacobi polynomials P_k^(0, b)(z), k = 0 .. degree; those of Legendre for b = 0."""
    values = [torch.ones_like(z), 1 + (b + 2) * (z - 1) / 2]
    for k in range(2, degree + 1):
        c = 2 * k + b
        first = (c - 1) * (c * (c - 2) * z - b * b) * values[-1]
        second = 2 * (k - 1) * (k + b - 1) * c * values[-2]
        values.append((first - second) / (2 * k * (k + b) * (c - 2)))
    return values[: degree + 1]

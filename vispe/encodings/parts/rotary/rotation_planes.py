"""Planes of rotation of skew-symmetric matrices: a rotation rate for each plane, and the basis of all planes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from vispe.encodings.parts.rotary.skew_symmetric import eigh


def rotation_planes(matrices: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return the rates (h, blocks, s // 2) of skew-symmetric matrices, and their basis (h, channels, channels).

    Rows 2 j and 2 j + 1 of the basis span plane j of all blocks. Channels beyond the blocks are unchanged.

    Args:
        matrices: (h, blocks, s, s) float64.
        channels: channels of a head, at least blocks s.
    """
    heads, blocks, width, _ = matrices.shape
    planes = width // 2
    # i S is Hermitian: eigenvalues are +- rates, and each pair of eigenvectors spans a plane of rotation
    values, vectors = eigh(1j * matrices)
    # rounding can make a rate of 0 negative
    rates = values[..., width - planes :].clamp(min=0)
    basis = torch.zeros(heads, channels, channels, dtype=torch.float64, device=matrices.device)
    # channels after the planes of all blocks: one per block of odd width
    spare = 2 * planes * blocks
    for h in range(heads):
        for m in range(blocks):
            rows = _real_basis(vectors[h, m], rates[h, m])
            span = slice(m * width, (m + 1) * width)
            basis[h, 2 * planes * m : 2 * planes * (m + 1), span] = rows[: 2 * planes]
            if width % 2:
                basis[h, spare + m, span] = rows[-1]
    for c in range(blocks * width, channels):
        basis[:, c, c] = 1.0
    return rates, basis


def _real_basis(vectors: Tensor, rates: Tensor) -> Tensor:
    """Return rows a_1, b_1, a_2, b_2, ... in which exp(x S) rotates (a_j, b_j) by x times rate j."""
    size, planes = vectors.shape[-1], rates.shape[-1]
    # real and imaginary part of a unit eigenvector have norm 1 / sqrt(2)
    pairs = vectors[:, size - planes :] * 2**0.5
    rows = torch.stack([pairs.real.t(), pairs.imag.t()], 1).flatten(0, 1)
    # real and imaginary parts of rate 0 need not be orthogonal: these planes are completed by QR
    rotates = (rates > 1e-12).repeat_interleave(2)
    rotated = rows[rotates]
    if len(rotated) == size:
        return rotated
    unrotated = _complete(rotated)
    full = torch.empty(size, size, dtype=unrotated.dtype, device=unrotated.device)
    is_unrotated = torch.ones(size, dtype=torch.bool, device=unrotated.device)
    is_unrotated[: 2 * planes] = ~rotates
    full[~is_unrotated], full[is_unrotated] = rotated, unrotated
    return full


def _complete(rows: Tensor) -> Tensor:
    """Return (s - k, s) orthonormal rows that complete orthonormal `rows` (k, s) to a basis."""
    qr = cast("Callable[..., tuple[Tensor, Tensor]]", torch.linalg.qr)  # pyright: ignore[reportUnknownMemberType]
    return qr(rows.t(), mode="complete")[0][:, len(rows) :].t()

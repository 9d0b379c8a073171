"""Learned basis of each head, in which a rotation acts on queries and keys (HARoPE, arXiv 2510.10489)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import exact_product
from vispe.attention.transform.head_linear import HeadLinear
from vispe.encodings.parts.eval_cache import EvalCache
from vispe.encodings.parts.rotary.skew_symmetric import matrix_exponential, skew_matrix
from vispe.grid import Positions

BasisKey = Literal["inverse_transpose", "same"]
FLOOR = 1e-4  # smallest entry of S, since keys are divided by it


class HeadBasis(nn.Module):
    """Invertible matrices M = U S V^T of queries and their counterparts of keys, one pair per head.

    U = exp(A) and V = exp(B) with A, B skew-symmetric, S = diag(softplus(sigma)), at least `FLOOR`. The initial values
    A = B = 0, softplus(sigma) = 1 give the identity.

    Args:
        heads: number of heads, h.
        width: channels of a head, d_h.
        key: matrix of the keys: 'inverse_transpose' M^-T = U S^-1 V^T, or 'same' M.

    Attributes:
        u: entries of A above the diagonal, row by row, (h, d_h (d_h - 1) / 2).
        v: those of B.
        sigma: (h, d_h).
    """

    def __init__(self, heads: int, width: int, key: BasisKey) -> None:
        super().__init__()
        self.key = key
        self.u = nn.Parameter(torch.empty(heads, width * (width - 1) // 2))
        self.v = nn.Parameter(torch.empty_like(self.u))
        self.sigma = nn.Parameter(torch.empty(heads, width))
        self._eval_cache = EvalCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all matrices to the identity."""
        nn.init.zeros_(self.u)
        nn.init.zeros_(self.v)
        # softplus(log(e - 1)) = 1
        nn.init.constant_(self.sigma, math.log(math.e - 1))

    def scales(self) -> Tensor:
        """Return the diagonal of S (h, d_h), float32 or better."""
        return self._scales(torch.promote_types(self.sigma.dtype, torch.float32))

    def _scales(self, dtype: torch.dtype) -> Tensor:
        return F.softplus(self.sigma.to(dtype)).clamp(min=FLOOR)

    def matrices(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the matrices of queries and keys (h, d_h, d_h), in `dtype` or better."""
        width, dtype = self.sigma.shape[-1], torch.promote_types(self.sigma.dtype, dtype)
        u, v = (matrix_exponential(skew_matrix(x.to(dtype), width)) for x in (self.u, self.v))
        # (h, 1, d_h): scales the columns of U
        scales = self._scales(dtype)[:, None]
        of_queries = exact_product(u * scales, v.mT)
        # U and V are orthogonal, so the inverse transpose of U S V^T is U S^-1 V^T
        return of_queries, of_queries if self.key == "same" else exact_product(u / scales, v.mT)

    def condition_numbers(self) -> Tensor:
        """Return the ratio of the largest to the smallest entry of S for each head (h,); 1 for rotations."""
        scales = self.scales().detach()
        return scales.amax(-1) / scales.amin(-1)

    def angles(self) -> Tensor:
        """Return the largest angle by which U rotates a plane of channels of each head (h,), in degrees."""
        u = skew_matrix(self.u.detach().to(self.scales().dtype), self.sigma.shape[-1])
        # eigenvalues of a rotation are exp(+- i angle)
        return torch.linalg.eigvals(matrix_exponential(u)).angle().abs().amax(-1).rad2deg()

    def transform(self, pos: Positions) -> HeadLinear:
        """Return the map of queries and keys, of all tokens; `pos` is the key of its cache."""
        return HeadLinear(*self._eval_cache(self, pos, self.matrices))

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
        return f"{self.sigma.shape[0]}, {self.sigma.shape[1]}, key={self.key!r}"


def describe_bases(bases: Sequence[HeadBasis]) -> list[str]:
    """Return one line with the range of the rotations U, and one per layer with the condition number of each head."""
    if not bases or bases[0].u.is_meta:
        return []
    angles = torch.stack([basis.angles() for basis in bases])
    lines = [f"learned bases: U rotates by up to {angles.min():.1f} to {angles.max():.1f} degrees per head"]
    for layer, basis in enumerate(bases):
        numbers = " ".join(f"{number:.2f}" for number in basis.condition_numbers().tolist())
        lines.append(f"  layer {layer}: condition number of M per head {numbers}")
    return lines


def fold_rows(rows: Tensor, matrices: Tensor) -> Tensor:
    """Return the weight (h d_h, c) or bias (h d_h,) of a projection whose output is multiplied by `matrices`.

    The product is computed in float64 and returned in the dtype of `rows`.
    """
    # float64: the folded weight is rounded once
    by_head = rows.double().reshape(matrices.shape[0], matrices.shape[1], -1)
    return (matrices.double() @ by_head).reshape(rows.shape).to(rows.dtype)

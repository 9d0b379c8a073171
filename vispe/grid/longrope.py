"""Frequencies of LongRoPE, with searched factors for each pair (arXiv 2402.13753).

The notation is that of `vispe.grid.frequencies`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted
from vispe.grid.frequencies import check_positive, powers_of_base
from vispe.grid.yarn import yarn_mscale


def longrope(
    dim: int, base: float, factors: Tensor | Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``1 / (factor_i * base ** (2 i / dim))``: LongRoPE with searched factors (arXiv 2402.13753)."""
    scaled_factors = torch.as_tensor(factors).to(dtype)
    if scaled_factors.shape != (dim // 2,):
        raise ShapeError(
            f"longrope needs one factor for each of {counted(dim // 2, 'pair')} (dim={dim}), got shape "
            f"{tuple(scaled_factors.shape)}."
        )
    return 1.0 / (scaled_factors * powers_of_base(dim, base, dtype))


def longrope_factors(
    factors: Tensor | Sequence[float], length: float, trained: float, longest: float, *, clamp: bool = True
) -> Tensor:
    """Return LongRoPE's factors interpolated for a length between the trained and the longest one.

    ``1 + (factor - 1) * (length / trained - 1) / (longest / trained - 1)``. `clamp` prevents extrapolation outside of
    these lengths (the reference code extrapolates).

    Raises:
        OptionError: a length is not positive, or `longest` does not exceed `trained`.
    """
    check_positive(length=length, trained=trained, longest=longest)
    if longest <= trained:
        raise OptionError(
            f"longrope_factors needs longest > trained, got longest={longest}, trained={trained}."
        )
    # 0 at the trained length, 1 at the longest
    progress = (length / trained - 1) / (longest / trained - 1)
    return 1 + (torch.as_tensor(factors) - 1) * (min(max(progress, 0.0), 1.0) if clamp else progress)


def longrope_mscale(policy: str | float, scale: float, trained: float) -> float:
    """Return LongRoPE's factor of cos and sin.

    Args:
        policy: 'su' for ``sqrt(1 + ln scale / ln trained)``, 'yarn' for `yarn_mscale`, or the factor itself.
        scale: longest over trained length.
        trained: trained length, in tokens.

    Raises:
        OptionError: `policy` is unknown.
    """
    if policy == "yarn":
        return yarn_mscale(scale)
    if policy == "su":
        return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(trained))
    try:
        return float(policy)
    except ValueError:
        raise OptionError(f"policy must be su, yarn or a number, got {policy!r}.") from None

"""Factor of scalable softmax: logarithm of the number of keys of a query (arXiv 2501.19399)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.errors import OptionError
from vispe.grid import Positions

Relative = Literal["none", "reference"]


def log_keys(
    pos: Positions, causal: bool, normalize: Relative = "none", reference: tuple[int, ...] | None = None
) -> Tensor:
    """Return ln of the number of keys per query, (b or 1, n) float32, or (b or 1, 1) if equal for all queries.

    In packed batches, tokens beyond the patches and the grid's prefix tokens are padding and not counted.

    Args:
        pos: positions of the tokens.
        causal: token i has i + 1 keys; otherwise all tokens except padding.
        normalize: 'reference' divides by the logarithm of the number of tokens at training.
        reference: the grid at training; `Grid.reference` by default.

    Raises:
        OptionError: normalize='reference' without a reference grid.
    """
    keys = pos.coords.new_full((1, 1), pos.tokens, dtype=torch.float32)
    if causal:
        # causal: query i has i keys, counted from 1
        keys = torch.arange(1, pos.tokens + 1, dtype=torch.float32, device=keys.device)[None]
    elif pos.grid is not None and not pos.regular:
        # tokens beyond the patches and the prefix are padding
        patches = pos.spatial.sum(1, keepdim=True)
        keys = (patches + (pos.tokens - patches).clamp(max=pos.grid.prefix)).float()
    if normalize == "none":
        return keys.log()
    shape = reference or (pos.grid.reference if pos.grid else None)
    if shape is None or pos.grid is None:
        raise OptionError(
            f"normalize='reference' needs the grid of the training resolution, got {pos}. Pass reference=[h, w] and "
            "tokens of a Grid, or Grid(..., reference=(h, w))."
        )
    # at least two tokens, since ln 1 = 0
    return keys.log() / math.log(max(math.prod(shape) + pos.grid.prefix, 2))


def head_factor(scale: Tensor, logs: Tensor) -> Tensor:
    """Return the factors (b or 1, h, n or 1, 1) of queries, from scales (h,) and the output of `log_keys`."""
    return (at_least_float32(scale)[:, None] * logs[:, None])[..., None]

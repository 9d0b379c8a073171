"""ALiBi in one dimension, symmetric for bidirectional attention (arXiv 2108.12409)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.table import TableBias
from vispe.encodings.parts.bias.slopes import AlibiBase
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveInt

_SIDES = ("offsets.right", "offsets.left")


@register
class Alibi(AlibiBase):
    """Attention falls off linearly with the distance between tokens of a sequence.

    bias[h, i, j] = -slope[h] * |p_i - p_j|          arXiv 2108.12409, section 3

    Args:
        num_heads: heads, h.
        depth: blocks of the model, to check `layers`.
        slopes: 'alibi' (2^(-8k/h) with the original rule where h is not a power of two), 'geometric' (2^(-8k/h) for
            any h), 'constant' (all 1), 'harmonic' (c / k), 'radius' (3.00 / r_k: the bias alone puts 95 % of the weight
            within r_k tokens) or 'learned' (h per layer, from U[0, 1)).
        softplus: apply softplus to learned slopes, so that they stay positive.
        layers: blocks with the bias; all by default.
        biased_heads: number of leading heads with a slope, the others have 0; all by default.
        steepest: c of slopes='harmonic', 1 by default.
        factor: multiplier of the slopes of 'alibi', 'geometric' and 'constant'; 96 in BiPE, between segments.
        radius: r of slopes='radius', in tokens: two numbers, for the first and the last head, with geometric
            logarithm, or one for each head.
        randomized_offsets: draw the distances instead (arXiv 2305.16843): in training, tokens at distances 1, 2, ...
            get distinct, ordered integer distances below this number; half a token less for earlier keys. In
            evaluation, distances are evenly spaced. All tokens of the line are required.
        both_sides: draw distances of earlier keys separately.
        test: 'draw' also draws in evaluation, as the authors of randomized positions do; 'even' does not.

    Shapes: pos (n, 1) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: O(h) memory, O(1) per score.
    Invariant to: translation; reversal of the sequence.
    Raises: ShapeError if `pos` is not 1-axis, or `randomized_offsets` is too small for it.
    Differs from the reference: two-sided; equal to the causal original under a causal mask.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("alibi", num_heads=2)
        >>> encoding.bias(Grid((6,)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "alibi"
    paper = "Train Short, Test Long, https://arxiv.org/abs/2108.12409"
    year = 2021
    ndim = (1,)
    encodes = ("distance",)
    invariant = ("translation", "reflection")
    formula = r"b_{hij} = -m_h \, |p_i - p_j|"
    tested_options = (
        "slopes=harmonic,steepest=0.5",
        "slopes=learned",
        "slopes=learned,softplus=true",
        "slopes=geometric",
        "layers=[0,2]",
        "biased_heads=2",
    )

    randomized_offsets: PositiveInt | None = None
    both_sides: bool = False
    test: Literal["even", "draw"] = "even"

    def __post_init__(self) -> None:
        if self.randomized_offsets is None and (self.both_sides or self.test == "draw"):
            raise OptionError(
                f"both_sides={self.both_sides} and test={self.test!r} have no effect with randomized_offsets=None. "
                f"Pass "
                "randomized_offsets=..."
            )
        super().__post_init__()

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw the distances of this forward pass; `draws`: offsets.right and offsets.left, (n - 1,) each."""
        supplied = {name: draw for name, draw in (draws or {}).items() if name in _SIDES}
        drawing = self.randomized_offsets is not None and (self.training or self.test == "draw")
        if not supplied and (not drawing or "offsets" in pos.attrs):
            return pos
        # n tokens have the distances 1 .. n - 1 on each side
        count = self._need_grid(pos).shape[0] - 1
        sides = _SIDES if self.both_sides else _SIDES[:1]
        sides_drawn = [
            self._checked_draw(supplied[name], name, count)
            if name in supplied
            else self._drawn(count, pos, generator)
            for name in sides
        ]
        return pos.replace(attrs={**pos.attrs, "offsets": (sides_drawn[0], sides_drawn[-1])})

    def _drawn(self, count: int, pos: Positions, generator: torch.Generator | None) -> Tensor:
        """Return `count` distinct integer distances, in ascending order."""
        reach = self._reach(count)
        # distance 0 is reserved for the token itself
        chosen = torch.randperm(reach - 1, generator=generator, device=pos.coords.device)[:count]
        return (chosen.sort().values + 1).to(pos.coords)

    def _checked_draw(self, draw: Tensor, name: str, count: int) -> Tensor:
        if tuple(draw.shape) != (count,):
            raise ShapeError(f"alibi needs a draw of {name} of shape ({count},), got {tuple(draw.shape)}.")
        return draw.sort().values

    def _reach(self, count: int) -> int:
        reach = self.randomized_offsets or 0
        if count >= reach:
            raise ShapeError(
                f"alibi(randomized_offsets={reach}) cannot assign distinct distances to {counted(count, 'offset')}. "
                f"Use a larger number."
            )
        return reach

    def _distance(self, pos: Positions) -> Bias:
        if self.randomized_offsets is None:
            return super()._distance(pos)
        count = self._need_grid(pos).shape[0] - 1
        if "offsets" in pos.attrs:
            right, left = pos.attrs["offsets"]
        else:
            reach = self._reach(count)
            steps = torch.arange(1, count + 1, device=pos.coords.device, dtype=pos.coords.dtype)
            # evaluation: evenly spaced in the range that draws cover
            right = left = (steps * reach / (count + 1)).floor().clamp(min=1)
        # from the largest offset to the smallest; distances to the left are half a token smaller, as in the reference
        line = torch.cat([right.flip(0), right.new_zeros(1), left - 0.5])
        slopes = self.head_slopes()
        slope = slopes if isinstance(slopes, Tensor) else line.new_tensor(slopes)
        # (h, 1) * (2 n - 1,) -> (h, 2 n - 1)
        return TableBias(-slope[:, None] * line, pos)

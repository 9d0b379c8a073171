"""Base of rotations with content-dependent angles: added to those of RoPE, or summed along a sequence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.layers import positioned_first, take_tokens
from vispe.encodings.parts.rotary.angles import AxialRotary
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions

Form = Literal["field", "scan"]


class ContextRotary(AxialRotary):
    """Rotates queries and keys by angles that depend on token content.

    With 'field', each token adds a bounded angle to those of RoPE: attention still depends on offsets, between
    positions displaced by content. With 'scan', angles are cumulative sums over the tokens of a sequence. Subclasses
    define `_field` and `_steps`.
    """

    reads_tokens = True

    form: Form = "field"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "scan":
            if self.spacing is not None:
                raise OptionError(
                    f"spacing={list(self.spacing)} has no effect with form='scan', which counts tokens. Omit it."
                )
            self._accept(1)

    @property
    def per_layer(self) -> bool:
        """True: every layer reads its input tokens."""
        return True

    def _need_axes(self, pos: Positions) -> None:
        if self.form == "scan" and pos.axes != 1:
            raise ShapeError(
                f"{self.name} with form='scan' needs 1 axis, along which it sums, got {counted(pos.axes, 'axis')} "
                f"({pos}). Use form='field'."
            )
        super()._need_axes(pos)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> PairRotation:
        """Return the rotation for the tokens `x` (b, n, d); the identity for prefix tokens."""
        self._need_axes(pos)
        if x is None or x.shape[1:] != (pos.tokens, self.dim):
            shape = "none" if x is None else tuple(x.shape)
            raise ShapeError(
                f"{self.name} reads the tokens and needs x (b, {pos.tokens}, {self.dim}), got {shape}. "
                "Pass them to transform()."
            )
        # dropped tokens would be missing from the sums
        if self.form == "scan" and pos.index is not None:
            raise ShapeError(
                f"{self.name} with form='scan' needs all tokens of a sequence, got {pos} with dropped tokens. "
                "Keep all tokens, or use form='field'."
            )
        tokens = at_least_float32(x)
        spatial = pos.spatial[:, None, :, None]
        if self.form == "field":
            # (b or 1, 1, n, pairs) + (b, h, n, pairs) -> (b, h, n, pairs)
            angle = self.angles(pos) + self._field(tokens, pos) * spatial
        else:
            # first factor: prefix tokens do not contribute to the sums; second: they are not rotated
            angle = self._increments(tokens, pos).mul(spatial).cumsum(-2) * self._rates() * spatial
        return PairRotation(angle.cos(), angle.sin(), self.layout)

    def _increments(self, x: Tensor, pos: Positions) -> Tensor:
        """Return the angle increments, in which tokens without a position are not neighbours of others."""
        spatial = pos.spatial[..., None]
        orders = positioned_first(pos)
        if orders is None:
            return self._steps(x, spatial[:, None])
        order, back = orders
        steps = self._steps(take_tokens(x, order), take_tokens(spatial, order)[:, None])
        return take_tokens(steps, back)

    def _field(self, x: Tensor, pos: Positions) -> Tensor:
        """Return the angles (b, h, n, pairs) that tokens (b, n, d) add to those of RoPE."""
        raise NotImplementedError

    def _steps(self, x: Tensor, spatial: Tensor) -> Tensor:
        """Return the angle increments (b, h, n, pairs) of tokens (b, n, d), for themselves and all later tokens."""
        raise NotImplementedError

    def _rates(self) -> Tensor | float:
        """Return the factor of the sums, per pair."""
        return 1.0


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Return (b, n, h * c) as (b, h, n, c)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def unit_heads(x: Tensor, heads: int, eps: float) -> Tensor:
    """Return tokens (b, n, d) split into heads and L2-normalised per head, (b, h, n, d / h)."""
    parts = heads_of(x, heads)
    # eps under the root: a token of zeros stays 0 instead of NaN
    return parts * torch.rsqrt(parts.square().sum(-1, keepdim=True) + eps)

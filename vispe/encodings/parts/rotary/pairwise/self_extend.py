"""SelfExtend: exact offsets for near tokens, grouped positions for far ones, to extend the context length."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import readable
from vispe.attention.transform.abstract_transform import Layout
from vispe.encodings.parts.rotary.pairwise.pairwise_scores import PairwiseRotaryScores
from vispe.errors import OptionError, ShapeError, is_integer


def self_extend(ids: Tensor, group: int, window: int) -> tuple[Tensor, Tensor]:
    """Return grouped positions of queries ``floor(i / g) + w - floor(w / g)`` and keys ``floor(j / g)``.

    These apply to keys at least `window` before their query (arXiv 2401.01325); their offset begins at about
    `window` and increases by 1 per `group` tokens. If no position reaches the window, it counts as 0.

    Args:
        ids: positions from 0 on, any shape.
        group: number of consecutive positions that share one, g.
        window: offset from which positions are grouped, w.

    Raises:
        OptionError: `group` or `window` is not a positive integer.

    Example:
        >>> import torch
        >>> query, key = self_extend(torch.arange(6), 2, 4)
        >>> query.tolist(), key.tolist()
        ([2, 2, 3, 3, 4, 4], [0, 0, 1, 1, 2, 2])
    """
    check_self_extend(group, window)
    window = window if ids.numel() and bool(ids.max() >= window) else 0
    key = ids.div(group, rounding_mode="floor")
    return key + window - window // group, key


def check_self_extend(group: object, window: object) -> None:
    """Raise `OptionError` unless both are positive integers."""
    for name, value in (("group", group), ("window", window)):
        if not is_integer(value) or value < 1:  # type: ignore[operator]
            raise OptionError(f"self_extend: {name} must be a positive integer, got {value!r}.")


def _snapped(positions: Tensor) -> Tensor:
    """Return positions as multiples of 2 ** -20, so that rounding of fractions does not decide at a boundary."""
    return (positions * 2**20).round() / 2**20


class SelfExtendScores(PairwiseRotaryScores):
    """Rotary logits with exact offsets for near tokens and grouped offsets for far ones (arXiv 2401.01325).

    On an axis, offsets below `window` are exact. Others are ``floor(i / g) - floor(j / g)``, moved away from 0 by
    ``w - floor(w / g)``, in both directions. On several axes the rule applies to each separately, so pairs within the
    window on all axes have exact offsets.

    Args:
        queries, keys, rates, layout, factor: see `PairwiseRotaryScores`; a pair of channels rotates with one axis
            at most.
        group: number of consecutive positions that share one, g.
        window: offset from which positions are grouped, w.
        plain: pairs with exact offsets at any distance (b or 1, n, m) bool; none by default.

    Raises:
        OptionError: `group` or `window` is not a positive integer.
        ShapeError: shapes disagree, or a pair of channels rotates with several axes.

    Example:
        >>> import torch
        >>> from vispe.attention import attention
        >>> x, at = torch.randn(1, 2, 9, 4), torch.arange(9.0).reshape(1, 9, 1)
        >>> bias = SelfExtendScores(at, at, torch.tensor([[[1.0, 0.01]]]), 2, 4)
        >>> attention(x, x, x, bias=bias, is_causal=True).shape
        torch.Size([1, 2, 9, 4])
    """

    __slots__ = ("group", "plain", "window")

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        rates: Tensor,
        group: int,
        window: int,
        layout: Layout = "half",
        factor: float = 1.0,
        plain: Tensor | None = None,
    ) -> None:
        super().__init__(queries, keys, rates, layout, factor)
        check_self_extend(group, window)
        if readable(self.rates) and bool(((self.rates != 0).sum(1) > 1).any()):
            raise ShapeError(
                "SelfExtendScores groups positions per axis, but some pair of channels rotates with several axes. "
                "Use rates with at most one axis per pair."
            )
        self.group, self.window, self.plain = group, window, plain

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the logits (b, h, n, m)."""
        exact = self.rotate(q, self.queries), self.rotate(k, self.keys)
        # keys after the query use the mirrored rule: the jump has the opposite sign
        row, column = ((_snapped(at) / self.group).floor() for at in (self.queries, self.keys))
        jump = self.window - self.window // self.group
        grouped_k = self.rotate(k, column)
        grouped_q_after, grouped_q_before = self.rotate(q, row + jump), self.rotate(q, row - jump)
        # channels of one axis at a time: (h or 1, 1, width) masks select them in the product
        total = torch.zeros((), dtype=q.dtype, device=q.device)
        for axis, channels in enumerate(self._channels(q.shape[1], q.shape[3])):
            selected = channels[:, None]
            product = (exact[0] * selected) @ exact[1].transpose(-1, -2)
            if axis < self.queries.shape[2]:
                # signed offset along this axis (b or 1, 1, n, m)
                offset = (self.queries[:, :, None, axis] - self.keys[:, None, :, axis])[:, None]
                product_after = (grouped_q_after * selected) @ grouped_k.transpose(-1, -2)
                product_before = (grouped_q_before * selected) @ grouped_k.transpose(-1, -2)
                is_near = _snapped(offset).abs() < self.window
                is_near = is_near if self.plain is None else is_near | self.plain[:, None]
                product = torch.where(
                    is_near, product, torch.where(offset > 0, product_after, product_before)
                )
            total = total + product
        return scale * total

    def _channels(self, heads: int, width: int) -> list[Tensor]:
        """Return 0/1 masks (h or 1, width) of the channels that rotate with each axis, and last with none."""
        rotating = (self.rates != 0).float()
        rotating = torch.cat([rotating, 1 - rotating.sum(1, keepdim=True)], 1)
        if 1 < len(rotating) < heads:
            rotating = rotating.repeat_interleave(heads // len(rotating), 0)
        # expand pairs to channels in the layout of the rotation
        channels = rotating.repeat(1, 1, 2) if self.layout == "half" else rotating.repeat_interleave(2, -1)
        unrotated = channels.new_zeros(*channels.shape[:2], width - channels.shape[2])
        unrotated[:, -1] = 1
        all_channels = torch.cat([channels, unrotated], 2)
        return list(all_channels.unbind(1))

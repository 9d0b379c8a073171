"""SelfExtend: near tokens at their distance, far ones at that of groups, so that a model reads beyond its length."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.pairwise_rope.pairwise_scores import TurnedScores
from vispe.attention.precision import readable
from vispe.attention.transform.abstract_transform import Layout
from vispe.errors import OptionError, ShapeError, is_whole


def self_extend(ids: Tensor, group: int, window: int) -> tuple[Tensor, Tensor]:
    """Return the grouped positions of queries and of keys: ``floor(i / g) + w - floor(w / g)`` and ``floor(j / g)``.

    Keys at least `window` before their query are at ``window`` steps or a little more there, and each `group` of them
    at one. The window counts as 0 where no position reaches it: there is nothing beyond, arXiv 2401.01325.

    Args:
        ids: positions of any shape, from 0 on.
        group: positions that become one, g.
        window: distance from which positions are grouped, w.

    Example:
        >>> import torch
        >>> query, key = self_extend(torch.arange(6), 2, 4)
        >>> query.tolist(), key.tolist()
        ([2, 2, 3, 3, 4, 4], [0, 0, 1, 1, 2, 2])
    """
    check_grouping(group, window)
    window = window if ids.numel() and bool(ids.max() >= window) else 0
    key = ids.div(group, rounding_mode="floor")
    return key + window - window // group, key


def check_grouping(group: object, window: object) -> None:
    """Raise `OptionError` unless both are whole numbers above 0."""
    for name, value in (("group", group), ("window", window)):
        if not is_whole(value) or value < 1:  # type: ignore[operator]
            raise OptionError(f"self_extend needs a whole number {name} above 0, got {value!r}.")


class GroupedScores(TurnedScores):
    """Rotary logits of near tokens at their distance, of far ones at that of their groups (arXiv 2401.01325).

    On an axis, tokens less than `window` apart keep their offset; others have ``floor(i / g) - floor(j / g)`` plus
    ``w - floor(w / g)`` away from 0, in both directions. On several axes each goes by its own rule, so that pairs
    within the window on all of them keep all offsets.

    Args:
        queries, keys, rates, layout, factor: see `TurnedScores`; a pair of channels turns with one axis at most.
        group: positions that become one, g.
        window: distance from which positions are grouped, w.
        plain: pairs that keep their offset however far they are apart (b or 1, n, m) bool; none by default.

    Raises:
        OptionError: `group` or `window` is no whole number above 0.
        ShapeError: a pair of channels turns with several axes.

    Example:
        >>> import torch
        >>> from vispe.attention import attention
        >>> x, at = torch.randn(1, 2, 9, 4), torch.arange(9.0).reshape(1, 9, 1)
        >>> bias = GroupedScores(at, at, torch.tensor([[[1.0, 0.01]]]), 2, 4)
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
        check_grouping(group, window)
        if readable(self.rates) and bool(((self.rates != 0).sum(1) > 1).any()):
            raise ShapeError(
                "Positions are grouped axis by axis, but a pair of channels turns with several axes here."
            )
        self.group, self.window, self.plain = group, window, plain

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the logits (b, h, n, m)."""
        near = self.turn(q, self.queries), self.turn(k, self.keys)
        # the mirrored rule for keys behind is that of queries, the other way
        row, column = ((at / self.group).floor() for at in (self.queries, self.keys))
        jump = self.window - self.window // self.group
        far = self.turn(k, column)
        later, earlier = self.turn(q, row + jump), self.turn(q, row - jump)
        total = torch.zeros((), dtype=q.dtype, device=q.device)
        for axis, channels in enumerate(self._channels(q.shape[1], q.shape[3])):
            mine = channels[:, None]
            product = (near[0] * mine) @ near[1].transpose(-1, -2)
            if axis < self.queries.shape[2]:
                offset = (self.queries[:, :, None, axis] - self.keys[:, None, :, axis])[:, None]
                ahead = (later * mine) @ far.transpose(-1, -2)
                behind = (earlier * mine) @ far.transpose(-1, -2)
                near_by = offset.abs() < self.window
                near_by = near_by if self.plain is None else near_by | self.plain[:, None]
                product = torch.where(near_by, product, torch.where(offset > 0, ahead, behind))
            total = total + product
        return scale * total

    def _channels(self, heads: int, width: int) -> list[Tensor]:
        """Return which channels (h or 1, width) turn with each axis, and last which with none, as 0 and 1."""
        turning = (self.rates != 0).float()
        turning = torch.cat([turning, 1 - turning.sum(1, keepdim=True)], 1)
        if 1 < len(turning) < heads:
            turning = turning.repeat_interleave(heads // len(turning), 0)
        both = turning.repeat(1, 1, 2) if self.layout == "half" else turning.repeat_interleave(2, -1)
        rest = both.new_zeros(*both.shape[:2], width - both.shape[2])
        rest[:, -1] = 1
        every = torch.cat([both, rest], 2)
        return list(every.unbind(1))

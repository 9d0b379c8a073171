"""Attention by its definition, through which relevance finds its way back to queries, keys, values and positions.

Both sides of a product get half of its relevance, and so do a rotation and what it turns; a bias has its share of the
sum that logits are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vispe.attention.call import Call
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.compose import bias_of, transform_of, value_term_of
from vispe.errors import UnsupportedHost
from vispe.evaluate.behaviour.saliency_rules import split_ratio
from vispe.hosts.common.context import Context

Rule = Literal["epsilon", "ratio"]


class Taken:
    """What positions and layers took on the way back; see `Relevance`."""

    def __init__(self, rule: Rule, grid: tuple[int, int], prefix: int) -> None:
        self.rule, self.grid, self.prefix = rule, grid, prefix
        self.leaks: Counter[str] = Counter(linear=0.0, norm=0.0, softmax=0.0)
        self.positions = torch.zeros(0, 0, dtype=torch.float64)
        self.offsets = torch.zeros([2 * side - 1 for side in grid], dtype=torch.float64)

    def leak(self, kind: str, tensor: Tensor, of: Callable[[Tensor], Tensor]) -> None:
        """Count a leak once the gradient of a tensor is known."""

        def count(g: Tensor) -> None:
            self.leaks[kind] += float(of(g).double().sum())

        tensor.register_hook(count)


class Rules(Context):
    """A context in which attention is computed plainly, with the rules on its way back."""

    __slots__ = ("layer", "run")

    def __init__(self, run: Taken, layer: int, given: Any) -> None:
        super().__init__(getattr(given, "positions", None), getattr(given, "encodings", ()), None, False)
        self.run, self.layer = run, layer

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Return attention (b, h, n, d_h)."""
        own = getattr(module, "pos_enc", None)
        encodings = self.encodings if own is None else (*self.encodings, *own.parts())
        number, run = getattr(module, "vispe_layer", 0), self.run
        bias = bias_of(encodings, self.positions, number, x.detach()) if encodings else None
        turn = transform_of(encodings, self.positions, number, x.detach()) if encodings else None
        if encodings and value_term_of(encodings, self.positions, number) is not None:
            raise UnsupportedHost(
                "Relevance of an encoding that adds to the output of attention is not known."
            )
        if bias is not None and (bias.whole or bias.per_sample or not bias.finite):
            raise UnsupportedHost(
                "Relevance of a bias that reads tokens, masks or replaces logits is not known."
            )
        q, k = (self._turned(turn, name, t) for name, t in (("query", q), ("key", k)))
        product = (keep(q) * q.shape[-1] ** -0.5) @ keep(k).mT
        logits = product
        if bias is not None:
            added = Call(q.detach(), k.detach(), v.detach(), bias).dense_bias()
            assert added is not None
            added = added.detach().to(product.dtype)
            logits = product + added
            self._split(product, added, logits)
        weights = logits.softmax(-1)
        # what the softmax takes: relevance of weights less that of logits
        run.leak("softmax", weights, lambda g: g * weights.detach())
        run.leak("softmax", logits, lambda g: -g * logits.detach())
        return keep(weights) @ keep(v)

    def _turned(self, turn: Transform | None, name: str, x: Tensor) -> Tensor:
        """Return queries or keys, turned; cosines and sines get half of what is turned."""
        if turn is None or type(turn) is Transform:
            return x
        if not isinstance(turn, PairRotation) or turn.values:
            raise UnsupportedHost(
                f"Relevance through {type(turn).__name__} is not known; rotations of pairs are."
            )
        part = x.new_ones(x.shape[-2:])
        # tokens without a place are not turned, nor are channels beyond the pairs
        part[:, : 2 * turn.cos.shape[-1]] = 0.5
        part[~self.positions.spatial[0]] = 1.0
        y = getattr(turn, name)(keep(x, part))

        def count(g: Tensor) -> None:
            self.run.positions[self.layer] += ((y.detach() * g)[0] * (1 - part)).sum((0, -1)).double().cpu()

        y.register_hook(count)
        return y

    def _split(self, product: Tensor, added: Tensor, logits: Tensor) -> None:
        """Hand the relevance of logits to both summands on the way back."""
        run, p = self.run, self.run.prefix

        def split(g: Tensor) -> Tensor | None:
            placed, back = added * g, None
            if run.rule == "ratio":
                seen, placed = split_ratio(product.detach(), added.expand_as(g), logits.detach() * g)
                back = torch.where(product == 0, 0.0, seen / product.detach())
            pairs = placed.sum((0, 1)).double().cpu()
            run.positions[self.layer] += pairs.sum(0)
            # every pair of patches to the offset of the query from the key
            (h, w), (_, wide) = run.grid, run.offsets.shape
            at = torch.arange(h)[:, None] * wide + torch.arange(w)
            offsets = (at.flatten()[:, None] - at.flatten()[None]) + (h - 1) * wide + w - 1
            run.offsets.view(-1).index_add_(0, offsets.flatten(), pairs[p:, p:].flatten())
            return back

        product.register_hook(split)


def keep(x: Tensor, part: Tensor | float = 0.5) -> Tensor:
    """Return x, through which a part of its gradient passes, 1 or a half of it: values are the same, bit by bit."""
    return x * part + (x * (1 - part)).detach()

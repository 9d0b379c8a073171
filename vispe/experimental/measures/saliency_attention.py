"""Attention with gradients that propagate relevance to queries, keys, values and positions (PA-LRP).

Both factors of a product get half of its relevance, as do a rotation and its input. A bias gets relevance in
proportion to its share of the logits, which are a sum.
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
from vispe.experimental.measures.saliency_rules import split_ratio
from vispe.hosts.common.context import Context

Rule = Literal["epsilon", "ratio"]


class RelevanceSums:
    """Relevance collected by positions and leaks during a backward pass; see `Relevance`."""

    def __init__(self, rule: Rule, grid: tuple[int, int], prefix: int) -> None:
        self.rule, self.grid, self.prefix = rule, grid, prefix
        self.leaks: Counter[str] = Counter(linear=0.0, norm=0.0, softmax=0.0)
        self.positions = torch.zeros(0, 0, dtype=torch.float64)
        self.offsets = torch.zeros([2 * side - 1 for side in grid], dtype=torch.float64)

    def leak(self, kind: str, tensor: Tensor, of: Callable[[Tensor], Tensor]) -> None:
        """Add a leak in the backward pass, when the gradient of the tensor is known."""

        def count(g: Tensor) -> None:
            self.leaks[kind] += float(of(g).double().sum())

        tensor.register_hook(count)


class RelevanceContext(Context):
    """Context that computes attention by its definition, with the propagation rules in its backward pass."""

    __slots__ = ("layer", "run")

    def __init__(self, run: RelevanceSums, layer: int, context: Any) -> None:
        super().__init__(getattr(context, "positions", None), getattr(context, "encodings", ()), None, False)
        self.run, self.layer = run, layer

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Return attention (b, h, n, d_h)."""
        pos_enc = getattr(module, "pos_enc", None)
        encodings = self.encodings if pos_enc is None else (*self.encodings, *pos_enc.parts())
        number, run = getattr(module, "vispe_layer", 0), self.run
        bias = bias_of(encodings, self.positions, number, x.detach()) if encodings else None
        transform = transform_of(encodings, self.positions, number, x.detach()) if encodings else None
        if encodings and value_term_of(encodings, self.positions, number) is not None:
            raise UnsupportedHost("relevance: no rule for encodings that add to the output of attention.")
        if bias is not None and (bias.replaces_product or bias.per_sample or not bias.finite):
            raise UnsupportedHost(
                "relevance: no rule for a bias that reads tokens, masks or replaces logits."
            )
        q, k = (self._rotated(transform, name, t) for name, t in (("query", q), ("key", k)))
        product = (scale_gradient(q) * q.shape[-1] ** -0.5) @ scale_gradient(k).mT
        logits = product
        if bias is not None:
            added = Call(q.detach(), k.detach(), v.detach(), bias).dense_bias()
            assert added is not None
            added = added.detach().to(product.dtype)
            logits = product + added
            self._split(product, added, logits)
        weights = logits.softmax(-1)
        # leak of the softmax: relevance of the weights minus that of the logits
        run.leak("softmax", weights, lambda g: g * weights.detach())
        run.leak("softmax", logits, lambda g: -g * logits.detach())
        return scale_gradient(weights) @ scale_gradient(v)

    def _rotated(self, transform: Transform | None, name: str, x: Tensor) -> Tensor:
        """Return rotated queries or keys; cosines and sines get half of the relevance of rotated entries."""
        if transform is None or type(transform) is Transform:
            return x
        if not isinstance(transform, PairRotation) or transform.values:
            raise UnsupportedHost(
                f"relevance: no rule for {type(transform).__name__}. Only rotations of channel pairs are supported."
            )
        part = x.new_ones(x.shape[-2:])
        # prefix tokens and channels beyond the pairs are not rotated
        part[:, : 2 * transform.cos.shape[-1]] = 0.5
        part[~self.positions.spatial[0]] = 1.0
        y = getattr(transform, name)(scale_gradient(x, part))

        def count(g: Tensor) -> None:
            self.run.positions[self.layer] += ((y.detach() * g)[0] * (1 - part)).sum((0, -1)).double().cpu()

        y.register_hook(count)
        return y

    def _split(self, product: Tensor, added: Tensor, logits: Tensor) -> None:
        """Split the relevance of logits between both terms in the backward pass."""
        run, p = self.run, self.run.prefix

        def split(g: Tensor) -> Tensor | None:
            position_relevance, content_gradient = added * g, None
            if run.rule == "ratio":
                content_relevance, position_relevance = split_ratio(
                    product.detach(), added.expand_as(g), logits.detach() * g
                )
                content_gradient = torch.where(product == 0, 0.0, content_relevance / product.detach())
            pairs = position_relevance.sum((0, 1)).double().cpu()
            run.positions[self.layer] += pairs.sum(0)
            # (patches, patches) -> offsets of query minus key, as flat indices into `run.offsets`
            (h, w), (_, wide) = run.grid, run.offsets.shape
            at = torch.arange(h)[:, None] * wide + torch.arange(w)
            offsets = (at.flatten()[:, None] - at.flatten()[None]) + (h - 1) * wide + w - 1
            run.offsets.view(-1).index_add_(0, offsets.flatten(), pairs[p:, p:].flatten())
            return content_gradient

        product.register_hook(split)


def scale_gradient(x: Tensor, part: Tensor | float = 0.5) -> Tensor:
    """Return x bit for bit, with its gradient multiplied by `part`."""
    return x * part + (x * (1 - part)).detach()

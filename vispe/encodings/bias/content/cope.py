"""CoPE: positions that count relevant tokens instead of all tokens (arXiv 2405.18719), on lines and grids."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import exact_product, no_infinity
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.nearer_key_count import HIDDEN_PAIRS, count_nearer
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveInt, Spacing


class CountBias(Bias):
    """``q_i . table[count(i, j)]``, interpolated between integer counts; counts are sums of sigmoid(logits).

    Args:
        table: (counts, d_h).
        pos: positions of the tokens.
        order: positions that define the distance of keys.
        causal: whether only keys up to the query count.
    """

    __slots__ = ("causal", "hidden", "order", "table_of_counts")

    def __init__(self, table: Tensor, pos: Positions, order: Positions, causal: bool) -> None:
        super().__init__(pos)
        self.table_of_counts, self.order, self.causal = table, order, causal
        self.hidden: Tensor | None = pos.attrs.get(HIDDEN_PAIRS)

    @property
    def per_sample(self) -> bool:
        """True: the bias depends on content."""
        return True

    @property
    def finite(self) -> bool:
        """Whether all entries are known to be finite."""
        return no_infinity(self.table_of_counts)

    def _dense(self, request: DenseRequest) -> Tensor:
        if request.q is None or request.k is None or request.scale is None:
            raise ShapeError(
                "cope counts keys by their logits and needs q, k and scale, got None for one of them. Pass q, k and "
                "scale to dense()."
            )
        q, k = request.pick(request.q, 1), request.pick(request.k, 1)
        # relevance of every key to every query, (b, h, n, m)
        gates = (exact_product(q, k.transpose(-1, -2)) * request.scale).sigmoid()
        count, valid = count_nearer(gates, self.order, self.causal, self.hidden)
        last = self.table_of_counts.shape[0] - 1
        # counts beyond the table share its last row
        count = count.clamp(max=last)
        # scores of all integer counts, then linear interpolation between the two nearest
        read = exact_product(q, self.table_of_counts.t())
        # the gradient of the count comes from the interpolation: floor has none
        below = count.detach().floor()
        low, high = (read.gather(-1, index.long()) for index in (below, (below + 1).clamp(max=last)))
        return (low + (high - low) * (count - below)).where(valid, 0.0)


@register
class Cope(Biased):
    """Adds a learned score of the query for the number of relevant patches that are nearer than the key.

    bias[h, i, j] = q_i . e[count_ij], count_ij = sum over m of sigmoid(q_i . k_m / sqrt(d_h))          arXiv 2405.18719

    The sum is over the patches at most as far from i as j: a patch counts by its relevance to the query. Between
    integer counts, e is interpolated. Counts are computed in `parts/bias/nearer_key_count.py`.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        max_pos: number of vectors e; larger counts use the last one.
        causal: one axis, looking back, for sequences under a causal mask: the sum is over j <= m <= i, as in the paper.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (b, h, n, n); prefix rows and columns are 0, and prefix tokens do not count.
    New resolution: no resampling needed; larger grids have larger counts. Dropped patches do not count.
    Cost: max_pos d_h parameters per layer, for all heads; keys are sorted once per grid; the bias is made dense for
        every image. e starts at 0, so a pretrained model is unchanged at first.
    Invariant to: translation, rotation by any angle and reflection, when patches keep their content.
    Raises: ShapeError for causal=True on a grid of several axes, or without queries and keys.
    Differs from the reference: the order of keys on grids; logits are those before any rotation.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("cope", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q, scale=0.5).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "cope"
    paper = (
        "Contextual Position Encoding: Learning to Count What's Important, https://arxiv.org/abs/2405.18719"
    )
    year = 2024
    formula = (
        r"b_{hij} = q_i \cdot e_{n_{ij}}, \quad n_{ij} = \sum_m \sigma \left( \frac{q_i \cdot "
        r"k_m}{\sqrt{d_h}} \right)"
    )
    tested_options = ("max_pos=3", "causal=true", "spacing=[2,0.5]")
    ndim = (1, 2, 3)
    counts_keys = True
    encodes: ClassVar[tuple[str, ...]] = ("distance", "content")
    invariant: ClassVar[tuple[str, ...]] = ("translation", "quarter_turns", "reflection", "rotation")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    max_pos: PositiveInt = 64
    causal: bool = False
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        if self.causal and self.spacing is not None:
            raise OptionError(
                "cope: spacing has no effect with causal=True, which counts along one axis, got "
                f"spacing={list(self.spacing)}. Omit it."
            )
        if self.causal or self.spacing is not None:
            self._accept(1 if self.spacing is None else len(self.spacing))
        # zeros: a pretrained model is unchanged at first
        self.pos_emb = nn.Parameter(torch.zeros(self.max_pos, self._resolve_head_dim()))

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own vectors."""
        return True

    def reset_parameters(self) -> None:
        """Set the vectors to 0."""
        nn.init.zeros_(self.pos_emb)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias; `dense` depends on queries and keys."""
        if self.causal and pos.axes != 1:
            raise ShapeError(f"cope needs 1 axis with causal=True, got {counted(pos.axes, 'axis')} ({pos}).")
        self._need_axes(pos)
        order = pos if self.spacing is None else pos.with_spacing(self.spacing)
        return CountBias(self.pos_emb, pos, order, self.causal)
